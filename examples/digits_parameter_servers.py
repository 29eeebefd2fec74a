"""Trains on scikit-learn's digits with two workers at their own pace and a parameter server.

    tfdist run --ps 1 -n 2 examples/digits_parameter_servers.py

The program runs in four processes. On the workers and the server the strategy serves the chief and
does not return; what follows it runs on the chief alone.
"""

import argparse
import os

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdist

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--steps", type=int, default=None, help="steps per epoch (default: all data)")
parser.add_argument("--bound", type=int, default=4, help="steps a worker may be ahead")
parser.add_argument("--out", default="digits-output", help="folder for the model")
options = parser.parse_args()

strategy = tfdist.ParameterServerStrategy(consistency=tfdist.Stale(bound=options.bound))
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
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

history = model.fit(
    x_train,
    y_train,
    batch_size=32,
    epochs=options.epochs,
    steps_per_epoch=options.steps,
    validation_data=(x_test, y_test),
    verbose=2,
    callbacks=[tfdist.callbacks.WorkerMonitor()],
).history
loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
os.makedirs(options.out, exist_ok=True)
path = os.path.join(options.out, "digits.keras")
model.save(path)
print(f"test accuracy: {accuracy:.4f}, model: {os.path.abspath(path)}")
print(f"steps by worker in the last epoch: {history['steps_by_worker'][-1]}")
print(f"gradients by staleness 0, 1, 2, ...: {history['staleness_histogram'][-1]}")
