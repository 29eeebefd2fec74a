"""How a model is split: arguments of :class:`tfdist.ModelParallelStrategy`."""

import contextlib
import threading
from typing import NamedTuple

_making = threading.local()


class Automatic(NamedTuple):
    """Stages are cut so that the most expensive one costs the least.

    See :func:`automatic`.
    """

    memory_limit: int | None = None


def automatic(memory_limit=None):
    """For ``cut``: stages of equal work, by an estimate from the shapes of the layers.

    Args:
        memory_limit: bytes that the weights of a stage, their gradients and two slots of an
            optimizer may take on a device; None for no limit.

    Raises:
        ValueError: the limit is not a positive number.
    """
    if memory_limit is not None and not memory_limit > 0:
        raise ValueError(
            f"memory_limit: expected a positive number of bytes, got {memory_limit!r}."
        )
    return Automatic(memory_limit)


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
