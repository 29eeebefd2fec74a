"""Trains on scikit-learn's digits with a batch of 64 for each worker, and the rate for that.

    tfdist run -n 2 examples/large_batch_two_workers.py

Shows the callbacks for large batches, and those that watch the workers and the clock.
"""

import argparse
import sys

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdist

C = tfdist.callbacks

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--steps", type=int, default=None, help="steps per epoch (default: all data)")
parser.add_argument("--minutes", type=float, default=60.0, help="time that the job has")
options = parser.parse_args()
deadline = C.DeadlineStop(options.minutes)  # counts from here

strategy = tfdist.MultiWorkerMirroredStrategy()
replicas = strategy.num_replicas_in_sync
keras.utils.set_random_seed(1)

images, labels = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(
    (images / 16.0).astype("float32"), labels, test_size=0.2, random_state=1, stratify=labels
)

with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, "relu")])
    model.add(keras.layers.Dense(10))
    model.compile(
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),  # the rate of a batch of 64
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
history = model.fit(
    x_train,
    y_train,
    batch_size=64 * replicas,
    epochs=options.epochs,
    steps_per_epoch=options.steps,
    validation_data=(x_test, y_test),
    callbacks=[
        C.ScaleLearningRate(replicas),
        C.LearningRateWarmup(epochs=2, start=1 / replicas),
        C.WorkerMonitor(),
        C.MetricAverage(["memory_megabytes"]),
        deadline,
    ],
    verbose=0,
).history
accuracy = model.evaluate(x_test, y_test, verbose=0, return_dict=True)["accuracy"]
if strategy.board is None or strategy.board.rank == 0:
    rates = ", ".join(f"{rate:.3f}" for rate in history["effective_learning_rate"])
    print(f"test accuracy: {accuracy:.4f} on {replicas} replicas")
    print(f"learning rate at the end of each epoch: {rates}")
    print(f"examples per second: {history['examples_per_second'][-1]:.0f}")
sys.exit(75 if deadline.stopped else 0)  # 75 (EX_TEMPFAIL): start me again
