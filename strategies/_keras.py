"""The only module that knows the inside of Keras.

:func:`install` replaces the functions of Keras listed here by ones that act differently for
models, optimizers and losses under a strategy of tfdist, and call the original for all others.
Each replacement names the parameters that the original must have. When Keras changes one of them,
``install`` fails and says so, before anything trains wrongly.
"""

import contextlib
import functools
import inspect
import os
import random
import sys
import tempfile
import threading
import types
import warnings

import keras
import numpy as np
import tensorflow as tf
from keras.src import tree
from keras.src.backend.common import global_state, stateless_scope
from keras.src.backend.common import variables as keras_variables
from keras.src.backend.common.symbolic_scope import SymbolicScope
from keras.src.backend.tensorflow import core as tf_core
from keras.src.backend.tensorflow import nn as tf_nn
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.losses import loss as loss_module
from keras.src.models import functional
from keras.src.ops import operation, symbolic_arguments
from keras.src.optimizers import base_optimizer, loss_scale_optimizer
from keras.src.random import seed_generator
from keras.src.saving import saving_api
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.trainers import epoch_iterator
from keras.src.trainers.data_adapters import array_data_adapter, array_slicing
from tensorflow.python.distribute import values as distribute_values
from tensorflow.python.framework import func_graph
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.trackable import data_structures

from tfdist import progress
from tfdist.compression import all_reduce, everywhere
from tfdist.parallel import current_stage
from tfdist.strategies._agreement import digest
from tfdist.strategies._cross_entropy import split_cross_entropy
from tfdist.strategies._exchange import GradientExchange
from tfdist.strategies._position import Position, Source, take_position
from tfdist.strategies._saving import exchanges_in, write_once
from tfdist.strategies._server_variables import ServerVariable
from tfdist.strategies._split_variables import SplitVariable
from tfdist.strategies._step import MetricState, current_step, zero_without_rows
from tfdist.strategies._worker_step import WorkerStep

KERAS_VERSION = tuple(int(part) for part in keras.__version__.split(".")[:2])
OLDEST_KERAS = (3, 8)

_NOT_ELEMENTWISE = ("Adafactor", "Lamb", "Muon")

_replacements = []


def _replaces(owner, name, parameters):
    """Registers ``make(stock) -> function`` as the replacement of ``owner.name``."""

    def register(make):
        _replacements.append((owner, name, parameters, make))
        return make

    return register


def install():
    """Installs the replacements; safe to call again.

    Raises:
        RuntimeError: this Keras is not one that tfdist knows, or does not run on TensorFlow.
    """
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            "tfdist trains Keras models on TensorFlow, but Keras runs on "
            f"{keras.backend.backend()!r}. Set the environment variable KERAS_BACKEND=tensorflow "
            "before keras is imported."
        )
    if KERAS_VERSION < OLDEST_KERAS:
        raise RuntimeError(
            f"tfdist needs Keras 3.8 or newer, found {keras.__version__}. "
            "Run: pip install --upgrade keras"
        )
    if hasattr(tf_trainer.TensorFlowTrainer.fit, "_tfdist_stock"):
        return
    check_seam()
    for owner, name, _, make in _replacements:
        stock = getattr(owner, name)
        replacement = functools.wraps(stock)(make(stock))
        replacement._tfdist_stock = stock
        setattr(owner, name, replacement)
    keras.Variable.sparse_read = property(_sparse_read)
    tf_trainer.loss_module = types.SimpleNamespace(
        unscale_loss_for_distribution=_unscale_weighted,
        scale_loss_for_distribution=lambda v: loss_module.scale_loss_for_distribution(v),
    )


def check_seam():
    """Checks that Keras has every function that tfdist replaces, with known parameters.

    Raises:
        RuntimeError: names each function that is missing or has other parameters.
    """
    problems = []
    for owner, name, expected, _ in _replacements:
        where = f"{owner.__name__}.{name}"
        function = getattr(owner, name, None)
        if function is None:
            problems.append(f"{where} is missing")
            continue
        found = list(inspect.signature(function).parameters)
        if found[: len(expected)] != expected:
            problems.append(f"{where} has the parameters {found}, expected {expected}")
    if problems:
        raise RuntimeError(
            f"tfdist does not know this Keras ({keras.__version__}): " + "; ".join(problems) + ". "
            "Install a Keras that tfdist was tried with (see its README), or a newer tfdist."
        )


def _strategy_of(strategy):
    """``strategy`` where it is one of tfdist's, else None."""
    return strategy if hasattr(strategy, "board") else None


def _replica_strategy():
    """The strategy of tfdist in whose replica context this thread is, else None."""
    replica = tf.distribute.get_replica_context()
    return None if replica is None else _strategy_of(replica.strategy)


# ------------------------------------------------------------------------------ variables


def variable_role(kwargs):
    """Classifies a variable that is being made by the keyword arguments of its creation.

    Returns:
        "optimizer counter": the optimizer's iterations or learning rate;
        "metric state": sums that each replica keeps and that are added when read;
        "layer state": non-trainable floats that a layer updates from the rows it sees;
        None: anything else.
    """
    name = str(kwargs.get("name") or "").split("/")[-1]
    aggregation = kwargs.get("aggregation") or tf.VariableAggregation.NONE
    automatic = kwargs.get("synchronization") in (None, tf.VariableSynchronization.AUTO)
    if aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
        is_counter = name in ("iteration", "iterations", "learning_rate")
        return "optimizer counter" if is_counter else None
    if not automatic:
        return None
    if aggregation == tf.VariableAggregation.SUM and KERAS_VERSION < (3, 10):
        return "metric state"
    is_state = (
        aggregation == tf.VariableAggregation.NONE
        and kwargs.get("trainable") is False
        and kwargs.get("colocate_with") is None
        and tf.as_dtype(kwargs.get("dtype") or tf.float32).is_floating
    )
    return "layer state" if is_state and is_made_by_a_layer() else None


def is_made_by_a_layer():
    """Whether the variable that is being made is one of a layer (or, of those of models that are
    built late, the state of a metric)."""
    maker = _maker()
    return isinstance(maker, keras.Layer) or (maker is None and _late.is_making)


class _Late(threading.local):
    is_making = False  # a variable that was asked for while the model was built symbolically


_late = _Late()


@_replaces(tf_core.Variable, "_deferred_initialize", ["self"])
def _note_late(stock):
    def _deferred_initialize(self):
        _late.is_making = True
        try:
            stock(self)
        finally:
            _late.is_making = False

    return _deferred_initialize


def is_step_state():
    """Whether the variable that is being made, which is not trainable, is changed by steps and not
    by an optimizer."""
    return not isinstance(_maker(), base_optimizer.BaseOptimizer)


def _maker():
    scopes = global_state.get_global_attribute("name_scope_stack") or []
    callers = [scope.caller for scope in scopes if scope.caller is not None]
    return callers[-1] if callers else None


def _on_the_server(method):
    def make(stock):
        def assign(self, value):
            # Stock reads, adds and writes: an update that comes in between would be lost.
            if _is_on_a_server(self):
                return getattr(self._value, method)(tf.cast(value, self._value.dtype))
            return stock(self, value)

        return assign

    return make


for _method in ("assign_add", "assign_sub"):
    _replaces(keras_variables.Variable, _method, ["self", "value"])(_on_the_server(_method))


def _is_on_a_server(variable):
    is_ours = isinstance(getattr(variable, "_value", None), ServerVariable)
    return is_ours and not stateless_scope.in_stateless_scope()


def _sparse_read(self):
    """``sparse_read`` of a variable on servers, which ``tf.gather`` looks for.

    Without it an embedding would bring the whole table to the worker.
    """
    if _is_on_a_server(self):
        return self._value.sparse_read
    raise AttributeError("sparse_read")


@_replaces(seed_generator.SeedGenerator, "next", ["self", "ordered"])
def _seeds_of_their_own(stock):
    def next(self, ordered=True):
        seed = stock(self, ordered=ordered)
        strategy = _replica_strategy()
        step = current_step()
        if isinstance(step, WorkerStep):
            # Workers read the same state: the number of the step tells them apart.
            number = step.serial * strategy.num_replicas_in_sync + step.replica
            offset = tf.cast(number, seed.dtype) * tf.constant(1_000_003, seed.dtype)
            return seed + tf.stack([offset, tf.zeros([], seed.dtype)])
        if strategy is None or strategy.num_replicas_in_sync == 1:
            return seed
        # Replica 0 draws what one process draws; the others draw something else.
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        offset = tf.stack([tf.cast(replica, seed.dtype) * 1_000_003, tf.zeros([], seed.dtype)])
        return seed + offset

    return next


# --------------------------------------------------------------------------------- losses


# A loss in a step is the replica's estimate of the global batch's loss (see _step.py), so it is
# not divided by the number of replicas; its gradient is weighted by the replica's share instead.


@_replaces(loss_module, "scale_loss_for_distribution", ["value"])
def _do_not_scale(stock):
    def scale_loss_for_distribution(value):
        return stock(value) if current_step() is None else value

    return scale_loss_for_distribution


@_replaces(loss_module, "unscale_loss_for_distribution", ["value"])
def _unscale_unweighted(stock):
    def unscale_loss_for_distribution(value):
        # CompileLoss tracks the loss of each output with weight 1 on every replica.
        step = current_step()
        if step is None:
            return stock(value)
        return step.scale(value) * tf.cast(step.num_parts, value.dtype)

    return unscale_loss_for_distribution


def _unscale_weighted(value):
    """For the trainer, which weights a replica's loss by its rows when it tracks it."""
    step = current_step()
    if step is None:
        return loss_module.unscale_loss_for_distribution(value)
    return tf.where(step.has_rows, value, tf.zeros_like(value))


@_replaces(loss_module, "reduce_values", ["values", "sample_weight", "reduction"])
def _normalise_by_all_weights(stock):
    def reduce_values(values, sample_weight=None, reduction="sum_over_batch_size"):
        step = current_step()
        weighted = reduction == "mean_with_sample_weight" and sample_weight is not None
        is_reduced = tuple(values.shape) == ()
        if step is None or is_reduced or not (weighted or reduction == "sum"):
            return stock(values, sample_weight, reduction)
        total = step.unscale(tf.reduce_sum(values))
        if not weighted:
            return total
        (weight,) = step.sum([tf.reduce_sum(tf.cast(sample_weight, tf.float32))])
        return tf.math.divide_no_nan(total, tf.cast(weight, total.dtype))

    return reduce_values


@_replaces(loss_module, "apply_mask", ["sample_weight", "mask", "dtype", "reduction"])
def _normalise_by_all_unmasked(stock):
    def apply_mask(sample_weight, mask, dtype, reduction):
        step = current_step()
        if step is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return stock(sample_weight, mask, dtype, reduction)
        # Stock makes unmasked entries weigh total / valid. Both are counted over all replicas.
        is_valid = tf.cast(mask, tf.bool)
        total, valid = step.sum(
            [
                tf.cast(tf.size(is_valid), tf.float32),
                tf.reduce_sum(tf.cast(is_valid, tf.float32)),
            ]
        )
        weight = tf.cast(tf.math.divide_no_nan(total, valid), dtype)
        float_mask = tf.where(is_valid, weight, tf.zeros([], dtype))
        if sample_weight is None:
            return float_mask
        float_mask, sample_weight = loss_module.squeeze_or_expand_to_same_rank(
            float_mask, tf.cast(sample_weight, dtype)
        )
        return sample_weight * float_mask

    return apply_mask


# ------------------------------------------------------------------------------ gradients


# In each replica's thread: the optimizers (by id) whose gradients at hand are sums already, and
# for how long: for the next update, or as long as the enclosing optimizer holds them.
_exchanged = threading.local()


def _marks():
    if not hasattr(_exchanged, "marks"):
        _exchanged.marks = {}
    return _exchanged.marks


@_replaces(tf_optimizer.TFOptimizer, "_all_reduce_sum_gradients", ["self", "grads_and_vars"])
def _exchange_once(stock):
    def _all_reduce_sum_gradients(self, grads_and_vars):
        grads_and_vars = list(grads_and_vars)
        strategy = _replica_strategy()
        if strategy is None:
            return stock(self, grads_and_vars)
        mark = _marks().get(id(self))
        if mark == "next update":
            del _marks()[id(self)]
        if mark is not None:
            return grads_and_vars
        tf_optimizer.filter_empty_gradients(grads_and_vars)  # warns, or raises if all are None
        gradients = _exchange(strategy, self, *zip(*grads_and_vars, strict=True))
        return [(g, v) for g, (_, v) in zip(gradients, grads_and_vars, strict=True)]

    return _all_reduce_sum_gradients


@_replaces(base_optimizer.BaseOptimizer, "_clip_gradients", ["self", "grads"])
def _clip_after_exchange(stock):
    def _clip_gradients(self, grads):
        strategy = _replica_strategy()
        clips = any(c and c > 0 for c in (self.clipnorm, self.global_clipnorm, self.clipvalue))
        if strategy is not None and clips and id(self) not in _marks():
            grads = _exchange(strategy, self, grads, _exchanged.variables)
            _marks()[id(self)] = "next update"
        return stock(self, grads)

    return _clip_gradients


@_replaces(
    loss_scale_optimizer.LossScaleOptimizer, "apply", ["self", "grads", "trainable_variables"]
)
def _exchange_before_looking(stock):
    def apply(self, grads, trainable_variables=None):
        strategy = _replica_strategy()
        if strategy is None or len(grads) == 0:
            return stock(self, grads, trainable_variables)
        _build_outside_of_step(self, trainable_variables)
        # A sum is finite only where every replica's gradient is, so all replicas take the same
        # branch; and no collective is left inside of it.
        variables = list(trainable_variables or self._trainable_variables)
        if isinstance(current_step(), WorkerStep):
            inner = self.inner_optimizer
            _push(strategy, self, inner, grads, variables, lambda g: stock(self, g, variables))
            return None
        grads = _weight_by_rows(self, grads, variables)
        if strategy.compression is not None:
            # Residuals must not depend on a scale that changes. (A power of two: exact.)
            grads = _multiply(grads, 1 / tf.convert_to_tensor(self.dynamic_scale))
        sums = _exchange(strategy, self.inner_optimizer, grads, variables)
        if strategy.compression is not None:
            sums = _multiply(sums, tf.convert_to_tensor(self.dynamic_scale))
        inner = id(self.inner_optimizer)
        _marks()[inner] = "held"
        try:
            return stock(self, sums, trainable_variables)
        finally:
            del _marks()[inner]

    return apply


@_replaces(base_optimizer.BaseOptimizer, "apply", ["self", "grads", "trainable_variables"])
def _build_first(stock):
    def apply(self, grads, trainable_variables=None):
        if _replica_strategy() is not None and trainable_variables is not None and len(grads) > 0:
            trainable_variables = list(trainable_variables)
            _build_outside_of_step(self, trainable_variables)
        if isinstance(current_step(), WorkerStep) and id(self) not in _marks() and len(grads) > 0:
            variables = list(trainable_variables or self._trainable_variables)
            strategy = _replica_strategy()
            _push(strategy, self, self, grads, variables, lambda g: stock(self, g, variables))
            return None
        return stock(self, grads, trainable_variables)

    return apply


def _push(strategy, optimizer, updating, gradients, variables, apply):
    """Lets the servers apply a worker's gradients, now or together with those of other workers.

    Args:
        optimizer: the one that the training step has called.
        updating: the one that updates the variables: the same, or the one that it wraps.
        apply: ``apply(gradients)``.
    """
    step = current_step()
    if not step.is_deferring and getattr(updating, "gradient_accumulation_steps", None):
        raise ValueError(
            "gradient_accumulation_steps: gradients of several workers can't be accumulated one "
            "by one under ParameterServerStrategy, since each is applied as soon as it comes. "
            "Use a larger batch, or consistency=tfdist.Sync()."
        )
    gradients = _weight_by_rows(optimizer, gradients, variables)
    gradients = _exchange(strategy, updating, gradients, variables)
    if step.is_deferring:
        step.deferred.append((optimizer, gradients, variables))
        return
    _marks()[id(updating)] = "held"
    try:
        step.transport.commit(step, gradients, lambda: apply(gradients))
    finally:
        del _marks()[id(updating)]


@_replaces(base_optimizer.BaseOptimizer, "_get_current_learning_rate", ["self"])
def _rate_for_stale_gradients(stock):
    def _get_current_learning_rate(self):
        rate = stock(self)
        step = current_step()
        if not isinstance(step, WorkerStep) or step.staleness_now is None:
            return rate
        if not step.transport.settings.scales_rate:
            return rate
        return rate / tf.cast(tf.maximum(step.staleness_now, 1), rate.dtype)

    return _get_current_learning_rate


def _build_outside_of_step(optimizer, variables):
    """Makes the optimizer's variables eagerly, where a step's first use would trace them.

    (A ``tf.function`` that makes variables runs inside of a ``tf.cond`` the first time, in which
    collectives cannot run.)
    """
    if optimizer.built or variables is None:
        return

    def build(_):
        with tf.init_scope(), keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
            optimizer.built = True

    # All replicas come here before any of them goes on, so all see an optimizer not built yet.
    tf.distribute.get_replica_context().merge_call(build)


@_replaces(
    base_optimizer.BaseOptimizer,
    "_backend_apply_gradients",
    ["self", "grads", "trainable_variables"],
)
def _apply_weighted(stock):
    def _backend_apply_gradients(self, grads, trainable_variables):
        if _replica_strategy() is not None and id(self) not in _marks():
            grads = _weight_by_rows(self, grads, trainable_variables)
        _exchanged.variables = trainable_variables  # for _clip_gradients, which is not told
        return stock(self, grads, trainable_variables)

    return _backend_apply_gradients


def _weight_by_rows(optimizer, gradients, variables):
    """Gradients of this replica's part of the global loss, with the variables' static shapes."""
    step = current_step()
    is_weighted = step is None or id(optimizer) in step.weighted
    if step is not None:
        step.weighted.discard(id(optimizer))

    def weight(gradient, variable):
        if gradient is None:
            return None
        if is_weighted and hasattr(gradient, "_tfdist_parts"):
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            if is_weighted:
                return gradient
            scaled = gradient.values * tf.cast(step.share, gradient.dtype)
            return tf.IndexedSlices(scaled, gradient.indices, gradient.dense_shape)
        gradient = tf.ensure_shape(gradient, variable.shape)
        return gradient if is_weighted else gradient * tf.cast(step.share, gradient.dtype)

    if step is not None:
        gradients = zero_without_rows(step, list(gradients))
    return [weight(g, v) for g, v in zip(gradients, variables, strict=True)]


def _weights_loss(stock):
    def scale_loss(self, loss):
        step = current_step()
        if step is not None and _replica_strategy() is not None:
            # Costs nothing, where weighting the gradients would go through all of them.
            step.weighted.add(id(self))
            loss = step.scale(loss)
        return stock(self, loss)

    return scale_loss


_replaces(base_optimizer.BaseOptimizer, "scale_loss", ["self", "loss"])(_weights_loss)
_replaces(loss_scale_optimizer.LossScaleOptimizer, "scale_loss", ["self", "loss"])(_weights_loss)


def _multiply(gradients, factor):
    def multiply(gradient):
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values * tf.cast(factor, gradient.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient * tf.cast(factor, gradient.dtype)

    return [multiply(gradient) for gradient in gradients]


def _exchange(strategy, optimizer, gradients, variables):
    """Sums an optimizer's gradients (or None) for ``variables`` over all replicas."""
    present = [i for i, g in enumerate(gradients) if g is not None]
    exchange = getattr(optimizer, "gradient_exchange", None)
    numbers = None
    if exchange is not None:
        number_of = {}
        for number, variable in enumerate(optimizer._trainable_variables):
            number_of |= {id(variable): number, id(variable.value): number}
        numbers = [number_of[id(variables[i])] for i in present]
    sums = strategy.extended.exchange_gradients(
        [gradients[i] for i in present],
        numbers=numbers,
        exchange=exchange,
        variables=[variables[i] for i in present],
    )
    result = list(gradients)
    for i, total in zip(present, sums, strict=True):
        result[i] = total
    return result


class _SaveableExchange(GradientExchange, KerasSaveable):
    """A gradient exchange whose state Keras saves with the optimizer that has it.

    It has a place of its own in the file, so that plain Keras, which has no such attribute, reads
    all the rest.
    """

    def _obj_type(self):
        return "Metric"  # of the kinds that Keras knows, one without children

    def save_own_variables(self, store):
        if self.has_state():
            store["state"] = np.frombuffer(self.to_bytes(), np.uint8)

    def load_own_variables(self, store):
        if "state" in store:
            self.from_bytes(np.asarray(store["state"]).tobytes())


@_replaces(base_optimizer.BaseOptimizer, "build", ["self", "variables"])
def _build_with_exchange(stock):
    def build(self, variables):
        stock(self, variables)
        if hasattr(self._distribution_strategy, "note_optimizer"):
            self._distribution_strategy.note_optimizer(self)
        values = [getattr(variable, "value", variable) for variable in variables]
        _set_exchange(self, variables)
        sharded = [v for v in values if getattr(v, "is_sharded", False)]
        if sharded and type(self).__name__ in _NOT_ELEMENTWISE:
            raise ValueError(
                f"{type(self).__name__} looks at a variable as a whole, which {sharded[0].name} is "
                "not: it is cut into shards on several servers. Use an optimizer that treats every "
                "element by itself (SGD, Adam, AdamW, ...), or no variable_partitioner."
            )

    return build


def _set_exchange(optimizer, variables):
    """Gives an optimizer the exchange for the gradients of its variables, if they are exchanged."""
    values = [getattr(variable, "value", variable) for variable in variables]
    strategy = _strategy_of(getattr(values[0], "distribute_strategy", None)) if values else None
    wraps_another = isinstance(optimizer, loss_scale_optimizer.LossScaleOptimizer)
    if strategy is None or wraps_another or not hasattr(strategy.extended, "exchange_groups"):
        return
    split = [v for v in values if isinstance(v, SplitVariable)]
    if split and type(optimizer).__name__ in _NOT_ELEMENTWISE:
        raise ValueError(
            f"{type(optimizer).__name__} looks at a variable as a whole, which {split[0].name} is "
            "not: tensor= splits it over several devices. Use an optimizer that treats every "
            "element by itself (SGD, Adam, AdamW, ...), or stages= instead of tensor=."
        )
    specs = [tf.TensorSpec(v.shape, v.dtype, name=v.path) for v in variables]
    shards, first_shard = [], {}
    for number, (variable, value) in enumerate(zip(variables, values, strict=True)):
        if isinstance(value, SplitVariable):
            first_shard[number] = len(specs) + len(shards)
            shards += [tf.TensorSpec(s.shape, s.dtype, name=variable.path) for s in value.shards]
    if strategy.compression is None:
        # Has no state: checkpoints stay those of plain Keras.
        plain = everywhere(all_reduce())
        exchange = GradientExchange(strategy.extended, plain, specs + shards, first_shard)
        optimizer.gradient_exchange = data_structures.NoDependency(exchange)
    else:
        optimizer.gradient_exchange = _SaveableExchange(
            strategy.extended, strategy.compression, specs + shards, first_shard
        )


# ------------------------------------------------------------------------- split models


def _splitting_strategy():
    strategy = _replica_strategy()
    return strategy if hasattr(strategy, "call_graph") else None


@_replaces(keras.Layer, "__call__", ["self"])
def _call_in_place(stock):
    def __call__(self, *args, **kwargs):
        strategy = _splitting_strategy()
        if strategy is None or _any_symbolic((args, kwargs)):
            return stock(self, *args, **kwargs)
        return strategy.call_layer(stock, self, args, kwargs)

    return __call__


@_replaces(operation.Operation, "__call__", ["self"])
def _compute_in_place(stock):
    def __call__(self, *args, **kwargs):
        strategy = _splitting_strategy()
        if strategy is None or _any_symbolic((args, kwargs)):
            return stock(self, *args, **kwargs)
        return strategy.call_operation(stock, self, args, kwargs)

    return __call__


@_replaces(functional.Functional, "_run_through_graph", ["self", "inputs", "operation_fn"])
def _run_in_place(stock):
    def _run_through_graph(self, inputs, operation_fn=lambda op: op, **kwargs):
        strategy = _splitting_strategy()
        if strategy is not None and not _any_symbolic(inputs):
            outputs = strategy.call_graph(self, tree.flatten(inputs), operation_fn)
            if outputs is not None:
                return tree.pack_sequence_as(self._outputs_struct, outputs)
        return stock(self, inputs, operation_fn=operation_fn, **kwargs)

    return _run_through_graph


@_replaces(tf_nn, "sparse_categorical_crossentropy", ["target", "output", "from_logits", "axis"])
def _cross_entropy_of_parts(stock):
    def sparse_categorical_crossentropy(target, output, from_logits=False, axis=-1):
        known = getattr(output, "_tfdist_parts", None)
        is_last = known is not None and axis in (-1, output.shape.rank - 1)
        if not from_logits or not is_last or known.axis not in (-1, output.shape.rank - 1):
            return stock(target, output, from_logits=from_logits, axis=axis)
        target = tf.convert_to_tensor(target)
        if target.shape.rank == output.shape.rank and target.shape[-1] == 1:
            target = tf.squeeze(target, -1)
        return split_cross_entropy(target, known.parts, [part.device for part in known.parts])

    return sparse_categorical_crossentropy


@_replaces(keras.Layer, "__new__", ["cls"])
def _note_stage(stock):
    def __new__(cls, *args, **kwargs):
        layer = stock(cls, *args, **kwargs)
        if current_stage() is not None:
            object.__setattr__(layer, "_tfdist_stage", current_stage())
        return layer

    return __new__


def stage_of_layer(layer):
    """The stage in whose context a layer was made, or None."""
    return getattr(layer, "_tfdist_stage", None)


def stage_of_node(node):
    """The stage of a node's layer, or else of the model that the layer is in."""
    return node.stage if isinstance(node, InnerNode) else stage_of_layer(node.operation)


def name_of_node(node):
    """The name of a node's layer; after that of the model that the layer is in."""
    return node.name if isinstance(node, InnerNode) else node.operation.name


def _any_symbolic(nest):
    return any(isinstance(leaf, keras.KerasTensor) for leaf in tree.flatten(nest))


def graph_of(model):
    """The functional model that a model is (or that a Sequential one has); else None."""
    if isinstance(model, keras.Sequential):
        return model._functional
    is_own = type(model).call is not functional.Functional.call
    return model if isinstance(model, functional.Functional) and not is_own else None


def nodes_of(graph):
    """The nodes of a functional model in the order of their computation.

    In the place of a functional model in it are that one's nodes, if it has no settings of its own
    there (such as ``training=False``).
    """
    nodes = []
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            if node.operation and not node.is_input:
                nodes += _nodes_within(node) or [node]
    return nodes


class InnerNode:
    """A node of a model within the model, between tensors of the outer one.

    Args:
        node: the node.
        outer: the layer that the inner model is in the outer one.
        outer_of: dict from ids of symbolic tensors of the inner model to those of the outer one.
            Grows by stand-ins for those that only the inner one knows: it may be called twice.
    """

    def __init__(self, node, outer, outer_of):
        def to_outer(symbol):
            if not isinstance(symbol, keras.KerasTensor):
                return symbol
            if id(symbol) not in outer_of:
                outer_of[id(symbol)] = keras.KerasTensor(symbol.shape, symbol.dtype)
            return outer_of[id(symbol)]

        self.operation = node.operation
        self.name = f"{outer.name}/{name_of_node(node)}"
        inner_stage = stage_of_node(node)
        self.stage = stage_of_layer(outer) if inner_stage is None else inner_stage
        self.input_tensors = [to_outer(symbol) for symbol in node.input_tensors]
        self.outputs = [to_outer(symbol) for symbol in node.outputs]
        args, kwargs = node.arguments.convert(to_outer)
        self.arguments = symbolic_arguments.SymbolicArguments(*args, **kwargs)


def _nodes_within(node):
    layer = node.operation
    inner = graph_of(layer) if isinstance(layer, keras.Model) else None
    if inner is None or layer.activity_regularizer is not None:
        return None
    args, kwargs = node.arguments.args, node.arguments.kwargs
    given = tree.flatten(args)
    ends = [*inner.inputs, *inner.outputs]
    is_plain = (
        len(args) == 1
        and all(value is None for value in kwargs.values())
        and len({id(symbol) for symbol in ends}) == len(ends)
        and len(given) == len(inner.inputs)
        and not isinstance(args[0], dict)  # whose order may be another
        and all(
            isinstance(a, keras.KerasTensor)
            and (len(a.shape), a.dtype, a.sparse) == (len(b.shape), b.dtype, b.sparse)
            for a, b in zip(given, inner.inputs, strict=True)
        )
    )
    if not is_plain:
        return None
    outer_of = {id(b): a for a, b in zip([*given, *node.outputs], ends, strict=True)}
    return [InnerNode(each, layer, outer_of) for each in nodes_of(inner)]


def compute(node, tensors, operation_of):
    """Computes a node of a functional model; ``tensors`` is a dict from ids, which grows."""
    args, kwargs = node.arguments.fill_in(tensors)
    outputs = operation_of(node.operation)(*args, **kwargs)
    for symbol, value in zip(node.outputs, tree.flatten(outputs), strict=True):
        tensors[id(symbol)] = value


def in_training(operation):
    """What is called in the place of a layer or operation of a model that trains."""
    return functional.operation_fn(operation, training=True)


def attention_layers(layer):
    """The layers of a MultiHeadAttention that make query, key, value and output."""
    return layer._query_dense, layer._key_dense, layer._value_dense, layer._output_dense


def layers_of(model):
    """All layers in a model or layer, at any depth; without itself and metrics."""
    found = model._flatten_layers(include_self=False)
    return [layer for layer in found if not isinstance(layer, keras.metrics.Metric)]


def top_layers_of(model):
    """The layers that a model has itself."""
    found = model._flatten_layers(include_self=False, recursive=False)
    return [layer for layer in found if not isinstance(layer, keras.metrics.Metric)]


def own_losses(model):
    """What the layers of a model have added by ``add_loss`` in its last call."""
    losses = model._get_own_losses()
    for layer in model._flatten_layers(include_self=False):
        losses.extend(layer._get_own_losses())
    return losses


def set_losses(model, losses):
    """Puts losses in place of those that :func:`own_losses` finds."""
    model._clear_losses()
    model._losses.extend(losses)


def tf_variable(variable):
    """The ``tf.Variable`` (or the like) behind a Keras variable, whatever it is cast to now."""
    return variable._value


def replace_value(variable, value):
    """Lets a Keras variable stand for another ``tf.Variable``."""
    variable._value = value


def variables_of_optimizer(optimizer):
    """All variables of an optimizer, and of the one that it wraps."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return list(optimizer.variables) + ([] if inner is None else list(inner.variables))


def updated_variables(optimizer):
    """The variables that an optimizer, if it is built, updates."""
    return getattr(optimizer, "_trainable_variables", None) or []


def refresh_optimizer(optimizer):
    """Lets an optimizer that is built already find its variables, which were replaced."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        refresh_optimizer(inner)
    if not optimizer.built:
        return
    variables = optimizer._trainable_variables
    optimizer._trainable_variables_indices = {
        optimizer._var_key(variable): i for i, variable in enumerate(variables)
    }
    _set_exchange(optimizer, variables)


def place_sums():
    """Moves the sums of gradients that a tape has made to where what they sum is."""
    graph = tf.compat.v1.get_default_graph()
    seen = getattr(graph, "_tfdist_num_placed", 0)
    if not isinstance(graph, func_graph.FuncGraph):
        return
    made = graph.get_operations()
    for op in made[seen:]:
        if op.type == "AddN" and op.inputs[0].op.device:
            op._set_device(op.inputs[0].op.device)
    graph._tfdist_num_placed = len(made)


def interleaved_step(strategy, trainer, one_by_one):
    """A training step like Keras' own, whose micro-batches each go forward and backward in turn.

    Raises:
        ValueError: the model has a training step of its own.
    """
    if type(trainer).train_step is not keras.Model.train_step:
        raise ValueError(
            f"schedule='1f1b': {type(trainer).__name__} has a train_step of its own, which has the "
            "loss of the whole batch at once. Use ModelParallelStrategy(schedule='gpipe')."
        )

    def forward(part):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(part)
        y_pred = trainer(x, training=True) if trainer._call_has_training_arg else trainer(x)
        loss = trainer._compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
        )
        rows = tf.cast(current_step().rows, tf.int32)
        trainer._loss_tracker.update_state(_unscale_weighted(loss), sample_weight=rows)
        return trainer.optimizer.scale_loss(loss), y_pred

    def train_step(data):
        gradients, y_pred = one_by_one(strategy, trainer, data, forward)
        step = current_step()
        step.weighted.add(id(trainer.optimizer))
        trainer.optimizer.apply_gradients(zip(gradients, trainer.trainable_weights, strict=True))
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        return trainer.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    return train_step


# -------------------------------------------------------------------------------- trainer

_Trainer = tf_trainer.TensorFlowTrainer


@_replaces(_Trainer, "_make_function", ["self", "step_function"])
def _make_training_function(stock):
    def _make_function(self, step_function):
        strategy = _strategy_of(self.distribute_strategy)
        if strategy is None:
            return stock(self, step_function)
        return strategy.training_function(
            step_function,
            is_training=step_function == self.train_step,
            trainer=self,
            metrics_behind=functools.partial(_metrics_behind, self),
            steps_per_execution=self.steps_per_execution,
            run_eagerly=self.run_eagerly,
            jit_compile=_may_compile(self, strategy),
        )

    return _make_function


@_replaces(_Trainer, "make_predict_function", ["self", "force"])
def _make_predict_function(stock):
    def make_predict_function(self, force=False):
        strategy = _strategy_of(self.distribute_strategy)
        if strategy is None:
            return stock(self, force)
        if self.predict_function is None or force:
            self.predict_function = strategy.predict_function(
                self.predict_step,
                trainer=self,
                run_eagerly=self.run_eagerly,
                jit_compile=_may_compile(self, strategy),
            )
        return self.predict_function

    return make_predict_function


def _metrics_behind(trainer, step, logs):
    """The state of those metrics that ``step`` has updated and whose results are in ``logs``."""
    if not isinstance(logs, dict):
        return None

    def results_of(metric):
        result = metric.result()
        return result if isinstance(result, dict) else {metric.name: result}

    def is_logged(metric):
        is_updated = any(id(v.value) in step.updated_metrics for v in metric.variables)
        return is_updated and not logs.keys().isdisjoint(results_of(metric))

    metrics = [metric for metric in trainer.metrics if is_logged(metric)]
    variables = [v for metric in metrics for v in metric.variables]

    def results(values):
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            # A metric may return its variable, whose value is another one outside of this scope.
            everything = {
                k: tf.convert_to_tensor(v)
                for metric in metrics
                for k, v in results_of(metric).items()
            }
        return {k: v for k, v in everything.items() if k in logs}

    results.variables = variables
    return MetricState([tf.convert_to_tensor(v) for v in variables], results)


def _may_compile(trainer, strategy):
    if not trainer.jit_compile or trainer.run_eagerly:
        return False
    if strategy.num_replicas_in_sync > 1:
        raise ValueError(
            "compile: jit_compile=True cannot be honoured under "
            f"{type(strategy).__name__} with {strategy.num_replicas_in_sync} replicas: the step "
            "holds the all-reduce of the gradients, which XLA cannot compile on these devices. "
            "Use jit_compile='auto' or False, or put @tf.function(jit_compile=True) on the part "
            "of the model that profits."
        )
    return True


@_replaces(_Trainer, "_maybe_symbolic_build", ["self", "iterator", "data_batch"])
def _build_from_spec(stock):
    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        source = getattr(iterator, "_distributed_dataset", None)
        is_ours = _strategy_of(self._distribute_strategy) is not None
        # What a checkpoint is restored into must be there before the first step.
        is_alone = self._distribute_strategy is None and isinstance(source, Source)
        is_ours = is_ours or is_alone
        if is_ours and type(self).call in (keras.Model.call, keras.Layer.call):
            # A model that is all train_step (a GAN, say) has nothing that could be called.
            return None
        if is_ours and hasattr(source, "before_epoch"):  # an input that the strategy has made
            # The specification is enough: no data is read, so a generator loses nothing.
            iterator = None
            data_batch = tf.nest.map_structure(
                _none_if_absent, source.element_spec, expand_composites=False
            )
            specs = tf.nest.flatten(data_batch, expand_composites=False)
            if any(isinstance(s, tf.RaggedTensorSpec | tf.SparseTensorSpec) for s in specs):
                _build_by_tracing(self, source.element_spec)
        if is_alone:
            return self._symbolic_build(data_batch=data_batch)
        return stock(self, iterator=iterator, data_batch=data_batch)

    return _maybe_symbolic_build


def _none_if_absent(spec):
    return spec if hasattr(spec, "shape") and hasattr(spec, "dtype") else None


def _build_by_tracing(trainer, element_spec):
    """Builds model, metrics and losses for inputs of which Keras makes no symbolic tensors."""

    def visit(data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = trainer(x, training=False)
        if trainer.compiled:
            trainer.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
            trainer._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)

    scope = trainer.distribute_strategy.scope()
    with scope, keras.StatelessScope(), SymbolicScope():
        tf.function(visit, autograph=False).get_concrete_function(element_spec)


_SAME_IN_FIT = (
    "batch_size",
    "epochs",
    "initial_epoch",
    "steps_per_epoch",
    "validation_split",
    "validation_steps",
    "validation_batch_size",
    "validation_freq",
    "shuffle",
    "class_weight",
)


@_replaces(_Trainer, "fit", ["self", "x", "y", "batch_size", "epochs", "verbose", "callbacks"])
def _fit_together(stock):
    signature = inspect.signature(stock)

    def fit(self, *args, **kwargs):
        strategy = _strategy_of(self.distribute_strategy)
        board = None if strategy is None else strategy.board
        if board is None:
            with contextlib.nullcontext() if strategy is None else progress.training():
                return stock(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        arguments = call.arguments
        settings = {name: repr(arguments[name]) for name in _SAME_IN_FIT if name in arguments}
        settings["validation_data"] = arguments["validation_data"] is not None
        settings["steps_per_execution"] = int(self.steps_per_execution)
        board.require_same("fit", settings)
        arguments["verbose"] = _quiet_but_for_chief(arguments["verbose"], board)
        together = Together(strategy, board)
        callbacks = arguments["callbacks"]
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks.append(together)
            members = callbacks.callbacks
        else:
            members = [*tf.nest.flatten(callbacks or []), together]
            arguments["callbacks"] = members
        with progress.training(), contextlib.ExitStack() as undo:
            _back_up_together(members, board, undo)
            if board.rank != 0:
                _write_nothing(members, undo)
            return stock(*call.args, **call.kwargs)

    return fit


@_replaces(_Trainer, "fit", ["self", "x", "y", "batch_size", "epochs", "verbose", "callbacks"])
def _fit_from_a_position(stock):
    """For a callback that has ``use_position``: tells it where the input is, and lets it come last.

    Last, after ``History``, because it saves what the other callbacks have made of a step.
    """
    signature = inspect.signature(stock)

    def fit(self, *args, **kwargs):
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        callbacks = call.arguments["callbacks"]
        is_made = isinstance(callbacks, keras.callbacks.CallbackList)
        given = callbacks.callbacks if is_made else tree.flatten(callbacks or [])
        (user, *more) = [c for c in given if hasattr(c, "use_position")] or [None]
        if user is None:
            return stock(self, *args, **kwargs)
        if more:
            raise ValueError(
                f"fit: expected one {type(user).__name__} among the callbacks, got "
                f"{1 + len(more)}. Combine policies with any_of() and union() instead."
            )
        given = [c for c in given if c is not user]
        if not any(isinstance(c, keras.callbacks.History) for c in given):
            given.append(keras.callbacks.History())
        given.append(user)
        if is_made:
            callbacks.callbacks = given
        else:
            call.arguments["callbacks"] = given
        position = Position()
        object.__setattr__(self, "_tfdist_input_position", position)
        user.use_position(position, given)
        initial_epoch = self._initial_epoch
        try:
            with position.of_next_input():
                return stock(*call.args, **call.kwargs)
        finally:
            user.use_position(None, [])
            object.__delattr__(self, "_tfdist_input_position")
            self._initial_epoch = initial_epoch

    return fit


def _quiet(stock):
    signature = inspect.signature(stock)

    def quiet(self, *args, **kwargs):
        strategy = _strategy_of(self.distribute_strategy)
        board = None if strategy is None else strategy.board
        if board is None:
            return stock(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        call.arguments["verbose"] = _quiet_but_for_chief(call.arguments["verbose"], board)
        return stock(*call.args, **call.kwargs)

    return quiet


_replaces(_Trainer, "evaluate", ["self", "x", "y", "batch_size", "verbose"])(_quiet)
_replaces(_Trainer, "predict", ["self", "x", "batch_size", "verbose"])(_quiet)


def _quiet_but_for_chief(verbose, board):
    """ "auto" is a progress bar for the chief's terminal, lines for its log, nothing for others."""
    if verbose != "auto":
        return verbose
    if board.rank != 0:
        return 0
    return 1 if sys.stdout.isatty() else 2


# ---------------------------------------------------------------------------------- input


@_replaces(tf_trainer.TFEpochIterator, "__init__", ["self", "distribute_strategy"])
def _feed_replicas(stock):
    def __init__(self, distribute_strategy=None, *args, **kwargs):
        strategy = _strategy_of(distribute_strategy)
        position = take_position()
        if strategy is None and position is None:
            return stock(self, distribute_strategy, *args, **kwargs)
        board = None if strategy is None else strategy.board
        seed, py_dataset, order = None, None, None
        if kwargs.get("shuffle") and (board is not None or position is not None):
            # Drawn by all, so that their generators stay in step; the chief's counts.
            seed = random.randrange(2**31)
            if board is not None:
                seed = board.from_chief("shuffle seed", seed)
            if isinstance(kwargs.get("x"), keras.utils.PyDataset):
                py_dataset = _ShuffledPyDataset(kwargs["x"], seed)
                kwargs.update(x=py_dataset, shuffle=False)
        epoch_iterator.EpochIterator.__init__(self, *args, **kwargs)
        self._distribute_strategy = distribute_strategy
        adapter = self.data_adapter
        is_array = isinstance(adapter, array_data_adapter.ArrayDataAdapter)
        if is_array and board is not None:
            board.require_same("input", {"rows": adapter._num_samples})
        if is_array and seed is not None:
            # Not a tf.Variable, which would be mirrored where fit is called in the scope.
            order = resource_variable_ops.ResourceVariable(
                [seed, -1], dtype=tf.int64, trainable=False
            )
            dataset = _shuffled_arrays(adapter, order)
        else:
            dataset = adapter.get_tf_dataset()
        if strategy is None:
            if not isinstance(dataset, tf.distribute.DistributedDataset):
                dataset = distribute_strategy.experimental_distribute_dataset(dataset)
            source = Source(dataset)
        else:
            source = strategy.distribute_input(
                dataset,
                num_batches=adapter.num_batches,
                same_stream=is_array,
            )
            if source.num_steps != adapter.num_batches:
                self.data_adapter = _WithLength(adapter, source.num_steps)
                self._num_batches = source.num_steps
        self._distributed_dataset = source
        if position is not None:
            position.seed = position.seed if seed is None else seed
            position.batch_size = getattr(adapter, "batch_size", None)
            position.bind(self, source, dataset, order, py_dataset)
            self._tfdist_input_position = position
        elif order is not None:
            source.before_epoch = lambda: order.assign_add([0, 1])

    return __init__


@_replaces(epoch_iterator.EpochIterator, "_enumerate_iterator", ["self"])
def _enumerate_from_a_position(stock):
    def _enumerate_iterator(self):
        position = getattr(self, "_tfdist_input_position", None)
        if position is None or not position.is_pending:
            return stock(self)
        return position.resume(stock(self))

    return _enumerate_iterator


@_replaces(_Trainer, "_get_metrics_result_or_logs", ["self", "logs"])
def _logs_of_an_epoch_that_had_ended(stock):
    def _get_metrics_result_or_logs(self, logs):
        # A resumed epoch without any step left: Keras has no logs of it.
        position = getattr(self, "_tfdist_input_position", None)
        if position is not None and isinstance(logs, dict) and not logs:
            logs = position.logs or logs
        return stock(self, logs)

    return _get_metrics_result_or_logs


class _WithLength:
    """A data adapter with another number of batches."""

    def __init__(self, adapter, num_batches):
        self._adapter = adapter
        self.num_batches = num_batches

    def __getattr__(self, name):
        return getattr(self._adapter, name)


def _shuffled_arrays(adapter, seed_and_pass):
    """Batches of Keras' arrays in an order that is the same on all workers.

    (Keras' own dataset draws the order from the process' generator, or, once that is seeded,
    draws the same one in each epoch.)

    Args:
        adapter: the data adapter of the arrays.
        seed_and_pass: int64 variable [2], the same on all workers; another value gives another
            order.
    """
    num_rows, batch_size = adapter._num_samples, adapter._batch_size
    inputs = tree.lists_to_tuples(
        array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    )

    def order(_):
        rows = tf.range(num_rows, dtype=tf.int64)
        if adapter._shuffle != "batch":
            rows = tf.random.experimental.stateless_shuffle(rows, seed_and_pass.read_value())
        return tf.data.Dataset.from_tensor_slices(rows)

    def order_within(number, rows):
        return tf.random.experimental.stateless_shuffle(
            rows, seed_and_pass.read_value() + tf.stack([number, tf.zeros_like(number)])
        )

    def take(row_numbers, arrays):
        def take_from(array):
            if isinstance(array, array_slicing.TensorflowSparseWrapper):
                return array_slicing.slice_tensorflow_sparse_wrapper(array, row_numbers)
            if isinstance(array, list | tuple | dict):
                return None
            return tf.gather(array, row_numbers, axis=0) if tf.is_tensor(array) else array

        return tree.traverse(take_from, arrays)

    batches = tf.data.Dataset.range(1).flat_map(order).batch(batch_size)
    if adapter._shuffle == "batch":
        batches = batches.enumerate().map(order_within)
    whole = tf.data.Dataset.from_tensors(inputs).repeat()
    batches = tf.data.Dataset.zip(batches, whole).map(take, num_parallel_calls=tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    return batches.with_options(options)


class _ShuffledPyDataset(keras.utils.PyDataset):
    """The batches of a PyDataset in an order that is the same on all workers.

    It follows from ``seed``, the same on all, and ``number``, how many there were before it.
    """

    def __init__(self, inner, seed):
        super().__init__(
            workers=inner.workers,
            use_multiprocessing=inner.use_multiprocessing,
            max_queue_size=inner.max_queue_size,
        )
        self._inner = inner
        self.seed, self.number = seed, 0
        self._order = None
        self.reorder()

    @property
    def num_batches(self):
        return self._inner.num_batches

    def __len__(self):
        return len(self._inner)

    def __getitem__(self, index):
        return self._inner[index if self._order is None else self._order[index]]

    def on_epoch_begin(self):
        self._inner.on_epoch_begin()

    def on_epoch_end(self):
        self._inner.on_epoch_end()
        self.number += 1
        self.reorder()

    def reorder(self):
        """Takes the order of ``seed`` and ``number``."""
        if self.num_batches is not None:
            self._order = list(range(self.num_batches))
            random.Random(f"{self.seed}/{self.number}").shuffle(self._order)


# ------------------------------------------------------------------------------ callbacks


class Together(keras.callbacks.Callback):
    """Keeps the workers of one ``fit`` together: same start, same stop, same learning rate.

    Comes after the user's callbacks, so that it sees what they decided. A stop that every worker
    asks for at the same step (the usual case, since all have the same logs) takes effect at once;
    one that only some ask for takes effect on all at the end of the epoch.
    """

    _PATIENCE_SECONDS = 5.0

    def __init__(self, strategy, board):
        super().__init__()
        self._strategy = strategy
        self._board = board
        self._wants_to_stop = False
        self._epoch = 0
        self._num_fits = board.next_number("fit")

    def on_train_begin(self, logs=None):
        start = self.model._initial_epoch
        chief_start = self._board.from_chief("initial epoch", start)
        if start != chief_start:
            warnings.warn(
                f"This worker would resume at epoch {start}, the chief resumes at {chief_start}. "
                "The chief's backup decides.",
                stacklevel=2,
            )
            self.model._initial_epoch = chief_start
        variables = self._variables()
        digests = self._board.gather("weights", digest(v.numpy() for v in variables))
        if len(set(digests)) > 1:
            _take_from_chief(self._strategy, self._board, variables)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._wants_to_stop = False
        rate = getattr(getattr(self.model, "optimizer", None), "learning_rate", None)
        if not hasattr(rate, "assign"):
            return  # a schedule, which depends on the step alone
        chief_rate = self._board.from_chief("learning rate", float(rate.numpy()))
        if chief_rate != float(rate.numpy()):
            warnings.warn(
                f"This worker set the learning rate to {float(rate.numpy())}, the chief to "
                f"{chief_rate}. The chief's is used on all workers.",
                stacklevel=2,
            )
            rate.assign(chief_rate)

    def on_train_batch_end(self, batch, logs=None):
        if not self.model.stop_training or self._wants_to_stop:
            self.model.stop_training = False if self._wants_to_stop else self.model.stop_training
            return
        topic = f"stop/{self._num_fits}/{self._epoch}/{batch}"
        if not self._board.unanimous(topic, self._PATIENCE_SECONDS):
            self._wants_to_stop = True
            self.model.stop_training = False

    def on_epoch_end(self, epoch, logs=None):
        wishes = self._board.gather("stop", bool(self._wants_to_stop or self.model.stop_training))
        self.model.stop_training = any(wishes)

    def on_train_end(self, logs=None):
        # Files that the chief's callbacks wrote are complete when fit returns on any worker.
        self._board.barrier("end of fit")

    def _variables(self):
        optimizer = getattr(self.model, "optimizer", None)
        variables = [*self.model.variables, *(optimizer.variables if optimizer else ())]
        unique = {id(v.value): v.value for v in variables}
        return [
            v for v in unique.values() if not isinstance(v, distribute_values.SyncOnReadVariable)
        ]


def _take_from_chief(strategy, board, variables):
    """Overwrites variables on all workers by the chief's values."""
    for variable in variables:
        value = tf.convert_to_tensor(variable)
        wide = tf.float64 if value.dtype.is_floating else tf.int64
        mine = tf.cast(value, wide) * tf.cast(board.rank == 0, wide)
        variable.assign(tf.cast(strategy.reduce("SUM", mine, axis=None), value.dtype))


def _override(owner, name, value, undo):
    had, old = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    undo.callback(setattr, owner, name, old) if had else undo.callback(delattr, owner, name)


def _write_nothing(callbacks, undo):
    """On workers other than the chief, lets the callbacks that write files write none.

    ``ModelCheckpoint`` goes through ``model.save``, which knows by itself.
    """
    override = functools.partial(_override, undo=undo)
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger):
            override(callback, "filename", os.devnull)
        elif isinstance(callback, keras.callbacks.TensorBoard):
            folder = undo.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            override(callback, "log_dir", folder)
        elif isinstance(callback, keras.callbacks.BackupAndRestore):
            override(callback, "on_train_end", lambda logs=None: None)


def _back_up_together(callbacks, board, undo):
    """Lets every worker take part in the chief's BackupAndRestore, and the chief alone write.

    The workers' directories may differ. They meet only where there is something to collect.
    """

    def save_model(callback, stock):
        has_parts = bool(exchanges_in(callback.model))
        path = callback._weights_path
        if has_parts:
            path = board.from_chief("backup", path)
        if board.rank == 0:
            stock()
        elif has_parts:
            callback.model.save_weights(path, overwrite=True)

    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            save = functools.partial(save_model, callback, callback._save_model)
            _override(callback, "_save_model", save, undo)


# --------------------------------------------------------------------------------- saving


def _saves_once(stock):
    signature = inspect.signature(stock)

    def save(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        model, path = call.args[0], call.arguments["filepath"]
        strategy = _strategy_of(getattr(model, "distribute_strategy", None))
        overwrite = call.arguments.get("overwrite", True)
        is_sharded = str(path).endswith(".json")
        if strategy is None or is_sharded or (not overwrite and os.path.exists(path)):
            return stock(*args, **kwargs)

        def write(beside):
            call.arguments["filepath"] = beside
            return stock(*call.args, **call.kwargs)

        return write_once(strategy, path, write, exchanges_in(model))

    return save


_replaces(saving_api, "save_model", ["model", "filepath", "overwrite"])(_saves_once)
_replaces(saving_api, "save_weights", ["model", "filepath", "overwrite"])(_saves_once)
_replaces(keras.Model, "export", ["self", "filepath"])(_saves_once)
