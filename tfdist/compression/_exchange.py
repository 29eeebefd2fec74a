"""How gradients meet: what an exchange is, and the exchange that goes through a compressor."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from tfdist.collectives import bucket_specs, bucketed_sum
from tfdist.compression._compressor import Compressor
from tfdist.compression._wire import from_words, specs_of, to_words

COMPRESSED_BUCKET_BYTES = 4 << 20
"""Size of a bucket before compression."""

_MOST_UNROLLED = 8


class Collective(Protocol):
    """The primitives by which the members of an exchange meet, each called by all members.

    Several calls whose inputs are ready may run side by side.
    """

    world_size: int

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """All-reduce: the sum over all members; a float tensor."""

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """All-gather of a tensor of shape [n]: [world_size, n], in the order of the members."""

    def scatter(self, tensor: tf.Tensor) -> tf.Tensor:
        """All-to-all: row i of [world_size, n] goes to member i; what comes from each, by rows."""


class Exchange(NamedTuple):
    """Sums lists of gradients over all members, in any number of collective calls.

    Pure functions; every member calls them alike. ``specs`` are ``tf.TensorSpec`` of the
    gradients, with the variables' paths as names.
    """

    name: str
    """How it was made; must be the same on all workers."""

    init: Callable[[Sequence[tf.TensorSpec], int], Any]
    """``init(specs, world_size) -> state`` of one member: a nest of tensors."""

    apply: Callable[
        [Sequence[tf.Tensor], Any, Collective, Sequence[tf.TensorSpec]],
        tuple[list[tf.Tensor], Any],
    ]
    """``apply(gradients, state, collective, specs) -> (sums, new state)``. The sums are the same
    on all members, bit for bit."""

    sent_bytes: Callable[[Sequence[tf.TensorSpec], int], float]
    """``sent_bytes(specs, world_size)``: what one member sends in a step, on average."""

    resize: Callable[[Sequence[Any], Sequence[tf.TensorSpec], int], list[Any]]
    """``resize(states, specs, world_size)``: from the states of all members of another number, as
    numpy arrays, the states for ``world_size`` members. The sum of the residuals is kept."""

    everywhere: bool = False
    """Whether it goes between all replicas, also between those of one host."""

    compressor_of: Callable[[tf.TensorSpec], Compressor | None] | None = None
    """``compressor_of(spec)``: what compresses one gradient on its own, where it is sent to a
    parameter server instead; None for uncompressed. An exchange without it is refused there."""


def all_reduce() -> Exchange:
    """The exchange without compression."""

    def apply(gradients, state, collective, specs):
        return bucketed_sum(gradients, lambda vector, _: collective.sum(vector)), state

    return Exchange(
        name="None",
        init=lambda specs, world_size: (),
        apply=apply,
        sent_bytes=lambda specs, world_size: sum(
            all_reduce_bytes(spec.shape.num_elements() * spec.dtype.size, world_size)
            for spec in specs
        ),
        resize=lambda states, specs, world_size: [()] * world_size,
        compressor_of=lambda spec: None,
    )


def as_exchange(compression) -> Exchange:
    """The exchange that a value of the argument ``compression`` stands for.

    Args:
        compression: None, a Compressor or an Exchange.

    Raises:
        ValueError: it is something else.
    """
    if compression is None:
        return all_reduce()
    if isinstance(compression, Exchange):
        return compression
    if isinstance(compression, Compressor):
        return through(compression)
    raise ValueError(
        "compression: expected None or what a function of tfdist.compression returns, such as "
        f"tfdist.compression.power_sgd(rank=4). Received: compression={compression!r}."
    )


def compressor_for(exchange: Exchange | None, spec: tf.TensorSpec) -> Compressor | None:
    """What compresses a gradient that is sent to a parameter server; None for nothing.

    Args:
        exchange: an Exchange, or None.
        spec: of the gradient (of its part on one server), with the variable's path as name.

    Raises:
        ValueError: the exchange needs all workers at once.
    """
    if exchange is None:
        return None
    if exchange.compressor_of is None:
        raise ValueError(
            f"compression: {exchange.name} can't be used on the way to a parameter server. Use "
            "int8(), one_bit(), top_k(fraction) or another Compressor."
        )
    return exchange.compressor_of(spec)


def everywhere(compression) -> Exchange:
    """Compresses between all replicas, also between those of one host.

    Without it, the replicas of a host sum their gradients first, uncompressed, and the hosts
    exchange the sums.

    Args:
        compression: a Compressor or an Exchange.
    """
    exchange = as_exchange(compression)
    return exchange._replace(name=f"everywhere({exchange.name})", everywhere=True)


# -------------------------------------------------------------------- through a compressor


class BucketState(NamedTuple):
    """One member's state for one bucket."""

    own: Any  # for what this member sends; for each part of it, where it is sent in parts
    sums: Any  # for the part whose sum this member computes and sends on; else ()


def through(compressor: Compressor, bucket_bytes: int = COMPRESSED_BUCKET_BYTES) -> Exchange:
    """The exchange of gradients in buckets, each compressed as one vector.

    For each bucket the primitive is taken that sends the fewest bytes. With N members, a bucket
    of S bytes, a payload of P bytes, and p bytes for the payload of an N-th of it:

    - "sum": summable payloads are summed by all-reduce, 2 (N-1)/N P;
    - "gather": every member gets all payloads and adds them, (N-1) P;
    - "parts": member i gets everyone's i-th part, adds them, compresses the sum again and sends it
      to all, 2 (N-1) p; with a state (a residual) of its own for the sums. Not for sparse ones,
      as a sum is denser than what it is the sum of;
    - "dense": what remains of the gradients is summed uncompressed, 2 (N-1)/N S.

    Reference: Alistarh et al. 2017, arXiv:1610.02132 (gather); Wang et al. 2018 / Tang et al. 2019,
    arXiv:1905.05957 (compressing the sums again, with a residual of their own).
    """
    return _Through(compressor, bucket_bytes).exchange()


def sent_through(compressor: Compressor, spec: tf.TensorSpec, world_size: int) -> dict[str, float]:
    """What a member sends for one bucket in each way that is open, in bytes; see :func:`through`.

    Args:
        spec: the bucket, ``tf.TensorSpec([n], dtype)``.
    """
    others = world_size - 1
    whole = compressor.payload_bytes(spec)
    if compressor.summable:
        ways = {"sum": all_reduce_bytes(whole, world_size)}
    else:
        ways = {"gather": float(others * whole)}
        if world_size > 2 and not compressor.sparse:
            ways["parts"] = 2.0 * others * compressor.payload_bytes(_part_of(spec, world_size))
    dense = spec.shape.num_elements() * spec.dtype.size
    return ways | {"dense": all_reduce_bytes(dense, world_size)}


def all_reduce_bytes(num_bytes, world_size):
    """What a member of a ring all-reduce sends."""
    return 2 * (world_size - 1) / world_size * num_bytes


class _Through:
    """The exchange through one compressor; see :func:`through`.

    What comes before and after a collective is compiled, so that the many passes of an encoder
    over a bucket become one or two.
    """

    def __init__(self, compressor, bucket_bytes):
        self._compressor = compressor
        self._bucket_bytes = bucket_bytes
        compiled = functools.partial(tf.function, jit_compile=True, autograph=False)
        self._encode = compiled(self._encode)
        self._encode_parts = compiled(self._encode_parts)
        self._decode = compiled(self._decode)
        self._decode_sum = compiled(self._decode_sum)
        self._sum_part = compiled(self._sum_part)
        self._decode_parts = compiled(self._decode_parts)

    def exchange(self):
        return Exchange(
            name=self._compressor.name,
            init=self._init,
            apply=self._apply,
            sent_bytes=self._sent_bytes,
            resize=self._resize,
            compressor_of=lambda spec: self._compressor,
        )

    def _way(self, spec, world_size):
        ways = sent_through(self._compressor, spec, world_size)
        return min(ways, key=ways.get)

    def _init(self, specs, world_size):
        return [self._init_bucket(spec, world_size) for spec in self._buckets(specs)]

    def _init_bucket(self, spec, world_size):
        _check(self._compressor, spec)
        if self._way(spec, world_size) != "parts":
            return BucketState(self._compressor.init(spec), ())
        of_part = self._compressor.init(_part_of(spec, world_size))
        own = tf.nest.map_structure(lambda leaf: tf.stack([leaf] * world_size), of_part)
        return BucketState(own, of_part)

    def _sent_bytes(self, specs, world_size):
        ways = [sent_through(self._compressor, s, world_size) for s in self._buckets(specs)]
        return sum(min(bucket.values()) for bucket in ways)

    def _buckets(self, specs):
        return bucket_specs(specs, self._bucket_bytes)

    def _apply(self, gradients, state, collective, specs):
        new_state = list(state)

        def sum_bucket(vector, number):
            way = self._way(_spec_of(vector), collective.world_size)
            go = getattr(self, f"_by_{way}")
            total, new_state[number] = go(vector, state[number], collective)
            return total

        return bucketed_sum(gradients, sum_bucket, self._bucket_bytes), new_state

    # Each way: (vector, state, collective) -> (sum, new state)

    def _by_sum(self, vector, state, collective):
        (first, *rest), own = self._encode(vector, state.own)
        total = collective.sum(first)
        return self._decode((total, *rest), _shape_and_dtype(vector)), BucketState(own, ())

    def _by_dense(self, vector, state, collective):
        payload, own = self._encode(vector, state.own)
        kept = self._decode(tuple(payload), _shape_and_dtype(vector))
        return collective.sum(kept), BucketState(own, ())

    def _by_gather(self, vector, state, collective):
        payload, own = self._encode(vector, state.own)
        rows = collective.gather(to_words(payload))
        return self._decode_sum(rows, _shape_and_dtype(vector)), BucketState(own, ())

    def _by_parts(self, vector, state, collective):
        world_size = collective.world_size
        rows, own = self._encode_parts(vector, state.own, world_size)
        rows, sums = self._sum_part(
            collective.scatter(rows), state.sums, _shape_and_dtype(vector), world_size
        )
        rows = collective.gather(rows)
        total = self._decode_parts(rows, _shape_and_dtype(vector), world_size)
        return total, BucketState(own, sums)

    # What is compiled. A bucket's shape and dtype are Python values, so each bucket of another
    # shape is compiled once.

    def _encode(self, vector, state):
        return self._compressor.encode(vector, state)

    def _decode(self, payload, like):
        return self._compressor.decode(tuple(payload), _spec(like))

    def _decode_sum(self, rows, like):
        return self._sum_of_rows(rows, _spec(like))

    def _encode_parts(self, vector, states, world_size):
        part = _part_of(_spec_of(vector), world_size)
        width = part.shape[0]
        missing = width * world_size - vector.shape[0]
        parts = tf.reshape(tf.pad(vector, [[0, missing]]), [world_size, width])

        def encode(pair):
            payload, state = self._compressor.encode(*pair)
            return to_words(payload), state

        return _map(encode, (parts, states), world_size)

    def _sum_part(self, rows, state, like, world_size):
        part = _part_of(_spec(like), world_size)
        payload, state = self._compressor.encode(self._sum_of_rows(rows, part), state)
        return to_words(payload), state

    def _decode_parts(self, rows, like, world_size):
        spec = _spec(like)
        part = _part_of(spec, world_size)
        payload_specs = _payload_specs(self._compressor, part)
        parts = _map(
            lambda row: self._compressor.decode(from_words(row, payload_specs), part),
            rows,
            world_size,
        )
        return tf.reshape(parts, [-1])[: spec.shape[0]]

    def _sum_of_rows(self, rows, spec):
        payload_specs = _payload_specs(self._compressor, spec)

        def decode(row):
            return self._compressor.decode(from_words(row, payload_specs), spec)

        count = rows.shape[0]
        if count <= _MOST_UNROLLED:
            return tf.add_n([decode(rows[i]) for i in range(count)])
        return tf.while_loop(
            lambda i, _: i < count,
            lambda i, total: (i + 1, total + decode(rows[i])),
            (0, tf.zeros(spec.shape, spec.dtype)),
        )[1]

    # State for another number of members

    def _resize(self, states, specs, world_size):
        old_size = len(states)
        resized = [[] for _ in range(world_size)]
        for number, spec in enumerate(self._buckets(specs)):
            template, is_residual = self._leaves(spec)
            buckets = [state[number] for state in states]
            in_parts = self._way(spec, old_size) == "parts"
            leaves = []
            for j, leaf in enumerate(template):
                own = [tf.nest.flatten(bucket.own)[j] for bucket in buckets]
                if not is_residual[j]:
                    leaves.append(np.asarray(own[0])[0] if in_parts else np.asarray(own[0]))
                    continue
                total = sum(_trimmed(value, spec) for value in own)
                if in_parts:
                    sums = [tf.nest.flatten(bucket.sums)[j] for bucket in buckets]
                    total = total + _trimmed(np.concatenate(sums), spec)
                leaves.append((total / world_size).astype(leaf.dtype.as_numpy_dtype))
            for state in resized:
                state.append(self._bucket_state(spec, leaves, is_residual, world_size))
        return resized

    def _leaves(self, spec):
        leaves = tf.nest.flatten(self._compressor.init(spec))
        return leaves, [leaf.dtype.is_floating and leaf.shape == spec.shape for leaf in leaves]

    def _bucket_state(self, spec, leaves, is_residual, world_size):
        if self._way(spec, world_size) != "parts":
            structure = self._compressor.init(spec)
            return BucketState(tf.nest.pack_sequence_as(structure, leaves), ())
        part = _part_of(spec, world_size)
        structure = self._compressor.init(part)
        own = []
        for leaf, is_cut in zip(leaves, is_residual, strict=True):
            if is_cut:
                missing = part.shape[0] * world_size - leaf.size
                own.append(np.pad(leaf, [0, missing]).reshape(world_size, -1))
            else:
                own.append(np.stack([leaf] * world_size))
        sums = [
            np.zeros_like(o[0]) if cut else o[0] for o, cut in zip(own, is_residual, strict=True)
        ]
        pack = functools.partial(tf.nest.pack_sequence_as, structure)
        return BucketState(pack(own), pack(sums))


def _check(compressor, spec):
    """Raises unless the payload has the size that the compressor says."""
    payload = _payload_specs(compressor, spec)
    if compressor.summable:
        payload = payload[:1]
        found = sum(p.shape.num_elements() * p.dtype.size for p in payload)
    else:
        found = sum(-(-p.shape.num_elements() * p.dtype.size // 4) * 4 for p in payload)
    expected = compressor.payload_bytes(spec)
    if found != expected:
        raise ValueError(
            f"{compressor.name}: payload_bytes({spec}) must be the size of what encode returns "
            f"(each tensor padded to 4 bytes unless summable), {found}. It is {expected}."
        )


@functools.lru_cache(maxsize=256)
def _payload_specs(compressor, spec):
    def encode():
        payload, _ = compressor.encode(tf.zeros(spec.shape, spec.dtype), compressor.init(spec))
        return tuple(payload)

    with tf.init_scope():
        traced = tf.function(encode, autograph=False).get_concrete_function()
    return specs_of(traced.structured_outputs)


def _part_of(spec, world_size):
    return tf.TensorSpec([-(-spec.shape.num_elements() // world_size)], spec.dtype)


def _spec_of(vector):
    return tf.TensorSpec(vector.shape, vector.dtype)


def _shape_and_dtype(vector):
    return vector.shape[0], vector.dtype.name


def _spec(like):
    return tf.TensorSpec([like[0]], tf.as_dtype(like[1]))


def _trimmed(value, spec):
    return np.asarray(value).reshape(-1)[: spec.shape[0]].astype("float64")


def _map(function, elements, count):
    """Stacks the results of ``function`` for each row of a nest of tensors."""
    if count > _MOST_UNROLLED:
        row = tf.nest.map_structure(lambda rows: rows[0], elements)
        signature = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), function(row))
        return tf.map_fn(function, elements, fn_output_signature=signature)
    results = [
        function(tf.nest.map_structure(lambda rows, i=i: rows[i], elements)) for i in range(count)
    ]
    return tf.nest.map_structure(lambda *rows: tf.stack(rows), *results)
