"""Which layer of a model is on which devices: the plan of a split model."""

import re
from typing import NamedTuple

import keras
import numpy as np

from tfdist.partition import Block, cut, cut_after
from tfdist.strategies import _keras
from tfdist.strategies._tensor import COLUMN, HEADS, ROW, VOCABULARY, WIDTH

_COST_OF_AN_ELEMENT = 8  # in FLOPs: moving a number through memory beside computing with it
_COPIES_OF_A_WEIGHT = 4  # itself, its gradient and two slots of an optimizer


class Unit(NamedTuple):
    """A layer or an operation, in the order of the computation.

    Attributes:
        name: the layer's.
        operation: the layer or operation.
        node: its place in a functional model; None in others.
        parameters: number of its weights.
        flops: floating-point operations of its forward pass, for one row; estimated.
        activations: bytes of its outputs for one row.
        cost: what is balanced, in any unit; seconds where it is measured.
    """

    name: str
    operation: object
    node: object
    parameters: int
    flops: float
    activations: int
    cost: float


class Plan:
    """Where each layer of a model is computed.

    Attributes:
        stages: list of lists of :class:`Unit`.
        splits: dict from the id of a layer to how its weights are split over ``tensor`` devices.
        tensor: int.
        is_measured: whether the costs of the units are measured.
    """

    def __init__(self, model, graph, stages, splits, tensor, is_measured=False):
        self.model, self.graph, self.is_measured = model, graph, is_measured
        self.stages = stages
        self.splits = splits
        self.tensor = tensor
        self.stage_of, self.stage_of_sublayer = {}, {}
        for number, units in enumerate(stages):
            for unit in units:
                self.stage_of.setdefault(id(unit.operation), number)
                for layer in _with_sublayers(unit.operation):
                    self.stage_of_sublayer.setdefault(id(layer), number)
        self.axes = _axes(model, splits)

    @property
    def num_stages(self):
        """How many stages there are."""
        return len(self.stages)

    def stage_of_layer(self, layer):
        """The stage of a layer, or of the layer that it is part of."""
        return self.stage_of_sublayer[id(layer)]

    def shares(self):
        """The predicted part of the work of each stage."""
        costs = [sum(unit.cost for unit in units) for units in self.stages]
        total = sum(costs)
        return [cost / total if total else 1 / len(costs) for cost in costs]

    def summary(self, print_fn=print):
        """Prints the stages: layers, parameters, FLOPs, activations, share of the work."""
        print_fn(self.as_text())

    def as_text(self):
        """What :meth:`summary` prints."""
        share = "measured share" if self.is_measured else "share"
        head = ("stage", "layers", "from", "to", "parameters", "MFLOPs/row", "kB/row", share)
        rows = []
        for number, (units, share) in enumerate(zip(self.stages, self.shares(), strict=True)):
            rows.append(
                (
                    str(number),
                    str(len(units)),
                    units[0].name if units else "",
                    units[-1].name if units else "",
                    f"{sum(u.parameters for u in units):,}",
                    f"{sum(u.flops for u in units) / 1e6:,.2f}",
                    f"{sum(u.activations for u in units) / 1e3:,.1f}",
                    f"{share:.1%}",
                )
            )
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in [head, *rows]
        ]
        if self.tensor > 1:
            named = {id(layer): layer.path for layer in _keras.layers_of(self.model)}
            split = [f"{named[key]}: {kind}" for key, kind in self.splits.items()]
            whole = [
                layer.path
                for layer in _keras.layers_of(self.model)
                if id(layer) not in self.splits and layer._trainable_variables
            ]
            lines.append(f"split over {self.tensor} devices: {', '.join(split) or 'nothing'}")
            lines.append(f"whole on the first of them: {', '.join(whole) or 'nothing'}")
        return "\n".join(line.rstrip() for line in lines)

    def plot(self, file=None):
        """Draws the share of the work and the parameters of each stage.

        Args:
            file: where to write the picture; None returns the figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("plan.plot() needs matplotlib: pip install matplotlib") from error
        figure = Figure(figsize=(1.5 + 1.2 * self.num_stages, 3.5), layout="constrained")
        axes = figure.subplots(1, 2)
        names = [str(i) for i in range(self.num_stages)]
        axes[0].bar(names, [100 * share for share in self.shares()])
        axes[0].set(title="work, %", xlabel="stage")
        axes[1].bar(names, [sum(u.parameters for u in units) / 1e6 for units in self.stages])
        axes[1].set(title="parameters, millions", xlabel="stage")
        if file is None:
            return figure
        figure.savefig(file)
        return None


def make_plan(model, *, num_stages, tensor, how, layout, measure=None):
    """Plans how a built model is split.

    Args:
        model: a built ``keras.Model``.
        num_stages: int.
        tensor: int, over how many devices layers are split.
        how: a :class:`tfdist.parallel.Automatic`, or a list of names of last layers.
        layout: dict from patterns of variable paths to axes, or None.
        measure: ``measure(graph, nodes, rows) -> list of seconds``, for costs that are measured.

    Raises:
        ValueError: the model can't be split so; says why and what fits.
    """
    graph = _keras.graph_of(model)
    units = _units_of_graph(graph) if graph is not None else _units_of_layers(model)
    splits = _splits(model, tensor, layout or {})
    is_measured = False
    tags = [
        _keras.stage_of_layer(u.operation) if u.node is None else _keras.stage_of_node(u.node)
        for u in units
    ]
    if any(tag is not None for tag in tags):
        stages = _by_tags(units, tags, num_stages)
    elif graph is None and num_stages > 1:
        raise ValueError(
            f"stages={num_stages}: {type(model).__name__} is a subclass of keras.Model, in which "
            "the order of the layers is not known. Make its layers in "
            "`with tfdist.parallel.stage(0): ...`, `with tfdist.parallel.stage(1): ...`, or write "
            "it as a functional model."
        )
    elif isinstance(how, list):
        names = [unit.name for unit in units]
        lengths = cut_after(names, how)
        if len(lengths) != num_stages:
            raise ValueError(
                f"cut: {len(how)} names make {len(lengths)} stages, but stages={num_stages}."
            )
        stages = _in_lengths(units, lengths)
    else:
        limit = how.memory_limit
        is_measured = how.cost == "measured" and num_stages > 1
        if is_measured:
            costs = measure(graph, [unit.node for unit in units], how.rows)
            units = [u._replace(cost=cost) for u, cost in zip(units, costs, strict=True)]
        blocks = [Block(u.name, u.cost, _bytes_of(u, splits, tensor)) for u in units]
        stages = _in_lengths(units, cut(blocks, num_stages, limit))
    return Plan(model, graph, stages, splits, tensor, is_measured)


def _in_lengths(units, lengths):
    stages, start = [], 0
    for length in lengths:
        stages.append(units[start : start + length])
        start += length
    return stages


def _by_tags(units, tags, num_stages):
    if max(tag for tag in tags if tag is not None) >= num_stages:
        raise ValueError(
            f"tfdist.parallel.stage({max(t for t in tags if t is not None)}): there are only "
            f"stages 0 to {num_stages - 1}. Use ModelParallelStrategy(stages=...) with more."
        )
    stages, now = [[] for _ in range(num_stages)], 0
    for unit, tag in zip(units, tags, strict=True):
        if tag is not None and tag < now and unit.node is not None:
            raise ValueError(
                f"tfdist.parallel.stage({tag}): {unit.name} is computed after a layer of stage "
                f"{now}. Stages must follow each other in the order of the computation."
            )
        now = now if tag is None else tag
        stages[now].append(unit)
    return stages


def _bytes_of(unit, splits, tensor):
    share = tensor if id(unit.operation) in splits else 1
    return _COPIES_OF_A_WEIGHT * 4 * unit.parameters // share


# ---------------------------------------------------------------------------------------- costs


def _units_of_graph(graph):
    units, seen = [], set()
    for node in _keras.nodes_of(graph):
        operation = node.operation
        is_first = id(operation) not in seen
        seen.add(id(operation))
        units.append(_unit(operation, node, node.outputs, is_first))
    return units


def _units_of_layers(model):
    return [_unit(layer, None, [], True) for layer in _keras.top_layers_of(model)]


def _unit(operation, node, outputs, is_first):
    weights = getattr(operation, "weights", [])
    parameters = sum(int(np.prod(w.shape)) for w in weights) if is_first else 0
    shapes = [tuple(1 if d is None else d for d in output.shape[1:]) for output in outputs]
    elements = sum(int(np.prod(shape)) for shape in shapes)
    positions = int(np.prod(shapes[0][:-1])) if shapes and len(shapes[0]) > 1 else 1
    flops = sum(
        2.0 * int(np.prod(w.shape)) * positions
        for layer in _with_sublayers(operation)
        if not isinstance(layer, keras.layers.Embedding)
        for w in layer._trainable_variables
        if len(w.shape) > 1
    )
    for layer in _with_sublayers(operation):
        if isinstance(layer, keras.layers.MultiHeadAttention):
            flops += 4.0 * positions * positions * layer.num_heads * layer.key_dim
    cost = flops + _COST_OF_AN_ELEMENT * elements
    name = operation.name if node is None else _keras.name_of_node(node)
    return Unit(name, operation, node, parameters, flops, 4 * elements, cost)


def _with_sublayers(operation):
    if not isinstance(operation, keras.Layer):
        return []
    return [operation, *_keras.layers_of(operation)]


# --------------------------------------------------------------------------- splitting of layers


def _splits(model, tensor, layout):
    """How each layer is split: a dict from its id to the kind."""
    splits, used, inside = {}, set(), set()
    before = None  # the last Dense that was split by columns
    for layer in _keras.layers_of(model):
        if id(layer) in inside:
            continue
        if isinstance(layer, keras.layers.MultiHeadAttention):
            inside.update(id(sub) for sub in _keras.layers_of(layer))
        main = _main_variable(layer)
        if main is None:
            continue
        asked = [
            (pattern, axis) for pattern, axis in layout.items() if re.search(pattern, main.path)
        ]
        used.update(pattern for pattern, _ in asked)
        if tensor == 1:
            continue
        kind = _asked_kind(layer, main, asked[0], tensor) if asked else None
        if not asked:
            kind = _default_kind(layer, main, before, tensor)
        if kind is not None:
            splits[id(layer)] = kind
        if isinstance(layer, keras.layers.Dense):
            before = main if kind == COLUMN else None
    unused = set(layout) - used
    if unused:
        found = [_main_variable(layer) for layer in _keras.layers_of(model)]
        raise ValueError(
            f"layout: {sorted(unused)} match no variable that can be split. Such variables are: "
            f"{[variable.path for variable in found if variable is not None]}."
        )
    return splits


def _main_variable(layer):
    """The variable by whose path and shape it is decided, of layers that can be split."""
    if not layer.built or getattr(layer, "lora_enabled", False):
        return None
    if getattr(layer, "quantization_mode", None):
        return None
    if type(layer) is keras.layers.MultiHeadAttention:
        return _keras.attention_layers(layer)[0].kernel
    if type(layer) is keras.layers.Embedding:
        return layer.embeddings
    if type(layer) is keras.layers.Dense:
        return layer.kernel
    if type(layer) is keras.layers.EinsumDense and re.fullmatch(
        r"(\w*)(\w),\2(\w)->\1\3|\.\.\.(\w),\4(\w)->\.\.\.\5", layer.equation
    ):
        return layer.kernel
    return None


def _is_linear(layer):
    return layer.activation is None or layer.activation is keras.activations.linear


def _default_kind(layer, main, before, tensor):
    if isinstance(layer, keras.layers.MultiHeadAttention):
        return HEADS if layer.num_heads % tensor == 0 else None
    if isinstance(layer, keras.layers.Embedding):
        if main.shape[0] % tensor == 0:
            return VOCABULARY
        return WIDTH if main.shape[1] % tensor == 0 else None
    rows, columns = main.shape
    follows = before is not None and before.shape[1] == rows and columns <= rows
    if follows and rows % tensor == 0 and _is_linear(layer):
        return ROW
    return COLUMN if columns % tensor == 0 and _is_elementwise(layer) else None


def _is_elementwise(layer):
    return layer.activation not in (keras.activations.softmax, keras.activations.log_softmax)


def _asked_kind(layer, main, asked, tensor):
    pattern, axis = asked
    if axis is None:
        return None
    if isinstance(layer, keras.layers.MultiHeadAttention):
        kind, size, what = HEADS, layer.num_heads, "heads"
    else:
        rank = len(main.shape)
        if not isinstance(axis, int) or not -rank <= axis < rank:
            raise ValueError(
                f"layout: {pattern!r}: expected None or an axis of {main.path} of shape "
                f"{tuple(main.shape)}, got {axis!r}."
            )
        by_rows = axis % rank == 0
        if isinstance(layer, keras.layers.Embedding):
            kind = VOCABULARY if by_rows else WIDTH
        else:
            kind = ROW if by_rows else COLUMN
        size, what = main.shape[axis], f"axis {axis} of {main.path}"
    if kind == ROW and not _is_linear(layer):
        raise ValueError(
            f"layout: {pattern!r}: {layer.path} has an activation, which must come after the sum "
            "over its rows. Split axis 1, or put the activation in a layer of its own."
        )
    if kind == COLUMN and not _is_elementwise(layer):
        raise ValueError(
            f"layout: {pattern!r}: the activation of {layer.path} needs all columns. Split axis 0, "
            "or put the activation in a layer of its own."
        )
    if size % tensor:
        fitting = [t for t in range(tensor, 0, -1) if size % t == 0]
        raise ValueError(
            f"layout: {what} has size {size}, which can't be split over tensor={tensor} devices; "
            f"tensor={fitting[0]} fits."
        )
    return kind


def _axes(model, splits):
    """The axis along which each split variable is cut: a dict from the id of a Keras variable."""
    axes = {}
    for layer in _keras.layers_of(model):
        kind = splits.get(id(layer))
        if kind == HEADS:
            *inputs, output = _keras.attention_layers(layer)
            for dense in inputs:
                axes[id(dense.kernel)] = 1
                if dense.bias is not None:
                    axes[id(dense.bias)] = 0
            axes[id(output.kernel)] = 0
        elif kind in (VOCABULARY, WIDTH):
            axes[id(layer.embeddings)] = 0 if kind == VOCABULARY else 1
        elif kind == ROW:
            axes[id(layer.kernel)] = 0
        elif kind == COLUMN:
            axes[id(layer.kernel)] = 1
            if layer.bias is not None:
                axes[id(layer.bias)] = 0
    return axes
