"""How far workers of a parameter server may be apart: settings, and the clock that enforces them.

Nothing here imports TensorFlow. A *step* is one gradient, computed by one worker; a worker's clock
is the number of steps that it has finished.
"""

import dataclasses
from collections.abc import Iterable


class Consistency:
    """What the argument ``consistency`` of ``ParameterServerStrategy`` takes."""

    @property
    def bound(self) -> int | None:
        """The most steps that a worker may be ahead of the slowest live one; None: no bound."""
        return None


@dataclasses.dataclass(frozen=True)
class Async(Consistency):
    """Every gradient is applied as soon as it reaches the servers; no worker waits for another.

    Reference: Dean et al. 2012, "Large Scale Distributed Deep Networks" (Downpour SGD).
    """


@dataclasses.dataclass(frozen=True)
class Stale(Consistency):
    """No worker is more than ``bound`` steps ahead of the slowest live one.

    A worker that has finished c steps starts the next only where the slowest one has finished at
    least c - bound. With bound 0 the workers go in lock step, but each gradient is still applied
    on its own; see :class:`Sync` for averaged ones.

    Args:
        bound: whole number, at least 0.

    Reference: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel
    Parameter Server".
    """

    bound: int = 0

    def __post_init__(self):
        _require_whole("Stale", "bound", self.bound)


@dataclasses.dataclass(frozen=True)
class Sync(Consistency):
    """The gradients of a step's workers are averaged and applied once.

    Each batch is shared out by rows to all live workers. With ``backup_workers=b`` the step ends
    when all but b of them are done; the gradients of the late ones, and so their rows, are dropped.

    Args:
        backup_workers: whole number, at least 0 and less than the number of workers.

    Reference: Chen et al. 2016, arXiv:1604.00981.
    """

    backup_workers: int = 0

    def __post_init__(self):
        _require_whole("Sync", "backup_workers", self.backup_workers)


@dataclasses.dataclass(frozen=True)
class _Wrapped(Consistency):
    inner: Consistency = dataclasses.field(default_factory=Async, kw_only=True)

    def __post_init__(self):
        name = type(self).__name__
        if not isinstance(self.inner, Consistency):
            raise ValueError(
                f"{name}: inner must be Async(), Stale(bound) or another of their kind, got "
                f"{self.inner!r}."
            )
        if settings_of(self.inner).is_synchronous:
            raise ValueError(
                f"{name}: inner must not be Sync: its gradients are never stale. Use Async() or "
                "Stale(bound)."
            )

    @property
    def bound(self):
        return self.inner.bound


@dataclasses.dataclass(frozen=True)
class DelayCompensation(_Wrapped):
    """Corrects a stale gradient towards the weights to which it is applied.

    g + lambda g * g * (w now - w when the worker read it), elementwise, on the server, which keeps
    a copy of the weights for each worker. Gradients that are ``tf.IndexedSlices`` are left alone.

    Args:
        lambda_: at least 0; the paper uses 0.04 to 2, or lambda / sqrt(mean of g * g).
        inner: :class:`Async` (the default) or :class:`Stale`.

    Reference: Zheng et al. 2017, arXiv:1609.08326, eq. 10 (DC-ASGD-c, constant lambda).
    """

    lambda_: float = 0.04

    def __post_init__(self):
        super().__post_init__()
        is_number = isinstance(self.lambda_, int | float) and not isinstance(self.lambda_, bool)
        if not is_number or not self.lambda_ >= 0:
            raise ValueError(
                f"DelayCompensation: lambda_ must be a number of at least 0, got {self.lambda_!r}."
            )


@dataclasses.dataclass(frozen=True)
class StalenessScaledRate(_Wrapped):
    """Divides the learning rate of a gradient by its staleness, where that is above 1.

    Args:
        inner: :class:`Async` (the default), :class:`Stale` or :class:`DelayCompensation`.

    Reference: Zhang et al. 2016, arXiv:1511.05950, eq. 7.
    """


@dataclasses.dataclass(frozen=True)
class Settings:
    """A consistency, taken apart."""

    bound: int | None
    is_synchronous: bool
    backup_workers: int
    lambda_: float
    scales_rate: bool


def settings_of(consistency: Consistency) -> Settings:
    """Takes a consistency apart.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(consistency, Consistency):
        raise ValueError(
            "consistency: expected tfdist.Async(), tfdist.Stale(bound), tfdist.Sync() or one that "
            f"wraps them, got {consistency!r}."
        )
    lambda_, scales_rate, each = 0.0, False, consistency
    while isinstance(each, _Wrapped):
        if isinstance(each, DelayCompensation):
            lambda_ += each.lambda_
        else:
            scales_rate = True
        each = each.inner
    is_synchronous = isinstance(each, Sync)
    return Settings(
        bound=each.bound,
        is_synchronous=is_synchronous,
        backup_workers=each.backup_workers if is_synchronous else 0,
        lambda_=lambda_,
        scales_rate=scales_rate,
    )


class Clocks:
    """Who may start a step. Not thread-safe: the caller holds a lock.

    Args:
        num_workers: how many there are.
        bound: as in :class:`Stale`; None lets everyone start.
    """

    def __init__(self, num_workers: int, bound: int | None = None):
        self.bound = bound
        self._finished = [0] * num_workers
        self._live = set(range(num_workers))

    @property
    def live(self) -> frozenset[int]:
        """The workers that count."""
        return frozenset(self._live)

    def finished(self, worker: int) -> int:
        """The steps that a worker has finished (or was taken to have, when it came back)."""
        return self._finished[worker]

    def ahead(self, worker: int, steps: int = 1) -> int:
        """How far ahead of the slowest live one a worker is when it starts the last of its next
        ``steps`` steps."""
        return self._finished[worker] + steps - 1 - self._floor()

    def may_start(self, worker: int, steps: int = 1) -> bool:
        """Whether a worker may start ``steps`` steps."""
        return self.bound is None or self.ahead(worker, steps) <= self.bound

    def finish(self, worker: int, steps: int = 1) -> None:
        """Notes that a worker has finished ``steps`` steps."""
        self._finished[worker] += steps

    def leave(self, worker: int) -> None:
        """A worker that died or hangs: nobody waits for it."""
        self._live.discard(worker)

    def join(self, worker: int) -> None:
        """A worker that came back starts where the slowest live one is."""
        if worker not in self._live:
            self._finished[worker] = max(self._finished[worker], self._floor())
            self._live.add(worker)

    def reset(self) -> None:
        """All clocks at zero, when nobody is in a step."""
        self._finished = [0] * len(self._finished)

    def _floor(self) -> int:
        return min((self._finished[worker] for worker in self._live), default=0)


def histogram(staleness: Iterable[int]) -> list[int]:
    """How many gradients had each staleness: element i counts those of staleness i."""
    counts: list[int] = []
    for value in staleness:
        counts.extend([0] * (value + 1 - len(counts)))
        counts[value] += 1
    return counts


def _require_whole(name, argument, value):
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name}: {argument} must be a whole number of at least 0, got {value!r}.")
