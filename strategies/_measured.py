"""What layers of a model cost on this machine: the time of their forward and backward passes."""

import json
import time

import keras
import tensorflow as tf
from keras import tree

from tfdist.strategies import _keras

_REPEATS = 7  # of which the fastest counts: what disturbs a measurement only adds to it


def measured_costs(model, graph, nodes, rows, device):
    """What each node of a model costs in a training step, on one device.

    Layers of the same configuration and shapes are measured once. What was measured is kept on the
    model. Weights, statistics and seeds stay as they are.

    Args:
        model: the ``keras.Model``.
        graph: the functional model that it is, or has.
        nodes: list of nodes, see :func:`tfdist.strategies._keras.nodes_of`.
        rows: int, of the batch.
        device: string.

    Returns:
        A list of seconds.

    Raises:
        ValueError: a layer can't be measured: a size that it needs is unknown, or its call fails.
    """
    if not hasattr(model, "_tfdist_costs"):
        object.__setattr__(model, "_tfdist_costs", {})  # (not tracked by Keras)
    known = model._tfdist_costs
    costs = []
    for node in nodes:
        key = (_likeness(node), rows, device)
        if key not in known:
            known[key] = timer_of(graph, [node], rows, device)()
        costs.append(known[key])
    return costs


def _likeness(node):
    """What layers of the same cost have in common."""
    symbols = lambda leaf: (  # noqa: E731
        f"{leaf.shape} {leaf.dtype}" if isinstance(leaf, keras.KerasTensor) else repr(leaf)
    )
    given = repr(tree.map_structure(symbols, (node.arguments.args, node.arguments.kwargs)))
    operation = node.operation
    if not isinstance(operation, keras.Layer):
        return type(operation), id(operation), given
    try:
        config = operation.get_config()
        config.pop("name", None)
        config = json.dumps(keras.saving.serialize_keras_object(config), sort_keys=True)
    except (TypeError, ValueError, NotImplementedError):  # a layer that can't be saved
        config = id(operation)
    shapes = [tuple(variable.shape) for variable in operation.variables]
    return type(operation), config, given, repr(shapes)


def timer_of(graph, nodes, rows, device):
    """Measures the forward and backward pass of some nodes, computed one after the other.

    Args:
        graph: the functional model whose nodes they are.
        nodes: list of nodes.
        rows: int, of the batch.
        device: string.

    Returns:
        A function that measures, and returns seconds, less those that calling a function takes.

    Raises:
        ValueError: see :func:`measured_costs`.
    """
    made = {id(symbol) for node in nodes for symbol in node.outputs}
    used = {id(symbol): symbol for node in nodes for symbol in node.input_tensors}
    needed = [symbol for key, symbol in used.items() if key not in made]
    last = [s for node in nodes for s in node.outputs if id(s) not in used]
    of_data = {id(symbol) for symbol in graph.inputs}
    name = _keras.name_of_node(nodes[0])
    layers = [node.operation for node in nodes if isinstance(node.operation, keras.Layer)]
    variables = list({id(v): v for layer in layers for v in layer.variables}.values())
    trainable = {id(v) for layer in layers for v in layer.trainable_variables}

    @tf.function(autograph=False)
    def step(inputs, values):
        tensors = {id(symbol): value for symbol, value in zip(needed, inputs, strict=True)}
        sources = [t for s, t in zip(needed, inputs, strict=True) if id(s) not in of_data]
        sources += [t for v, t in zip(variables, values, strict=True) if id(v) in trainable]
        sources = [tensor for tensor in sources if tensor.dtype.is_floating]
        state = list(zip(variables, values, strict=True))
        with tf.GradientTape() as tape:
            tape.watch(sources)
            with keras.StatelessScope(state_mapping=state, collect_losses=True):
                for node in nodes:
                    _keras.compute(node, tensors, _keras.in_training)
            outputs = [tensors[id(symbol)] for symbol in last]
            outputs = [t for t in outputs if tf.is_tensor(t) and t.dtype.is_floating]
        ones = [tf.ones_like(output) for output in outputs]
        return outputs, tape.gradient(outputs, sources, output_gradients=ones)

    nothing = tf.function(lambda inputs, values: inputs, autograph=False)
    with tf.device(device):
        inputs = [_some_values(symbol, rows, name) for symbol in needed]
        values = [tf.identity(keras.ops.convert_to_tensor(variable)) for variable in variables]
        try:
            step(inputs, values)
        except Exception as error:
            raise ValueError(
                f"cost='measured': {name} can't be called on {rows} rows alone: {error}. Use "
                "tfdist.parallel.automatic(cost='estimated') or a list of names."
            ) from error
        nothing(inputs, values)

    def measure():
        with tf.device(device):
            seconds = _fastest(step, inputs, values) - _fastest(nothing, inputs, values)
        return max(seconds, 0.0)

    return measure


def _some_values(symbol, rows, name):
    shape = (rows, *symbol.shape[1:])
    if None in shape:
        raise ValueError(
            f"cost='measured': {name} has an input of unknown size, {tuple(symbol.shape)}. Give "
            "keras.Input whole shapes, or use tfdist.parallel.automatic(cost='estimated')."
        )
    dtype = tf.as_dtype(symbol.dtype)
    if dtype.is_floating:
        return tf.cast(tf.random.stateless_normal(shape, (0, 0)), dtype)
    return tf.zeros(shape, dtype)


def _fastest(function, *args):
    least = float("inf")
    for _ in range(_REPEATS):
        tf.test.experimental.sync_devices()
        start = time.perf_counter()
        function(*args)
        tf.test.experimental.sync_devices()
        least = min(least, time.perf_counter() - start)
    return least
