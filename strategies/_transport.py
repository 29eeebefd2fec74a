"""How values travel between workers and servers, inside of a traced step."""

import functools

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import gen_resource_variable_ops, resource_variable_ops

from tfdist.compression import int8
from tfdist.strategies._server_variables import on_servers, raw_read

PULL_DTYPES = (None, "float16", "bfloat16", "int8")
_SHORTEST_TO_PULL_AS_INT8 = 512  # elements; a block and its scale
_NOTHING = -1  # the staleness of a step that pushed nothing


class Transport:
    """Pull and push of one strategy.

    Args:
        servers: device strings of the servers' CPUs.
        num_workers: how many workers there are.
        settings: :class:`tfdist.staleness.Settings`.
        compressor_of: ``compressor_of(spec) -> Compressor or None`` for the gradient of a variable
            (of a shard of it), by its ``tf.TensorSpec``.
        pull_dtype: one of ``PULL_DTYPES``.
        replica_device: ``replica_device(replica) -> str``, where a worker computes.
    """

    def __init__(self, servers, num_workers, settings, compressor_of, pull_dtype, replica_device):
        self.settings = settings
        self._num_workers = num_workers
        self._compressor_of = compressor_of
        self._pull_dtype = pull_dtype
        self._replica_device = replica_device
        self._pull_int8 = int8()
        self._backups, self._slots, self._row_slots = {}, {}, set()
        with ops.device(servers[0]):
            self.version = _plain_variable(tf.zeros([], tf.int64))  # how many gradients came
            # For gradients that are applied together: the rows behind each worker's.
            self._rows = _plain_variable(tf.zeros([num_workers]))
        self._revoked = []  # on each server the last revoked attempt of each worker
        for server in servers:
            with ops.device(server):
                none = tf.fill([num_workers], tf.constant(-1, tf.int64))
                self._revoked.append(_plain_variable(none))

    def revoke(self, worker, attempt):
        """Lets a worker's attempt push nothing from now on. Called on the chief."""
        update = tf.IndexedSlices(tf.constant([attempt], tf.int64), tf.constant([worker]))
        for revoked in self._revoked:
            revoked.scatter_update(update)

    # -------------------------------------------------------------------------------- pull

    def pull(self, variable, step):
        """Brings a ``ServerVariable`` to the worker, in the graph of the step."""
        parts = []
        for number, shard in enumerate(variable.shards):
            with tf.control_dependencies([step.version]):
                value = raw_read(shard)
            if self.settings.lambda_ and variable.trainable:
                with ops.device(shard.device):
                    backup = self._backup(variable, number)
                    backup.scatter_update(tf.IndexedSlices(value[None], step.worker[None]))
            parts.append(self._carry(value, shard, step, variable.trainable))
        with ops.device(self._replica_device(step.replica)):
            return parts[0] if len(parts) == 1 else tf.concat(parts, 0)

    def _carry(self, value, shard, step, is_weight):
        here = self._replica_device(step.replica)
        dtype = self._pull_dtype
        if dtype is None or not is_weight or value.dtype not in (tf.float32, tf.float64):
            with ops.device(here):
                return tf.identity(value)
        if dtype != "int8":
            return self.carry_rows(value, shard.device, step.replica)
        if value.shape.num_elements() < _SHORTEST_TO_PULL_AS_INT8:
            with ops.device(here):
                return tf.identity(value)
        spec = tf.TensorSpec([value.shape.num_elements()], value.dtype)
        with ops.device(shard.device):
            noise = tf.cast(step.serial, tf.int32)
            payload, _ = self._pull_int8.encode(tf.reshape(value, [-1]), noise)
        with ops.device(here):
            return tf.reshape(self._pull_int8.decode(payload, spec), value.shape)

    def pulled_bytes(self, variables):
        """Bytes that a worker gets when it pulls each of these ``ServerVariable`` once."""
        total = 0
        for variable in variables:
            for shard in variable.shards:
                spec = tf.TensorSpec([shard.shape.num_elements()], shard.dtype)
                is_narrowed = variable.trainable and shard.dtype in (tf.float32, tf.float64)
                if is_narrowed and self._pull_dtype in ("float16", "bfloat16"):
                    total += 2 * spec.shape[0]
                elif (
                    is_narrowed
                    and self._pull_dtype == "int8"
                    and spec.shape[0] >= _SHORTEST_TO_PULL_AS_INT8
                ):
                    total += self._pull_int8.payload_bytes(spec)
                else:
                    total += spec.shape[0] * spec.dtype.size
        return total

    def pushed_bytes(self, variables):
        """Bytes that a worker sends when it pushes a dense gradient for each of these."""
        total = 0
        for variable in variables:
            for shard in variable.shards:
                compressor = self._compressor_of(self._spec_of(variable, shard))
                spec = tf.TensorSpec([shard.shape.num_elements()], shard.dtype)
                if compressor is None:
                    total += spec.shape[0] * spec.dtype.size
                else:
                    total += compressor.payload_bytes(spec)
        return total

    def _spec_of(self, variable, shard):
        return tf.TensorSpec(shard.shape, shard.dtype, variable.name.split(":")[0])

    def carry_rows(self, rows, device, replica):
        """Brings rows to a replica, in the dtype in which the strategy pulls (no shorter than 16
        bits)."""
        is_wide = rows.dtype in (tf.float32, tf.float64)
        narrow = {"float16": tf.float16, "bfloat16": tf.bfloat16}.get(self._pull_dtype)
        if narrow is None or not is_wide:
            return rows
        with ops.device(device):
            sent = tf.cast(rows, narrow)
        with ops.device(self._replica_device(replica)):
            return tf.cast(sent, rows.dtype)

    def _backup(self, variable, number):
        """What each worker has last pulled of a shard: [num_workers, *shape], on its server."""
        return self._beside(self._backups, variable, number)

    def _beside(self, kept, variable, number):
        key = (variable._unique_id, number)
        if key not in kept:
            shard = variable.shards[number]
            with tf.init_scope(), ops.device(shard.device):
                shape = [self._num_workers, *shard.shape]
                kept[key] = _plain_variable(tf.zeros(shape, shard.dtype))
        return kept[key]

    # -------------------------------------------------------------------------------- push

    def begin(self, step):
        """Notes at which version the step reads the weights."""
        step.version = raw_read(self.version)

    def commit(self, step, gradients, apply):
        """Applies gradients to the servers' variables, unless the attempt was revoked.

        Args:
            step: the :class:`~tfdist.strategies._worker_step.WorkerStep`.
            gradients: list of tensors, ``tf.IndexedSlices`` or None; nothing happens before all
                are there.
            apply: ``apply()`` makes the operations, through the strategy's ``extended.update``.
        """
        if not step.is_first_replica:
            return
        own = step.num_pushes
        step.num_pushes += 1
        flat = tf.nest.flatten([g for g in gradients if g is not None], expand_composites=True)
        with tf.control_dependencies(flat):
            step.gradients_are_there = tf.no_op()
            staleness = tf.cast(raw_read(self.version) - step.version - own, tf.int32)
        step.staleness_now = staleness
        step.is_pushing = True
        try:
            apply()
        finally:
            step.is_pushing = False
            step.staleness_now = None

        def count(staleness):
            self.version.assign_add(1, read_value=False)
            return staleness

        step.staleness = self.guarded(
            step, self.version.device, [staleness], count, otherwise=_NOTHING
        )

    def push_states(self, step, changes):
        """Adds what a step has changed of layers' states, unless the attempt was revoked.

        Args:
            changes: list of (:class:`StateVariable`, first value, last value).
        """
        if step.is_first_replica:
            for variable, first, last in changes:
                self.guarded(step, variable.device, [first, last], variable.push)

    def guarded(self, step, device, arguments, write, otherwise=0):
        """``write(*arguments)`` on a server, unless the step's attempt was revoked.

        The server looks when the arguments have arrived: nothing of a worker that was stopped and
        wakes is written, however far it had come.

        Args:
            device: the server's.
            arguments: list; those that are tensors or ``tf.IndexedSlices`` are sent.
            write: makes the operations; a scalar that it returns is returned.
            otherwise: what is returned where nothing is written.
        """
        revoked = self._revoked[tf.DeviceSpec.from_string(device).task or 0]
        with ops.device(device):
            arrived = tf.nest.map_structure(
                lambda a: tf.identity(a) if isinstance(a, tf.Tensor) else a,
                arguments,
                expand_composites=True,
            )
            tensors = tf.nest.flatten(arrived, expand_composites=True)
            after = [t for t in tensors if isinstance(t, tf.Tensor)]
            if step.gradients_are_there is not None:
                after.append(step.gradients_are_there)
            with tf.control_dependencies(after):
                is_valid = tf.not_equal(raw_read(revoked)[step.worker], step.attempt)

            def do():
                result = write(*arrived)
                return result if isinstance(result, tf.Tensor) else tf.constant(otherwise)

            return tf.cond(is_valid, do, lambda: tf.constant(otherwise))

    def send(self, variable, number, gradient, step):
        """Brings a gradient to a shard's server.

        Args:
            variable: the ``ServerVariable``.
            number: the shard's.
            gradient: the shard's part, a tensor or ``tf.IndexedSlices``.
            step: the step, or None where the gradient is at the server already.
        """
        if step is None or isinstance(gradient, tf.IndexedSlices):
            return gradient
        shard = variable.shards[number]
        compressor = self._compressor_of(self._spec_of(variable, shard))
        if compressor is not None:
            gradient = self._through(compressor, gradient, variable, number, step)
        if self.settings.lambda_:
            with ops.device(shard.device):
                then = self._backup(variable, number).sparse_read(step.worker)
                drift = raw_read(shard) - then
                gradient = gradient + self.settings.lambda_ * gradient * gradient * drift
        return gradient

    def _through(self, compressor, gradient, variable, number, step):
        """The gradient as the server decodes it; the compressor's state stays on the worker."""
        spec = tf.TensorSpec([gradient.shape.num_elements()], gradient.dtype)
        flat = tf.reshape(gradient, [-1])
        with ops.device(self._replica_device(step.replica)):
            initial = tf.nest.flatten(compressor.init(spec))
            name = f"tfdist/{variable._unique_id}/{number}/compression"
            kept = [_Kept(leaf, f"{name}/{i}") for i, leaf in enumerate(initial)]
            old = [leaf.read() for leaf in kept]
            state = tf.nest.pack_sequence_as(compressor.init(spec), old)
            payload, state = _encode(compressor)(flat, state)
            # A residual must not remember a gradient that is not finite.
            is_finite = tf.reduce_all(tf.math.is_finite(flat))
            for leaf, was, new in zip(kept, old, tf.nest.flatten(state), strict=True):
                leaf.assign(tf.where(is_finite, new, was))
        with ops.device(variable.shards[number].device):
            decoded = compressor.decode(tuple(payload), spec)
            return tf.reshape(decoded, gradient.shape)

    # ------------------------------------------------------------------- applied together

    def keep(self, step, deferred, rows):
        """Puts a worker's gradients beside their variables, for :meth:`kept`.

        Args:
            deferred: list of (gradients, variables).
            rows: scalar float, the rows behind them.
        """
        worker = step.worker
        writes = []
        for gradients, variables in deferred:
            for gradient, variable in zip(gradients, variables, strict=True):
                if gradient is None:
                    continue
                variable = on_servers(variable)
                for number, shard in enumerate(variable.shards):
                    part = gradient if not variable.is_sharded else variable.slice(gradient, number)
                    if isinstance(part, tf.IndexedSlices):
                        writes += self._keep_rows(variable, number, part, worker)
                        continue
                    part = self.send(variable, number, part, step)
                    with ops.device(shard.device):
                        slot = self._beside(self._slots, variable, number)
                        slot.scatter_update(tf.IndexedSlices(part[None], worker[None]))
                        writes.append(part)
        with tf.control_dependencies(writes), ops.device(self._rows.device):
            self._rows.scatter_update(tf.IndexedSlices(rows[None], worker[None]))

    def kept(self, variable, workers, total_rows):
        """The sum of the gradients that these workers have put beside a variable.

        Weighted so that the rows that are missing are not missed.

        Args:
            workers: bool [num_workers].
            total_rows: scalar float, the rows by which the gradients were weighted.
        """
        with ops.device(self._rows.device):
            present = tf.reduce_sum(tf.where(workers, raw_read(self._rows), 0.0))
            factor = tf.math.divide_no_nan(total_rows, present)
        if variable._unique_id in self._row_slots:
            return self._kept_rows(variable, workers, factor)
        parts = []
        for number, shard in enumerate(variable.shards):
            with ops.device(shard.device):
                slots = raw_read(self._beside(self._slots, variable, number))
                chosen = tf.boolean_mask(slots, workers)
                parts.append(tf.reduce_sum(chosen, 0) * tf.cast(factor, shard.dtype))
        return parts[0] if len(parts) == 1 else tf.concat(parts, 0)

    def _keep_rows(self, variable, number, rows, worker):
        shard = variable.shards[number]
        slots = self._slots_of_rows(variable, number)
        with ops.device(shard.device):
            values, indices = tf.identity(rows.values), tf.cast(rows.indices, tf.int64)

            def write(slot):
                slot[0].assign(values)
                slot[1].assign(indices)
                return tf.constant(0)

            tf.switch_case(worker, [functools.partial(write, slot) for slot in slots])
        return [values, indices]

    def _kept_rows(self, variable, workers, factor):
        """The rows that these workers have put beside a variable, with those of all its shards."""
        values, indices = [], []
        for number, shard in enumerate(variable.shards):
            with ops.device(shard.device):
                for worker, slot in enumerate(self._slots_of_rows(variable, number)):
                    count = tf.cast(workers[worker], tf.int64)
                    own = slot[1].read()
                    kept = tf.shape(own, tf.int64)[0] * count
                    start = variable.starts[number] if variable.is_sharded else 0
                    values.append(slot[0].read()[:kept] * tf.cast(factor, shard.dtype))
                    indices.append(own[:kept] + start)
        shape = tf.constant(variable.shape.as_list(), tf.int64)
        return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), shape)

    def _slots_of_rows(self, variable, number):
        """For each worker, what it has kept of any number of rows: values and row numbers."""
        shard = variable.shards[number]
        width = shard.shape[1:].as_list()
        self._row_slots.add(variable._unique_id)
        with ops.device(shard.device):
            return [
                (
                    _Kept(tf.zeros([0, *width], shard.dtype), f"{name}/values", [None, *width]),
                    _Kept(tf.zeros([0], tf.int64), f"{name}/rows", [None]),
                )
                for name in (
                    f"tfdist/{variable._unique_id}/{number}/{worker}"
                    for worker in range(self._num_workers)
                )
            ]


class _Kept:
    """A variable that keeps its value from step to step; ``initial`` at first.

    It is found by its name on the device where this is made, in any graph: on each worker there is
    one of its own. (A captured variable must have a static shape.)
    """

    def __init__(self, initial, name, shape=None):
        self._initial = initial
        self._shape = initial.shape if shape is None else tf.TensorShape(shape)
        self._handle = gen_resource_variable_ops.var_handle_op(
            dtype=initial.dtype, shape=self._shape, shared_name=name
        )

    def read(self):
        def value():
            return gen_resource_variable_ops.read_variable_op(self._handle, self._initial.dtype)

        is_there = gen_resource_variable_ops.var_is_initialized_op(self._handle)
        found = tf.cond(is_there, value, lambda: tf.identity(self._initial))
        found.set_shape(self._shape)
        return found

    def assign(self, value):
        gen_resource_variable_ops.assign_variable_op(self._handle, value)


@functools.lru_cache(maxsize=64)
def _encode(compressor):
    return tf.function(compressor.encode, autograph=False, jit_compile=True)


def _plain_variable(value):
    return resource_variable_ops.ResourceVariable(value, trainable=False)
