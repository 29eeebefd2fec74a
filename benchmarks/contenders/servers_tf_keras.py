"""``tf_keras`` 2: ``model.fit`` under TensorFlow's ``ParameterServerStrategy``."""

import harness
import servers
import tensorflow as tf
import tf_keras as keras

run = servers.Run()
options = run.options
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    config = tf.compat.v1.ConfigProto()
    config.inter_op_parallelism_threads = 8
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
        config=config,
    )
    server.join()

strategy = tf.distribute.ParameterServerStrategy(resolver)
with strategy.scope():
    model = harness.mlp(keras, servers.HIDDEN[options.model])
    model.compile(
        optimizer=keras.optimizers.SGD(harness.LEARNING_RATE, momentum=harness.MOMENTUM),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=options.steps_per_execution,
    )
model.fit(
    keras.utils.experimental.DatasetCreator(lambda context: run.dataset()),
    steps_per_epoch=options.steps,
    epochs=options.epochs,
    callbacks=[run.clock(keras)],
    verbose=0,
)
run.report(model.count_params())
