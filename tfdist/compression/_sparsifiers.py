"""Compressors that send a few elements as they are, and keep the rest for later."""

import math
from typing import NamedTuple

import tensorflow as tf

from tfdist.compression._bits import mix, num_words, pack, unpack
from tfdist.compression._compressor import (
    Compressor,
    encode_and_decode,
    length,
    mark_non_finite,
    non_finite_mark,
    require_fraction,
    stateless,
)
from tfdist.compression._compressor import error_feedback as with_error_feedback

_WIDEST_BLOCK = 1 << 16


def top_k(fraction, *, exact=False, error_feedback=True):
    """Sends the elements of largest magnitude, 5 to 8 bytes each in float32.

    Args:
        fraction: how many of all elements, in (0, 1].
        exact: False takes the largest of every ``round(1 / fraction)`` neighbours, which is ten
            times faster than True, which takes the largest of all. The error is hardly larger (of
            normal numbers at 1 %, 0.76 against 0.71 of the norm), and within the bound that the
            theory asks for: |x - C(x)|^2 <= (1 - k/n) |x|^2.
        error_feedback: False forgets what is not sent.

    Reference: Aji and Heafield 2017, arXiv:1704.05021; Stich et al. 2018, arXiv:1809.07599.
    """
    require_fraction("top_k", fraction)
    if exact:
        compressor = _exact_top_k(fraction)._replace(name=f"top_k({fraction}, exact=True)")
    else:
        compressor = _block_top_k("top_k", fraction)._replace(name=f"top_k({fraction})")
    return with_error_feedback(compressor) if error_feedback else compressor


def random_k(fraction, seed=0, *, error_feedback=True):
    """Sends one random element of every ``round(1 / fraction)`` neighbours, the same on all
    replicas, so that no index travels and the payloads can be summed on their way.

    Args:
        fraction: how many of all elements, in (0, 1].
        seed: whole number, 0 to 2^31 - 1.
        error_feedback: False multiplies what is sent by the number of neighbours, which makes it
            unbiased, at a large variance.

    Reference: Stich et al. 2018, arXiv:1809.07599, definition 2.3; Wangni et al. 2017,
    arXiv:1710.09854, for the unbiased form. (One element of each block instead of k of all.)
    """
    require_fraction("random_k", fraction)
    if not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise ValueError(f"random_k: seed must be a whole number from 0 to 2^31 - 1, got {seed!r}.")
    width = round(1 / fraction)
    gain = 1 if error_feedback else width

    def positions(num_rows, last_row_width, step):
        row = tf.cast(tf.range(num_rows, dtype=tf.int32), tf.uint32)
        stream = mix(tf.cast(step, tf.uint32)) + mix(tf.constant(seed, tf.uint32))
        word = mix(mix(row) + stream)
        widths = tf.where(tf.range(num_rows) == num_rows - 1, last_row_width, width)
        return tf.cast(word % tf.cast(widths, tf.uint32), tf.int32)

    def encode(tensor, step):
        rows = _rows(tensor, width)
        picked = positions(rows.shape[0], _last_row_width(length(tensor), width), step)
        values = _pick(rows, picked) * tf.cast(gain, tensor.dtype)
        # The step stays here: all replicas count alike.
        return (values + non_finite_mark(tensor), step), step + 1

    def decode(payload, spec):
        values, step = payload
        n = length(spec)
        picked = positions(values.shape[0], _last_row_width(n, width), step)
        return _place(values, picked, width, n)

    compressor = Compressor(
        name=f"random_k({fraction}, seed={seed})",
        init=lambda _: tf.zeros([], tf.int32),
        encode=encode,
        decode=decode,
        payload_bytes=lambda spec: spec.dtype.size * _num_rows(spec, width),
        biased=error_feedback,
        summable=True,
        sparse=True,
    )
    return with_error_feedback(compressor) if error_feedback else compressor


class Momentum(NamedTuple):
    """State of deep gradient compression."""

    velocity: tf.Tensor  # [n], u of the paper
    residual: tf.Tensor  # [n], v of the paper: velocities not sent yet
    inner: tuple


def momentum_corrected(compressor, momentum, name):
    """Error feedback for a sparsifier that takes over the optimizer's momentum.

    u = m u + g;  v = v + u;  send C(v);  where an element was sent, u = v = 0

    Args:
        compressor: a sparse compressor without error feedback.
        momentum: m, in [0, 1).
        name: the new compressor's.

    Reference: Lin et al. 2017, arXiv:1712.01887, Alg. 4 (momentum correction and factor masking).
    """

    def init(spec):
        zeros = tf.zeros(spec.shape, spec.dtype)
        return Momentum(zeros, zeros, compressor.init(spec))

    def encode(tensor, state):
        velocity = tf.cast(momentum, tensor.dtype) * state.velocity + tensor
        residual = state.residual + velocity
        payload, sent, inner = encode_and_decode(compressor, residual, state.inner)
        is_kept = sent == 0
        zero = tf.zeros_like(tensor)
        velocity = tf.where(is_kept, velocity, zero)
        return payload, Momentum(velocity, tf.where(is_kept, residual, zero), inner)

    return compressor._replace(name=name, init=init, encode=encode, encode_decode=None)


def dgc_compressor(fraction, momentum):
    """Deep gradient compression at a fixed fraction; see :func:`tfdist.compression.dgc`."""
    name = f"dgc({fraction}, momentum={momentum})"
    return momentum_corrected(_block_top_k("dgc", fraction), momentum, name)


def _exact_top_k(fraction):
    def count(n):
        return max(1, math.ceil(fraction * n))

    def encode(tensor, state):
        magnitude = tf.where(tf.math.is_finite(tensor), tf.abs(tensor), tensor.dtype.max)
        _, indices = tf.math.top_k(magnitude, count(length(tensor)), sorted=False)
        return (tf.gather(tensor, indices), indices), state

    def decode(payload, spec):
        values, indices = payload
        return tf.scatter_nd(indices[:, None], values, [length(spec)])

    compressor = Compressor(
        name="",
        init=stateless,
        encode=encode,
        decode=decode,
        payload_bytes=lambda spec: (
            _in_words(spec.dtype.size * count(length(spec))) + 4 * count(length(spec))
        ),
        biased=True,
        sparse=True,
    )
    return mark_non_finite(compressor)


def _block_top_k(name, fraction):
    width = round(1 / fraction)
    if width > _WIDEST_BLOCK:
        raise ValueError(
            f"{name}: fraction must be at least 1/{_WIDEST_BLOCK}, got {fraction!r}. "
            "Use top_k(fraction, exact=True) below."
        )
    bits = next(bits for bits in (1, 2, 4, 8, 16) if width <= 2**bits)

    def encode(tensor, state):
        rows = _rows(tensor, width)
        magnitude = tf.where(tf.math.is_finite(rows), tf.abs(rows), tensor.dtype.max)
        picked = tf.argmax(magnitude, 1, tf.int32)
        return (_pick(rows, picked), pack(picked, bits)), state

    def decode(payload, spec):
        values, words = payload
        picked = unpack(words, bits, values.shape[0])
        return _place(values, picked, width, length(spec))

    def payload_bytes(spec):
        count = _num_rows(spec, width)
        return _in_words(spec.dtype.size * count) + 4 * num_words(count, bits)

    compressor = Compressor(
        name="",
        init=stateless,
        encode=encode,
        decode=decode,
        payload_bytes=payload_bytes,
        biased=True,
        sparse=True,
    )
    return mark_non_finite(compressor)


# ------------------------------------------------------------------- one element of each row


def _num_rows(spec, width):
    return -(-length(spec) // width)


def _last_row_width(n, width):
    return n - (n - 1) // width * width


def _rows(tensor, width):
    n = length(tensor)
    missing = -n % width
    padded = tf.pad(tensor, [[0, missing]]) if missing else tensor
    return tf.reshape(padded, [-1, width])


def _pick(rows, picked):
    """[m], the element of each row of [m, width] that [m] ``picked`` names."""
    is_picked = tf.range(rows.shape[1])[None, :] == picked[:, None]
    return tf.reduce_sum(tf.where(is_picked, rows, tf.zeros([], rows.dtype)), 1)


def _place(values, picked, width, n):
    """[n], the inverse of :func:`_pick`; zero elsewhere."""
    is_picked = tf.range(width)[None, :] == picked[:, None]
    rows = tf.where(is_picked, values[:, None], tf.zeros([], values.dtype))
    return tf.reshape(rows, [-1])[:n]


def _in_words(num_bytes):
    return -(-num_bytes // 4) * 4
