"""Split models: how even the stages are, memory of a device, and what one stage costs.

    python benchmarks/model_parallel.py cut memory overhead --out model_parallel.json

``README.md`` beside this file says what each measures and how.
"""

import argparse
import datetime
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

from step_time import installed_versions, machine

MEASURED_GOAL = 1.15  # largest stage over the best one known, at most
MEMORY_GOAL = 0.26  # bytes on a device over those of the whole model, at most
OVERHEAD_GOAL = 1.02  # step time in one stage over that of plain fit, at most


def main(arguments=None):
    """Measures what is asked for; returns 0."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    host, versions = machine(), installed_versions(sys.executable)
    import tensorflow as tf

    (cpu, *_) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 8)
    report = {
        "benchmark": "model_parallel",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": ["python", "benchmarks/model_parallel.py", *arguments],
        "machine": host,
        "versions": versions,
        "results": {},
    }
    print(f"{host['cpu']}, {host['cores']} cores; load average before: {host['load_average']}")
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    for what in options.what:
        print(f"\n{what}: {MEASUREMENTS[what].__doc__.splitlines()[0]}", flush=True)
        rows = []
        for row in MEASUREMENTS[what](options):
            rows.append(row)
            print(_line(row), flush=True)
        report["results"][what] = rows
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")
        print(f"\nWritten to {options.out}")
    return 0


def _parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "what", nargs="*", metavar="WHAT", help=f"some of {', '.join(MEASUREMENTS)}; all if none"
    )
    parser.add_argument("--rounds", type=int, default=7, help="of which the median counts")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures, as JSON")
    parser.add_argument("--quick", action="store_true", help="as little as there can be")
    options = parser.parse_args(arguments)
    if unknown := set(options.what) - set(MEASUREMENTS):
        parser.error(f"expected some of {','.join(MEASUREMENTS)}, got {','.join(sorted(unknown))}")
    if options.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {options.rounds}")
    options.what = options.what or list(MEASUREMENTS)
    options.rounds = 1 if options.quick else options.rounds
    return options


def _line(row):
    parts = [f"{row['label']:44}"]
    parts += [f"{key} {value}" for key, value in row.get("figures", {}).items()]
    if "ratio" in row:
        parts.append(f"ratio {row['ratio']:.3f}")
    if "goal" in row:
        verdict = "met" if row["ratio"] <= row["goal"] else "missed"
        parts.append(f"(goal <= {row['goal']}: {verdict})")
    return "  ".join(parts)


def _split(build, rounds=0, optimizer="sgd", loss="mse", **split):
    """A compiled model under the strategy, and the strategy."""
    import keras

    import tfdist

    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    strategy = tfdist.ModelParallelStrategy(data=1, **split)
    with strategy.scope():
        model = build()
        model.compile(optimizer, loss)
    return model, strategy


# ------------------------------------------------------------------------------- the stages


def measure_cut(options):
    """The largest stage over the best that there is: by estimated costs, then by measured time."""
    import tfdist
    from tfdist.partition import Block, cut
    from tfdist.strategies import _keras
    from tfdist.strategies._measured import measured_costs, seconds_of
    from tfdist.strategies._plan import make_plan

    for name, (build, rows) in _models(options).items():
        model = build()
        nodes = _keras.nodes_of(model)

        def plan_for(stages, cost, costs=None, model=model, rows=rows):
            how = tfdist.parallel.automatic(cost=cost, rows=rows)
            return make_plan(
                model,
                num_stages=stages,
                tensor=1,
                how=how,
                layout=None,
                measure=lambda *_: costs,
            )

        measured = measured_costs(model, model, nodes, rows, "CPU:0")
        del model._tfdist_costs
        again = measured_costs(model, model, nodes, rows, "CPU:0")
        for stages in (2,) if options.quick else (2, 4, 8):
            plan = plan_for(stages, "estimated")
            costs = [unit.cost for units in plan.stages for unit in units]
            largest = max(sum(unit.cost for unit in units) for units in plan.stages)
            yield {
                "label": f"{name}, {stages} stages, estimated",
                "figures": {"layers": len(costs)},
                "ratio": largest / least_largest(costs, stages),
                "goal": 1.0,
            }
            best = cut([Block("", cost) for cost in again], stages)
            lengths = {
                "estimated": [len(units) for units in plan.stages],
                "measured": [len(u) for u in plan_for(stages, "measured", measured).stages],
                "best": best,
            }
            times = {}
            for _ in range(1 if options.quick else 3):
                for parts in lengths.values():
                    start = 0
                    for length in parts:
                        part = start, start + length
                        start += length
                        seconds = seconds_of(model, nodes[slice(*part)], rows, "CPU:0")
                        times[part] = min(seconds, times.get(part, seconds))
            slowest = {}
            for which, parts in lengths.items():
                ends = [0, *itertools.accumulate(parts)]
                slowest[which] = max(times[part] for part in zip(ends, ends[1:], strict=False))
            least = min(slowest.values())
            for which in ("estimated", "measured"):
                row = {
                    "label": f"{name}, {stages} stages, time when cut by {which} cost",
                    "figures": {"slowest stage, ms": round(1e3 * slowest[which], 2)},
                    "ratio": slowest[which] / least,
                }
                yield row | ({"goal": MEASURED_GOAL} if which == "measured" else {})


def least_largest(costs, stages):
    """The least possible largest sum, over all cuts of a list into so many parts.

    By trying all cuts but those that a part that is tried already makes no better than the best
    one so far.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = float("inf")

    def extend(start, left, largest):
        nonlocal best
        rest = sums[-1] - sums[start]
        if left == 1:
            best = min(best, max(largest, rest))
            return
        ends = range(start + 1, len(costs) - left + 2)
        for end in sorted(ends, key=lambda end: abs(sums[end] - sums[start] - rest / left)):
            part = max(largest, sums[end] - sums[start])
            if max(part, (sums[-1] - sums[end]) / (left - 1)) < best:
                extend(end, left - 1, part)

    extend(0, stages, 0.0)
    return best


def _models(options):
    import keras

    if options.quick:
        return {"transformer, 1 layer": (lambda: _transformer(1, 16, 8, 32), 2)}
    images = {"weights": None, "input_shape": (96, 96, 3)}
    return {
        "ResNet-50": (lambda: keras.applications.ResNet50(**images), 4),
        "transformer, 12 layers": (lambda: _transformer(12, 256, 64, 8000), 4),
        "MobileNetV2": (lambda: keras.applications.MobileNetV2(**images), 4),
    }


def _transformer(blocks, width, length, vocabulary):
    import keras
    from keras import layers

    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(inputs)
    for _ in range(blocks):
        x = _block(x, width)
    return keras.Model(inputs, layers.Dense(vocabulary)(layers.LayerNormalization()(x)))


def _block(x, width):
    from keras import layers

    y = layers.LayerNormalization()(x)
    x = layers.Add()([x, layers.MultiHeadAttention(4, width // 4)(y, y, use_causal_mask=True)])
    y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
    return layers.Add()([x, layers.Dense(width)(y)])


# ------------------------------------------------------------------------------- one device


def measure_memory(options):
    """Bytes of weights and Adam's slots on a device, of those of the whole transformer block."""
    import keras

    width = 64 if options.quick else 512

    def block():
        inputs = keras.Input((16, width))
        return keras.Model(inputs, _block(inputs, width))

    keras.utils.clear_session()
    plain = block()
    optimizer = keras.optimizers.Adam()
    optimizer.build(plain.trainable_variables)
    whole = sum(_bytes_by_device([*plain.variables, *optimizer.variables]).values())
    model, strategy = _split(block, optimizer="adam", tensor=4)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    strategy.split(model)
    held = _bytes_by_device([*model.variables, *model.optimizer.variables])
    for device, number in sorted(held.items()):
        yield {
            "label": f"tensor=4, {device}",
            "figures": {"bytes": number, "of": whole},
            "ratio": number / whole,
            "goal": MEMORY_GOAL,
        }


def _bytes_by_device(variables):
    """The bytes of the buffers behind Keras variables, by the name of the device they are on."""
    import tensorflow as tf

    from tfdist.strategies import _keras

    held = {}
    for variable in variables:
        value = _keras.tf_variable(variable)
        for shard in getattr(value, "shards", [value]):
            for piece in getattr(shard, "values", [shard]):
                with tf.device(piece.handle.device):
                    buffer = tf.raw_ops.ReadVariableOp(resource=piece.handle, dtype=piece.dtype)
                device = buffer.backing_device.rpartition("device:")[2]
                held[device] = held.get(device, 0) + buffer.numpy().nbytes
    return held


def measure_overhead(options):
    """Step time of fit under ModelParallelStrategy() with one stage over that of plain fit."""
    import keras
    import numpy as np

    rng = np.random.default_rng(1)
    rows = 128

    def perceptron():
        hidden = [keras.layers.Dense(600, "relu") for _ in range(3)]
        return keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])

    def transformer():
        return _transformer(2, 64, 32, 256)

    steps = (
        {"perceptron": 4, "transformer": 4}
        if options.quick
        else {"perceptron": 100, "transformer": 25}
    )
    tasks = {
        "perceptron": (
            perceptron,
            rng.standard_normal((rows * steps["perceptron"], 784), np.float32),
            rng.integers(0, 10, rows * steps["perceptron"]),
        ),
        "transformer": (transformer, *rng.integers(0, 256, (2, 32 * steps["transformer"], 32))),
    }
    for name, (build, x, y) in tasks.items():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        split, _ = _split(build, loss=loss, devices=["CPU:0"])
        plain = build()
        plain.compile("sgd", loss)
        times = {"plain": [], "split": []}
        for round_ in range(options.rounds + 1):
            turns = [("plain", plain), ("split", split)]
            for which, model in turns if round_ % 2 else turns[::-1]:
                times[which].append(_seconds_of_an_epoch(model, x, y, len(x) // steps[name]))
        ours, theirs = (statistics.median(times[which][1:]) for which in ("split", "plain"))
        yield {
            "label": name,
            "figures": {"plain, ms": round(1e3 * theirs, 2), "one stage, ms": round(1e3 * ours, 2)},
            "ratio": ours / theirs,
            "goal": OVERHEAD_GOAL,
        }


def _seconds_of_an_epoch(model, x, y, batch_size):
    """The time of a step, from the end of the first one to that of the last."""
    import keras

    ends = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append(
            (float(logs["loss"]), time.perf_counter())
        )
    )
    model.fit(x, y, batch_size=batch_size, verbose=0, shuffle=False, callbacks=[note])
    return (ends[-1][1] - ends[0][1]) / (len(ends) - 1)


MEASUREMENTS = {
    "cut": measure_cut,
    "memory": measure_memory,
    "overhead": measure_overhead,
}


if __name__ == "__main__":
    sys.exit(main())
