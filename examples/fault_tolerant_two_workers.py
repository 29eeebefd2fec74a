"""Trains on scikit-learn's digits, and goes on where it was when something has ended it.

    tfdist run -n 2 --max-restarts 5 examples/fault_tolerant_two_workers.py

Meanwhile kill a worker (``pkill -9 -n -f fault_tolerant``), or all, and start the command again:
the weights at the end are those of a run that nobody disturbed. Then
``tfdist checkpoints ls digits-checkpoints`` lists what was saved.
"""

import argparse

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdist

C = tfdist.callbacks

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--steps", type=int, default=None, help="steps per epoch (default: all data)")
parser.add_argument("--checkpoints", default="digits-checkpoints", help="folder")
options = parser.parse_args()

strategy = tfdist.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)

images, labels = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(
    (images / 16.0).astype("float32"), labels, test_size=0.2, random_state=1, stratify=labels
)

with strategy.scope():
    hidden = [keras.layers.Dense(128, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *hidden])
    model.compile(
        optimizer=keras.optimizers.Adam(0.001),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
history = model.fit(
    x_train,
    y_train,
    batch_size=64,
    epochs=options.epochs,
    steps_per_epoch=options.steps,
    validation_data=(x_test, y_test),
    callbacks=[
        C.FaultTolerantCheckpoint(
            options.checkpoints,
            save=C.any_of(C.every_steps(50), C.every_epochs(1), C.on_preemption()),
            keep=C.union(C.latest(2), C.best("val_accuracy")),
        ),
    ],
    verbose=0,
).history
if strategy.board is None or strategy.board.rank == 0:
    print(
        f"accuracy on held-out data: {history['val_accuracy'][-1]:.4f}, best "
        f"{max(history['val_accuracy']):.4f}, after {int(model.optimizer.iterations)} steps "
        f"on {strategy.num_replicas_in_sync} replicas"
    )
