"""A layer that takes a known time, forward and backward, and no core: it stands for a stage.

It waits inside of TensorFlow's runtime, in an element of a ``tf.data`` pipeline that comes late, so
it holds neither a thread of the executor nor Python. Like a device, it does one thing at a time, in
the order in which things become ready.
"""

import itertools

import keras
import tensorflow as tf

_OPEN, _DONE = 1, -1  # marks in the log: a micro-batch begins, and has gone back
_LOG = 1_000_000  # marks that it has room for
_numbers = itertools.count()


class Wait(keras.layers.Layer):
    """Waits, and gives what it was given, times a weight (so that it keeps its input).

    Args:
        forward: seconds.
        backward: seconds.
    """

    def __init__(self, forward, backward, **settings):
        super().__init__(**settings)
        self._forward, self._backward = forward, backward
        self._queue = f"wait{next(_numbers)}"  # a device finds its queues by their names
        self._device = None
        self._functions = {}

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)

    def call(self, x):
        self._device = x.device

        @tf.custom_gradient
        def wait(x):
            def backward(gradient):
                return self._waited(gradient, self._backward, after=_DONE)

            return self._waited(x, self._forward, before=_OPEN), backward

        return wait(x * self.scale)

    def _waited(self, x, seconds, before=None, after=None):
        key = before, str(x.shape), self._device
        if key not in self._functions:
            function = tf.function(lambda x: self._wait(x, seconds, before, after), autograph=False)
            spec = tf.TensorSpec(x.shape, x.dtype)
            self._functions[key] = function.get_concrete_function(spec)
        # A call without side effects as far as TensorFlow knows, which would put others in order.
        with tf.device(self._device):
            (result,) = tf.raw_ops.PartitionedCall(args=[x], Tout=[x.dtype], f=self._functions[key])
        result.set_shape(x.shape)
        return result

    def _wait(self, x, seconds, before, after):
        with tf.device(self._device):
            lock, log = _queue_of(self._queue, 1), _queue_of(self._queue + "log", _LOG)
            with tf.control_dependencies([x]):
                taken = [_put(lock, 0)]
            with tf.control_dependencies(taken):
                taken += [] if before is None else [_put(log, before)]
            with tf.control_dependencies(taken):
                result = _late(x, seconds)
            with tf.control_dependencies([result]):
                gone = [] if after is None else [_put(log, after)]
            with tf.control_dependencies([result, *gone]):
                tf.raw_ops.QueueDequeueV2(handle=lock, component_types=[tf.int32])
            return result

    def most_under_way(self):
        """The most batches that were under way at once since the last call: begun, not gone back.

        Raises:
            RuntimeError: some have not gone back.
        """
        with tf.device(self._device):
            log = _queue_of(self._queue + "log", _LOG)
            count = tf.raw_ops.QueueSizeV2(handle=log)
            (marks,) = tf.raw_ops.QueueDequeueManyV2(
                handle=log, n=count, component_types=[tf.int32]
            )
        under_way = list(itertools.accumulate(marks.numpy().tolist()))
        if not under_way or under_way[-1] != 0:
            raise RuntimeError(f"expected as many backward as forward passes, got {under_way}")
        return max(under_way)


def _late(x, seconds):
    kind = {"output_types": [x.dtype], "output_shapes": [x.shape]}
    element = tf.raw_ops.TensorDataset(components=[x], output_shapes=[x.shape])
    late = tf.raw_ops.SleepDataset(
        input_dataset=element,
        sleep_microseconds=tf.constant(round(seconds * 1e6), tf.int64),
        **kind,
    )
    # Without it the end of the data would be late, too.
    one = tf.raw_ops.TakeDataset(input_dataset=late, count=tf.constant(1, tf.int64), **kind)
    (result,) = tf.raw_ops.DatasetToSingleElement(dataset=one, **kind)
    return result


def _queue_of(name, capacity):
    return tf.raw_ops.FIFOQueueV2(
        component_types=[tf.int32], shapes=[[]], capacity=capacity, shared_name=name
    )


def _put(queue, value):
    return tf.raw_ops.QueueEnqueueV2(handle=queue, components=[tf.constant(value)])
