"""A custom training loop under TensorFlow's own strategy, in the pattern of its tutorials.

The model and the optimizer are Keras 3's; the loop, the loss scaling and the reduction of the
loss in each step are written by hand.
"""

import harness
import keras
import tensorflow as tf

run = harness.Run()
run.mark("import")
strategy = tf.distribute.MultiWorkerMirroredStrategy()
run.mark("cluster")

with strategy.scope():
    model = harness.mlp(keras, run.hidden)
    optimizer = keras.optimizers.SGD(harness.LEARNING_RATE, momentum=harness.MOMENTUM)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
dataset = strategy.experimental_distribute_dataset(harness.tf_dataset(run))


def replica_step(features, labels):
    with tf.GradientTape() as tape:
        losses = loss_of(labels, model(features, training=True))
        loss = tf.nn.compute_average_loss(losses, global_batch_size=run.batch_size)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function
def train_step(iterator):
    loss = strategy.run(replica_step, args=next(iterator))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None)


iterator = iter(dataset)
for epoch in range(run.epochs):
    if run.finite and epoch > 0:
        iterator = iter(dataset)
    total = 0.0
    for _ in range(run.steps):
        total += train_step(iterator)
        run.step()
    print(f"epoch {epoch + 1}: loss {float(total) / run.steps:.4f}")
run.report(model.count_params(), float(total) / run.steps)
