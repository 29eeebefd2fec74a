"""Keras 2's ``model.fit`` under TensorFlow's own ``MultiWorkerMirroredStrategy``."""

import harness
import tensorflow as tf
import tf_keras

run = harness.Run()
run.mark("import")
strategy = tf.distribute.MultiWorkerMirroredStrategy()
run.mark("cluster")
harness.fit(run, tf_keras, strategy)
