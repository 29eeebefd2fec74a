"""The variables that a checkpoint of a model holds, by name, and how they get their values back."""

import re

import keras
import numpy as np

from tfdist.checkpoints import CheckpointError


def optimizers_of(model):
    """The optimizers of a model by the names of its attributes."""
    found = {"optimizer": getattr(model, "optimizer", None)}
    for name, value in vars(model).items():
        if isinstance(value, keras.optimizers.Optimizer) and value is not found["optimizer"]:
            found[name] = value
    return {name: optimizer for name, optimizer in found.items() if optimizer is not None}


def state_of(model):
    """What a step changes: dict from names to Keras variables; without metrics."""
    named = _named("model", model.variables)
    for name, optimizer in optimizers_of(model).items():
        inner = getattr(optimizer, "inner_optimizer", None)
        both = [*optimizer.variables, *(inner.variables if inner is not None else ())]
        named |= _named(name, {id(v): v for v in both}.values())
    return named


def metrics_of(model):
    """The sums that metrics keep: dict from names to Keras variables."""
    return _named("metrics", model.metrics_variables)


def exchanges_of(model):
    """The gradient exchanges, with residuals of compression, by the names of their optimizers."""
    found = {}
    for name, optimizer in optimizers_of(model).items():
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        exchange = getattr(optimizer, "gradient_exchange", None)
        if exchange is not None:
            found[name] = exchange
    return found


def _named(prefix, variables):
    named = {}
    for variable in variables:
        name, number = f"{prefix}/{variable.path}", 2
        while name in named:
            name, number = f"{prefix}/{variable.path}#{number}", number + 1
        named[name] = variable
    return named


def read(variables):
    """The values of a dict of variables, as numpy arrays which later steps leave alone.

    On a CPU nothing is copied here: the array shares the variable's memory, and TensorFlow copies
    what somebody else still reads before it updates it.
    """
    return {name: np.asarray(_value(variable)) for name, variable in variables.items()}


def _value(variable):
    value = variable.value
    return value.read_value() if hasattr(value, "read_value") else value


def assign(variables, tensors, where):
    """Gives variables the values of a checkpoint.

    Names that Keras has numbered (``dense_3``) may have other numbers: then the order counts.

    Args:
        variables: dict from names to Keras variables.
        tensors: dict from names to numpy arrays.
        where: the checkpoint's path, for messages.

    Raises:
        CheckpointError: a variable is missing, or has another shape or dtype.
    """
    for variable, value in _matched(variables, tensors, where):
        variable.assign(value)


def _matched(variables, tensors, where):
    if variables.keys() != tensors.keys():
        ours, theirs = ([_unnumbered(n) for n in names] for names in (variables, tensors))
        if ours != theirs:
            missing = sorted(variables.keys() - tensors.keys())[:3]
            unknown = sorted(tensors.keys() - variables.keys())[:3]
            raise CheckpointError(
                f"The checkpoint {where} is of another model or optimizer. It has "
                f"{len(tensors)} variables, this one {len(variables)}; only this one has "
                f"{missing or 'none'}, only the checkpoint has {unknown or 'none'}. Use another "
                "directory for another model; build what has no variables yet before fit."
            )
        tensors = dict(zip(variables, tensors.values(), strict=True))
    pairs = [(variables[name], tensors[name]) for name in variables]
    for name, (variable, value) in zip(variables, pairs, strict=True):
        dtype = keras.backend.standardize_dtype(value.dtype.name)
        if tuple(variable.shape) != value.shape or variable.dtype != dtype:
            raise CheckpointError(
                f"The checkpoint {where} is of another model: {name} has shape "
                f"{list(value.shape)} and dtype {dtype} there, {list(variable.shape)} and "
                f"{variable.dtype} here."
            )
    return pairs


def _unnumbered(name):
    # An optimizer's slots have the number within: adam/mlp_dense_3_kernel_momentum.
    return re.sub(r"_\d+(?=[/#_]|$)", "", name)


def residuals(exchanges, board):
    """The states of gradient exchanges, for all workers on the chief: dict of arrays.

    All workers call this; on the others it is empty.
    """
    found = {}
    for name, exchange in exchanges.items():
        if not exchange.has_state():
            continue
        exchange.collect(from_all=board is not None)
        if board is None or board.rank == 0:
            found[f"residuals/{name}"] = np.frombuffer(exchange.to_bytes(), np.uint8)
    return found
