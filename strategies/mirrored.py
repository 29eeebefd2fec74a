"""Several devices of one machine."""

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, mirrored_strategy

from tfdist.strategies._replicated import Replicated, ReplicatedExtended, refuse_compression


class _MirroredExtended(ReplicatedExtended, mirrored_strategy.MirroredExtended):
    def __init__(self, strategy, devices, cross_device_ops):
        super().__init__(strategy, devices=devices, cross_device_ops=cross_device_ops)
        kinds = {tf.DeviceSpec.from_string(d).device_type for d in self.worker_devices}
        if len(kinds) > 1:
            raise ValueError(
                "MirroredStrategy: devices must all be of one kind, since the gradients are "
                f"exchanged by collectives. Received: devices={list(self.worker_devices)}. "
                "Give either the GPUs or the CPUs."
            )
        self._prepare_collectives()


class MirroredStrategy(Replicated, tf.distribute.MirroredStrategy):
    """Trains a copy of the model on each of several devices of this machine.

    Drop-in for ``tf.distribute.MirroredStrategy``. Under it ``model.fit`` gives the weights that
    one device gives on the same global batch.

    Args:
        devices: list of device names, such as ``["GPU:0", "GPU:1"]``; by default all GPUs, or the
            CPU where there is none.
        cross_device_ops: accepted for compatibility. Gradients are always exchanged by
            collectives (NCCL on GPUs), since only those work inside of control flow.
        compression: None; reserved for gradient compression.

    Raises:
        ValueError: unknown devices, or devices of different kinds.
    """

    def __init__(self, devices=None, cross_device_ops=None, *, compression=None):
        refuse_compression(compression)
        self._set_collective_keys()
        extended = _MirroredExtended(self, devices=devices, cross_device_ops=cross_device_ops)
        distribute_lib.Strategy.__init__(self, extended)
        self.extended.board = None
