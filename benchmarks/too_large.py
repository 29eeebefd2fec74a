"""Trains a model with Adam under a limit of memory; in one process, or in stages in all workers.

    python benchmarks/too_large.py --width 4096 --limit 4800
    tfdist run -n 2 benchmarks/too_large.py --width 4096 --limit 4800

The limit is that of the data that a process may have beyond what it has after its imports (Linux's
``RLIMIT_DATA``). Prints the losses.
"""

import argparse
import os
import re
import resource
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist

LAYERS = 24


def main():
    """Sets the limit, makes the model and trains it.

    Raises:
        tf.errors.ResourceExhaustedError: (or MemoryError) the limit is too low.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, required=True, help=f"of each of {LAYERS} layers")
    parser.add_argument("--limit", type=float, required=True, help="MB")
    options = parser.parse_args()
    (kilobytes,) = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    limit = 1024 * int(kilobytes) + round(1e6 * options.limit)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    strategy = tf.distribute.get_strategy()
    if os.environ.get("TF_CONFIG"):
        workers = tfdist.cluster.resolve().jobs["worker"]
        devices = [f"/job:worker/task:{i}/CPU:0" for i in range(len(workers))]
        strategy = tfdist.ModelParallelStrategy(devices, stages=len(devices))
    keras.utils.set_random_seed(1)
    with strategy.scope():
        hidden = [keras.layers.Dense(options.width, "relu") for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((options.width,)), *hidden])
        model.compile("adam", "mse", jit_compile=False)
    if isinstance(strategy, tfdist.ModelParallelStrategy):
        strategy.split(model)  # before Adam makes its slots, so that no process ever has them all
    x = np.random.default_rng(1).standard_normal((64, options.width), np.float32)
    history = model.fit(x, x, batch_size=16, epochs=2, verbose=0)
    print("losses", *history.history["loss"], flush=True)


if __name__ == "__main__":
    main()
