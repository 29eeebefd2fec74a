"""Codes of a few bits packed into words, and random numbers that compilers can fuse."""

import tensorflow as tf


def num_words(n, bits):
    """32-bit words that ``n`` codes of ``bits`` bits take."""
    return -(-n // (32 // bits))


def pack(codes, bits):
    """Packs codes into words.

    The codes are laid out in 32 / bits rows, and a word takes one code of each row: shifts of
    whole rows are vectorised by compilers, unlike shifts within a row.

    Args:
        codes: int32 [n] in [0, 2^bits).
        bits: 1, 2, 4 or 8.

    Returns:
        int32 [num_words(n, bits)].
    """
    rows = 32 // bits
    words = num_words(codes.shape[0], bits)
    missing = rows * words - codes.shape[0]
    codes = tf.pad(codes, [[0, missing]]) if missing else codes
    shifts = tf.range(rows, dtype=tf.int32)[:, None] * bits
    return tf.reduce_sum(tf.bitwise.left_shift(tf.reshape(codes, [rows, words]), shifts), 0)


def unpack(words, bits, n):
    """The ``n`` codes, int32 [n], that :func:`pack` packed."""
    rows = 32 // bits
    shifts = tf.range(rows, dtype=tf.int32)[:, None] * bits
    codes = tf.bitwise.bitwise_and(tf.bitwise.right_shift(words[None, :], shifts), 2**bits - 1)
    return tf.reshape(codes, [-1])[:n]


def dither(values, step):
    """Random numbers for stochastic rounding, uniform in [0, 1), float32 of the values' shape [n].

    A hash of the position, of ``step`` and of the value: replicas, which have different values,
    round independently of one another, without any shared generator. (XLA's own generators take
    twenty times longer on the CPU.)

    Args:
        values: float32 or float64 [n].
        step: scalar int32, another one for each call.
    """
    position = tf.cast(tf.range(values.shape[0], dtype=tf.int32), tf.uint32)
    bits = tf.bitcast(tf.cast(values, tf.float32), tf.uint32)
    word = position * _word(0x9E3779B1) + tf.cast(step, tf.uint32) * _word(0x85EBCA6B)
    word = mix(tf.bitwise.bitwise_xor(word, bits * _word(0xC2B2AE35)))
    return tf.cast(tf.bitwise.right_shift(word, _word(8)), tf.float32) * 2.0**-24


def mix(word):
    """Spreads each bit of uint32 numbers over all bits.

    Reference: Appleby, MurmurHash3 (public domain), the finaliser fmix32.
    """
    word = _xor_shifted(word, 16) * _word(0x85EBCA6B)
    word = _xor_shifted(word, 13) * _word(0xC2B2AE35)
    return _xor_shifted(word, 16)


def _xor_shifted(word, places):
    return tf.bitwise.bitwise_xor(word, tf.bitwise.right_shift(word, _word(places)))


def _word(value):
    return tf.constant(value, tf.uint32)
