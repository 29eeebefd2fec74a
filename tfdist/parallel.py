"""How a model is split: arguments of :class:`tfdist.ModelParallelStrategy`."""

import contextlib
import threading
from typing import NamedTuple

_making = threading.local()

COSTS = ("estimated", "measured")


class Automatic(NamedTuple):
    """Stages are cut so that the most expensive one costs the least.

    See :func:`automatic`.
    """

    memory_limit: int | None = None
    cost: str = "estimated"
    rows: int = 8


def automatic(memory_limit=None, *, cost="estimated", rows=8):
    """For ``cut``: stages of equal work.

    Args:
        memory_limit: bytes that the weights of a stage, their gradients and two slots of an
            optimizer may take on a device; None for no limit.
        cost: what the work of a layer is. "estimated": floating-point operations and elements
            written, from its shapes. "measured": the time of its forward and backward pass on
            the first device, which is measured when the model is split.
        rows: of the batch with which layers are measured; best those of a micro-batch.

    Raises:
        ValueError: the limit is not a positive number, ``cost`` is another word, or ``rows`` is
            not a positive integer.
    """
    if cost not in COSTS:
        raise ValueError(f"cost: expected one of {COSTS}, got {cost!r}.")
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ValueError(f"rows: expected an integer of at least 1, got {rows!r}.")
    if memory_limit is not None and not memory_limit > 0:
        raise ValueError(
            f"memory_limit: expected a positive number of bytes, got {memory_limit!r}."
        )
    return Automatic(memory_limit, cost, rows)


class _Stage(contextlib.ContextDecorator):
    def __init__(self, what):
        self.what = what
        self._outer = None

    def __enter__(self):
        if not isinstance(self.what, int):
            raise TypeError(
                f"tfdist.parallel.stage({self.what!r}): as a context, it takes the number of the "
                "stage. A name goes in ModelParallelStrategy(cut=[...])."
            )
        self._outer = current_stage()
        _making.stage = self.what
        return self

    def __exit__(self, *_):
        _making.stage = self._outer


def stage(what):
    """Cuts a model by hand.

    Args:
        what: the number of a stage, from 0 on: ``with tfdist.parallel.stage(1):`` puts the layers
            that are made in it in that stage. Or the name of a layer, for the list ``cut`` of
            :class:`tfdist.ModelParallelStrategy`: a stage ends with this layer.

    Raises:
        ValueError: ``what`` is neither.
    """
    if isinstance(what, bool) or not isinstance(what, int | str) or (what == "" or what == -1):
        raise ValueError(f"stage: expected the number of a stage or a layer's name, got {what!r}.")
    if isinstance(what, int) and what < 0:
        raise ValueError(f"stage: expected a number from 0 on, got {what}.")
    return _Stage(what)


def current_stage():
    """The number of the stage in whose context layers are being made, or None."""
    return getattr(_making, "stage", None)


def cut_from(cut):
    """The argument ``cut``: an :class:`Automatic`, or a list of names.

    Raises:
        ValueError: it is something else.
    """
    if cut is None:
        return Automatic()
    if isinstance(cut, Automatic):
        return cut
    cut = [cut] if isinstance(cut, str | _Stage) else cut
    if isinstance(cut, list | tuple):
        names = [each.what if isinstance(each, _Stage) else each for each in cut]
        if all(isinstance(name, str) for name in names):
            return names
    raise ValueError(
        "cut: expected None, tfdist.parallel.automatic(...) or a list of names of layers, after "
        f"which to cut; got {cut!r}."
    )
