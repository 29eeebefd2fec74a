"""Time until a worker that was killed trains again: for ``parameter_server.py back``.

Each process leaves its pid in the working directory; the chief kills worker 1 in training.
"""

import json
import os
import signal
import time
from pathlib import Path

began = time.perf_counter()
import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402, F401

import_seconds = time.perf_counter() - began

import tfdist  # noqa: E402

task = json.loads(os.environ["TF_CONFIG"])["task"]
Path(f"{task['type']}-{task['index']}.pid").write_text(str(os.getpid()))

strategy = tfdist.ParameterServerStrategy()
keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
x = rng.standard_normal((3200, 64)).astype("float32")
y = (x[:, 0] > 0).astype("int32")
with strategy.scope():
    layers = [keras.layers.Dense(256, "relu"), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def train():
    """One short epoch; returns the steps that worker 1 has done in it."""
    before = strategy.steps_by_worker[1]
    model.fit(x, y, batch_size=32, verbose=0)
    return strategy.steps_by_worker[1] - before


train()
assert train() > 0
os.kill(int(Path("worker-1.pid").read_text()), signal.SIGKILL)
killed = time.perf_counter()
train()  # the steps that it had begun, and all others, go to worker 0
longest = 0.0
while True:
    epoch_began = time.perf_counter()
    steps = train()
    longest = max(longest, time.perf_counter() - epoch_began)
    if steps:
        break
result = {
    "seconds": time.perf_counter() - killed,
    "import_seconds": import_seconds,
    "longest_epoch": longest,
}
print("RESULT", json.dumps(result), flush=True)
