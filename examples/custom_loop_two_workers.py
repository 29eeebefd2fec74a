"""A training loop of one's own on two workers.

    tfdist run -n 2 examples/custom_loop_two_workers.py

Outside of ``fit`` the conventions are TensorFlow's: the loss is divided by the size of the global
batch by hand, and ``apply_gradients`` sums the gradients over the replicas.
"""

import argparse

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdist

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--steps", type=int, default=None, help="steps per epoch (default: all data)")
options = parser.parse_args()

GLOBAL_BATCH = 64
strategy = tfdist.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)

images, labels = load_digits(return_X_y=True)
dataset = tf.data.Dataset.from_tensor_slices(((images / 16.0).astype("float32"), labels))
dataset = dataset.shuffle(2000, seed=1).batch(GLOBAL_BATCH, drop_remainder=True)
if options.steps is not None:
    dataset = dataset.take(options.steps)
distributed = strategy.experimental_distribute_dataset(dataset)

with strategy.scope():
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
    )
    optimizer = keras.optimizers.Adam(2e-3)
    optimizer.build(model.trainable_variables)
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


def step(images, labels):
    """One replica's step; returns its part of the mean loss of the global batch."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(losses(labels, model(images, training=True))) / GLOBAL_BATCH
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function
def train_step(batch):
    """One step on all replicas; returns the loss of the global batch."""
    return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)


for epoch in range(options.epochs):
    mean = keras.metrics.Mean()
    for batch in distributed:
        mean.update_state(train_step(batch))
    print(f"epoch {epoch + 1}: loss {float(mean.result()):.4f}", flush=True)
print(f"trained on {strategy.num_replicas_in_sync} replicas")
