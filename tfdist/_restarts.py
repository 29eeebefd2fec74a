"""When a job that failed is started again, and with which workers."""

import collections
import time
from collections.abc import Collection, Iterable

LONGEST_PAUSE_SECONDS = 60.0
_FIRST_PAUSE_SECONDS = 1.0
_HOUR_SECONDS = 3600.0
_SETTLED_SECONDS = 60.0  # that a job which counts no steps must last to have got somewhere


class Budget:
    """How often a job may fail.

    Args:
        total: failures after which it is started again, in all.
        per_hour: the same, within any one hour.
        clock: what tells the time in seconds.
    """

    def __init__(self, total: int, per_hour: int, clock=time.monotonic):
        self.total = total
        self.per_hour = per_hour
        self.spent = 0
        self._clock = clock
        self._recent = collections.deque()
        self._in_vain = 0

    def spend(self) -> str | None:
        """Takes one failure out. Returns None, or why there is none left, as a sentence's end."""
        now = self._clock()
        while self._recent and now - self._recent[0] >= _HOUR_SECONDS:
            self._recent.popleft()
        if self.spent >= self.total:
            return f"it has been started again {self.spent} times (--max-restarts {self.total})"
        if len(self._recent) >= self.per_hour:
            return (
                f"it has failed {len(self._recent) + 1} times within an hour "
                f"(--max-restarts-per-hour {self.per_hour})"
            )
        self.spent += 1
        self._recent.append(now)
        return None

    def pause(self, *, got_somewhere: bool) -> float:
        """Seconds until the next start: 1, then doubled each time that nothing was reached."""
        self._in_vain = 0 if got_somewhere else self._in_vain + 1
        return min(LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** max(0, self._in_vain - 1))


def got_somewhere(made_progress: bool | None, seconds: float) -> bool:
    """Whether an attempt was of use: it has ended a step or, if it counts none, lasted a while."""
    return seconds >= _SETTLED_SECONDS if made_progress is None else made_progress


class Slots:
    """Which of the workers of the full job take part.

    A worker that fails twice in a row, the second time before the job has ended a step, can't come
    back: the job does without it, if enough are left. It is tried again after a while, which
    doubles when that fails. The workers of a host whose launcher is gone are left out until it is
    there.

    Args:
        hosts: the host of each slot.
        min_workers: with how many the job goes on.
        retry_seconds: after which a lost worker is tried again.
        clock: what tells the time in seconds.
    """

    def __init__(self, hosts: Iterable[str], min_workers: int, retry_seconds, clock=time.monotonic):
        self.hosts = list(hosts)
        self.min_workers = min_workers
        self._first_retry = retry_seconds
        self._clock = clock
        self._last_failed: int | None = None
        self._lost: dict[int, float] = {}  # slot -> when it is tried again
        self._retry: dict[int, float] = {}  # slot -> how long it was left out last

    def active(self, present: Collection[str]) -> list[int]:
        """The slots to start with, given the hosts that are there."""
        now = self._clock()
        self._lost = {slot: when for slot, when in self._lost.items() if when > now}
        return [
            slot
            for slot, host in enumerate(self.hosts)
            if slot not in self._lost and host in present
        ]

    def may_grow(self, running: Collection[int], present: Collection[str]) -> bool:
        """Whether more could take part than do."""
        now = self._clock()
        return any(
            host in present and slot not in running and self._lost.get(slot, 0.0) <= now
            for slot, host in enumerate(self.hosts)
        )

    def failed(self, slot: int | None, running: Collection[int], *, got_somewhere: bool) -> bool:
        """Notes who failed. Returns whether the job goes on without that worker."""
        again = slot is not None and slot == self._last_failed and not got_somewhere
        self._last_failed = slot
        if got_somewhere:
            self._retry = {s: t for s, t in self._retry.items() if s not in running}
        retried = slot in self._retry and not got_somewhere  # came back, and fails at once
        if not (again or retried) or len(running) - 1 < self.min_workers:
            return False
        self._retry[slot] = 2 * self._retry[slot] if slot in self._retry else self._first_retry
        self._lost[slot] = self._clock() + _FIRST_PAUSE_SECONDS + self._retry[slot]
        self._last_failed = None
        return True
