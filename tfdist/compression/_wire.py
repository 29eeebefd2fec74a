"""Payloads as vectors of words, the form in which collectives carry them."""

import tensorflow as tf


def to_words(payload):
    """One int32 vector that holds a payload, each of its tensors padded to whole words."""
    return tf.concat([_words_of(tensor) for tensor in payload], 0)


def from_words(words, specs):
    """The payload that :func:`to_words` made a vector of.

    Args:
        words: int32 vector.
        specs: a ``tf.TensorSpec`` for each tensor of the payload.
    """
    sizes = [-(-spec.shape.num_elements() * spec.dtype.size // 4) for spec in specs]
    return tuple(
        _from_words(part, spec) for part, spec in zip(tf.split(words, sizes), specs, strict=True)
    )


def specs_of(payload):
    """A list of ``tf.TensorSpec``: shape and dtype of each tensor of a payload."""
    return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in payload]


def _words_of(tensor):
    flat = tf.reshape(tensor, [-1])
    size = flat.dtype.size
    if size == 4:
        return tf.bitcast(flat, tf.int32)
    if size > 4:
        return tf.reshape(tf.bitcast(flat, tf.int32), [-1])
    missing = -flat.shape[0] % (4 // size)
    flat = tf.pad(flat, [[0, missing]]) if missing else flat
    return tf.bitcast(tf.reshape(flat, [-1, 4 // size]), tf.int32)


def _from_words(words, spec):
    size = spec.dtype.size
    n = spec.shape.num_elements()
    if size <= 4:
        flat = tf.reshape(tf.bitcast(words, spec.dtype), [-1])[:n]
    else:
        flat = tf.bitcast(tf.reshape(words, [-1, size // 4]), spec.dtype)
    return tf.reshape(flat, spec.shape)
