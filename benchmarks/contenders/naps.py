"""Steps that sleep: workers of any speed, without taking the cores from one another."""

import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing


def after_nap(tensor, milliseconds, slow):
    """The tensor, after a sleep on the worker that computes it; worker 0 sleeps ``slow`` times
    longer."""
    index = tf.distribute.coordinator.experimental_get_current_worker_index()
    times = tf.where(tf.cast(index, tf.int32) == 0, slow, 1)
    naps = tf.data.Dataset.range(tf.cast(times, tf.int64)).apply(testing.sleep(1000 * milliseconds))
    done = naps.reduce(tf.constant(0, tf.int64), lambda count, _: count + 1)
    with tf.control_dependencies([done]):
        return tf.identity(tensor)
