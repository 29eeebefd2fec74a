"""Variables that are one to Keras and to files, whatever there is behind them."""

import contextlib
import threading

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import ps_values
from tensorflow.python.framework import ops

_shard = threading.local()


@contextlib.contextmanager
def acting_as_shard(number):
    """Every variable in several shards is its shard ``number`` in this context and thread."""
    outer = shard_number()
    _shard.number = number
    try:
        yield
    finally:
        _shard.number = outer


def shard_number():
    """The shard that variables act as in this thread, or None."""
    return getattr(_shard, "number", None)


class WholeVariable(ps_values.CachingVariable):
    """What such variables share. A subclass has ``read_value`` and ``_write``.

    Args:
        strategy: the strategy under which it was made.
        variable: the variable that holds the value (of several: the first).
    """

    host = "CPU:0"  # the device on which files are written

    def __init__(self, strategy, variable):
        super().__init__(variable)
        self._strategy = strategy

    @property
    def distribute_strategy(self):
        """The strategy under which it was made."""
        return self._strategy

    def is_initialized(self, name=None):
        return self._v.is_initialized(name)

    def value(self):
        return self.read_value()

    def read_value_no_copy(self):
        return self.read_value()

    def _dense_var_to_tensor(self, dtype=None, name=None, as_ref=False):
        del name, as_ref
        value = self.read_value()
        return value if dtype is None or dtype == value.dtype else NotImplemented

    def __tf_tensor__(self, dtype=None, name=None):
        return self._dense_var_to_tensor(dtype, name)

    def numpy(self):
        if not tf.executing_eagerly():
            raise NotImplementedError("numpy() is only available when executing eagerly.")
        return self.read_value().numpy()

    def __array__(self, dtype=None, copy=None):
        del copy  # always made anew
        return np.asarray(self.numpy(), dtype=dtype)

    def __bool__(self):
        return bool(self.numpy())

    def _write(self, method, value):
        """Calls the method of this name, of the variable or of what stands for it."""
        raise NotImplementedError

    def assign(self, value, use_locking=None, name=None, read_value=True):
        return self._write("assign", value)

    def assign_add(self, delta, use_locking=None, name=None, read_value=True):
        return self._write("assign_add", delta)

    def assign_sub(self, delta, use_locking=None, name=None, read_value=True):
        return self._write("assign_sub", delta)

    def scatter_add(self, sparse_delta, use_locking=False, name=None):
        return self._write("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta, use_locking=False, name=None):
        return self._write("scatter_sub", sparse_delta)

    def scatter_update(self, sparse_delta, use_locking=False, name=None):
        return self._write("scatter_update", sparse_delta)

    # In TensorFlow's checkpoints and SavedModels: one tensor.

    def _serialize_to_tensors(self):
        with ops.device(self.host):
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
