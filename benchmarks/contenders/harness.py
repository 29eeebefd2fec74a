"""What every contender of ``step_time.py`` shares: settings, model, data, clock, report.

The driver starts a contender twice (one process per worker) with ``TF_CONFIG`` in the environment.
A contender reads its settings with :class:`Run`, marks the phases of its start, calls
:meth:`Run.step` after each training step and :meth:`Run.report` at the end.
"""

import argparse
import json
import sys
import time

import numpy as np

FEATURES, CLASSES = 784, 10
LEARNING_RATE, MOMENTUM = 0.01, 0.9
HIDDEN = {
    "1M": (640, 640, 128),  # 995,978 parameters
    "25M": (4096, 4096, 1216),  # 24,990,794 parameters
}


class Run:
    """One worker's part of one measurement.

    Attributes:
        hidden: Widths of the hidden layers.
        batch_size: Global batch size, over both workers.
        steps, epochs: Steps in an epoch, and epochs; the first epoch is the warm-up.
        finite: Whether the data ends after ``steps`` batches (the last batch's size is unknown to
            the graph), or repeats for ever in batches of a fixed size.
    """

    def __init__(self):
        parser = argparse.ArgumentParser()
        parser.add_argument("--model", choices=HIDDEN, default="1M")
        parser.add_argument("--input", choices=("finite", "static"), default="finite")
        parser.add_argument("--batch-size", type=int, default=128)
        parser.add_argument("--steps", type=int, default=10)
        parser.add_argument("--epochs", type=int, default=4)
        parser.add_argument("--started", type=float, default=time.monotonic())
        options = parser.parse_args()
        self.hidden = HIDDEN[options.model]
        self.finite = options.input == "finite"
        self.batch_size = options.batch_size
        self.steps = options.steps
        self.epochs = options.epochs
        self._last_mark = options.started
        self._phases = {}  # seconds
        self._step_ends = []
        self._cpu_at_step_ends = []  # seconds of all threads of this process

    def data(self):
        """Returns one epoch of random rows: features [rows, 784] and labels [rows]."""
        rng = np.random.default_rng(0)
        rows = self.steps * self.batch_size
        features = rng.standard_normal((rows, FEATURES), dtype=np.float32)
        return features, rng.integers(0, CLASSES, rows)

    def mark(self, phase):
        """Notes that a phase of the start (``import``, ``cluster``) is over."""
        now = time.monotonic()
        self._phases[phase] = now - self._last_mark
        self._last_mark = now

    def step(self):
        """Notes the end of a training step."""
        self._step_ends.append(time.monotonic())
        self._cpu_at_step_ends.append(time.process_time())
        if len(self._step_ends) == 1:
            self.mark("first_step")

    def report(self, num_parameters, loss):
        """Prints the result for the driver, then stays until it ends this process.

        The worker that is done first must not leave: its peer may still need it.
        """
        ends, windows = self._windows(self._step_ends)
        boundaries = ends[1:, 0] - ends[:-1, -1] - windows[1:]
        _, cpu_windows = self._windows(self._cpu_at_step_ends)
        result = {
            "parameters": int(num_parameters),
            "loss": float(loss),
            "phases": self._phases,
            "step_seconds": float(np.median(windows[1:])),
            "cpu_seconds": float(np.median(cpu_windows[1:])),
            "boundary_seconds": float(np.median(boundaries)),
        }
        print("RESULT", json.dumps(result), flush=True)
        sys.stdin.read()

    def _windows(self, ends):
        """Returns the ends by epoch and step, and each epoch's seconds per step.

        An epoch's window runs from the end of its first step to the end of its last.
        """
        ends = np.reshape(ends, (self.epochs, self.steps))
        return ends, (ends[:, -1] - ends[:, 0]) / (self.steps - 1)


def mlp(keras, hidden):
    """Builds the model with Keras 3 or ``tf_keras``, whichever is passed."""
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            *(keras.layers.Dense(width, activation="relu") for width in hidden),
            keras.layers.Dense(CLASSES),
        ]
    )


def tf_dataset(run):
    """Returns the global dataset, as one writes it for a single process."""
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(run.data())
    if run.finite:
        return dataset.batch(run.batch_size)
    return dataset.batch(run.batch_size, drop_remainder=True).repeat()


def fit(run, keras, strategy):
    """Trains with ``model.fit``: the same lines for tfdist and for ``tf_keras``."""
    with strategy.scope():
        model = mlp(keras, run.hidden)
        model.compile(
            optimizer=keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    history = model.fit(
        tf_dataset(run),
        epochs=run.epochs,
        steps_per_epoch=None if run.finite else run.steps,
        callbacks=[
            keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: run.step())
        ],
        verbose=2,
    )
    run.report(model.count_params(), history.history["loss"][-1])
