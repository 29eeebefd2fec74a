"""Trains on scikit-learn's digits with two devices of this machine.

    python examples/digits_two_devices.py

Uses all GPUs; where there are fewer than two, it cuts the CPU into two logical devices.
"""

import argparse

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdist

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--steps", type=int, default=None, help="steps per epoch (default: all data)")
options = parser.parse_args()

devices = None  # all GPUs
if len(tf.config.list_physical_devices("GPU")) < 2:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    devices = ["CPU:0", "CPU:1"]
strategy = tfdist.MirroredStrategy(devices)
keras.utils.set_random_seed(1)

images, labels = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(
    (images / 16.0).astype("float32"), labels, test_size=0.2, random_state=1, stratify=labels
)
train = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(2000, seed=1).batch(64)

with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
    model.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
model.fit(train, epochs=options.epochs, steps_per_epoch=options.steps, verbose=2)
loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"test accuracy: {accuracy:.4f} on {strategy.num_replicas_in_sync} replicas")
