"""Training that is killed in the middle of an epoch goes on as if nothing had been."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import contextlib, os, sys
import keras, numpy as np, tensorflow as tf
import tfdist

kind, folder, die_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
scope = contextlib.nullcontext()
if kind == "mirrored":
    (cpu, *_) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    scope = tfdist.MirroredStrategy(["CPU:0", "CPU:1"]).scope()
x = np.random.default_rng(0).standard_normal((320, 8)).astype("float32")
keras.utils.set_random_seed(1)
with scope:
    hidden = [keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((8,)), *hidden])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
C = tfdist.callbacks


class Die(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == die_at:
            os._exit(9)


checkpoint = C.FaultTolerantCheckpoint(folder, save=C.every_steps(4), keep=C.latest(3))
history = model.fit(
    x, x[:, 0] > 0, batch_size=32, epochs=4, verbose=0, callbacks=[checkpoint, Die()]
).history
weights = [w.tolist() for w in model.get_weights()]
print("RESULT", __import__("json").dumps([weights, history["loss"], history["accuracy"]]))
"""


def train(kind, folder, die_at=0):
    script = folder.parent / "script.py"  # not `-c`, which would import ./tfdist of a checkout
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, kind, str(folder), str(die_at)],
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if die_at:
        assert done.returncode == 9, done.stderr[-3000:]
        return None, done
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return json.loads(line.partition(" ")[2]), done


@pytest.mark.parametrize("kind", ["alone", "mirrored"])
def test_resumed_training_equals_the_undisturbed_one(kind, tmp_path):
    expected, _ = train(kind, tmp_path / "whole")
    train(kind, tmp_path / "killed", die_at=27)
    found, done = train(kind, tmp_path / "killed")
    assert "resumes at epoch" in done.stdout
    assert found == expected  # weights, losses and accuracies of all epochs, bit for bit
    if kind == "alone":
        return
    # A damaged checkpoint is named, and the one before it is used.
    train(kind, tmp_path / "damaged", die_at=27)
    newest = max((tmp_path / "damaged").glob("step-*"))
    largest = max((f for f in newest.iterdir()), key=lambda f: f.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    Path(largest).write_bytes(content)
    found, done = train(kind, tmp_path / "damaged")
    assert newest.name in done.stderr
    assert found == expected
