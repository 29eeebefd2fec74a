"""Cutting a sequence of layers into stages of a pipeline. Pure."""

from typing import NamedTuple


class Block(NamedTuple):
    """What cannot be cut: one layer, or one operation, of a model.

    Attributes:
        name: the layer's.
        cost: what a training step spends in it, in any unit.
        bytes: memory that it needs on its device.
    """

    name: str
    cost: float
    bytes: int = 0


def cut(blocks, num_stages, memory_limit=None):
    """Cuts a sequence of blocks into stages so that the largest cost of a stage is the least.

    By dynamic programming over (number of stages, first block of the last stage): exact. Of equal
    cuts it takes the one whose early stages are the longest.

    Args:
        blocks: list of :class:`Block`, in the order in which they are computed.
        num_stages: int; no stage is empty.
        memory_limit: bytes that a stage may need, or None.

    Returns:
        A list of the number of blocks of each stage.

    Raises:
        ValueError: there are fewer blocks than stages, or no cut keeps the limit.
    """
    n = len(blocks)
    if num_stages < 1:
        raise ValueError(f"stages: expected at least 1, got {num_stages}.")
    if n < num_stages:
        raise ValueError(
            f"stages={num_stages}: the model has only {n} layers that can be told apart; "
            f"use stages={max(n, 1)} or fewer."
        )
    costs, sizes = [0.0], [0]
    for block in blocks:
        costs.append(costs[-1] + block.cost)
        sizes.append(sizes[-1] + block.bytes)

    def fits(start, end):
        return memory_limit is None or sizes[end] - sizes[start] <= memory_limit

    # best[j]: the least largest cost of blocks[:j] in so many stages; where[k][j]: the start of
    # the last of them.
    infinite = float("inf")
    best = [0.0] + [infinite] * n
    where = []
    for stage in range(1, num_stages + 1):
        nxt, start_of = [infinite] * (n + 1), [None] * (n + 1)
        for end in range(stage, n + 1):
            for start in range(end - 1, stage - 2, -1):
                if not fits(start, end):
                    break
                last = costs[end] - costs[start]
                if last > nxt[end]:
                    break  # an earlier start costs more still
                largest = max(best[start], last)
                if largest < nxt[end]:
                    nxt[end], start_of[end] = largest, start
        best = nxt
        where.append(start_of)
    if best[n] == infinite:
        raise ValueError(_too_large(blocks, num_stages, memory_limit))
    ends = [n]
    for start_of in reversed(where):
        ends.append(start_of[ends[-1]])
    ends.reverse()
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]


def _too_large(blocks, num_stages, memory_limit):
    largest = max(blocks, key=lambda block: block.bytes)
    if largest.bytes > memory_limit:
        return (
            f"memory limit: {largest.name} alone needs {largest.bytes} bytes, a device has "
            f"{memory_limit}. Split it by tensor=, or use devices with at least {largest.bytes}."
        )
    needed, room = 1, memory_limit
    for block in blocks:
        if block.bytes > room:
            needed, room = needed + 1, memory_limit
        room -= block.bytes
    return (
        f"memory limit: no {num_stages} stages of at most {memory_limit} bytes hold the "
        f"{sum(b.bytes for b in blocks)} bytes of this model; {needed} stages do."
    )


def cut_after(names, last_names):
    """Cuts by hand, after blocks with given names.

    Args:
        names: list of all blocks' names, in order.
        last_names: the names of the last blocks of all stages but the last stage.

    Returns:
        A list of the number of blocks of each stage.

    Raises:
        ValueError: a name is unknown, not in order, or leaves a stage empty.
    """
    ends = []
    for name in last_names:
        within = [known for known in names if known.startswith(f"{name}/")]
        if name not in names and within:
            name = within[-1]  # a model in the model ends with the last of its layers
        if name not in names:
            close = [n for n in names if name.lower() in n.lower() or n.lower() in name.lower()]
            hint = f" Did you mean {close[:5]}?" if close else f" It has {names[:20]}."
            raise ValueError(f"cut: the model has no layer {name!r}.{hint}")
        end = len(names) - names[::-1].index(name)
        if ends and end <= ends[-1]:
            raise ValueError(f"cut: {name!r} does not come after {names[ends[-1] - 1]!r}.")
        if end == len(names):
            raise ValueError(f"cut: nothing comes after {name!r}, so the last stage is empty.")
        ends.append(end)
    ends = [0, *ends, len(names)]
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]
