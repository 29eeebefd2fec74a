"""The gradient exchange of one optimizer: its collectives, its state, and how that is saved."""

import io
import threading
import warnings

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.framework import ops
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.trackable import base as trackable

from tfdist.collectives import bucketed_sum
from tfdist.compression import all_reduce


class GradientExchange(trackable.Trackable):
    """Sums an optimizer's gradients over all replicas through a compression.

    The state (residuals, for instance) is held in plain variables on the device of each replica
    that takes part. It is saved with the optimizer, for all replicas, and goes on unchanged where
    the number of replicas is the same; else the sum of the residuals is kept.

    Args:
        extended: the strategy's extended, a ``ReplicatedExtended``.
        exchange: a :class:`tfdist.compression.Exchange`.
        specs: ``tf.TensorSpec`` of the trainable variables, with their paths as names; then those
            of the shards of split ones.
        first_shard: for the number of each split variable, that of its first shard.
    """

    def __init__(self, extended, exchange, specs, first_shard=None):
        self._extended = extended
        self._exchange = exchange
        self._specs = list(specs)
        self._first_shard = first_shard or {}
        self._lock = threading.Lock()
        self._variables = {}  # (which gradients, replica in this process) -> list of variables
        self._structures = {}  # which gradients -> the nest of which these are the leaves
        self._loaded = {}  # which gradients -> the states of all members, as lists of arrays
        self._notes = None  # steps, seconds, squares of gradients, added up
        self._notes_read = np.zeros(3)  # those that read_statistics has told of
        self._collected = None  # what the other workers have sent for a file
        self._is_finite = tf.function(_are_finite, jit_compile=True, autograph=False)

    def number_of_shard(self, number, shard):
        """The number by which the gradient of a variable's shard goes."""
        return self._first_shard[number] + shard

    # ------------------------------------------------------------------------ in a step

    def sum(self, gradients, numbers):
        """Sums dense gradients over all replicas (in replica context).

        Args:
            gradients: list of dense tensors with static shapes, in the order in which they become
                ready.
            numbers: the numbers of their variables.

        Returns:
            The sums in the same order.
        """
        replica = distribute_lib.get_replica_context()._replica_id
        if not self._extended.is_watched or replica != 0:
            return self._sum(gradients, numbers, replica)
        with tf.control_dependencies(gradients):
            began = tf.timestamp()
        squares = tf.add_n([tf.reduce_sum(tf.cast(g, tf.float32) ** 2) for g in gradients])
        sums = self._sum(gradients, numbers, replica)
        with tf.control_dependencies(sums):
            seconds = tf.timestamp() - began
        self._note(seconds, squares, gradients[0].device)
        return sums

    def _sum(self, gradients, numbers, replica):
        hosts, host = self._extended.exchange_groups(replica, self._exchange.everywhere)
        if host is None:
            return self._sum_between(hosts, gradients, numbers, replica)
        # Replicas of one host sum first; then the first of them goes between the hosts.
        gradients = bucketed_sum(gradients, lambda vector, _: host.sum(vector))
        is_first = replica == 0
        if is_first:
            gradients = self._sum_between(hosts, gradients, numbers, replica)
        return bucketed_sum(gradients, lambda vector, _: host.broadcast(vector, is_first))

    def _sum_between(self, collective, gradients, numbers, replica):
        specs = [self._specs[i] for i in numbers]
        key = tuple(numbers)
        structure, variables = self._state(key, specs, collective, replica)
        with ops.device(collective.device):
            state = [variable.read_value() for variable in variables]
            sums, new_state = self._exchange.apply(
                gradients, tf.nest.pack_sequence_as(structure, state), collective, specs
            )
            self._assign(variables, state, tf.nest.flatten(new_state), sums)
        return sums

    def _assign(self, variables, state, new_state, sums):
        pairs = [
            (variable, new)
            for variable, old, new in zip(variables, state, new_state, strict=True)
            if new is not old
        ]

        def assign():
            for variable, value in pairs:
                variable.assign(value, read_value=False)
            return tf.constant(0)

        if not any(variable.dtype.is_floating for variable, _ in pairs):
            assign()
            return
        # A step with gradients that are not finite is skipped or spoilt, on all replicas alike,
        # since all have the same sums. A residual must not remember it.
        tf.cond(self._is_finite(sums), assign, lambda: tf.constant(0))

    def _state(self, key, specs, collective, replica):
        """The structure of the state, and its variables, made on first use."""
        with self._lock:
            if (key, replica) not in self._variables:
                with ops.init_scope(), ops.device(collective.device):
                    template = self._exchange.init(specs, collective.world_size)
                    self._structures[key] = tf.nest.map_structure(lambda _: 0, template)
                    initial = self._initial(key, template, collective.world_size, replica)
                    self._variables[key, replica] = [
                        resource_variable_ops.ResourceVariable(value, trainable=False)
                        for value in initial
                    ]
        return self._structures[key], self._variables[key, replica]

    def _initial(self, key, template, world_size, replica):
        if key in self._loaded:
            return self._own_row(self._loaded[key], key, world_size, replica)
        return tf.nest.flatten(template)

    def _own_row(self, rows, key, world_size, replica):
        if len(rows) != world_size:
            specs = [self._specs[i] for i in key]
            structure = self._exchange.init(specs, len(rows))
            states = [tf.nest.pack_sequence_as(structure, row) for row in rows]
            resized = self._exchange.resize(states, specs, world_size)
            rows = [tf.nest.flatten(state) for state in resized]
        return rows[self._member(replica)]

    def _member(self, replica):
        """The number of a replica of this process among all members."""
        return self._extended.exchange_member(replica, self._exchange.everywhere)

    # ------------------------------------------------------------- what a monitor wants

    def _note(self, seconds, squares, device):
        if self._notes is None:
            with ops.init_scope(), ops.device(device):
                self._notes = resource_variable_ops.ResourceVariable(
                    tf.zeros([3], tf.float64), trainable=False
                )
        squares = tf.cast(squares, tf.float64)
        self._notes.assign_add([tf.ones([], tf.float64), seconds, squares], read_value=False)

    def read_times(self):
        """What was noted since the exchange was made, while ``is_watched`` was set.

        Returns:
            ``(seconds, steps)``, floats: the time between the last gradient and the last sum of
            each step, added up, and the number of steps.
        """
        steps, seconds, _ = self._read_notes()
        return float(seconds), float(steps)

    def _read_notes(self):
        return np.zeros(3) if self._notes is None else self._notes.numpy()

    def read_statistics(self):
        """What was noted since the last call, while the strategy's ``is_watched`` was set.

        Returns:
            dict of floats: ``steps``; ``seconds``, between the last gradient and the last sum of
            each step, added up; ``sent_bytes``, by one member in a step; ``uncompressed_bytes``,
            what it would send without compression; ``gradient_norm``, the root mean square over
            the steps of the norm of this process' gradients; ``residual_norm``, now.
        """
        notes = self._read_notes()
        steps, seconds, squares = notes - self._notes_read
        self._notes_read = notes
        sent, uncompressed, residual = 0.0, 0.0, 0.0
        for (key, replica), variables in self._variables.items():
            if replica != 0:
                continue
            specs = [self._specs[i] for i in key]
            collective, _ = self._extended.exchange_groups(0, self._exchange.everywhere)
            sent += self._exchange.sent_bytes(specs, collective.world_size)
            uncompressed += all_reduce().sent_bytes(specs, collective.world_size)
            state = tf.nest.pack_sequence_as(self._structures[key], variables)
            residual += sum(
                float(tf.reduce_sum(tf.cast(r, tf.float32) ** 2)) for r in _residuals(state)
            )
        return {
            "steps": float(steps),
            "seconds": float(seconds),
            "sent_bytes": sent,
            "uncompressed_bytes": uncompressed,
            "gradient_norm": float(np.sqrt(squares / max(steps, 1))),
            "residual_norm": float(np.sqrt(residual)),
        }

    # ------------------------------------------------------------------------- in files

    def has_state(self):
        """Whether there is anything to save."""
        return any(self._variables.values())

    def collect(self, from_all):
        """Gets the state of all members, for :meth:`to_bytes`.

        Args:
            from_all: whether all workers call this; if not, there is only this worker's.
        """
        self._collected = {}
        for key in sorted({key for key, _ in self._variables}):
            replicas = sorted(r for k, r in self._variables if k == key)
            rows = [[v.numpy() for v in self._variables[key, r]] for r in replicas]
            if from_all:
                rows = self._gathered(rows)
            self._collected[key] = rows

    def _gathered(self, rows):
        """The rows of all workers, in the order of their ranks."""
        flat = b"".join(np.ascontiguousarray(value).tobytes() for row in rows for value in row)
        words = np.frombuffer(flat + bytes(-len(flat) % 4), np.int32)
        everyone = []
        hosts = self._extended.host_group()
        for worker in hosts.gather(tf.constant(words)).numpy():
            at, data = 0, worker.tobytes()
            for row in rows:
                values = []
                for like in row:
                    size = like.nbytes
                    values.append(np.frombuffer(data[at : at + size], like.dtype))
                    values[-1] = values[-1].reshape(like.shape)
                    at += size
                everyone.append(values)
        return everyone

    def to_bytes(self):
        """The state of all members that :meth:`collect` got, as the bytes of an ``.npz`` file."""
        if self._collected is None:
            self.collect(from_all=False)
        arrays = {"exchange": np.array(self._exchange.name)}
        for number, (key, rows) in enumerate(sorted(self._collected.items())):
            arrays[f"{number}/gradients"] = np.array(key, np.int64)
            for member, row in enumerate(rows):
                for leaf, value in enumerate(row):
                    arrays[f"{number}/{member}/{leaf}"] = _as_numpy(value)
        self._collected = None
        out = io.BytesIO()
        np.savez(out, **arrays)
        return out.getvalue()

    def from_bytes(self, data):
        """Takes over what :meth:`to_bytes` made, here or under another number of replicas."""
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            name = str(arrays["exchange"])
            if name != self._exchange.name:
                warnings.warn(
                    f"The file holds the state of compression={name}, this strategy has "
                    f"compression={self._exchange.name}. Its residuals start at zero.",
                    stacklevel=2,
                )
                return
            members = {}
            for path in arrays.files:
                number, *rest = path.split("/")
                if len(rest) == 2:
                    members.setdefault(number, {})[tuple(map(int, rest))] = arrays[path]
            keys = {n: tuple(map(int, arrays[f"{n}/gradients"])) for n in members}
        for number, leaves in members.items():
            self._load(keys[number], leaves)

    def _load(self, key, leaves):
        specs = [self._specs[i] for i in key]
        num_members = 1 + max(member for member, _ in leaves)
        like = tf.nest.flatten(self._exchange.init(specs, num_members))
        rows = [
            [_as_dtype(leaves[member, leaf], like[leaf].dtype) for leaf in range(len(like))]
            for member in range(num_members)
        ]
        self._loaded[key] = rows
        for (existing, replica), variables in self._variables.items():
            if existing == key:
                collective, _ = self._extended.exchange_groups(replica, self._exchange.everywhere)
                row = self._own_row(rows, key, collective.world_size, replica)
                for variable, value in zip(variables, row, strict=True):
                    variable.assign(value)

    # TensorFlow's checkpoints

    def _serialize_to_tensors(self):
        return {"state": tf.constant(self.to_bytes() if self.has_state() else b"")}

    def _restore_from_tensors(self, restored_tensors):
        data = restored_tensors["state"]
        if tf.executing_eagerly() and data.numpy():
            self.from_bytes(data.numpy())


def _residuals(state):
    """The tensors of all fields named ``residual`` in a nest of named tuples."""
    if hasattr(state, "_fields"):
        own = [state.residual] if "residual" in state._fields else []
        return own + [r for field in state for r in _residuals(field)]
    if isinstance(state, list | tuple):
        return [r for part in state for r in _residuals(part)]
    return []


def _are_finite(tensors):
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors])


def _as_numpy(value):
    """``.npz`` files know no bfloat16: its bits."""
    value = np.asarray(value)
    return value.view(np.uint16) if value.dtype == tf.bfloat16.as_numpy_dtype else value


def _as_dtype(value, dtype):
    return value.view(dtype.as_numpy_dtype) if dtype == tf.bfloat16 else value
