"""Work on a given device whose backward pass runs there, too.

Back-propagation through a ``tf.GradientTape`` makes its operations wherever it is called. Here a
part of a model is one operation to the tape, and brings a backward pass of its own device.
"""

import contextlib
from typing import NamedTuple

import keras
import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.eager import tape as tape_lib
from tensorflow.python.framework import ops


def placed(function, tensors, sources, device, *, after=(), on_backward=None, recomputed=None):
    """``function(*tensors)`` on a device, forward and backward.

    Args:
        function: returns a nest of tensors.
        tensors: list of tensors, on any device.
        sources: list of pairs of what the function reads and is trainable, and what stands for it
            outside: variables, and the tensors that tapes know them by.
        device: where it runs.
        after: operations that must have ended before it begins.
        on_backward: called with the gradients that a backward pass was given (None where there are
            none) and those that it has made, lists.
        recomputed: the Keras variables that the function may write; where it is given, the
            activations are not kept but computed again in the backward pass.

    Returns:
        The function's nest. Attributes of tensors that tell a mask or parts are kept.
    """
    if not record.could_possibly_record():
        with ops.device(device):
            with ops.control_dependencies(list(after)):
                entries = [_copy(t) for t in tensors]
            return function(*entries)
    with ops.device(device):
        with record.stop_recording(), ops.control_dependencies(list(after)):
            entries = [_copy(t) for t in tensors]
        run = _Kept(function) if recomputed is None else _Recomputed(function, recomputed)
        result = run.forward(entries, [inner for inner, _ in sources])
    results = tf.nest.flatten(result, expand_composites=True)
    originals, rebuild = _recordable(results)
    with record.stop_recording():
        copies = []
        for original in originals:
            with ops.device(original.device or device):
                copies.append(tf.identity(original))
    floats = [i for i, t in enumerate(tensors) if _is_float(t)]
    inputs = [tensors[i] for i in floats] + [outer for _, outer in sources]

    def backward(*gradients):
        if on_backward is not None:
            gradients = [_here(g, t, device) for g, t in zip(gradients, originals, strict=True)]
        with ops.device(device):
            found = run.backward(originals, gradients)
            found = [found[i] for i in floats] + found[len(tensors) :]
        if on_backward is not None:
            on_backward(gradients, [g for g in found if g is not None])
        return found

    record.record_operation("TfdistPlaced", copies, inputs, backward)
    return tf.nest.pack_sequence_as(result, rebuild(copies), expand_composites=True)


def _here(gradient, tensor, device):
    """A copy of a tensor's gradient where the tensor is."""
    if gradient is None:
        return None
    with ops.device(tensor.device or device):
        return tf.identity(gradient)


class _Kept:
    """Keeps its activations for the backward pass."""

    def __init__(self, function):
        self._function = function
        self._tape = None
        self._sources = None

    def forward(self, entries, sources):
        self._sources = [*entries, *sources]
        with tf.GradientTape(persistent=True) as self._tape:
            self._tape.watch(_watched(self._sources))
            return self._function(*entries)

    def backward(self, outputs, gradients):
        return self._tape.gradient(outputs, self._sources, output_gradients=gradients)


class _Recomputed:
    """Computes its activations again, from the same state of seeds and statistics."""

    def __init__(self, function, variables):
        self._function = function
        self._variables = variables

    def forward(self, entries, sources):
        self._entries, self._sources = entries, sources
        for source in sources:
            if not isinstance(source, tf.Tensor):  # so that tapes outside know it
                tape_lib.variable_accessed(source._get())
        self._state = [(v, tf.identity(v.value)) for v in self._variables]
        with record.stop_recording():
            result, scope = self._call(entries)
            for variable, _ in self._state:
                variable.assign(scope.get_current_value(variable))
        if scope.losses:
            raise ValueError(
                "recompute=True: a layer of this model calls add_loss (or has an "
                "activity_regularizer) and its activations are computed twice. Use recompute=False."
            )
        return result

    def _call(self, entries):
        with keras.StatelessScope(state_mapping=self._state, collect_losses=True) as scope:
            return self._function(*entries), scope

    def backward(self, outputs, gradients):
        del outputs
        present = [g for g in gradients if g is not None]
        with record.stop_recording(), ops.control_dependencies(present):
            # A copy of its own, or TensorFlow would take both computations for one.
            entries = [_copy(entry) for entry in self._entries]
        with tf.GradientTape() as tape:
            tape.watch(_watched([*entries, *self._sources]))
            result, _ = self._call(entries)
        again, _ = _recordable(tf.nest.flatten(result, expand_composites=True))
        return tape.gradient(again, [*entries, *self._sources], output_gradients=gradients)


def _watched(sources):
    """Those that a tape must be told of: it sees variables when they are read."""
    return [s for s in sources if isinstance(s, tf.Tensor) and _is_float(s)]


def _is_float(tensor):
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def _copy(tensor):
    copied = tf.identity(tensor)
    _keep_mask(tensor, copied)
    return copied


def _keep_mask(original, copied):
    mask = getattr(original, "_keras_mask", None)
    if mask is not None:
        copied._keras_mask = mask


class Parts(NamedTuple):
    """The parts of a tensor, along one axis, that are on several devices."""

    parts: list
    axis: int


def joined(parts, axis, device=None):
    """The whole of some parts, which :func:`parts_of` finds again.

    Parts that are ``tf.IndexedSlices`` (gradients of a table) have shapes, and so has the whole.
    """
    with ops.device(device) if device else contextlib.nullcontext():
        if isinstance(parts[0], tf.IndexedSlices):
            whole = _joined_slices(parts, axis)
        else:
            whole = tf.concat(parts, axis)
    whole._tfdist_parts = Parts(list(parts), axis)
    return whole


def _joined_slices(parts, axis):
    shapes = [tf.get_static_value(part.dense_shape) for part in parts]
    shape = list(shapes[0])
    shape[axis] = sum(each[axis] for each in shapes)
    shape = tf.constant(shape, parts[0].dense_shape.dtype)
    if axis == 0:
        starts = [sum(each[0] for each in shapes[:i]) for i in range(len(parts))]
        indices = [
            part.indices + tf.cast(start, part.indices.dtype)
            for part, start in zip(parts, starts, strict=True)
        ]
        return tf.IndexedSlices(
            tf.concat([part.values for part in parts], 0), tf.concat(indices, 0), shape
        )
    return tf.IndexedSlices(
        tf.concat([part.values for part in parts], axis), parts[0].indices, shape
    )


def parts_of(tensor, number, axis):
    """The parts of a tensor if it was joined from so many along the axis, else None."""
    known = getattr(tensor, "_tfdist_parts", None)
    if known is None or len(known.parts) != number:
        return None
    rank = tensor.shape.rank
    return known.parts if known.axis % rank == axis % rank else None


def _recordable(tensors):
    """The float tensors among these, with the parts in place of what was joined.

    Returns:
        ``(list, rebuild)``; ``rebuild(copies)`` is the list of all tensors, of copies.
    """
    found, recipe = [], []
    for tensor in tensors:
        parts = getattr(tensor, "_tfdist_parts", None)
        if not tf.is_tensor(tensor) or not _is_float(tensor):
            recipe.append((tensor, None, None))
        elif parts is None:
            recipe.append((tensor, [len(found)], None))
            found.append(tensor)
        else:
            recipe.append((tensor, [len(found) + i for i in range(len(parts.parts))], parts.axis))
            found.extend(parts.parts)

    def rebuild(copies):
        rebuilt = []
        for tensor, places, axis in recipe:
            if places is None:
                rebuilt.append(tensor)
                continue
            if axis is None:
                copied = copies[places[0]]
            else:
                copied = joined([copies[i] for i in places], axis, tensor.device)
            _keep_mask(tensor, copied)
            rebuilt.append(copied)
        return rebuilt

    return found, rebuild
