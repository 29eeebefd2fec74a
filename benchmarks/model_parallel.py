"""Split models: the pipeline, how even the stages are, memory of a device, what one stage costs.

    python benchmarks/model_parallel.py bubble activations --out model_parallel.json

``README.md`` beside this file says what each measures and how.
"""

import argparse
import bisect
import contextlib
import ctypes
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from step_time import installed_versions, machine, report_head

STAGES = 4  # that wait
FORWARD, BACKWARD = 0.02, 0.04  # s that such a stage takes for a micro-batch
THREADS = 32  # of the executor, where stages wait: well above their number
BUBBLE_GOAL = 1.10  # step time over the schedule's, at most
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
    if {"bubble", "activations"} & set(options.what):
        tf.config.threading.set_inter_op_parallelism_threads(THREADS)
    report = {
        **report_head("model_parallel", arguments, host, versions),
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
    parser.add_argument(
        "--model", default="", help="cut: only the models whose name has this in it"
    )
    parser.add_argument(
        "--stages", type=int, nargs="+", default=[2, 4, 8], help="cut: numbers of stages"
    )
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


# ------------------------------------------------------------------------------ the pipeline


def measure_bubble(options):
    """Step time over that of the schedule, (m + p - 1) * (forward + backward)."""
    import numpy as np

    forward, backward = (0.002, 0.004) if options.quick else (FORWARD, BACKWARD)
    for schedule in ("gpipe", "1f1b"):
        for number in (4,) if options.quick else (4, 8, 16, 32):
            model, _ = _waiting_model(schedule, number, forward, backward, width=1)
            x = np.ones((number, 1), np.float32)
            seconds = _seconds_of_steps(model, x, options.rounds)
            bubble = (number + STAGES - 1) * (forward + backward)
            yield {
                "label": f"{schedule}, {STAGES} stages, {number} micro-batches",
                "figures": {
                    "step, ms": round(1e3 * seconds, 1),
                    "schedule, ms": round(1e3 * bubble, 1),
                    "work of a stage, ms": round(1e3 * number * (forward + backward), 1),
                },
                "ratio": seconds / bubble,
                "goal": BUBBLE_GOAL,
            }


def measure_activations(options):
    """The most micro-batches whose activations a stage holds, and the memory that they take."""
    import numpy as np

    number, width = (5, 1000) if options.quick else (16, 1_000_000)
    forward, backward = (0.002, 0.004) if options.quick else (FORWARD, BACKWARD)
    taken = {}
    for schedule in ("gpipe", "1f1b"):
        model, waits = _waiting_model(schedule, number, forward, backward, width)
        x = np.ones((number, width), np.float32)
        _seconds_of_steps(model, x, 1)
        for wait in waits:
            wait.most_under_way()
        with _peak_memory() as peak:
            model.fit(x, x[:, :1], batch_size=number, verbose=0)
        held = [wait.most_under_way() for wait in waits]
        figures = {"by stage": held}
        if peak:
            taken[schedule] = peak[0]
            figures["MB"] = round(peak[0] / 1e6)
            figures["of a micro-batch between stages, MB"] = round(4 * width / 1e6)
        row = {"label": f"{schedule}, {STAGES} stages, {number} micro-batches", "figures": figures}
        if schedule == "1f1b":
            row |= {"ratio": max(held) / STAGES, "goal": 1.0}
        yield row
    if len(taken) == 2 and not options.quick:
        yield {"label": "memory, 1f1b / gpipe", "ratio": taken["1f1b"] / taken["gpipe"]}


def _waiting_model(schedule, number, forward, backward, width):
    import keras
    from waiting import Wait

    waits = [Wait(forward, backward, name=f"stage{i}") for i in range(STAGES)]

    class Mean(keras.layers.Layer):
        def call(self, x):
            return keras.ops.mean(keras.ops.square(x), axis=-1, keepdims=True)

    model, _ = _split(
        lambda: keras.Sequential([keras.Input((width,)), *waits, Mean()]),
        stages=STAGES,
        micro_batches=number,
        schedule=schedule,
        cut=[wait.name for wait in waits[:-1]],
    )
    return model, waits


def _seconds_of_steps(model, x, rounds):
    """The median time of a step on all rows at once; the first step is not counted."""
    import keras

    class Times(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seconds = []

        def on_train_batch_begin(self, batch, logs=None):
            self.start = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            float(logs["loss"])
            self.seconds.append(time.perf_counter() - self.start)

    times = Times()
    y = x[:, :1]
    model.fit(x, y, batch_size=len(x), epochs=rounds + 1, verbose=0, callbacks=[times])
    return statistics.median(times.seconds[1:])


@contextlib.contextmanager
def _peak_memory():
    """A list that gets the bytes of this process beyond those at the start; empty but on Linux."""
    found = []
    try:
        # Large blocks are given back when they are freed, so that the peak is that of use.
        ctypes.CDLL(None).mallopt(-3, 1 << 16)
        Path("/proc/self/clear_refs").write_text("5")
        start = _status("VmRSS")
    except (OSError, AttributeError):
        yield found
        return
    yield found
    found.append(_status("VmHWM") - start)


def _status(key):
    (kilobytes,) = re.findall(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)


# ------------------------------------------------------------------------------- the stages


def measure_cut(options):
    """The largest stage over the best that there is: by estimated costs, then by measured time."""
    import tfdist
    from tfdist.partition import Block, cut
    from tfdist.strategies import _keras
    from tfdist.strategies._measured import measured_costs, timer_of
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
        timers = {}
        for stages in (2,) if options.quick else options.stages:
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
                        if part not in timers:
                            timers[part] = timer_of(model, nodes[slice(*part)], rows, "CPU:0")
                        seconds = timers[part]()
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

    It is the sum of one of the possible parts; of these it is the least that allows a cut. Whether
    one does is seen by making each part as long as it allows. (Fewer parts will do: to cut one
    again makes none larger.) So all cuts are compared without trying them one by one.
    """
    sums = [0.0, *itertools.accumulate(costs)]

    def allows_a_cut(largest):
        end = 0
        for _ in range(stages):
            start = end
            while end < len(costs) and sums[end + 1] - sums[start] <= largest:
                end += 1
        return end == len(costs)

    parts = sorted({b - a for a, b in itertools.combinations(sums, 2)})
    return parts[bisect.bisect_left(parts, True, key=allows_a_cut)]


def _models(options):
    import keras

    if options.quick:
        return {"transformer, 1 layer": (lambda: _transformer(1, 16, 8, 32), 2)}
    images = {"weights": None, "input_shape": (96, 96, 3)}
    models = {
        "ResNet-50": (lambda: keras.applications.ResNet50(**images), 4),
        "transformer, 12 layers": (lambda: _transformer(12, 256, 64, 8000), 4),
        "MobileNetV2": (lambda: keras.applications.MobileNetV2(**images), 4),
    }
    return {name: model for name, model in models.items() if options.model in name}


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


def measure_too_large(options):
    """A model that is too large for the memory of a process: in one, and in stages in two."""
    width, limit = (64, 4000) if options.quick else (4096, 4800)
    script = Path(__file__).with_name("too_large.py")
    command = [script, f"--width={width}", f"--limit={limit}"]
    launcher = ["-m", "tfdist.launch", "run", "-n", "2"]
    ways = [("one process", []), ("two stages, each in its process", launcher)]
    for label, prefix in ways[1:] if options.quick else ways:
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *prefix, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        end = f"failed with status {done.returncode}"
        if done.returncode == 0 and "losses" in done.stdout:
            end = "trained"
        elif "OOM when allocating" in done.stdout:
            end = "out of memory"
        seconds = round(time.perf_counter() - start)
        yield {"label": label, "figures": {"end": end, "limit, MB": limit, "s": seconds}}


MEASUREMENTS = {
    "bubble": measure_bubble,
    "activations": measure_activations,
    "cut": measure_cut,
    "memory": measure_memory,
    "overhead": measure_overhead,
    "too_large": measure_too_large,
}


if __name__ == "__main__":
    sys.exit(main())
