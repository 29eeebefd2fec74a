"""Layers whose weights are split over several devices (tensor parallelism).

A split layer is the stock layer, called once for each shard in a context in which its variables
are that shard. So class, configuration and arithmetic are Keras' own. (Shoeybi et al. 2019,
"Megatron-LM", for the pairs and the heads.)
"""

import functools

import keras
import tensorflow as tf
from tensorflow.python.framework import ops

from tfdist.strategies import _keras
from tfdist.strategies._placed import joined, parts_of, placed
from tfdist.strategies._split_variables import SplitVariable
from tfdist.strategies._whole_variable import acting_as_shard

COLUMN, ROW, HEADS, VOCABULARY, WIDTH = "column", "row", "heads", "vocabulary", "width"


def call_split(split, stock, layer, args, kwargs, devices, tokens_of):
    """Calls a layer that is split over devices.

    Args:
        split: one of the kinds above.
        stock: ``stock(layer, *args, **kwargs)``, the whole layer's call.
        devices: list of device strings, one for each shard; inputs and outputs are on the first.
        tokens_of: ``tokens_of(variable) -> tensors``, see :meth:`SplitVariable.tokens`.

    Returns:
        What the whole layer returns. Of a column the parts can be found by
        :func:`~tfdist.strategies._placed.parts_of`.
    """
    if kwargs.get("return_attention_scores"):
        return stock(layer, *args, **kwargs)
    number = len(devices)
    run = functools.partial(_on_each, stock, layer, devices, tokens_of)
    if split in (COLUMN, WIDTH):
        return joined(run([(args, kwargs)] * number), -1, devices[0])
    if split == HEADS:
        return _sum(
            run([(args, kwargs)] * number, once=_bias_of(_keras.attention_layers(layer)[-1])),
            devices[0],
        )
    inputs, *others = args
    if split == ROW:
        parts = parts_of(inputs, number, -1)
        if parts is None:
            parts = tf.split(inputs, number, -1)
        calls = [((part, *others), kwargs) for part in parts]
        return _sum(run(calls, once=_bias_of(layer)), devices[0])
    # Rows of other shards count as zeros.
    rows = layer.input_dim // number
    indices = tf.cast(inputs, tf.int32)
    is_here, calls = [], []
    for i in range(number):
        local = indices - i * rows
        is_here.append(tf.logical_and(local >= 0, local < rows))
        calls.append(((tf.where(is_here[i], local, 0), *others), kwargs))

    def masked(i, found):
        return tf.where(is_here[i][..., None], found, tf.zeros([], found.dtype))

    return _sum(run(calls, finish=masked), devices[0])


def _on_each(stock, layer, devices, tokens_of, calls, once=(), finish=None):
    """The results of ``calls``, (args, kwargs) for each shard.

    Args:
        once: variables that only the first shard adds.
        finish: ``finish(shard, result) -> result``.
    """
    results = []
    variables = layer.trainable_variables
    values = [_keras.tf_variable(variable) for variable in variables]
    for i, (device, call) in enumerate(zip(devices, calls, strict=True)):
        flat = tf.nest.flatten(call)
        places = [p for p, value in enumerate(flat) if tf.is_tensor(value)]

        def function(*tensors, i=i, call=call, flat=flat, places=places):
            flat = list(flat)
            for place, tensor in zip(places, tensors, strict=True):
                flat[place] = tensor
            args, kwargs = tf.nest.pack_sequence_as(call, flat)
            with acting_as_shard(i):
                result = _without(once if i else (), layer, stock, args, kwargs)
                return result if finish is None else finish(i, result)

        sources = [
            (v.shards[i], tokens_of(v)[i]) if isinstance(v, SplitVariable) else (v, v.handle)
            for v, variable in zip(values, variables, strict=True)
            if i == 0 or all(variable is not other for other in once)
        ]
        results.append(placed(function, [flat[p] for p in places], sources, device))
    return results


def _without(variables, layer, stock, args, kwargs):
    """The call with these variables as zeros."""
    if not variables:
        return stock(layer, *args, **kwargs)
    zeros = [(v, tf.zeros(v.shape, v.dtype)) for v in variables]
    with keras.StatelessScope(state_mapping=zeros) as scope:
        result = stock(layer, *args, **kwargs)
    for variable in layer.non_trainable_variables:  # the states of seeds
        value = scope.get_current_value(variable)
        if value is not None:
            variable.assign(value)
    return result


def _bias_of(layer):
    bias = getattr(layer, "bias", None)
    return [] if bias is None else [bias]


def _sum(parts, device):
    with ops.device(device):
        return tf.add_n(parts)
