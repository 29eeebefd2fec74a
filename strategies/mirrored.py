"""Several devices of one machine."""

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, mirrored_strategy

from tfdist.strategies._replicated import Replicated, ReplicatedExtended, exchange_for


class _MirroredExtended(ReplicatedExtended, mirrored_strategy.MirroredExtended):
    def __init__(self, strategy, devices, cross_device_ops, compression):
        super().__init__(strategy, devices=devices, cross_device_ops=cross_device_ops)
        kinds = {tf.DeviceSpec.from_string(d).device_type for d in self.worker_devices}
        if len(kinds) > 1:
            raise ValueError(
                "MirroredStrategy: devices must all be of one kind, since the gradients are "
                f"exchanged by collectives. Received: devices={list(self.worker_devices)}. "
                "Give either the GPUs or the CPUs."
            )
        self._prepare_collectives(compression)


class MirroredStrategy(Replicated, tf.distribute.MirroredStrategy):
    """Trains a copy of the model on each of several devices of this machine.

    Drop-in for ``tf.distribute.MirroredStrategy``. Under it ``model.fit`` gives the weights that
    one device gives on the same global batch.

    Args:
        devices: list of device names, such as ``["GPU:0", "GPU:1"]``; by default all GPUs, or the
            CPU where there is none.
        cross_device_ops: accepted for compatibility. Gradients are always exchanged by
            collectives (NCCL on GPUs), since only those work inside of control flow.
        compression: how gradients travel between the devices: None, or what a function of
            :mod:`tfdist.compression` returns.

    Raises:
        ValueError: unknown devices, devices of different kinds, or another ``compression``.
    """

    def __init__(self, devices=None, cross_device_ops=None, *, compression=None):
        exchange = exchange_for(compression)
        self._set_collective_keys()
        extended = _MirroredExtended(self, devices, cross_device_ops, exchange)
        distribute_lib.Strategy.__init__(self, extended)
        self.extended.board = None
