"""What all synchronous data-parallel strategies share.

The mixins are put before TensorFlow's own classes: ``ReplicatedExtended`` before a
``StrategyExtended``, ``Replicated`` before a ``Strategy``.
"""

import itertools

import tensorflow as tf
from tensorflow.python.distribute import cross_device_utils, distribute_lib, values
from tensorflow.python.eager import context
from tensorflow.python.framework import func_graph, ops
from tensorflow.python.ops import collective_ops, resource_variable_ops

from tfdist.collectives import bucketed_sum
from tfdist.strategies import _keras, _saving
from tfdist.strategies._step import MetricVariable, StepAveragedVariable

_PARALLEL_COLLECTIVES = 4
_num_strategies = itertools.count()


def refuse_compression(compression):
    """Raises ValueError unless ``compression`` is None."""
    if compression is not None:
        raise ValueError(
            f"compression: this version of tfdist has none to offer, expected None. Received: "
            f"compression={compression!r}."
        )


class Replicated:
    """A strategy under which plain ``model.fit`` equals training in one process."""

    def _set_collective_keys(self):
        # A second strategy in the process must not reuse the first one's collective keys.
        self._collective_key_base = type(self)._collective_key_base + 100_000 * next(
            _num_strategies
        )

    def scope(self):
        """Context manager in which models, optimizers and metrics are made.

        Entering it for the first time teaches Keras about tfdist's strategies; models under other
        strategies, or under none, stay as they are.
        """
        _keras.install()
        _saving.install()
        return super().scope()

    @property
    def board(self):
        """The workers' :class:`~tfdist.strategies._agreement.Board`; None with one worker."""
        return getattr(self.extended, "board", None)


class ReplicatedExtended:
    """Everything happens in the replicas: no ``merge_call``, one seam for gradients.

    TensorFlow's default lets the replicas meet in ``merge_call``, which is impossible inside of
    ``tf.cond`` and ``tf.while_loop``, where Keras puts gradient accumulation, loss scaling,
    averaged weights and several steps per execution.
    """

    def _use_merge_call(self):
        return False

    def _prepare_collectives(self):
        """To be called at the end of ``__init__``."""
        self._tokens = {}
        for name in ("_cross_device_ops", "_host_cross_device_ops", "_collective_ops"):
            for launcher in getattr(getattr(self, name, None), "_launchers", ()):
                launcher.__class__ = _Launcher

    def _create_variable(self, next_creator, **kwargs):
        role = _keras.variable_role(kwargs)
        if role == "layer state":
            kwargs["aggregation"] = tf.VariableAggregation.MEAN
        elif role == "optimizer counter":
            # Each replica writes the same value, and may do so inside of tf.cond.
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        elif role == "metric state":
            kwargs["synchronization"] = tf.VariableSynchronization.ON_READ
        variable = super()._create_variable(next_creator, **kwargs)
        if type(variable) is values.MirroredVariable:
            if role == "layer state":
                variable.__class__ = StepAveragedVariable
            elif variable.shape.rank == 0:
                variable.__class__ = ScalarVariable
        elif type(variable) is values.SyncOnReadVariable:
            variable.__class__ = MetricVariable
        return variable

    def _plain_datasets_from_function(self, dataset_fn):
        """One dataset for each input worker, as it is; ``dataset_fn(input_context)``."""
        return super()._distribute_datasets_from_function(dataset_fn, None)

    def exchange_gradients(self, gradients):
        """Sums gradients over all replicas (in replica context).

        Args:
            gradients: list of dense tensors or ``tf.IndexedSlices``, one for each variable.

        Returns:
            The sums in the same order, identical bit for bit on all replicas.
        """
        if self._num_replicas_in_sync == 1:
            return gradients
        replica = distribute_lib.get_replica_context()
        if context.executing_eagerly():
            return replica.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        sums = list(gradients)
        dense = [i for i, g in enumerate(gradients) if not isinstance(g, tf.IndexedSlices)]
        sparse = [i for i in range(len(gradients)) if i not in dense]
        dense.reverse()  # back-propagation makes the last variable's gradient first
        reduced = self._all_reduce_dense([gradients[i] for i in dense])
        for i, value in zip(dense, reduced, strict=True):
            sums[i] = value
        if sparse:
            reduced = replica.all_reduce(tf.distribute.ReduceOp.SUM, [gradients[i] for i in sparse])
            for i, value in zip(sparse, reduced, strict=True):
                sums[i] = value
        return sums

    def _all_reduce_dense(self, gradients):
        return bucketed_sum(gradients, self._all_reduce_bucket)

    def _collectives(self):
        """The cross-device operations among the compute devices of all workers."""
        return getattr(self, "_collective_ops", None) or self._cross_device_ops

    def _all_reduce_bucket(self, vector, index):
        replica_id = distribute_lib.get_replica_context()._replica_id
        launcher = self._collectives()._launchers[replica_id]
        options = launcher._options
        if "GPU" in launcher._device.upper():
            return launcher.all_reduce(vector)  # NCCL wants one order
        with ops.device(launcher._device):
            return collective_ops.all_reduce_v2(
                vector,
                launcher._group_size,
                launcher._group_key,
                launcher._next_instance_key(),
                communication_hint=options.implementation.value,
                timeout=options.timeout_seconds,
                ordering_token=self._token(launcher, index % _PARALLEL_COLLECTIVES),
            )

    def _token(self, launcher, lane):
        # Collectives that share a token run one after the other. With a few tokens a few of them
        # run side by side, which hides the latency of each.
        key = launcher._device, lane
        if key not in self._tokens:
            with ops.init_scope(), ops.device(launcher._device):
                self._tokens[key] = resource_variable_ops.ResourceVariable(0.0)
        return self._tokens[key].handle


class ScalarVariable(values.MirroredVariable):
    """A mirrored scalar that converts to a Python number, like a variable of one replica."""

    def __int__(self):
        return int(self.numpy())

    def __float__(self):
        return float(self.numpy())

    def __bool__(self):
        return bool(self.numpy())


class _Launcher(cross_device_utils.CollectiveReplicaLauncher):
    """Launches collectives also from inside of control flow.

    TensorFlow feeds a collective's instance key when the function is called. A function that is
    called inside of a ``tf.cond`` or ``tf.while_loop`` captures the key in the control flow's
    graph, where nobody feeds it. There the key is fixed when the function is traced.
    """

    _FIRST_FIXED_KEY = 1 << 30
    _num_fixed = 0

    def _next_instance_key(self):
        if not _is_called_from_control_flow():
            return super()._next_instance_key()
        key = self._FIRST_FIXED_KEY + self._num_fixed
        self._num_fixed += 1
        return key


def _is_called_from_control_flow():
    if context.executing_eagerly():
        return False
    graph = ops.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    graph = getattr(graph, "outer_graph", None)
    while isinstance(graph, func_graph.FuncGraph):
        if getattr(graph, "is_control_flow_graph", False):
            return True
        graph = graph.outer_graph
    return False
