"""Variables of a split model: several pieces on several devices that are one variable to Keras."""

import contextlib
import threading

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import ps_values, values
from tensorflow.python.eager import context, record, tape
from tensorflow.python.framework import ops

from tfdist.strategies._placed import joined

_shard = threading.local()


@contextlib.contextmanager
def acting_as_shard(number):
    """Every :class:`SplitVariable` is its shard ``number`` in this context and thread."""
    outer = shard_number()
    _shard.number = number
    try:
        yield
    finally:
        _shard.number = outer


def shard_number():
    """The shard that variables act as in this thread, or None."""
    return getattr(_shard, "number", None)


class SplitVariable(ps_values.CachingVariable):
    """A variable in shards along one axis, each on a device (in each replica) of its own.

    Args:
        strategy: the strategy.
        shards: list of variables that the strategy has made.
        axis: int, not negative.
        name: the whole variable's.
    """

    def __init__(self, strategy, shards, axis, name):
        super().__init__(shards[0])
        self._strategy = strategy
        self.shards = list(shards)
        self.axis = axis
        self._whole_name = name

    @property
    def distribute_strategy(self):
        """The strategy under which it was made."""
        return self._strategy

    _distribute_strategy = distribute_strategy

    @property
    def name(self):
        return f"{self._whole_name}:0"

    def local(self, number):
        """A shard, as this replica has it."""
        shard = self.shards[number]
        is_in_replica = tf.distribute.get_replica_context() is not None
        if isinstance(shard, values.DistributedVariable) and is_in_replica:
            return shard._get()
        return shard

    def _alone(self):
        number = shard_number()
        return None if number is None else self.local(number)

    @property
    def shape(self):
        if (alone := self._alone()) is not None:
            return alone.shape
        shape = self.shards[0].shape.as_list()
        shape[self.axis] *= len(self.shards)
        return tf.TensorShape(shape)

    @property
    def device(self):
        return (self._alone() or self._v).device

    @property
    def handle(self):
        alone = self._alone()
        return self.local(0).handle if alone is None else alone.handle

    def is_initialized(self, name=None):
        return self._v.is_initialized(name)

    # -------------------------------------------------------------------------- reading

    def value(self):
        return self.read_value()

    def read_value_no_copy(self):
        return self.read_value()

    def read_value(self):
        if (alone := self._alone()) is not None:
            return alone.read_value()
        is_in_replica = tf.distribute.get_replica_context() is not None
        if not is_in_replica or not record.could_possibly_record():
            return tf.concat([shard.read_value() for shard in self.shards], self.axis)
        if self._v.trainable:
            tape.variable_accessed(self.local(0))
        with record.stop_recording():
            whole = tf.concat(
                [self.local(i).read_value() for i in range(len(self.shards))], self.axis
            )
        record.record_operation("ReadVariableOp", [whole], [self.local(0).handle], lambda g: [g])
        return whole

    def sparse_read(self, indices, name=None):
        return tf.gather(self.read_value(), indices, name=name)

    def tokens(self):
        """A tensor for each shard by which a tape knows it; whoever uses the shard names it.

        The gradients of all of them together are the variable's, and stay in parts.
        """
        if self._v.trainable:
            tape.variable_accessed(self.local(0))
        with record.stop_recording():
            found = []
            for number in range(len(self.shards)):
                shard = self.local(number)
                with ops.device(shard.device):
                    found.append(tf.identity(shard.read_value()))

        def backward(*gradients):
            gradients = [
                tf.IndexedSlices(g.values, g.indices, tf.constant(s.shape.as_list(), tf.int64))
                if isinstance(g, tf.IndexedSlices)
                else g
                for g, s in zip(gradients, self.shards, strict=True)
            ]
            if len({type(g) for g in gradients}) > 1:
                gradients = [tf.convert_to_tensor(g) for g in gradients]
            return [joined(gradients, self.axis, gradients[0].device)]

        record.record_operation("TfdistShards", found, [self.local(0).handle], backward)
        return found

    def _dense_var_to_tensor(self, dtype=None, name=None, as_ref=False):
        del name, as_ref
        value = self.read_value()
        return value if dtype is None or dtype == value.dtype else NotImplemented

    def __tf_tensor__(self, dtype=None, name=None):
        return self._dense_var_to_tensor(dtype, name)

    def numpy(self):
        if not context.executing_eagerly():
            raise NotImplementedError("numpy() is only available when executing eagerly.")
        return np.concatenate([shard.numpy() for shard in self.shards], self.axis)

    def __array__(self, dtype=None, copy=None):
        del copy  # always made anew
        return np.asarray(self.numpy(), dtype=dtype)

    # -------------------------------------------------------------------------- writing

    def slice(self, value, number):
        """The part of a whole value (or a scalar) that belongs to a shard."""
        if isinstance(value, tf.IndexedSlices):
            return self._slice_rows(value, number)
        value = tf.convert_to_tensor(value, self.dtype)
        if value.shape.rank == 0:
            return value
        size = self.shards[0].shape[self.axis]
        start = [0] * value.shape.rank
        start[self.axis] = number * size
        return tf.slice(value, start, self.shards[number].shape)

    def _slice_rows(self, slices, number):
        shard = self.shards[number]
        shape = tf.constant(shard.shape.as_list(), tf.int64)
        size = shard.shape[self.axis]
        if self.axis:
            start = [0] * slices.values.shape.rank
            start[self.axis] = number * size
            length = [-1] * len(start)
            length[self.axis] = size
            values_here = tf.slice(slices.values, start, length)
            return tf.IndexedSlices(values_here, slices.indices, shape)
        local = slices.indices - tf.cast(number * size, slices.indices.dtype)
        is_here = tf.logical_and(local >= 0, local < size)
        places = tf.reshape(tf.where(is_here), [-1])
        return tf.IndexedSlices(tf.gather(slices.values, places), tf.gather(local, places), shape)

    def scatter_add(self, sparse_delta, use_locking=False, name=None):
        return self._scatter("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta, use_locking=False, name=None):
        return self._scatter("scatter_sub", sparse_delta)

    def scatter_update(self, sparse_delta, use_locking=False, name=None):
        return self._scatter("scatter_update", sparse_delta)

    def _scatter(self, method, slices):
        if (alone := self._alone()) is not None:
            return getattr(alone, method)(slices)
        for number, shard in enumerate(self.shards):
            getattr(shard, method)(self._slice_rows(slices, number))
        return None

    def _write(self, method, value):
        if (alone := self._alone()) is not None:
            return getattr(alone, method)(value)
        for number, shard in enumerate(self.shards):
            getattr(shard, method)(self.slice(value, number))
        return None

    def assign(self, value, use_locking=None, name=None, read_value=True):
        return self._write("assign", value)

    def assign_add(self, delta, use_locking=None, name=None, read_value=True):
        return self._write("assign_add", delta)

    def assign_sub(self, delta, use_locking=None, name=None, read_value=True):
        return self._write("assign_sub", delta)

    # In TensorFlow's checkpoints and SavedModels: one tensor.

    def _serialize_to_tensors(self):
        with ops.device("CPU:0"):
            return {"VARIABLE_VALUE": tf.identity(self.read_value())}

    def _restore_from_tensors(self, restored_tensors):
        self.assign(restored_tensors["VARIABLE_VALUE"])
        return self

    def _copy_trackable_to_cpu(self, object_map):
        if self not in object_map:
            with ops.device("CPU:0"):
                object_map[self] = tf.Variable(
                    tf.zeros(self.shape, self.dtype), trainable=self.trainable
                )
        object_map[self].assign(self.read_value())
