"""Compressors that keep every element, in fewer bits.

All but :func:`fp16`, :func:`bf16` and :func:`threshold` work in blocks: a block of elements shares
one scale, sent as a float, and each element becomes a code of 1, 2, 4 or 8 bits.
"""

import tensorflow as tf

from tfdist.compression._bits import dither, num_words, pack, unpack
from tfdist.compression._compressor import (
    Compressor,
    length,
    narrow,
    require_positive,
    stateless,
    working_dtype,
)
from tfdist.compression._compressor import error_feedback as with_error_feedback

_LARGEST_BELOW_TWO = 2.0 - 2.0**-23


def fp16(*, error_feedback=True):
    """Sends halves: 2 bytes an element. Sums of the payloads are rounded to halves on the way.

    Gradients whose sum exceeds 65,504 become infinite, and show; those below 6e-8 are sent when
    the residual has grown enough.

    Reference: IEEE 754; Seide et al. 2014 for error feedback.
    """
    return _half("fp16", tf.float16, error_feedback)


def bf16(*, error_feedback=True):
    """Sends bfloat16: 2 bytes an element, the range of float32, 8 bits of precision."""
    return _half("bf16", tf.bfloat16, error_feedback)


def _half(name, dtype, error_feedback):
    def encode(tensor, state):
        return (tf.cast(tensor, dtype),), state

    def decode(payload, spec):
        return tf.cast(payload[0], spec.dtype)

    compressor = Compressor(
        name=f"{name}()",
        init=stateless,
        encode=encode,
        decode=decode,
        payload_bytes=lambda spec: 2 * length(spec),
        biased=True,
        summable=True,
    )
    return _fed_back(compressor, error_feedback)


def int8(*, block=512):
    """Sends 8 bits an element: multiples of max|block| / 127, rounded at random, so unbiased.

    Args:
        block: elements that share one scale.

    Reference: Dettmers 2015, arXiv:1511.04561 (8-bit gradients); Alistarh et al. 2017,
    arXiv:1610.02132 (stochastic rounding).
    """
    require_positive("int8", "block", block)

    def quantize(scaled, noise):
        codes = tf.floor(scaled * 127 + noise)
        return tf.cast(tf.clip_by_value(codes, -127, 127), tf.int32) + 127

    def dequantize(codes, dtype):
        return tf.cast(codes - 127, dtype) / 127

    return _blockwise(f"int8(block={block})", block, 8, _largest, quantize, dequantize)


def qsgd(levels, *, block=512):
    """Sends ``levels`` levels of |x| / ||block||_2 and a sign, rounded at random, so unbiased.

    Takes 2 bits an element for 1 level, 4 for up to 7 levels, 8 for up to 127.

    Args:
        levels: s of the paper, 1 to 127.
        block: elements that share one norm (the paper's bucket).

    Reference: Alistarh et al. 2017, arXiv:1610.02132, section 3. (Codes have a fixed width instead
    of the paper's Elias coding, whose length is unknown to a static graph.)
    """
    require_positive("qsgd", "levels", levels)
    require_positive("qsgd", "block", block)
    if levels > 127:
        raise ValueError(f"qsgd: levels must be at most 127, got {levels}. Use fp16() beyond.")
    bits = 2 if levels == 1 else 4 if levels <= 7 else 8

    def norm(blocks):
        # Scaled first: squares of large elements overflow.
        largest = _largest(blocks)
        ratio = tf.math.divide_no_nan(blocks, largest)
        return largest * tf.sqrt(tf.reduce_sum(ratio * ratio, 1, keepdims=True))

    def quantize(scaled, noise):
        codes = tf.floor(scaled * levels + noise)
        return tf.cast(tf.clip_by_value(codes, -levels, levels), tf.int32) + levels

    def dequantize(codes, dtype):
        return tf.cast(codes - levels, dtype) / levels

    name = f"qsgd({levels}, block={block})"
    return _blockwise(name, block, bits, norm, quantize, dequantize)


def tern_grad(*, block=512):
    """Sends -1, 0 or 1 times max|block|, 2 bits an element; unbiased.

    Args:
        block: elements that share one scale.

    Reference: Wen et al. 2017, arXiv:1705.07878, eq. 2 and 3. (The scale belongs to a block instead
    of a layer; gradients are not clipped, which would bias them.)
    """
    require_positive("tern_grad", "block", block)

    def quantize(scaled, noise):
        codes = tf.floor(scaled + noise)
        return tf.cast(tf.clip_by_value(codes, -1, 1), tf.int32) + 1

    def dequantize(codes, dtype):
        return tf.cast(codes - 1, dtype)

    return _blockwise(f"tern_grad(block={block})", block, 2, _largest, quantize, dequantize)


def natural(*, block=512):
    """Sends powers of two, 8 bits an element, rounded at random between the neighbours; unbiased.

    Args:
        block: elements that share the largest exponent.

    Reference: Horváth et al. 2019, arXiv:1905.10988, definition 1. (A code is a sign and 7 bits of
    the exponent below that of the block's largest; what is 2^126 times smaller than it is rounded
    at random to zero or to that.)
    """
    require_positive("natural", "block", block)

    def power_below_largest(blocks):
        largest = tf.cast(_largest(blocks), tf.float32)
        exponent = tf.bitwise.bitwise_and(tf.bitcast(largest, tf.int32), 0x7F800000)
        return tf.cast(tf.bitcast(exponent, tf.float32), blocks.dtype)

    def quantize(scaled, noise):
        # scaled: |x| in [0, 2). Adding noise to the mantissa's bits carries into the exponent with
        # the probability that stochastic rounding asks for.
        bits = tf.bitcast(tf.cast(tf.abs(scaled), tf.float32), tf.int32)
        carry = tf.cast(noise * 2.0**23, tf.int32)
        exponent = tf.bitwise.right_shift(bits + carry, 23)
        codes = tf.clip_by_value(exponent - 1, 0, 127)  # 127: 2; 126: 1; 0: below 2^-125
        return codes + tf.where(scaled < 0, 128, 0)

    def dequantize(codes, dtype):
        exponent = tf.bitwise.bitwise_and(codes, 127) + 1
        power = tf.bitcast(tf.bitwise.left_shift(exponent, 23), tf.float32)
        # Twice the largest power of two would be infinite.
        power = tf.minimum(power, _LARGEST_BELOW_TWO)
        power = tf.where(exponent == 1, 0.0, power)
        return tf.cast(tf.where(codes >= 128, -power, power), dtype)

    name = f"natural(block={block})"
    return _blockwise(name, block, 8, power_below_largest, quantize, dequantize)


def one_bit(*, block=512, error_feedback=True):
    """Sends the sign times the mean of |block|, 1 bit an element, packed 8 to a byte.

    Args:
        block: elements that share one scale.
        error_feedback: False sends signs without memory, which harms training.

    Reference: Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019,
    arXiv:1901.09847, Alg. 1 (the scale ||p||_1 / d; here for each block).
    """
    require_positive("one_bit", "block", block)

    def encode(tensor, state):
        payload, _, state = encode_decode(tensor, state)
        return payload, state

    def encode_decode(tensor, state):
        n = length(tensor)
        blocks = _in_blocks(tf.cast(tensor, working_dtype(tensor.dtype)), block)
        # Half of the mean: the sum does not overflow where all elements are finite.
        half = tf.reduce_sum(tf.abs(blocks) / (2 * blocks.shape[1]), 1)
        largest = tf.constant(blocks.dtype.max, blocks.dtype)
        scale = tf.where(tf.math.is_finite(half), tf.minimum(half, largest / 2) * 2, float("nan"))
        signs = tf.cast(tf.reshape(blocks, [-1]) >= 0, tf.int32)
        values = tf.where(blocks >= 0, scale[:, None], -scale[:, None])
        decoded = narrow(tf.reshape(values, [-1])[:n], tensor.dtype)
        return (pack(signs, 1), scale), decoded, state

    def decode(payload, spec):
        words, scale = payload
        signs = tf.cast(2 * unpack(words, 1, _padded_length(spec, block)) - 1, scale.dtype)
        values = tf.reshape(signs, [scale.shape[0], -1]) * scale[:, None]
        return narrow(tf.reshape(values, [-1])[: length(spec)], spec.dtype)

    compressor = Compressor(
        name=f"one_bit(block={block})",
        init=stateless,
        encode=encode,
        decode=decode,
        payload_bytes=lambda spec: _block_bytes(spec, block, 1),
        biased=True,
        encode_decode=encode_decode,
    )
    return _fed_back(compressor, error_feedback)


def threshold(t, *, error_feedback=True):
    """Sends -t, 0 or t: what an element has gathered beyond t, 2 bits an element.

    An element whose gradients are larger than ``t`` step after step falls behind: choose ``t`` no
    smaller than typical gradients. From three replicas on, the sum is compressed again with the
    same ``t``, so it is the sum over all replicas that must seldom exceed ``t``.

    Args:
        t: the threshold, in units of the gradient (of its sum over a replica's rows as the
            optimizer sees it, loss scale removed).
        error_feedback: False forgets what is not sent.

    Reference: MXNet's 2-bit gradient compression (documentation of MXNet 1.x, "Gradient
    Compression"), after Strom 2015.
    """
    require_positive("threshold", "t", t, whole=False)

    def encode(tensor, state):
        codes = tf.where(tensor >= t, 2, tf.where(tensor <= -t, 0, 1))
        codes = tf.where(tf.math.is_finite(tensor), codes, 3)
        return (pack(codes, 2),), state

    def decode(payload, spec):
        codes = unpack(payload[0], 2, length(spec))
        value = tf.cast(codes - 1, spec.dtype) * tf.cast(t, spec.dtype)
        return tf.where(codes == 3, tf.constant(float("nan"), spec.dtype), value)

    compressor = Compressor(
        name=f"threshold({t})",
        init=stateless,
        encode=encode,
        decode=decode,
        payload_bytes=lambda spec: 4 * num_words(length(spec), 2),
        biased=True,
    )
    return _fed_back(compressor, error_feedback)


# ---------------------------------------------------------------------------- blocks


def _largest(blocks):
    return tf.reduce_max(tf.abs(blocks), 1, keepdims=True)


def _blockwise(name, block, bits, scale_of, quantize, dequantize):
    """An unbiased compressor with one scale for each block.

    Args:
        scale_of: ``scale_of(blocks [m, b]) -> [m, 1]``.
        quantize: ``quantize(scaled [m, b], noise [m, b]) -> codes``, int32 in [0, 2^bits); scaled
            is x / scale, noise uniform in [0, 1).
        dequantize: ``dequantize(codes, dtype) -> float``, what x / scale became.
    """

    def encode(tensor, step):
        blocks = _in_blocks(tf.cast(tensor, working_dtype(tensor.dtype)), block)
        # What a scale adds up to may overflow where no element is infinite.
        scale = tf.minimum(scale_of(blocks), tf.constant(blocks.dtype.max, blocks.dtype))
        # Below float32's normal numbers the reciprocal would overflow; arithmetic flushes them.
        is_normal = scale >= tf.cast(2.0**-126, scale.dtype)
        scaled = tf.where(is_normal, blocks / tf.where(is_normal, scale, 1), 0)
        noise = tf.reshape(dither(tf.reshape(blocks, [-1]), step), blocks.shape)
        codes = quantize(scaled, tf.cast(noise, scaled.dtype))
        is_finite = tf.reduce_all(tf.math.is_finite(blocks), 1, keepdims=True)
        scale = tf.where(is_finite, scale, float("nan"))
        return (pack(tf.reshape(codes, [-1]), bits), scale[:, 0]), step + 1

    def decode(payload, spec):
        words, scale = payload
        codes = unpack(words, bits, _padded_length(spec, block))
        values = tf.reshape(dequantize(codes, scale.dtype), [scale.shape[0], -1]) * scale[:, None]
        return narrow(tf.reshape(values, [-1])[: length(spec)], spec.dtype)

    return Compressor(
        name=name,
        init=lambda _: tf.zeros([], tf.int32),  # steps, so that the noise changes
        encode=encode,
        decode=decode,
        payload_bytes=lambda spec: _block_bytes(spec, block, bits),
        biased=False,
    )


def _in_blocks(vector, block):
    """[m, b] of [n]; the last block is padded, and its padding is sent.

    All that follows has the padded length, which compilers vectorise several times better than
    rows of which one ends early.
    """
    n = length(vector)
    missing = _padded_length(vector, block) - n
    padded = tf.pad(vector, [[0, missing]]) if missing else vector
    return tf.reshape(padded, [-1, min(block, n)])


def _padded_length(spec, block):
    width = min(block, length(spec))
    return -(-length(spec) // width) * width


def _block_bytes(spec, block, bits):
    padded = _padded_length(spec, block)
    num_scales = padded // min(block, length(spec))
    return 4 * num_words(padded, bits) + working_dtype(spec.dtype).size * num_scales


def _fed_back(compressor, wanted):
    return with_error_feedback(compressor) if wanted else compressor
