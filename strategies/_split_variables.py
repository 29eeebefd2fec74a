"""Variables of a split model: several pieces on several devices that are one variable to Keras."""

import tensorflow as tf
from tensorflow.python.distribute import values
from tensorflow.python.eager import record, tape
from tensorflow.python.framework import ops

from tfdist.strategies._placed import joined
from tfdist.strategies._whole_variable import WholeVariable, shard_number


class SplitVariable(WholeVariable):
    """A variable in shards along one axis, each on a device (in each replica) of its own.

    Args:
        strategy: the strategy.
        shards: list of variables that the strategy has made.
        axis: int, not negative.
        name: the whole variable's.
    """

    def __init__(self, strategy, shards, axis, name):
        super().__init__(strategy, shards[0])
        self.shards = list(shards)
        self.axis = axis
        self._whole_name = name

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

    # -------------------------------------------------------------------------- reading

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

    # -------------------------------------------------------------------------- writing

    def slice(self, value, number):
        """The part of a whole value (or a scalar) that belongs to a shard."""
        if isinstance(value, tf.IndexedSlices):
            return self._slice_rows(value, number)
        value = tf.convert_to_tensor(value, self.dtype)
        if value.shape.rank == 0:
            return value
        size = self.shards[0].shape[self.axis]
        start = [0] * self.shards[0].shape.rank
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

    def _write(self, method, value):
        if (alone := self._alone()) is not None:
            return getattr(alone, method)(value)
        for number, shard in enumerate(self.shards):
            getattr(shard, method)(self.slice(value, number))
        return None
