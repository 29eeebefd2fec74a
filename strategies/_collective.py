"""The collectives of one replica, as the exchanges of :mod:`tfdist.compression` ask for them."""

import itertools

import tensorflow as tf
from tensorflow.python.distribute import cross_device_utils
from tensorflow.python.eager import context
from tensorflow.python.framework import func_graph, ops
from tensorflow.python.ops import collective_ops, resource_variable_ops

_PARALLEL_COLLECTIVES = 4


class Launcher(cross_device_utils.CollectiveReplicaLauncher):
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


def launcher_for(group_key, group_size, device, options):
    """A launcher for a group of ``group_size`` devices, of which ``device`` is one.

    Args:
        group_key: int, the same for all members, and for no other group in the cluster.
        options: ``tf.distribute.experimental.CommunicationOptions``.
    """
    keys = cross_device_utils.CollectiveKeys(group_key_start=group_key)
    keys.get_group_key([device])
    return Launcher(group_key, group_size, keys, device, options)


class ReplicaCollective:
    """One replica's part in the collectives of a group of replicas.

    Implements :class:`tfdist.compression.Collective`; the members are in the order of their
    workers and devices.
    """

    def __init__(self, launcher):
        self._launcher = launcher
        self._tokens = {}
        self._lanes = itertools.cycle(range(_PARALLEL_COLLECTIVES))
        self.world_size = launcher._group_size
        self.device = launcher._device

    def sum(self, tensor):
        """All-reduce."""
        return self._launch(collective_ops.all_reduce_v2, tensor)

    def gather(self, tensor):
        """All-gather of [n]: [world_size, n]."""
        rows = self._launch(collective_ops.all_gather_v2, tensor)
        return tf.ensure_shape(
            tf.reshape(rows, [self.world_size, *tensor.shape]), [self.world_size, *tensor.shape]
        )

    def scatter(self, tensor):
        """All-to-all of [world_size, n]: row i goes to member i."""
        rows = self._launch(collective_ops.all_to_all_v2, tensor)
        return tf.ensure_shape(rows, tensor.shape)

    def broadcast(self, tensor, is_source):
        """The tensor of the one member for which ``is_source`` is true.

        The others give a tensor of the same shape and dtype.
        """
        if tensor.dtype == tf.bfloat16:  # which TensorFlow does not broadcast
            wide = self.broadcast(tf.cast(tensor, tf.float32), is_source)
            return tf.cast(wide, tf.bfloat16)
        if is_source:
            return self._launch(collective_ops.broadcast_send_v2, tensor, ordered=False)

        def receive(tensor, *args, **kwargs):
            return collective_ops.broadcast_recv_v2(tensor.shape, tensor.dtype, *args, **kwargs)

        return tf.ensure_shape(self._launch(receive, tensor, ordered=False), tensor.shape)

    def _launch(self, collective, tensor, ordered=True):
        launcher = self._launcher
        with ops.device(launcher._device):
            token = {"ordering_token": self._token()} if ordered else {}
            return collective(
                tensor,
                launcher._group_size,
                launcher._group_key,
                launcher._next_instance_key(),
                communication_hint=launcher._options.implementation.value,
                timeout=launcher._options.timeout_seconds,
                **token,
            )

    def _token(self):
        # Collectives that share a token run one after the other. With a few tokens a few of them
        # run side by side, which hides the latency of each. NCCL wants one order.
        if "GPU" in self._launcher._device.upper():
            return self._launcher._get_ordering_token()
        lane = next(self._lanes)
        if lane not in self._tokens:
            with ops.init_scope(), ops.device(self._launcher._device):
                self._tokens[lane] = resource_variable_ops.ResourceVariable(0.0)
        return self._tokens[lane].handle


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
