"""TPU slices.

Nothing here could be tried on a TPU. What can be checked without one is: the step function and
its Keras seam are those of the other strategies, and compile with XLA (``jit_compile=True``).
"""

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, tpu_strategy

from tfdist.strategies._replicated import Replicated, ReplicatedExtended


class _TPUExtended(ReplicatedExtended, tpu_strategy.TPUExtended):
    def _use_merge_call(self):
        return tpu_strategy.TPUExtended._use_merge_call(self)

    def _get_replica_id_in_sync_group(self, replica_id):
        return replica_id

    def _all_reduce_dense(self, gradients):
        # XLA schedules, fuses and overlaps the collectives of a TPU program by itself.
        replica = distribute_lib.get_replica_context()
        return replica.all_reduce(tf.distribute.ReduceOp.SUM, gradients)


class TPUStrategy(Replicated, tf.distribute.TPUStrategy):
    """Trains copies of the model on the cores of a TPU slice.

    Drop-in for ``tf.distribute.TPUStrategy``. Not tried on a TPU yet.

    Args:
        tpu_cluster_resolver: a ``tf.distribute.cluster_resolver.TPUClusterResolver`` to which
            TensorFlow is connected.
        experimental_device_assignment: a ``tf.tpu.experimental.DeviceAssignment``.
        compression: None. (Compressors compile with XLA, but there was no TPU to try them on.)

    Raises:
        ValueError: ``compression`` is not None.
        RuntimeError: TensorFlow sees no TPU.
    """

    def __init__(
        self, tpu_cluster_resolver=None, experimental_device_assignment=None, *, compression=None
    ):
        if compression is not None:
            raise ValueError(
                "TPUStrategy: compression must be None, since a TPU's own links are faster than "
                f"any compressor and nothing of it could be tried. Received: {compression!r}. "
            )
        if not tf.config.list_logical_devices("TPU"):
            raise RuntimeError(
                "TPUStrategy: TensorFlow sees no TPU. On a TPU machine, connect first: "
                "resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu='local'); "
                "tf.config.experimental_connect_to_cluster(resolver); "
                "tf.tpu.experimental.initialize_tpu_system(resolver). Elsewhere use "
                "MirroredStrategy or MultiWorkerMirroredStrategy."
            )
        extended = _TPUExtended(
            self, tpu_cluster_resolver, device_assignment=experimental_device_assignment
        )
        distribute_lib.StrategyV2.__init__(self, extended)
        self._enable_packed_variable_in_eager_mode = True
        self.extended.board = None
