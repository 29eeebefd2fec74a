"""tfdist: ``model.fit`` under ``tfdist.MultiWorkerMirroredStrategy(compression=...)``."""

import compressors
import harness
import keras
import link
import tensorflow as tf

from tfdist import MultiWorkerMirroredStrategy
from tfdist.compression import as_exchange

run = link.Run()
compression = compressors.make(run.contender)
strategy = MultiWorkerMirroredStrategy(compression=compression)

with strategy.scope():
    model = harness.mlp(keras, run.widths[1:-1])
    model.compile(
        optimizer=keras.optimizers.SGD(harness.LEARNING_RATE),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
specs = [tf.TensorSpec(v.shape, v.dtype, v.path) for v in reversed(model.trainable_variables)]
run.describe(model.count_params(), as_exchange(compression).sent_bytes(specs, run.world_size))
model.fit(
    link.tf_dataset(run),
    steps_per_epoch=run.num_steps,
    callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: run.step())],
    verbose=0,
)
link.stay()
