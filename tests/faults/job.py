"""A training job that harms itself, to be started by `tfdist run`.

``job.py FOLDER --harm PLAN``: attempt k of the job follows the k-th word of the plan, beyond its
end nothing happens. A word is ``SIGNAL:RANK:STEP:PLACE``: the worker of this rank sends itself the
signal in this step (counted over the whole training; in its first one where it begins after that),
at one of these places:

    begin       before the step
    forward     in the forward pass, from an operation of the model
    collective  while it waits for the gradients of the others, which are late
    save-N      at the N-th file operation of its process from this step on (see stepwise.py), or
                three steps later
    restore-N   at the N-th from the beginning of fit on, or before its first step
    launcher    before the step, but the signal goes to the launcher
    stuck       it sends no signal, and never begins this step

``-`` is an attempt that nothing happens to. FOLDER/steps.RANK gets a line for each step that a
worker has ended (attempt, step, time), FOLDER/strikes one for each signal (attempt, time, word),
FOLDER/written one for each checkpoint that was reported as written (attempt, step). The chief
writes FOLDER/report.json at the end.
"""

import argparse
import hashlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from stepwise import Killer

import tfdist
from tfdist import checkpoints

STEPS, BATCH = 6, 8  # steps of an epoch, rows of a step


class Harm(keras.callbacks.Callback):
    """Does what the plan says; also notes what happens."""

    def __init__(self, folder, rank, attempt, word):
        super().__init__()
        self.folder, self.attempt, self.word = folder, attempt, word
        self.trace = open(folder / f"steps.{rank}", "ab", buffering=0)  # noqa: SIM115
        self.strikes = open(folder / "strikes", "ab", buffering=0)  # noqa: SIM115
        self.written = open(folder / "written", "ab", buffering=0)  # noqa: SIM115
        name, victim, step, place = word.split(":") if word != "-" else ("-", -1, -1, "-")
        self.signum = getattr(signal, name, None)
        self.is_victim = int(victim) == rank
        self.step = int(step)
        self.place, _, number = place.partition("-")
        self.number = int(number or 0)
        self.now = -1
        self.checkpoint = None
        self.last_written = None

    def strike(self):
        self.strikes.write(f"{self.attempt} {time.time()} {self.word}\n".encode())
        os.kill(os.getppid() if self.place == "launcher" else os.getpid(), self.signum)

    def is_due(self, *places):
        return self.is_victim and self.place in places and self.step == self.now

    def is_overdue(self):
        """Whether there were fewer file operations than the word has it."""
        waited = {"restore": self.now, "save": self.now - self.step - 3}.get(self.place, -1)
        return self.is_victim and waited >= 0

    def on_train_begin(self, logs=None):
        if self.place == "restore" and self.is_victim:
            Killer(self.number, self.strike)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        is_first = self.now < 0
        self.now = self.epoch * STEPS + batch
        if is_first:  # an earlier attempt may have come further than the plan had it
            self.step = max(self.step, self.now)
        if self.is_due("begin", "launcher") or self.is_overdue():
            self.strike()
        if self.is_due("save"):
            Killer(self.number, self.strike)
        if self.is_due("stuck"):
            time.sleep(600)
        if self.is_due("collective"):
            threading.Timer(0.2, self.strike).start()

    def on_train_batch_end(self, batch, logs=None):
        self.trace.write(f"{self.attempt} {self.now} {time.time()}\n".encode())
        self.note_written()

    def note_written(self):
        written = self.checkpoint.last_written
        if written is not None and written != self.last_written:
            self.last_written = written
            self.written.write(f"{self.attempt} {written.step}\n".encode())

    def in_forward(self):
        """Runs in the forward pass of each step."""
        if self.is_due("forward"):
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


def lost_checkpoints(folder):
    """Steps that were reported as written, and are behind the newest checkpoint there is."""
    path = folder / "written"
    reported = [int(line.split()[1]) for line in path.read_text().splitlines()]
    newest = checkpoints.newest(folder / "checkpoints")
    return [step for step in reported if newest is None or newest.entry.step < step]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--harm", default="", help="the plan")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="number of its first attempt")
    args = parser.parse_args()
    attempt = args.first + int(os.environ.get("TFDIST_RESTART", 0))
    cluster = tfdist.cluster.resolve()
    words = args.harm.split(",") if args.harm else []
    harm = Harm(args.folder, cluster.rank, attempt, words[attempt] if attempt < len(words) else "-")
    lost = lost_checkpoints(args.folder)

    strategy = tfdist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((5,)),
                Passing(harm.in_forward),
                keras.layers.Dense(8, "tanh"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(2),
            ]
        )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = data()
    callbacks = tfdist.callbacks
    save = callbacks.any_of(callbacks.every_steps(2), callbacks.on_preemption())
    harm.checkpoint = callbacks.FaultTolerantCheckpoint(
        str(args.folder / "checkpoints"), save=save, keep=callbacks.latest(2)
    )
    history = model.fit(
        x, y, BATCH, args.epochs, shuffle=True, verbose=0, callbacks=[harm, harm.checkpoint]
    )
    weights = b"".join(np.ascontiguousarray(w).tobytes() for w in model.get_weights())
    report = {
        "iterations": int(model.optimizer.iterations.numpy()),
        "weights": hashlib.sha256(weights).hexdigest(),
        "losses": history.history["loss"],
        "lost_checkpoints": lost,
        "attempt": attempt,
    }
    if lost:
        raise SystemExit(f"lost checkpoints: {lost}")
    if cluster.is_chief:
        beside = args.folder / "report.new"
        beside.write_text(json.dumps(report))
        beside.rename(args.folder / "report.json")


if __name__ == "__main__":
    main()
