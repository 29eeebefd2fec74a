"""How far a worker is: a few counters that its launcher reads.

`tfdist run` gives each process a page of memory that both have mapped. A strategy of tfdist counts
its steps there (some microseconds each, without a system call); the launcher sees from it that a
worker hangs, which one is behind, and whether a job has got anywhere since it was started. A loop
of one's own takes part with :func:`training` and :func:`step`. Without a launcher the counters are
there, but nobody reads them. This module does not import TensorFlow.
"""

import array
import contextlib
import faulthandler
import functools
import mmap
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

VARIABLE = "TFDIST_PROGRESS"  # names the file descriptor of the page
_PAGE_BYTES = 4096
_PID, _DUMPS, _SAVES, _ACTIVE, _BEGUN, _ENDED = range(6)  # positions of 64-bit cells
DUMP_SIGNAL = signal.SIGUSR2


class Progress(NamedTuple):
    """What the counters said at one moment.

    Attributes:
        active: whether the process is in a call of ``fit``, or in :func:`training`.
        begun: steps that it has begun, evaluation included.
        ended: steps that it has ended.
        dumps: whether it prints its stacks when it gets ``DUMP_SIGNAL``.
        saves: whether a Python function handles SIGTERM, presumably to save. (TensorFlow handles it
            in every worker, to no effect: the kernel's view says nothing.)
    """

    active: bool
    begun: int
    ended: int
    dumps: bool
    saves: bool


NOTHING = Progress(False, 0, 0, False, False)


class Page:
    """The launcher's side: the counters of one process."""

    def __init__(self):
        with tempfile.TemporaryFile() as file:
            file.truncate(_PAGE_BYTES)
            self.descriptor = os.dup(file.fileno())
        self._cells = _mapped(self.descriptor)

    def belongs_to(self, pid: int) -> None:
        """Gives the page to a process that has been started with the descriptor."""
        self._cells[_PID] = pid
        os.close(self.descriptor)

    def read(self) -> Progress:
        """The counters now; they stay when the process has ended."""
        cells = self._cells
        return Progress(
            bool(cells[_ACTIVE]),
            cells[_BEGUN],
            cells[_ENDED],
            bool(cells[_DUMPS]),
            bool(cells[_SAVES]),
        )


def _mapped(descriptor: int) -> memoryview:
    return memoryview(mmap.mmap(descriptor, _PAGE_BYTES)).cast("Q")


@functools.cache
def _cells():
    """The counters of this process."""
    cells = _page_of_the_launcher()
    if cells is None:
        return array.array("Q", bytes(64))
    with contextlib.suppress(ValueError, AttributeError, OSError):  # not the main interpreter, ...
        # Somebody else's handler stays.
        if signal.getsignal(DUMP_SIGNAL) == signal.SIG_DFL:
            faulthandler.register(DUMP_SIGNAL, file=sys.__stderr__, all_threads=True)
            cells[_DUMPS] = 1
    return cells


def _page_of_the_launcher():
    """None without a launcher, and in a process that a worker has started: it has the variable,
    but not the page, or not for itself."""
    try:
        descriptor = int(os.environ.get(VARIABLE, ""))
        if os.fstat(descriptor).st_size != _PAGE_BYTES:
            return None
        cells = _mapped(descriptor)
    except (ValueError, OSError):
        return None
    return cells if cells[_PID] == os.getpid() else None


def attach() -> None:
    """Lets the launcher ask for this process' stacks from now on. Safe to call again."""
    _cells()


@contextlib.contextmanager
def training() -> Iterator[None]:
    """In this context steps follow one another: a pause longer than `--step-timeout` is a hang."""
    cells = _cells()
    cells[_ACTIVE] += 1
    try:
        yield
    finally:
        cells[_ACTIVE] -= 1
        # Who saves on SIGTERM in `fit` alone must not be asked to after it.
        cells[_SAVES] = callable(signal.getsignal(signal.SIGTERM))


@contextlib.contextmanager
def step(count: int = 1) -> Iterator[None]:
    """Counts what runs in this context as ``count`` steps; as none, when it raises."""
    cells = _cells()
    cells[_SAVES] = callable(signal.getsignal(signal.SIGTERM))
    cells[_BEGUN] += count
    try:
        yield
    except Exception:  # the end of the data, too
        cells[_BEGUN] -= count
        raise
    cells[_ENDED] += count


def count_ended(count: int) -> None:
    """Counts steps that other processes have run for this one."""
    cells = _cells()
    cells[_BEGUN] += count
    cells[_ENDED] += count
