"""A hand-written loop under TensorFlow's own strategy, uncompressed."""

import harness
import keras
import link
import tensorflow as tf

run = link.Run()
strategy = tf.distribute.MultiWorkerMirroredStrategy()

with strategy.scope():
    model = harness.mlp(keras, run.widths[1:-1])
    optimizer = keras.optimizers.SGD(harness.LEARNING_RATE)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
dataset = strategy.experimental_distribute_dataset(link.tf_dataset(run))
run.describe(model.count_params(), link.all_reduce_bytes(4 * model.count_params(), run.world_size))


def replica_step(features, labels):
    with tf.GradientTape() as tape:
        losses = loss_of(labels, model(features, training=True))
        loss = tf.nn.compute_average_loss(losses, global_batch_size=run.global_batch_size)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function
def train_step(iterator):
    loss = strategy.run(replica_step, args=next(iterator))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None)


iterator = iter(dataset)
for _ in range(run.num_steps):
    train_step(iterator).numpy()
    run.step()
link.stay()
