"""The variables of a parameter-server strategy.

Three kinds, told apart when a variable is made:

- :class:`ServerVariable`: weights, optimizer slots and counters. Lives on the servers, in one
  piece or in shards by rows, and is one variable to Keras in either case.
- :class:`StateVariable`: state that a layer updates from the rows it sees (moving statistics, the
  states of seed generators). A step works on a copy and adds what it changed.
- :class:`TotalVariable`: sums that a metric keeps. Lives on the chief; a step starts from zero,
  and the chief adds what the step found, once, when it takes the step for finished.

Outside of a worker's step they act like plain variables. There, on the chief, reading or writing
one first waits for the steps that are under way.
"""

import threading
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.eager import context, record, tape
from tensorflow.python.framework import ops
from tensorflow.python.ops import gen_resource_variable_ops

from tfdist.strategies._step import current_step
from tfdist.strategies._whole_variable import WholeVariable, shard_number
from tfdist.strategies._worker_step import WorkerStep


def _step():
    step = current_step()
    return step if isinstance(step, WorkerStep) else None


class _ClusterVariable(WholeVariable):
    """What the kinds share: what there is to do before they are used."""

    @property
    def host(self):
        """The chief, which writes: a server may not see the chief's files."""
        return self._strategy.chief_device

    def _before_use(self):
        if context.executing_eagerly():
            self._strategy.join()


class ServerVariable(_ClusterVariable):
    """A variable on the servers, whole or in shards of consecutive rows.

    Args:
        strategy: the strategy.
        shards: list of ``tf.Variable``, each on its server.
        name: the whole variable's.
    """

    def __init__(self, strategy, shards, name):
        super().__init__(strategy, shards[0])
        self.shards = list(shards)
        self._whole_name = name
        rows = [shard.shape[0] for shard in shards] if len(shards) > 1 else []
        self.starts = [sum(rows[:i]) for i in range(len(rows) + 1)] if rows else []

    @property
    def is_sharded(self):
        """Whether it is in more than one piece."""
        return len(self.shards) > 1

    @property
    def name(self):
        return f"{self._whole_name}:0" if self.is_sharded else self._v.name

    def _alone(self):
        """The one variable to act on: the only one, or the shard that this context is about."""
        if not self.is_sharded:
            return self.shards[0]
        number = shard_number()
        return None if number is None else self.shards[number]

    @property
    def shape(self):
        if (alone := self._alone()) is not None:
            return alone.shape
        return tf.TensorShape([self.starts[-1], *self.shards[0].shape[1:]])

    @property
    def device(self):
        alone = self._alone()
        return self._v.device if alone is None else alone.device

    @property
    def handle(self):
        alone = self._alone()
        return self._v.handle if alone is None else alone.handle

    # -------------------------------------------------------------------------- reading

    def read_value(self):
        step = _step()
        if step is not None and shard_number() is None:
            return self._read_in(step)
        if step is None:
            self._before_use()
        if (alone := self._alone()) is not None:
            return alone.read_value()
        values = [shard.read_value() for shard in self.shards]
        return self._recorded(lambda: tf.concat(values, 0), lambda gradient: gradient)

    def _read_in(self, step):
        """What a step reads: the value that it has pulled from the servers, once."""
        with step.where_to_read(self):
            return self._recorded(lambda: tf.identity(step.pulled(self)), lambda g: g)

    def _recorded(self, compute, backward):
        """A value that gradient tapes take for this variable's.

        Args:
            compute: ``compute() -> tensor``.
            backward: from the gradient of the tensor to the variable's.
        """
        if self._v.trainable:
            tape.variable_accessed(self._v)
        with record.stop_recording():
            value = compute()
        record.record_operation(
            "ReadVariableOp", [value], [self._v.handle], lambda g: [backward(g)]
        )
        return value

    def sparse_read(self, indices, name=None):
        """The rows with these indices, int of any shape; nothing else leaves the servers."""
        if _step() is None:
            self._before_use()
        row_shape = self.shape[1:]
        whole_shape = tf.constant(self.shape.as_list(), tf.int64)

        def backward(gradient):
            values = tf.reshape(gradient, [-1, *row_shape])
            return tf.IndexedSlices(values, tf.reshape(indices, [-1]), whole_shape)

        return self._recorded(lambda: self._gathered(indices, name), backward)

    def _gathered(self, indices, name):
        alone = self._alone()
        if alone is not None:
            with ops.device(alone.device):
                found = alone.sparse_read(indices, name=name)
            return self._carried(found, alone)
        flat = tf.reshape(indices, [-1])
        positions, rows = [], []
        for shard, here in zip(self.shards, self._shares(flat), strict=True):
            places = tf.reshape(tf.where(here.is_here), [-1])
            positions.append(tf.cast(places, tf.int32))
            wanted = tf.gather(here.local, places)
            with ops.device(shard.device):
                found = shard.sparse_read(wanted)
            rows.append(self._carried(found, shard))
        found = tf.dynamic_stitch(positions, rows)
        return tf.reshape(found, tf.concat([tf.shape(indices), self.shape[1:]], 0))

    def _carried(self, rows, shard):
        step = _step()
        if step is None:
            return rows
        return step.transport.carry_rows(rows, shard.device, step.replica)

    def _shares(self, flat):
        """For each shard, which of these row numbers are its own, and their numbers in it."""
        for start, end in zip(self.starts, self.starts[1:], strict=False):
            yield _Share(is_here=tf.logical_and(flat >= start, flat < end), local=flat - start)

    # -------------------------------------------------------------------------- writing

    def _write(self, method, value):
        step = _step()
        if step is None:
            self._before_use()
        elif not step.is_first_replica:
            return None  # all replicas of a worker would write the same
        else:
            step.forget(self)
            if step.is_pushing and shard_number() is None:
                return self._write_guarded(step, method, value)
        if (alone := self._alone()) is not None:
            with ops.device(alone.device):
                return getattr(alone, method)(value)
        for number, shard in enumerate(self.shards):
            with ops.device(shard.device):
                getattr(shard, method)(self.slice(value, number))
        return None

    def _write_guarded(self, step, method, value):
        for number, shard in enumerate(self.shards):
            part = self.slice(value, number) if self.is_sharded else tf.convert_to_tensor(value)
            step.transport.guarded(step, shard.device, [part], getattr(shard, method))

    def slice(self, value, number):
        """The part of a whole value that belongs to a shard.

        Args:
            value: a tensor or ``tf.IndexedSlices`` of the whole variable's shape, or a scalar.
            number: the shard's.
        """
        if isinstance(value, tf.IndexedSlices):
            share = list(self._shares(value.indices))[number]
            places = tf.reshape(tf.where(share.is_here), [-1])
            rows = self.starts[number + 1] - self.starts[number]
            return tf.IndexedSlices(
                tf.gather(value.values, places),
                tf.gather(share.local, places),
                tf.constant([rows, *self.shards[0].shape[1:].as_list()], tf.int64),
            )
        value = tf.convert_to_tensor(value, self.dtype)
        if value.shape.rank == 0:
            return value
        return value[self.starts[number] : self.starts[number + 1]]


class _Share(NamedTuple):
    is_here: tf.Tensor  # bool, of the shape of the row numbers
    local: tf.Tensor  # their numbers in the shard


class _CopiedVariable(_ClusterVariable):
    """A variable of which each step has a copy of its own, on its worker."""

    def initial_in_step(self, step):
        """The copy's first value, in the graph of the step."""
        raise NotImplementedError

    def read_value(self):
        step = _step()
        if step is not None:
            return step.copy_of(self).read()
        self._before_use()
        return self._v.read_value()

    def _write(self, method, value):
        step = _step()
        if step is not None:
            step.updated_metrics.add(id(self))
            return getattr(step.copy_of(self), method)(value)
        self._before_use()
        return getattr(self._v, method)(value)


class StateVariable(_CopiedVariable):
    """State of a layer. What a step has changed is added to the server's value.

    So no change is lost where two workers change it at once.
    """

    def initial_in_step(self, step):
        with ops.device(self._v.device):
            return self._v.read_value()

    def push(self, first, last):
        """Adds a step's change; what can't be added, such as a bool, is overwritten."""
        with ops.device(self._v.device):
            if self.dtype.is_floating or self.dtype.is_integer:
                delta = tf.cast(last, self.dtype) - tf.cast(first, self.dtype)
                if self.dtype in _WITHOUT_ADDITION:
                    return self._v.assign(self._v.read_value() + delta, read_value=False)
                return self._v.assign_add(delta, read_value=False)
            return self._v.assign(last, read_value=False)


_WITHOUT_ADDITION = (tf.uint32, tf.uint64, tf.uint16, tf.int16)
"""Dtypes for which TensorFlow has no AssignAdd on the CPU."""


class TotalVariable(_CopiedVariable):
    """A sum that a metric keeps over all finished steps, on the chief."""

    def __init__(self, strategy, variable):
        super().__init__(strategy, variable)
        self._lock = threading.Lock()
        self._pending = None

    def initial_in_step(self, step):
        return tf.zeros(self.shape, self.dtype)

    def add(self, delta):
        """Adds what a finished step has found, a numpy array; from any thread."""
        with self._lock:
            self._pending = delta if self._pending is None else self._pending + delta

    def _before_use(self):
        super()._before_use()
        if context.executing_eagerly():
            self._settle()

    def _settle(self):
        with self._lock:
            pending, self._pending = self._pending, None
            if pending is not None:
                self._v.assign_add(tf.constant(pending, self.dtype))


def on_servers(variable):
    """The ``ServerVariable`` behind a variable of Keras, or itself."""
    return variable if isinstance(variable, ServerVariable) else variable.value


def raw_read(variable):
    """Reads a ``tf.Variable`` in a graph on its own device, unseen by tapes."""
    with ops.device(variable.device):
        value = gen_resource_variable_ops.read_variable_op(variable.handle, variable.dtype)
        value.set_shape(variable.shape)
        return value
