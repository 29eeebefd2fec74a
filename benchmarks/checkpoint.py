"""What checkpoints of a training cost, beside ``tf.train.Checkpoint``.

    python benchmarks/checkpoint.py --out checkpoint.json

One process trains a multi-layer perceptron of 25 million parameters, in turn without checkpoints,
with ``FaultTolerantCheckpoint`` (in a thread), and with ``tf.train.Checkpoint.save`` between two
steps, both every 50 steps. Shown: the training's time, the time for which a save blocks it, and the
time of a restore. Needs only tfdist. ``README.md`` beside this file says what is measured and how.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import limits

TRAINING_GOAL = 1.03  # times the training without checkpoints, at most
BLOCKING_GOAL = 0.2  # times the saves of tf.train.Checkpoint, at most
RESTORE_GOAL = 1.1  # times the restore of tf.train.Checkpoint, at most
CONTENDERS = ("none", "tfdist", "tf.train")
BATCH = 128


def main(arguments=None):
    """Runs the benchmark; returns 0."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from step_time import installed_versions, machine, report_head

    host = machine()
    rows = {name: {"training": [], "fit": [], "saves": [], "restores": []} for name in CONTENDERS}
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        bench = Bench(options, Path(folder))
        for number in range(options.rounds + 1):  # the first warms up
            turn = number % len(CONTENDERS)
            for name in CONTENDERS[turn:] + CONTENDERS[:turn]:
                found = bench.train(name)
                if number:
                    for what, seconds in found.items():
                        rows[name][what] += seconds
    goals = _goals(rows)
    report = {
        **report_head("checkpoint", arguments, host, installed_versions(Path(sys.executable))),
        "parameters": bench.parameters,
        "megabytes": bench.megabytes,
        "results": rows,
        "goals": goals,
    }
    _print(report, options)
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")
        print(f"\nWritten to {options.out}")
    return 0


def _parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=120, help="of each training")
    parser.add_argument("--every", type=int, default=50, help="steps between two saves")
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    parser.add_argument("--width", type=int, default=3341, help="of the three hidden layers")
    parser.add_argument("--directory", type=Path, help="on whose disk the checkpoints are written")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures, as JSON")
    options = parser.parse_args(arguments)
    if options.steps <= options.every:
        parser.error(f"--steps {options.steps}: there must be more than --every {options.every}")
    return options


class Bench:
    """One model, trained again and again."""

    def __init__(self, options, folder):
        import keras
        import numpy as np
        import tensorflow as tf

        self._options, self._folder = options, folder
        hidden = [keras.layers.Dense(options.width, "relu") for _ in range(3)]
        self._model = keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])
        self._model.compile(
            keras.optimizers.SGD(0.01, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        random = np.random.default_rng(0)
        x = random.standard_normal((8 * BATCH, 784)).astype("float32")
        y = random.integers(0, 10, len(x))
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)
        self._data = data.cache().repeat()
        self._model.optimizer.build(self._model.trainable_variables)
        self.parameters = self._model.count_params()
        variables = [*self._model.variables, *self._model.optimizer.variables]
        self.megabytes = sum(np.array(v).nbytes for v in variables) / 1e6

    def train(self, name):
        """Trains once, restores once. Dict of lists of seconds."""
        from tfdist import callbacks

        folder = self._folder / name
        folder.mkdir()
        clock = _clock()
        saver = {
            "none": lambda: None,
            "tfdist": lambda: callbacks.FaultTolerantCheckpoint(
                folder, save=callbacks.every_steps(self._options.every), keep=callbacks.latest(2)
            ),
            "tf.train": lambda: _tf_saver(self._model, folder, self._options.every),
        }[name]()
        blocking = _timed(saver, self._options.every) if saver is not None else None
        began = time.perf_counter()
        self._fit([*([blocking] if blocking else []), clock])
        found = {
            "fit": [time.perf_counter() - began],
            "training": [clock.last - clock.first],
            "saves": blocking.seconds if blocking else [],
            "restores": [],
        }
        if name == "tfdist":
            found["restores"] = [self._restore(callbacks, folder)]
        elif name == "tf.train":
            began = time.perf_counter()
            saver.checkpoint.restore(saver.last_path).assert_consumed()
            found["restores"] = [time.perf_counter() - began]
        shutil.rmtree(folder)
        os.sync()  # so that nobody pays for what another one has left to be written
        return found

    def _fit(self, added):
        self._model.fit(
            self._data, epochs=1, steps_per_epoch=self._options.steps, verbose=0, callbacks=added
        )

    def _restore(self, callbacks, folder):
        """The time that a training, which is complete already, takes to restore all of it."""
        timed = _timed(callbacks.FaultTolerantCheckpoint(folder), self._options.every)
        self._fit([timed])
        return timed.begin_seconds


def _clock():
    import keras

    class Clock(keras.callbacks.Callback):
        """When the first and the last step were done."""

        first = last = 0.0

        def on_train_batch_end(self, batch, logs=None):
            self.last = time.perf_counter()
            self.first = self.first or self.last

    return Clock()


def _tf_saver(model, folder, every):
    import keras
    import tensorflow as tf

    class Saver(keras.callbacks.Callback):
        """``tf.train.Checkpoint.save``, which returns when the files are written."""

        def __init__(self):
            super().__init__()
            self.checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
            self.last_path = None

        def on_train_batch_end(self, batch, logs=None):
            if (batch + 1) % every == 0:
                self.last_path = self.checkpoint.save(str(folder / "ckpt"))

    return Saver()


def _timed(callback, every):
    """The callback, whose calls are timed: those after a step with a save, and the begin."""

    class Timed(type(callback)):
        def on_train_begin(self, logs=None):
            began = time.perf_counter()
            super().on_train_begin(logs)
            self.begin_seconds = time.perf_counter() - began

        def on_train_batch_end(self, batch, logs=None):
            began = time.perf_counter()
            super().on_train_batch_end(batch, logs)
            if (batch + 1) % every == 0:
                self.seconds.append(time.perf_counter() - began)

    callback.__class__ = Timed
    callback.seconds = []
    return callback


def _goals(rows):
    def ratio(name, what, over):
        values = [statistics.median(rows[n][what]) for n in (name, over)]
        return values[0] / values[1]

    found = [
        ("training / without saves", ratio("tfdist", "training", "none"), TRAINING_GOAL),
        ("blocked by a save / tf.train", ratio("tfdist", "saves", "tf.train"), BLOCKING_GOAL),
        ("restore / tf.train", ratio("tfdist", "restores", "tf.train"), RESTORE_GOAL),
    ]
    return [limits.at_most(what, value, bound) for what, value, bound in found]


def _print(report, options):
    host = report["machine"]
    print(f"{host['cpu']}, {host['cores']} cores; load average before: {host['load_average']}")
    print(", ".join(f"{name} {version}" for name, version in report["versions"].items()))
    print(
        f"{report['parameters']:,} parameters, {report['megabytes']:.0f} MB with the optimizer's; "
        f"{options.rounds} round(s) of {options.steps} steps, saves every {options.every}; "
        "seconds: median (fastest to slowest)\n"
    )
    print(f"{'':10}{'training':>24}{'fit':>24}{'blocked by a save':>24}{'restore':>24}")
    for name, row in report["results"].items():
        cells = (row[what] for what in ("training", "fit", "saves", "restores"))
        print(f"{name:10}" + "".join(f"{_spread(cell):>24}" for cell in cells))
    print()
    for goal in report["goals"]:
        print(limits.goal_line(goal))


def _spread(seconds):
    if not seconds:
        return "-"
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"


if __name__ == "__main__":
    sys.exit(main())
