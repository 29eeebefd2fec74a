"""A training job that harms itself, to be started by `tfdist run`.

``job.py FOLDER --harm PLAN``: attempt k of the job follows the k-th word of the plan, beyond its
end nothing happens. A word is ``SIGNAL:RANK:STEP:PLACE``: the worker of this rank sends itself the
signal in this step (counted over the whole training), at one of these places:

    begin       before the step
    forward     in the forward pass, from an operation of the model
    collective  while it waits for the gradients of the others, which are late
    epoch       after the last step of the epoch of this step, before the epoch's end
    restore     before the first step, while the checkpoint is read
    stuck       it sends no signal, and never begins this step
    exit        it ends with exit code 3
    start       the same, before it trains, and in every attempt that has this many workers

``-`` is an attempt that nothing happens to. Each worker appends to FOLDER/steps.RANK a line for
each step that it has ended: attempt, step, time. The chief writes FOLDER/report.json at the end.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist

EPOCHS, STEPS, BATCH = 3, 6, 8  # steps of an epoch, rows of a step


class Harm(keras.callbacks.Callback):
    """Does what the plan says; also notes each step."""

    def __init__(self, folder, rank, attempt, word):
        super().__init__()
        self.attempt = attempt
        self.trace = open(folder / f"steps.{rank}", "ab", buffering=0)  # noqa: SIM115
        signame, victim, step, self.place = word.split(":") if word != "-" else ("-", -1, -1, "-")
        self.signum = getattr(signal, signame, None)
        self.is_victim = int(victim) == rank
        self.step = int(step)
        self.now = 0

    def strike(self):
        if self.place == "exit":
            os._exit(3)
        os.kill(os.getpid(), self.signum)

    def is_due(self, place, step):
        return self.place == place and self.is_victim and self.step == step

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self.now = self.epoch * STEPS + batch
        if self.is_due("begin", self.now) or self.is_due("exit", self.now):
            self.strike()
        if self.is_due("stuck", self.now):
            time.sleep(600)
        if self.is_due("collective", self.now):
            threading.Timer(0.2, self.strike).start()

    def on_train_batch_end(self, batch, logs=None):
        step = self.epoch * STEPS + batch
        self.trace.write(f"{self.attempt} {step} {time.time()}\n".encode())

    def on_epoch_end(self, epoch, logs=None):
        if self.place == "epoch" and self.is_victim and epoch == self.step // STEPS:
            self.strike()

    def in_forward(self):
        """Runs in the forward pass of each step."""
        if self.is_due("forward", self.now):
            self.strike()
        if self.place == "collective" and not self.is_victim and self.now == self.step:
            time.sleep(0.5)


class Passing(keras.layers.Layer):
    """Gives on what it gets; calls a Python function as an operation of the model."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        def visit(x):
            self.function()
            return x

        visited = tf.numpy_function(visit, [x], x.dtype)
        with tf.control_dependencies([visited]):
            return tf.identity(x)


def data():
    random = np.random.default_rng(3)
    x = random.normal(size=(STEPS * BATCH, 5)).astype("float32")
    return x, (x[:, :2].sum(axis=1) > 0).astype("int32")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--harm", default="")
    parser.add_argument("--handle-sigterm", action="store_true")
    args = parser.parse_args()
    attempt = int(os.environ.get("TFDIST_RESTART", 0))
    cluster = tfdist.cluster.resolve()
    words = args.harm.split(",") if args.harm else []
    word = words[attempt] if attempt < len(words) else "-"
    starts = [w.split(":") for w in words if w.endswith(":start")]
    for _, victim, workers, _ in starts:
        concerned = cluster.rank == int(victim) and cluster.num_workers == int(workers)
        if concerned and len(list(args.folder.glob("failed.*"))) < 2:
            (args.folder / f"failed.{attempt}").touch()
            sys.exit(3)
    if word.endswith(":start"):
        word = "-"

    strategy = tfdist.MultiWorkerMirroredStrategy()
    harm = Harm(args.folder, cluster.rank, attempt, word)
    if harm.place == "restore" and harm.is_victim:
        saved = str(args.folder / "backup")
        sys.addaudithook(
            lambda event, about: (
                harm.strike() if event == "open" and str(about[0]).startswith(saved) else None
            )
        )
    if args.handle_sigterm:
        # Saves nothing: the backup of the last epoch is what the next attempt starts from.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((5,)),
                Passing(harm.in_forward),
                keras.layers.Dense(8, "tanh"),
                keras.layers.Dense(2),
            ]
        )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = data()
    backup = keras.callbacks.BackupAndRestore(str(args.folder / "backup"), delete_checkpoint=False)
    model.fit(x, y, BATCH, EPOCHS, shuffle=False, verbose=0, callbacks=[backup, harm])
    weights = b"".join(np.ascontiguousarray(w).tobytes() for w in model.get_weights())
    report = {
        "iterations": int(model.optimizer.iterations.numpy()),
        "weights": hashlib.sha256(weights).hexdigest(),
        "workers": cluster.num_workers,
        "nominal_workers": cluster.nominal_workers,
        "attempt": attempt,
    }
    if cluster.is_chief:
        beside = args.folder / "report.new"
        beside.write_text(json.dumps(report))
        beside.rename(args.folder / "report.json")


if __name__ == "__main__":
    main()
