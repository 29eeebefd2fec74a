"""What the contenders of ``parameter_server.py`` share: settings, data, clock, report."""

import argparse
import json
import time

import harness
import link
import numpy as np

HIDDEN = harness.HIDDEN | {"tiny": (32,)}


class Run:
    """The chief's part of a measurement: an epoch to warm up, then epochs that are measured."""

    def __init__(self):
        parser = argparse.ArgumentParser()
        parser.add_argument("--contender", default="tfdist")
        parser.add_argument("--model", choices=HIDDEN, default="1M")
        parser.add_argument("--batch-size", type=int, default=64)
        parser.add_argument("--steps", type=int, default=100)
        parser.add_argument("--epochs", type=int, default=3)
        parser.add_argument("--fed-by", choices=("workers", "chief"), default="workers")
        parser.add_argument("--steps-per-execution", type=int, default=1)
        parser.add_argument("--consistency", default="Async()")
        parser.add_argument("--slow", type=int, default=1, help="how many times slower worker 0 is")
        parser.add_argument("--nap-ms", type=int, default=0, help="a step's sleep")
        parser.add_argument("--count-bytes", action="store_true")
        parser.add_argument("--compression")
        parser.add_argument("--pull-dtype")
        self.options = parser.parse_args()
        self._ends, self._sent = [], []

    def dataset(self):
        """Random rows in batches, without end."""
        import tensorflow as tf

        rng = np.random.default_rng(0)
        rows = 32 * self.options.batch_size
        features = rng.standard_normal((rows, harness.FEATURES), dtype=np.float32)
        labels = rng.integers(0, harness.CLASSES, rows)
        dataset = tf.data.Dataset.from_tensor_slices((features, labels))
        return dataset.batch(self.options.batch_size, drop_remainder=True).repeat().prefetch(4)

    def clock(self, keras):
        """A callback that notes the ends of epochs."""

        def on_epoch_end(epoch, logs):
            self._ends.append(time.perf_counter())
            self._sent.append(link.sent_bytes_of("lo"))

        return keras.callbacks.LambdaCallback(on_epoch_end=on_epoch_end)

    def report(self, num_parameters, **more):
        """Prints the result for the driver."""
        seconds = np.diff(self._ends)
        result = {
            "parameters": int(num_parameters),
            "steps_per_second": float(self.options.steps / np.median(seconds)),
            "epoch_seconds": [float(s) for s in seconds],
            "wire_bytes": float(np.median(np.diff(self._sent)) / self.options.steps),
        }
        print("RESULT", json.dumps(result | more), flush=True)
