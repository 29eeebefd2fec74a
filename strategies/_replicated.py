"""What all synchronous data-parallel strategies share.

The mixins are put before TensorFlow's own classes: ``ReplicatedExtended`` before a
``StrategyExtended``, ``Replicated`` before a ``Strategy``.
"""

import itertools
import threading

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, values
from tensorflow.python.eager import context

from tfdist.collectives import bucketed_sum
from tfdist.compression import as_exchange
from tfdist.strategies import _functions, _input, _keras, _saving
from tfdist.strategies._collective import Launcher, ReplicaCollective, launcher_for
from tfdist.strategies._step import MetricVariable, StepAveragedVariable

_num_strategies = itertools.count()


def exchange_for(compression):
    """The Exchange for the argument ``compression``; None for None. Raises ValueError."""
    return None if compression is None else as_exchange(compression)


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

    def training_function(self, step_fn, *, is_training, trainer=None, **settings):
        """See :func:`tfdist.strategies._functions.training_function`."""
        del is_training, trainer
        return _functions.training_function(self, step_fn, **settings)

    def predict_function(self, step_fn, *, trainer=None, **settings):
        """See :func:`tfdist.strategies._functions.predict_function`."""
        del trainer
        return _functions.predict_function(self, step_fn, **settings)

    def distribute_input(self, dataset, **known):
        """See :func:`tfdist.strategies._input.distribute`."""
        return _input.distribute(self, dataset, board=self.board, **known)

    def watch_communication(self):
        """Lets the gradient exchanges of steps traced from now on keep statistics."""
        self.extended.is_watched = True

    @property
    def compression(self):
        """The :class:`tfdist.compression.Exchange` of gradients; None without compression."""
        return getattr(self.extended, "compression", None)

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

    def _prepare_collectives(self, compression):
        """To be called at the end of ``__init__``."""
        self.compression = compression
        self.is_watched = False  # whether exchanges keep statistics for a monitor
        self._groups_lock = threading.Lock()
        self._made_groups = {}
        for name in ("_cross_device_ops", "_host_cross_device_ops", "_collective_ops"):
            for launcher in getattr(getattr(self, name, None), "_launchers", ()):
                launcher.__class__ = Launcher

    def _role_of(self, kwargs):
        return _keras.variable_role(kwargs)

    def _create_variable(self, next_creator, **kwargs):
        role = self._role_of(kwargs)
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

    def exchange_gradients(self, gradients, numbers=None, exchange=None, variables=None):
        """Sums gradients over all replicas (in replica context).

        Args:
            gradients: list of dense tensors or ``tf.IndexedSlices``, one for each variable.
            numbers: the numbers of their variables, for ``exchange``.
            exchange: a :class:`~tfdist.strategies._exchange.GradientExchange`, or None to sum
                without compression.
            variables: their variables.

        Returns:
            The sums in the same order, identical bit for bit on all replicas.
        """
        del variables
        if self._num_replicas_in_sync == 1:
            return gradients
        replica = distribute_lib.get_replica_context()
        if context.executing_eagerly() and self.compression is None:
            return replica.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        if context.executing_eagerly() and len(self.worker_devices) > 1:
            raise ValueError(
                "compression: gradients can be compressed eagerly only with one device in each "
                f"worker, since TensorFlow runs the {len(self.worker_devices)} replicas here one "
                "after the other. Use run_eagerly=False, or call strategy.run in a tf.function."
            )
        sums = [self._dense_if_smaller(g) for g in gradients]
        dense = [i for i, g in enumerate(sums) if not isinstance(g, tf.IndexedSlices)]
        sparse = [i for i in range(len(sums)) if i not in dense]
        dense.reverse()  # back-propagation makes the last variable's gradient first
        if exchange is None:
            reduced = self._all_reduce_dense([sums[i] for i in dense])
        else:
            reduced = exchange.sum([sums[i] for i in dense], [numbers[i] for i in dense])
        slices = [sums[i] for i in sparse]
        for i, value in zip(dense, reduced, strict=True):
            sums[i] = value
        if sparse:
            reduced = replica.all_reduce(tf.distribute.ReduceOp.SUM, slices)
            for i, value in zip(sparse, reduced, strict=True):
                sums[i] = value
        return sums

    def _dense_if_smaller(self, gradient):
        """Slices that would take more bytes than the whole gradient, added up."""
        if not isinstance(gradient, tf.IndexedSlices) or gradient.dense_shape is None:
            return gradient
        shape = tf.get_static_value(gradient.dense_shape)
        rows = gradient.values.shape[0]
        if shape is None or rows is None:
            return gradient
        row_bytes = gradient.values.dtype.size * int(np.prod(shape[1:]))
        gathered = rows * (row_bytes + gradient.indices.dtype.size)  # each sends to all others
        if gathered * self._num_replicas_in_sync <= 2 * row_bytes * int(shape[0]):
            return gradient
        return tf.ensure_shape(tf.convert_to_tensor(gradient), shape)

    def _all_reduce_dense(self, gradients):
        replica_id = distribute_lib.get_replica_context()._replica_id
        collective = self._groups("all")[replica_id]
        return bucketed_sum(gradients, lambda vector, _: collective.sum(vector))

    # ------------------------------------------------------------ groups of replicas

    def exchange_groups(self, replica, everywhere):
        """The groups in which a replica of this process exchanges gradients.

        Args:
            replica: its number in this process.
            everywhere: whether compression goes between all replicas.

        Returns:
            The collective that is compressed, and the one within the host before and after it,
            None where there is no such step.
        """
        if everywhere or not self._has_hosts_of_several_devices():
            return self._groups("all")[replica], None
        return self._groups("hosts")[0], self._groups("host")[replica]

    def exchange_member(self, replica, everywhere):
        """The number of a replica of this process among the members of an exchange."""
        rank = getattr(self, "_id_in_cluster", 0)
        if everywhere or not self._has_hosts_of_several_devices():
            return rank * len(self.worker_devices) + replica
        return rank

    def host_group(self):
        """A collective of the first replica of each worker; None with one worker."""
        return self._groups("hosts")[0] if self._num_workers_together() > 1 else None

    def _num_workers_together(self):
        return self._num_replicas_in_sync // len(self.worker_devices)

    def _has_hosts_of_several_devices(self):
        return self._num_workers_together() > 1 and len(self.worker_devices) > 1

    def _groups(self, which):
        """A ``ReplicaCollective`` for each replica of this process, made on first use.

        Args:
            which: "all" replicas; the replicas of this "host"; the first one of all "hosts".
        """
        with self._groups_lock:
            if which not in self._made_groups:
                self._made_groups[which] = self._make_groups(which)
            return self._made_groups[which]

    def _make_groups(self, which):
        launchers = self._collectives()._launchers
        if which == "all":
            return [ReplicaCollective(launcher) for launcher in launchers]
        # Clear of the keys that TensorFlow counts up from 1 for each strategy.
        group_key = self._collective_key_base + 50_000
        size = self._num_workers_together()
        if which == "host":
            group_key += 1 + self._id_in_cluster
            size = len(launchers)
        else:
            launchers = launchers[:1]
        return [
            ReplicaCollective(launcher_for(group_key, size, each._device, each._options))
            for each in launchers
        ]

    def _collectives(self):
        """The cross-device operations among the compute devices of all workers."""
        return getattr(self, "_collective_ops", None) or self._cross_device_ops


class ScalarVariable(values.MirroredVariable):
    """A mirrored scalar that converts to a Python number, like a variable of one replica."""

    def __int__(self):
        return int(self.numpy())

    def __float__(self):
        return float(self.numpy())

    def __bool__(self):
        return bool(self.numpy())
