"""What every contender of ``compression.py`` shares: settings, model, clock, counters, report.

A contender reads its settings with :class:`Run`, says what it is about to send with
:meth:`Run.describe`, and calls :meth:`Run.step` after each training step. The step that is the last
to be measured prints the result.
"""

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path

import harness
import numpy as np

HIDDEN = {  # megabytes of float32 gradients: widths of the hidden layers
    2: (400, 400, 64),
    25: (2048, 2048, 216),
    100: (4096, 4096, 1216),
}
ROWS = 512  # of data for each worker, repeated
FOR_EVER = 10**6


class Run:
    """One worker's part of one measurement.

    Attributes:
        contender: its name.
        widths: of all layers, inputs and outputs included.
        batch_size: rows for each worker in a step.
        rank, world_size: this worker's, of those that run side by side.
        steps: how many are measured.
        is_alone: whether the workers compute without any exchange.
        num_steps: how many steps to train. Those alone go on until they are ended, so that the
            slowest of them shares the cores until its end.
    """

    def __init__(self):
        parser = argparse.ArgumentParser()
        parser.add_argument("--contender", required=True)
        parser.add_argument("--gradients", type=int, choices=HIDDEN, default=2)
        parser.add_argument("--batch-size", type=int, default=32)
        parser.add_argument("--warmup", type=int, default=4)
        parser.add_argument("--steps", type=int, default=10)
        parser.add_argument("--rank", type=int, default=0)
        parser.add_argument("--world-size", type=int, default=1)
        parser.add_argument("--interface", default="lo")
        parser.add_argument("--alone", action="store_true")
        options = parser.parse_args()
        self.contender = options.contender
        self.widths = (harness.FEATURES, *HIDDEN[options.gradients], harness.CLASSES)
        self.batch_size = options.batch_size
        self.rank, self.world_size = options.rank, options.world_size
        self.is_alone = options.alone
        self._interface = options.interface
        self._warmup, self.steps = options.warmup, options.steps
        self.num_steps = FOR_EVER if options.alone else options.warmup + options.steps
        self._count = 0
        self._ends, self._cpu, self._sent = [], 0.0, 0
        self._about = {}

    @property
    def global_batch_size(self):
        return self.batch_size * (1 if self.is_alone else self.world_size)

    def data(self):
        """Random rows: features [rows, 784] and labels [rows]."""
        rng = np.random.default_rng(0)
        rows = max(ROWS, self.batch_size) // self.batch_size * self.global_batch_size
        features = rng.standard_normal((rows, harness.FEATURES), dtype=np.float32)
        return features, rng.integers(0, harness.CLASSES, rows)

    def describe(self, num_parameters, sent_bytes):
        """Notes the size of the model, and what a worker sends in a step by the formula."""
        self._about = {"parameters": int(num_parameters), "formula_bytes": float(sent_bytes)}

    def step(self):
        """Notes the end of a training step."""
        self._count += 1
        if self._count == self._warmup and self.is_alone:
            meet(self.rank, self.world_size)
        if self._warmup <= self._count <= self._warmup + self.steps:
            self._ends.append(time.perf_counter())
        if self._count == self._warmup:
            self._cpu, self._sent = time.process_time(), sent_bytes_of(self._interface)
        if self._count == self._warmup + self.steps:
            self._report()

    def _report(self):
        steps = np.diff(self._ends)
        result = self._about | {
            "step_seconds": float(np.median(steps)),
            "min_step_seconds": float(steps.min()),
            "mean_step_seconds": float(steps.mean()),
            "cpu_seconds": (time.process_time() - self._cpu) / self.steps,
            "wire_bytes": (sent_bytes_of(self._interface) - self._sent) / self.steps,
        }
        report(result)


def report(result):
    """Prints the result for the driver."""
    print("RESULT", json.dumps(result), flush=True)


def stay():
    """Waits to be ended. The worker that is done first must not leave: its peers need it."""
    sys.stdin.read()


def meet(rank, world_size):
    """Waits for the others without any network, by files in the folder where all workers run."""
    Path(f"ready_{rank}").touch()
    while not all(os.path.exists(f"ready_{other}") for other in range(world_size)):
        time.sleep(0.01)


def sent_bytes_of(interface):
    """Bytes that have left by an interface; in a network namespace by its own one."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    return 0


def shapes(widths):
    """The shapes of the model's variables, in Keras' order."""
    pairs = itertools.pairwise(widths)
    return [shape for inputs, outputs in pairs for shape in ((inputs, outputs), (outputs,))]


def all_reduce_bytes(num_bytes, world_size):
    """What a worker sends in a ring all-reduce."""
    return 2 * (world_size - 1) / world_size * num_bytes


def tf_dataset(run):
    """Returns the global dataset: batches of a fixed size, without end."""
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(run.data())
    return dataset.batch(run.global_batch_size, drop_remainder=True).repeat()
