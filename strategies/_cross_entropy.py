"""Cross-entropy from logits that are on several devices."""

import functools

import tensorflow as tf
from tensorflow.python.framework import ops

from tfdist.strategies._placed import placed


def split_cross_entropy(target, parts, devices):
    """Sparse softmax cross-entropy from logits of which each device has some classes.

    Only numbers for each row travel between the devices, no logits.

    Args:
        target: int, [...].
        parts: list of float tensors [..., classes / number].
        devices: list of device strings.

    Returns:
        Float [...], on the first device.
    """
    target = tf.cast(target, tf.int32)
    size = parts[0].shape[-1]

    def largest(logits):
        return tf.stop_gradient(tf.reduce_max(logits, -1))

    highest = [
        placed(largest, [logits], [], device) for logits, device in zip(parts, devices, strict=True)
    ]
    with ops.device(devices[0]):
        shift = tf.stop_gradient(functools.reduce(tf.maximum, highest))

    def sums(logits, shift, target, i):
        local = target - i * size
        is_here = tf.logical_and(local >= 0, local < size)
        chosen = tf.gather(logits, tf.where(is_here, local, 0), batch_dims=len(local.shape))
        chosen = tf.where(is_here, chosen, tf.zeros([], logits.dtype))
        return tf.reduce_sum(tf.exp(logits - shift[..., None]), -1), chosen

    found = [
        placed(functools.partial(sums, i=i), [logits, shift, target], [], device)
        for i, (logits, device) in enumerate(zip(parts, devices, strict=True))
    ]
    with ops.device(devices[0]):
        exponentials, chosen = (tf.add_n(list(same)) for same in zip(*found, strict=True))
        return tf.math.log(exponentials) + shift - chosen
