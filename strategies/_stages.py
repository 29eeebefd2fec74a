"""The call of a split model in a replica: its stages, its micro-batches, their order."""

import contextlib
import functools
import threading

import keras
import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import ops

from tfdist.strategies import _input, _keras
from tfdist.strategies._order import Order
from tfdist.strategies._placed import joined, placed
from tfdist.strategies._split_variables import SplitVariable
from tfdist.strategies._step import Step, current_step, tracing
from tfdist.strategies._tensor import call_split
from tfdist.strategies._whole_variable import shard_number

_now = threading.local()  # replicas are traced in threads of their own


class Call:
    """One call of a split model by one replica.

    Args:
        plan: the :class:`~tfdist.strategies._plan.Plan`.
        devices: the replica's device strings, ``tensor`` for each stage.
        settings: the strategy's :class:`~tfdist.strategies.model_parallel.Settings`.
        order: the :class:`~tfdist.strategies._order.Order` of the step, or None.
        micro_batch: its number in the order.
    """

    def __init__(self, plan, devices, settings, order=None, micro_batch=0):
        self.plan, self.devices, self.settings = plan, devices, settings
        self.order, self.micro_batch = order, micro_batch
        self.is_in_stage = False
        self._tokens = {}

    def devices_of(self, stage):
        """The devices of a stage; what is not split is on the first."""
        start = stage * self.plan.tensor
        return self.devices[start : start + self.plan.tensor]

    def tokens_of(self, variable):
        """See :meth:`SplitVariable.tokens`; the same ones throughout the call."""
        if id(variable) not in self._tokens:
            self._tokens[id(variable)] = variable.tokens()
        return self._tokens[id(variable)]

    def run(self, stage, function, tensors, layers):
        """A stage, or a layer of it: ``function(*tensors)`` on the stage's device."""
        others = {id(v): v for layer in layers for v in layer.non_trainable_variables}
        trainable = {id(v): v for layer in layers for v in layer.trainable_variables}
        sources = []
        for variable in map(_keras.tf_variable, trainable.values()):
            sources.append((variable, variable.handle))
            if isinstance(variable, SplitVariable):
                sources += [(token, token) for token in self.tokens_of(variable)]
        after, on_backward = (), None
        if self.order is not None:
            after = self.order.before_forward(stage, self.micro_batch)
            on_backward = functools.partial(self.order.note_backward, stage, self.micro_batch)
        self.is_in_stage = True
        try:
            result = placed(
                function,
                tensors,
                sources,
                self.devices_of(stage)[0],
                after=after,
                on_backward=on_backward,
                recomputed=list(others.values()) if self.settings.recompute else None,
            )
        finally:
            self.is_in_stage = False
        if self.order is not None:
            self.order.note_forward(stage, self.micro_batch, result)
        return result


@contextlib.contextmanager
def calling(call):
    """Makes ``call`` the current one in this thread."""
    outer = current_call()
    _now.call = call
    try:
        yield call
    finally:
        _now.call = outer


def current_call():
    """The call of a split model that is being made in this thread, or None."""
    return getattr(_now, "call", None)


# ---------------------------------------------------------------- what Keras' calls turn into


def call_model(strategy, plan, stock, model, args, kwargs):
    """Calls the whole model, in a replica; its batch in micro-batches where it trains."""
    settings = strategy.settings
    devices = strategy.extended.devices_of_replica()
    order = getattr(_now, "order", None)
    number = settings.micro_batches
    # Nothing is gained where nothing goes backward.
    if order is not None or number == 1 or not args or not record.could_possibly_record():
        call = Call(plan, devices, settings, order, getattr(_now, "micro_batch", 0))
        with calling(call):
            return stock(model, *args, **kwargs)
    inputs, *others = args
    with calling(Call(plan, devices, settings)):
        outputs, losses = [], []
        for part, rows, share in micro_batches(inputs, number):
            output = stock(model, part, *others, **kwargs)
            outputs.append(_first_rows(output, rows))
            losses.append([loss * tf.cast(share, loss.dtype) for loss in _keras.own_losses(model)])
        _keras.set_losses(model, [tf.add_n(list(same)) for same in zip(*losses, strict=True)])
        with ops.device(devices[(plan.num_stages - 1) * plan.tensor]):
            return tf.nest.map_structure(lambda *rows: tf.concat(rows, 0), *outputs)


def micro_batches(data, number):
    """Cuts the rows of a nest of tensors into parts of equal size, within one.

    A part without rows, of a batch that is shorter than ``number``, gets one row in their place.

    Yields:
        ``(part, rows, share)``: the nest, how many of its rows count, and their share of all.
    """
    total = _input.rows_of(data)
    for j in range(number):
        start, rows = _input.split_rows(total, j, number)
        shown = tf.maximum(rows, 1) if tf.is_tensor(rows) else max(rows, 1)
        start = tf.minimum(start, total - 1) if tf.is_tensor(rows) else min(start, total - 1)
        part = _input._map_components(
            lambda c, start=start, shown=shown: _input._slice(start, shown, c), data
        )
        share = tf.math.divide_no_nan(tf.cast(rows, tf.float32), tf.cast(total, tf.float32))
        yield part, rows, share


def _first_rows(nest, rows):
    return tf.nest.map_structure(lambda t: t[:rows], nest)


def call_graph(graph, inputs, operation_of):
    """Calls a functional model, stage by stage.

    Args:
        graph: the model, whose call this is.
        inputs: list of tensors.
        operation_of: ``operation_of(operation)``, what is called in its place.

    Returns:
        The list of outputs.
    """
    call = current_call()
    tensors = {id(t): value for t, value in zip(graph.inputs, inputs, strict=True)}
    wanted = {id(t) for t in graph.outputs}
    for units in call.plan.stages:
        for unit in units:
            wanted.update(id(t) for t in unit.node.input_tensors)
    for stage, units in enumerate(call.plan.stages):
        made = {id(t) for unit in units for t in unit.node.outputs}
        needed = {id(t) for unit in units for t in unit.node.input_tensors} - made
        needed = [key for key in tensors if key in needed]
        given = [
            key
            for key in dict.fromkeys(id(t) for unit in units for t in unit.node.outputs)
            if key in wanted
        ]

        def function(*values, units=units, needed=needed, given=given):
            local = dict(zip(needed, values, strict=True))
            for unit in units:
                _keras.compute(unit.node, local, operation_of)
            return [local[key] for key in given]

        layers = [u.operation for u in units if isinstance(u.operation, keras.Layer)]
        results = call.run(stage, function, [tensors[key] for key in needed], layers)
        tensors.update(zip(given, results, strict=True))
    return [tensors[id(t)] for t in graph.outputs]


def call_layer(stock, layer, args, kwargs):
    """Calls a layer of a subclassed model on its stage."""
    call = current_call()
    stage = None if call is None or call.is_in_stage else call.plan.stage_of.get(id(layer))
    if stage is None or call.plan.graph is not None:
        return stock(layer, *args, **kwargs)
    flat = tf.nest.flatten((args, kwargs), expand_composites=True)
    places = [p for p, value in enumerate(flat) if tf.is_tensor(value)]

    def function(*tensors):
        values = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        args_, kwargs_ = tf.nest.pack_sequence_as((args, kwargs), values, expand_composites=True)
        return stock(layer, *args_, **kwargs_)

    return call.run(stage, function, [flat[p] for p in places], [layer])


def call_operation(stock, operation, args, kwargs):
    """Calls a layer's computation, on several devices if its weights are."""
    call = current_call()
    split = None if call is None else call.plan.splits.get(id(operation))
    if split is None or shard_number() is not None:
        return stock(operation, *args, **kwargs)
    stage = call.plan.stage_of_layer(operation)
    devices = call.devices_of(stage)
    return call_split(split, stock, operation, args, kwargs, devices, call.tokens_of)


# ------------------------------------------------------------------ micro-batches, one by one


class MicroStep(Step):
    """The view of a step that a micro-batch has: it is one more part of the batch.

    Args:
        outer: the replica's :class:`Step`.
        rows: scalar, its rows.
        number: of micro-batches in the batch.
    """

    def __init__(self, outer, rows, number):
        super().__init__(outer.strategy, rows, outer.total_rows)
        self.num_parts = outer.num_parts * number
        self.touched, self.updated_metrics = outer.touched, outer.updated_metrics

    def sum(self, tensors):
        """Refused: what all rows together weigh is not known before the last of them."""
        raise ValueError(
            "schedule='1f1b': the loss is normalised over the whole batch (by its mask, or by "
            "weights with the reduction 'mean_with_sample_weight'), but each micro-batch must have "
            "its loss at once. Use ModelParallelStrategy(schedule='gpipe')."
        )


def one_by_one(strategy, trainer, data, forward):
    """A training step whose micro-batches each go forward and backward before the next.

    Args:
        data: the replica's batch.
        forward: ``forward(part) -> (loss to differentiate, outputs)`` of a micro-batch.

    Returns:
        ``(gradients, outputs)``: the sum over the micro-batches, for
        ``trainer.trainable_weights``, and the outputs of all rows.
    """
    plan = strategy.prepare(trainer)
    settings = strategy.settings
    number = settings.micro_batches
    order = Order(settings.schedule, plan.num_stages, number)
    weights = trainer.trainable_weights
    totals, outputs = [None] * len(weights), []
    outer = current_step()
    start = len(_operations())
    for j, (part, rows, _) in enumerate(micro_batches(data, number)):
        _now.order, _now.micro_batch = order, j
        try:
            with tracing(MicroStep(outer, rows, number)), tf.GradientTape() as tape:
                loss, output = forward(part)
            num_made = len(_operations())
            gradients = tape.gradient(loss, weights)
            order.note_operations(_operations()[num_made:])
        finally:
            _now.order = None
        outputs.append(_first_rows(output, rows))
        totals = [_added(a, b) for a, b in zip(totals, gradients, strict=True)]
    order.close(_operations()[start:])
    with ops.device(strategy.extended.devices_of_replica()[(plan.num_stages - 1) * plan.tensor]):
        return totals, tf.nest.map_structure(lambda *rows: tf.concat(rows, 0), *outputs)


def _operations():
    """Those of the graph that is being made."""
    is_eager = tf.executing_eagerly()
    return [] if is_eager else tf.compat.v1.get_default_graph().get_operations()


def _added(total, gradient):
    """The sum of gradients, in parts where both are."""
    if total is None or gradient is None:
        return gradient if total is None else total
    known = [getattr(g, "_tfdist_parts", None) for g in (total, gradient)]
    if all(known):
        sums = [_added(a, b) for a, b in zip(known[0].parts, known[1].parts, strict=True)]
        return joined(sums, known[0].axis, sums[0].device)
    if isinstance(total, tf.IndexedSlices) and isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([total.values, gradient.values], 0),
            tf.concat([total.indices, gradient.indices], 0),
            total.dense_shape,
        )
    return _plus(total, gradient)


def _plus(total, gradient):
    with ops.device(gradient.device if tf.is_tensor(gradient) else None):
        return tf.convert_to_tensor(total) + tf.convert_to_tensor(gradient)
