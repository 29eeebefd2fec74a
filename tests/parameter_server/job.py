"""What the tests of faults and of staleness run in each process: trains, and does harm on the way.

    tfdist run --ps 2 -n 2 job.py FOLDER [options]

Each process leaves its pid in FOLDER; the chief, at a given step, sends a signal to one of them,
and writes what it has seen to FOLDER/report.json.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist

ROWS, BATCH = 640, 16


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--consistency", default="Async")
    parser.add_argument("--argument", type=int)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--harm", help="SIGNAL:JOB-INDEX, such as SIGKILL:worker-1")
    parser.add_argument(
        "--at", type=int, default=20, help="the step of the first epoch to do it at"
    )
    parser.add_argument("--wake-at", type=int, help="the step of the second epoch for SIGCONT")
    parser.add_argument("--until-back", action="store_true", help="train until the worker is back")
    parser.add_argument("--backup", action="store_true")
    parser.add_argument("--bounds", help="numbers, to train with one after the other")
    parser.add_argument("--shards", action="store_true")
    parser.add_argument("--slow", type=int, default=0, help="how much slower worker 0 is, times")
    options = parser.parse_args()
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    path = options.folder / f"{task['type']}-{task['index']}.pid"
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)

    partitioner = None
    if options.shards:
        partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(64, 2)
    kind = getattr(tfdist, options.consistency)
    consistency = kind() if options.argument is None else kind(options.argument)
    strategy = tfdist.ParameterServerStrategy(
        variable_partitioner=partitioner, consistency=consistency
    )
    restart = int(os.environ.get("TFDIST_RESTART", 0))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, 8)).astype("float32")
    y = (x[:, 0] > 0).astype("int32")
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = Model(options.slow)
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy", Rows(name="rows")],
        )
    harm = Harm(strategy, options) if options.harm and not restart else None
    callbacks = [harm] if harm else []
    if options.backup:
        callbacks.insert(0, keras.callbacks.BackupAndRestore(str(options.folder / "backup")))
    epochs = Epochs()
    logs = {}
    for bound in (options.bounds or "").split(",") if options.bounds else ():
        logs[bound] = strategy.coordinator.queue.log = []
        strategy.coordinator.queue.clocks.bound = int(bound)
        model.fit(x, y, batch_size=BATCH, epochs=options.epochs, verbose=0)
    history = model.fit(
        x, y, batch_size=BATCH, epochs=options.epochs, verbose=0, callbacks=[*callbacks, epochs]
    )
    seconds_until_back = None
    if options.until_back:
        harmed, before = int(options.harm[-1]), strategy.steps_by_worker[int(options.harm[-1])]
        while strategy.steps_by_worker[harmed] == before:
            model.fit(x, y, batch_size=BATCH, verbose=0)
        seconds_until_back = time.monotonic() - harm.done_at
    report = {
        "restart": restart,
        "epochs": epochs.seen,
        "rows": history.history["rows"],
        "loss": history.history["loss"],
        "iterations": int(model.optimizer.iterations.numpy()),
        "iterations_of_first_epoch": harm and harm.iterations_of_first_epoch,
        "steps_by_worker": strategy.steps_by_worker,
        "staleness": strategy.read_staleness(),
        "logs": logs,
        "lost_workers": strategy.coordinator.lost_workers,
        "seconds_until_back": seconds_until_back,
        "slots": [list(v.shape) for v in model.optimizer.variables],
    }
    path = options.folder / "report.new"
    path.write_text(json.dumps(report))
    path.rename(options.folder / "report.json")


class Model(keras.Model):
    """A small network whose worker 0 takes its time."""

    def __init__(self, slow):
        super().__init__()
        self.slow = slow
        self.hidden = keras.layers.Dense(16, "tanh")
        self.out = keras.layers.Dense(2)

    def call(self, inputs):
        return self.out(self.hidden(inputs))

    def train_step(self, data):
        if self.slow:
            index = tf.distribute.coordinator.experimental_get_current_worker_index()
            times = tf.where(tf.cast(index, tf.int32) == 0, self.slow, 1)
            matrix = tf.ones([200, 200])
            _, matrix = tf.while_loop(
                lambda i, m: i < 3 * times,
                lambda i, m: (i + 1, tf.linalg.matmul(m, m) / 200.0),
                (0, matrix),
            )
            x, y = data
            data = (x + 0.0 * matrix[0, 0], y)
        return super().train_step(data)


class Rows(keras.metrics.Metric):
    """How many rows were trained on."""

    def __init__(self, name):
        super().__init__(name=name)
        self.count = self.add_weight(name="count", shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(tf.cast(tf.shape(y_true)[0], "float32"))

    def result(self):
        return tf.convert_to_tensor(self.count)


class Harm(keras.callbacks.Callback):
    """Sends a signal to one of the processes in the middle of the first epoch."""

    def __init__(self, strategy, options):
        super().__init__()
        self._options = options
        self._signal, self._target = options.harm.split(":")
        self._epoch = 0
        self.done_at = None
        self.iterations_of_first_epoch = None

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.iterations_of_first_epoch = int(self.model.optimizer.iterations.numpy())

    def on_train_batch_end(self, batch, logs=None):
        first = self._epoch == (1 if self._options.backup else 0)
        if first and batch == self._options.at and self.done_at is None:
            self._send(getattr(signal, self._signal))
            self.done_at = time.monotonic()
        if self._epoch == 1 and batch == self._options.wake_at:
            self._send(signal.SIGCONT)

    def _send(self, what):
        os.kill(int((self._options.folder / f"{self._target}.pid").read_text()), what)


class Epochs(keras.callbacks.Callback):
    """The epochs that this run has begun."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(epoch)


if __name__ == "__main__":
    main()
