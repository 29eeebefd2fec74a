"""What a compressor is, and the combinators that make one from another."""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

State = Any
"""A nest of tensors with static shapes."""

Payload = tuple
"""A tuple of tensors with static shapes, what one replica sends."""


class Compressor(NamedTuple):
    """Two pure functions that shorten one flat tensor; no communication.

    The functions are compiled by XLA, so they may use only operations that XLA compiles, and only
    static shapes. Each call gets a ``spec``, ``tf.TensorSpec([n], dtype)`` with n >= 1, or a
    tensor of that shape and dtype (float16, bfloat16, float32 or float64).

    A NaN or an infinity anywhere in the tensor must make at least one decoded element non-finite,
    so that the optimizer or the loss scaler sees it (:func:`tfdist.compression.mark_non_finite`
    does it for compressors that would lose it).
    """

    name: str
    """How it was made, such as ``"top_k(0.01)"``; must be the same on all workers."""

    init: Callable[[tf.TensorSpec], State]
    """``init(spec) -> state``. Float tensors of shape [n] in the state are taken for residuals:
    when the number of replicas changes, their sum over the replicas is kept. All else is taken
    for the same on every replica."""

    encode: Callable[[tf.Tensor, State], tuple[Payload, State]]
    """``encode(tensor, state) -> (payload, new state)``."""

    decode: Callable[[Payload, tf.TensorSpec], tf.Tensor]
    """``decode(payload, spec) -> tensor`` of shape [n], an approximation of what was encoded."""

    payload_bytes: Callable[[tf.TensorSpec], int]
    """``payload_bytes(spec)``: the exact size of a payload."""

    biased: bool
    """Whether the expectation of decode(encode(x)) differs from x."""

    summable: bool = False
    """Whether payloads may be summed on their way (by all-reduce) before they are decoded. Then
    only the first tensor of the payload, a float, travels and is summed; the others, if any, are
    the same on all replicas."""

    sparse: bool = False
    """Whether it keeps few elements. The sum of sparse tensors is denser than each, so it is never
    compressed again on its way."""

    encode_decode: Callable[[tf.Tensor, State], tuple[Payload, tf.Tensor, State]] | None = None
    """Optional, for error feedback, where it is cheaper than to decode the payload:
    ``encode_decode(tensor, state) -> (payload, decoded, new state)``."""


class Feedback(NamedTuple):
    """State of a compressor with error feedback."""

    residual: tf.Tensor  # [n], what was not sent yet
    inner: State


def error_feedback(compressor: Compressor) -> Compressor:
    """Adds what was not sent in a step to the gradient of the next.

    p = g + residual;  send C(p);  residual = p - C(p)

    So nothing is lost, only late: the sum of what was sent plus the residual is the sum of the
    gradients. Biased compressors of this package have it already, unless made with
    ``error_feedback=False``.

    Args:
        compressor: any compressor without error feedback.

    Returns:
        A compressor; its state takes as much memory as the gradient.

    Reference: Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019,
    arXiv:1901.09847, Alg. 1. (There the learning rate is part of what is fed back; here gradients
    are, so that any optimizer may follow.)
    """

    def init(spec):
        return Feedback(tf.zeros(spec.shape, spec.dtype), compressor.init(spec))

    def encode(tensor, state):
        corrected = tensor + state.residual
        payload, sent, inner = encode_and_decode(compressor, corrected, state.inner)
        return payload, Feedback(corrected - sent, inner)

    return compressor._replace(
        name=f"error_feedback({compressor.name})", init=init, encode=encode, encode_decode=None
    )


def encode_and_decode(compressor, tensor, state):
    """The payload, what the receiver makes of it, and the new state."""
    if compressor.encode_decode is not None:
        return compressor.encode_decode(tensor, state)
    payload, state = compressor.encode(tensor, state)
    decoded = compressor.decode(payload, tf.TensorSpec(tensor.shape, tensor.dtype))
    return payload, decoded, state


def mark_non_finite(compressor: Compressor) -> Compressor:
    """Adds four bytes to the payload that make the decoded tensor NaN where the input was not
    finite.

    For compressors that could lose a NaN or an infinity, such as those that send few elements.

    Args:
        compressor: any compressor whose payloads are not summable.

    Raises:
        ValueError: the payloads are summable.
    """
    if compressor.summable:
        raise ValueError(
            f"mark_non_finite: expected a compressor whose payloads are not summable, got "
            f"{compressor.name}. Add `non_finite_mark(tensor)` to an element of its payload."
        )

    def encode(tensor, state):
        payload, state = compressor.encode(tensor, state)
        mark = tf.cast(non_finite_mark(tensor), tf.float32)
        return (*payload, tf.reshape(mark, [1])), state

    def decode(payload, spec):
        *payload, mark = payload
        return compressor.decode(tuple(payload), spec) + tf.cast(mark, spec.dtype)

    return compressor._replace(
        encode=encode,
        decode=decode,
        payload_bytes=lambda spec: compressor.payload_bytes(spec) + 4,
        encode_decode=None,
    )


def non_finite_mark(tensor: tf.Tensor) -> tf.Tensor:
    """0 where all elements of the float tensor are finite, else NaN; a scalar of its dtype.

    (A sum of ``x - x`` would do the same if compilers left it alone.)
    """
    is_finite = tf.reduce_all(tf.math.is_finite(tensor))
    return tf.where(is_finite, tf.zeros([], tensor.dtype), tf.constant(float("nan"), tensor.dtype))


def stateless(_spec):
    """``init`` of compressors without state."""
    return ()


def working_dtype(dtype):
    """The dtype in which compressors compute: float64 for float64, else float32."""
    return tf.float64 if dtype == tf.float64 else tf.float32


def narrow(values, dtype):
    """Casts to ``dtype``, in which finite values stay finite."""
    clipped = tf.clip_by_value(values, tf.cast(dtype.min, values.dtype), dtype.max)
    return tf.cast(tf.where(tf.math.is_finite(values), clipped, values), dtype)


def length(spec):
    """The number of elements of a tensor or ``tf.TensorSpec`` with a static shape."""
    return spec.shape.num_elements()


def require_fraction(name, fraction):
    """Raises unless ``fraction`` is a number in (0, 1]."""
    is_number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
    if not is_number or not 0 < fraction <= 1:
        raise ValueError(
            f"{name}: fraction must be a number in (0, 1], got {fraction!r}. For the 5 largest of "
            "500 elements use fraction=0.01."
        )


def require_positive(name, argument, value, whole=True):
    """Raises unless ``value`` is a positive number (a whole one)."""
    kind = int if whole else (int, float)
    if not isinstance(value, kind) or isinstance(value, bool) or not value > 0:
        what = "a whole number of at least 1" if whole else "a number above 0"
        raise ValueError(f"{name}: {argument} must be {what}, got {value!r}.")
