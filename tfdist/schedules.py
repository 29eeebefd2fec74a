"""Schedules of pipeline parallelism: in which order a stage works on its micro-batches.

Pure: a schedule is a tuple of :class:`Task` for each stage.
"""

from typing import NamedTuple

SCHEDULES = ("gpipe", "1f1b")


class Task(NamedTuple):
    """The forward or backward pass of one micro-batch in one stage."""

    is_forward: bool
    micro_batch: int


def schedule(name, num_stages, num_micro_batches):
    """The order of tasks of each stage.

    Args:
        name: "gpipe" (all forward passes, then all backward passes; Huang et al. 2019, "GPipe") or
            "1f1b" (a stage has at most as many micro-batches under way as there are stages from
            it to the end; Narayanan et al. 2019, "PipeDream", and 2021, "Memory-Efficient
            Pipeline-Parallel DNN Training", whose flush at the end of a batch it has).
        num_stages: int, at least 1.
        num_micro_batches: int, at least 1.

    Returns:
        A list with a tuple of :class:`Task` for each stage.

    Raises:
        ValueError: an unknown name.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {SCHEDULES}, got {name!r}.")
    return [
        tuple(_tasks(num_micro_batches, num_micro_batches if name == "gpipe" else num_stages - s))
        for s in range(num_stages)
    ]


def _tasks(num_micro_batches, most_under_way):
    ahead = min(num_micro_batches, most_under_way)
    for j in range(ahead):
        yield Task(True, j)
    for j in range(num_micro_batches):
        yield Task(False, j)
        if ahead + j < num_micro_batches:
            yield Task(True, ahead + j)


def most_under_way(tasks):
    """The largest number of micro-batches whose activations a stage holds at once."""
    now = most = 0
    for task in tasks:
        now += 1 if task.is_forward else -1
        most = max(most, now)
    return most
