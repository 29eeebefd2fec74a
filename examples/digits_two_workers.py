"""Trains a small convolutional network on scikit-learn's digits with two workers.

    tfdist run -n 2 examples/digits_two_workers.py

The same file trains in one process (``python examples/digits_two_workers.py``) and gives the same
model. Each batch of 64 images is shared out: 32 for each of two workers.
"""

import argparse
import os

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdist

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--steps", type=int, default=None, help="steps per epoch (default: all data)")
parser.add_argument("--out", default="digits-output", help="folder for the model")
options = parser.parse_args()

# First of all: the workers find each other before TensorFlow runs anything.
strategy = tfdist.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)

images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
x_train, x_test, y_train, y_test = train_test_split(
    images, labels, test_size=0.2, random_state=1, stratify=labels
)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

os.makedirs(options.out, exist_ok=True)
path = os.path.join(options.out, "digits.keras")
model.fit(
    x_train,
    y_train,
    batch_size=64,
    epochs=options.epochs,
    steps_per_epoch=options.steps,
    validation_data=(x_test, y_test),
    verbose="auto",  # the chief alone shows the progress
    callbacks=[keras.callbacks.CSVLogger(os.path.join(options.out, "history.csv"))],
)
loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
predictions = model.predict(x_test, verbose=0)
model.save(path)  # every worker calls it, the chief writes

# The file is a plain Keras model: it opens without tfdist and without a strategy.
reloaded = keras.models.load_model(path)
difference = np.abs(reloaded.predict(x_test, verbose=0) - predictions).max()
print(f"test accuracy: {accuracy:.4f} on {strategy.num_replicas_in_sync} replicas")
print(f"model: {os.path.abspath(path)} (reloaded, largest difference {difference:.1e})")
