"""Trains a small GPT, split over four devices, on the text of Python's help; then it writes.

    python examples/gpt_split.py

Two stages of layers, in each of which the weights are split over two devices: GPUs where there are
four, else logical CPU devices. The text comes with Python (``pydoc_data``).
"""

import argparse
import pydoc_data.topics

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--steps", type=int, default=200, help="steps per epoch")
parser.add_argument("--length", type=int, default=64, help="characters of context")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--blocks", type=int, default=4)
parser.add_argument("--write", type=int, default=200, help="characters to write at the end")
options = parser.parse_args()

if len(tf.config.list_physical_devices("GPU")) < 4:
    tf.config.set_visible_devices([], "GPU")
    (cpu, *_) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)

strategy = tfdist.ModelParallelStrategy(stages=2, tensor=2, data=1, micro_batches=4)
keras.utils.set_random_seed(1)

text = "\n".join(pydoc_data.topics.topics.values())
letters = sorted(set(text))
letters += ["\0"] * (-len(letters) % 4)  # so that their number divides
number_of = {letter: number for number, letter in enumerate(letters)}
codes = np.array([number_of[letter] for letter in text], np.int32)


def transformer():
    """A decoder: the next character from those before it."""
    inputs = keras.Input((options.length,), dtype="int32")
    x = layers.Embedding(len(letters), options.width)(inputs)
    x = x + layers.Embedding(options.length, options.width)(keras.ops.arange(options.length))
    for _ in range(options.blocks):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(4, options.width // 4)(y, y, use_causal_mask=True)
        x = layers.Add()([x, y])
        y = layers.Dense(4 * options.width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(options.width)(y)])
    return keras.Model(inputs, layers.Dense(len(letters))(layers.LayerNormalization()(x)))


with strategy.scope():
    model = transformer()
    model.compile(
        keras.optimizers.Adam(1e-3, global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
strategy.split(model).summary()

windows = tf.data.Dataset.from_tensor_slices(codes).batch(options.length + 1, drop_remainder=True)
batches = (
    windows.map(lambda window: (window[:-1], window[1:]))
    .shuffle(20_000, seed=1)
    .batch(32, drop_remainder=True)
    .repeat()
)
model.fit(batches, epochs=options.epochs, steps_per_epoch=options.steps, verbose=2)

rng = np.random.default_rng(1)
written = list(codes[: options.length])
for _ in range(min(options.write, 10 * options.steps)):
    logits = model.predict(np.array([written[-options.length :]]), verbose=0)[0, -1]
    odds = np.exp((logits - logits.max()) / 0.7)
    written.append(rng.choice(len(letters), p=odds / odds.sum()))
print("".join(letters[number] for number in written[options.length :]))
