"""Loss against time on four workers of different speeds: for ``parameter_server.py loss``."""

import argparse
import json
import time

import keras
import naps
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdist

USERS, DIMENSIONS = 100_000, 32

parser = argparse.ArgumentParser()
parser.add_argument("--task", choices=("digits", "recommender"), required=True)
parser.add_argument("--consistency", default="Async()")
parser.add_argument("--nap-ms", type=int, default=20)
parser.add_argument("--slow", type=int, default=10)
parser.add_argument("--seconds", type=float, default=30.0)
options = parser.parse_args()

name, _, argument = options.consistency.rstrip(")").partition("(")
strategy = tfdist.ParameterServerStrategy(
    consistency=getattr(tfdist, name)(*([int(argument)] if argument else []))
)
keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)


class Napping(keras.Model):
    """A functional model whose steps sleep."""

    def train_step(self, data):
        x, y = data
        return super().train_step((naps.after_nap(x, options.nap_ms, options.slow), y))


def digits():
    """A network of one hidden layer: model, loss, inputs [1797, 64], labels, the loss to reach, and
    the learning rate."""
    images, labels = load_digits(return_X_y=True)
    inputs = keras.Input((64,))
    hidden = keras.layers.Dense(64, "relu")(inputs)
    model = Napping(inputs, keras.layers.Dense(10)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, loss, (images / 16.0).astype("float32"), labels, 0.25, 0.05


def recommender():
    """Ratings that are products of hidden factors, of 100,000 users and as many items."""
    rows = 20_000
    pairs = np.stack([rng.integers(0, 2000, rows), rng.integers(0, 2000, rows)], 1)
    users, items = rng.standard_normal((2, 2000, 4))
    ratings = (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(1).astype("float32")
    inputs = keras.Input((2,), dtype="int32")
    user = keras.layers.Embedding(USERS, DIMENSIONS)(inputs[:, 0])
    item = keras.layers.Embedding(USERS, DIMENSIONS)(inputs[:, 1])
    outputs = keras.layers.Dot(1)([user, item])
    return Napping(inputs, outputs), keras.losses.MeanSquaredError(), pairs, ratings, 3.9, 0.5


with strategy.scope():
    model, loss, x, y, target, rate = digits() if options.task == "digits" else recommender()
    optimizer = (
        keras.optimizers.SGD(rate) if options.task == "digits" else keras.optimizers.Adagrad(rate)
    )
    model.compile(optimizer=optimizer, loss=loss)

# A batch is a step of one worker; under Sync() it is shared out, so four times as many rows.
batch = 64 * (4 if name == "Sync" else 1)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=0).repeat()
dataset = dataset.batch(batch, drop_remainder=True).prefetch(8)
model.fit(dataset, steps_per_epoch=4, epochs=1, verbose=0)  # traces
seconds, curve = 0.0, []
while seconds < options.seconds:
    began = time.perf_counter()
    model.fit(dataset, steps_per_epoch=25 if name != "Sync" else 7, epochs=1, verbose=0)
    seconds += time.perf_counter() - began
    current = float(model.evaluate(x[:2000], y[:2000], batch_size=500, verbose=0))
    curve.append((seconds, current))
reached = [s for s, value in curve if value <= target]
result = {
    "target": target,
    "seconds": options.seconds,
    "seconds_to_target": reached[0] if reached else float("inf"),
    "loss_at_end": curve[-1][1],
    "curve": curve,
}
print("RESULT", json.dumps(result), flush=True)
