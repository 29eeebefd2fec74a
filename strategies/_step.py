"""What one replica knows about the step that it is tracing.

Inside of a step every loss is an estimate of the global batch's loss from the replica's rows:
``sum over replicas of share * loss`` is the loss that one process computes, where ``share`` is the
replica's part of the rows of the global batch. So a training step written for one process is right
as it is, and its gradients are weighted by the share before they are summed. (TensorFlow's
convention, loss / num_replicas, is right only where all replicas have the same number of rows.)
"""

import contextlib
import threading
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.distribute import values

_tracing = threading.local()  # replicas are traced in threads of their own


class Step:
    """One replica's view of one step, alive while the step is traced (or run eagerly).

    Args:
        strategy: the strategy that runs the step.
        rows: scalar integer tensor, the rows of the global batch that this replica has.
        total_rows: scalar integer tensor, the rows of the global batch.
    """

    def __init__(self, strategy, rows, total_rows):
        self.strategy = strategy
        self.rows = tf.cast(rows, tf.float32)
        self.total_rows = tf.cast(total_rows, tf.float32)
        # Replicas without rows have share 0; a batch without rows has no shares at all.
        self.share = tf.math.divide_no_nan(self.rows, self.total_rows)
        self.has_rows = self.rows > 0
        self.num_parts = strategy.num_replicas_in_sync  # that the batch is shared out to
        self.touched = []  # StepAveragedVariables assigned in this step, in order
        self.updated_metrics = set()  # ids of the MetricVariables assigned in this step
        self.weighted = set()  # ids of the optimizers that weighted their loss by the share

    def sum(self, tensors):
        """All-reduce: the list of float tensors summed over all replicas, in one collective."""
        return packed_sum(self.strategy, tensors)

    def scale(self, value):
        """``value`` times this replica's share; 0 where the replica has no rows (never NaN)."""
        scaled = value * tf.cast(self.share, value.dtype)
        return tf.where(self.has_rows, scaled, tf.zeros_like(scaled))

    def unscale(self, value):
        """The inverse of :meth:`scale`; 0 where the replica has no rows."""
        return tf.math.divide_no_nan(value, tf.cast(self.share, value.dtype))


def current_step():
    """The step being traced in this thread, or None outside of one."""
    return getattr(_tracing, "step", None)


@contextlib.contextmanager
def tracing(step):
    """Makes ``step`` the current one in this thread."""
    outer = current_step()
    _tracing.step = step
    try:
        yield step
    finally:
        _tracing.step = outer


def packed_sum(strategy, tensors):
    """Sums each float tensor over all replicas with one collective for the whole list.

    Must be called in replica context. Returns tensors of the same shapes and dtypes.
    """
    if strategy.num_replicas_in_sync == 1 or not tensors:
        return list(tensors)
    flat = tf.concat([tf.reshape(tf.cast(t, tf.float32), [-1]) for t in tensors], 0)
    if hasattr(strategy.extended, "sum_replicas"):
        total = strategy.extended.sum_replicas(flat)
    else:
        context = tf.distribute.get_replica_context()
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, flat)
    parts = tf.split(total, [tf.size(t) for t in tensors], num=len(tensors))
    return [
        tf.cast(tf.reshape(p, tf.shape(t)), t.dtype) for p, t in zip(parts, tensors, strict=True)
    ]


class StepAveragedVariable(values.MirroredVariable):
    """State of a layer that each replica updates from its own rows, such as moving statistics.

    In a step of ``fit`` a replica writes its own copy at once, and all copies are averaged at the
    end of the step, weighted by rows, together with the logs in one collective. (TensorFlow would
    make one collective per write; Keras asks for none, which leaves every replica with statistics
    of its own.) The average of the copies equals the copy of the averages, since such updates are
    linear in the batch's statistics.

    Outside of a step of ``fit`` it is a mirrored variable with aggregation MEAN.
    """

    def _update_replica(self, update_fn, value, **kwargs):
        step = current_step()
        if step is None:
            return super()._update_replica(update_fn, value, **kwargs)
        if all(variable is not self for variable in step.touched):
            step.touched.append(self)
        return update_fn(self._get_on_device_or_primary(), value, **kwargs)

    def local_copy(self):
        """This replica's own ``tf.Variable``."""
        return self._get_on_device_or_primary()


class MetricVariable(values.SyncOnReadVariable):
    """A sum that each replica keeps for its own rows; a step knows which of them it has updated."""

    def _update_replica(self, update_fn, value, **kwargs):
        step = current_step()
        if step is not None:
            step.updated_metrics.add(id(self))
        return super()._update_replica(update_fn, value, **kwargs)


class MetricState(NamedTuple):
    """Metrics that a step has updated: their state, and the results for a given state."""

    state: list[tf.Tensor]
    results: Callable[[list[tf.Tensor]], dict[str, tf.Tensor]]


def finish(step, logs, metrics=None):
    """Ends a replica's step: reduces logs and layer state over all replicas, in one collective.

    Args:
        step: the replica's :class:`Step`.
        logs: what the step function returned, a nest.
        metrics: a :class:`MetricState` where (some of) the ``logs`` are results of metrics; these
            are computed anew from the states of all replicas. All other float tensors in ``logs``
            are averaged, weighted by rows.

    Returns:
        The logs, the same on every replica.
    """
    if metrics is None:
        metrics = MetricState([], lambda _: {})
    flat = tf.nest.flatten(logs, expand_composites=False)
    flat = [v.read_value() if isinstance(v, tf.Variable) else v for v in flat]
    floats = [tf.is_tensor(v) and tf.as_dtype(v.dtype).is_floating for v in flat]
    averaged = [i for i, is_float in enumerate(floats) if is_float]
    copies = [variable.local_copy() for variable in step.touched]
    parts = [
        metrics.state,
        [step.scale(flat[i]) for i in averaged],
        [step.scale(copy.read_value()) for copy in copies],
    ]
    summed = iter(step.sum([tensor for part in parts for tensor in part]))
    state, averages, states_of_layers = ([next(summed) for _ in part] for part in parts)
    for copy, value in zip(copies, states_of_layers, strict=True):
        # A batch without a single row (which only a broken pipeline makes) leaves the state alone.
        copy.assign(tf.where(step.total_rows > 0, value, copy.read_value()))
    for i, value in zip(averaged, averages, strict=True):
        flat[i] = value
    logs = tf.nest.pack_sequence_as(logs, flat)
    results = metrics.results(state)
    return {**logs, **results} if results else logs


def zero_without_rows(step, gradients):
    """Zeros where this replica has no rows, so that a mean over nothing (NaN) adds nothing.

    Args:
        step: the :class:`Step`.
        gradients: list of dense tensors, ``tf.IndexedSlices`` or None.
    """
    if tf.executing_eagerly():
        return gradients if step.has_rows else [_zeros_like(g) for g in gradients]
    if tf.get_static_value(step.has_rows):
        return gradients
    present = [i for i, g in enumerate(gradients) if g is not None]
    safe = tf.cond(
        step.has_rows,
        lambda: [gradients[i] for i in present],
        lambda: [_zeros_like(gradients[i]) for i in present],
    )
    result = list(gradients)
    for i, gradient in zip(present, safe, strict=True):
        result[i] = gradient
    return result


def _zeros_like(gradient):
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values_ = tf.zeros_like(gradient.values)
        return tf.IndexedSlices(values_, gradient.indices, gradient.dense_shape)
    return tf.zeros_like(gradient)
