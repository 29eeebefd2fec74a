"""A job from its first attempt to its last."""

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from tfdist import cluster as clusters
from tfdist._alliance import Leader
from tfdist._attempt import Attempt, Member, Outcome
from tfdist._placement import Task
from tfdist._processes import Family, Process, say
from tfdist._restarts import Budget, Slots, got_somewhere

_MISSING_SECONDS = 10.0  # for a host that was lost, when the job can go on without it


class Record:
    """`run.json`: what was started, and how each attempt ended. Whole at any moment.

    Args:
        path: of the file; None for none. The runs that it tells of are kept in `earlier`.
        about: what is known from the start (JSON-able).
    """

    def __init__(self, path: str | None, about: Mapping):
        self._path = path
        earlier = [] if path is None else _runs_in(path)
        self._content = {
            "version": 1,
            **about,
            "state": "running",
            "attempts": [],
            "earlier": earlier,
        }

    def begin(self, **attempt) -> None:
        """Adds an attempt."""
        self._content["attempts"].append({"began": _now(), **attempt})
        self._write()

    def end_attempt(self, outcome: Outcome) -> None:
        """Says how it ended."""
        self._content["attempts"][-1] |= {
            "ended": _now(),
            "outcome": outcome.kind,
            "reason": outcome.reason,
            "status": outcome.status,
            "steps": outcome.steps,
        }
        self._write()

    def end(self, status: int, why: str = "") -> None:
        """The job is over."""
        self._content |= {"state": "ended", "status": status, **({"why": why} if why else {})}
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        beside = f"{self._path}.new"
        try:
            with open(beside, "w") as file:
                json.dump(self._content, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self._path)
        except OSError as error:  # A full disk must not end the job.
            say(f"tfdist run: {self._path} cannot be written: {error.strerror}.")


def _runs_in(path: str) -> list[dict]:
    """The runs that a `run.json` tells of, the oldest first."""
    try:
        with open(path) as file:
            last = json.load(file)
        earlier = last.pop("earlier", [])
        if last["state"] == "running":  # nobody was left to say how it ended
            last["state"] = "lost"
        return [*earlier, last]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        aside = f"{path}.unreadable"
        say(f"tfdist run: {path} cannot be read ({error}); it is kept as {aside}.")
        with contextlib.suppress(OSError):
            os.replace(path, aside)
        return []


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Supervisor:
    """Starts the job, and starts it again.

    Args:
        family: this launcher's processes.
        here: this host.
        plan: ``plan(slots)`` gives the tasks of an attempt.
        start: ``start(task, tasks, attempt)`` starts one that belongs here.
        slots: which workers take part.
        budget: how often the job may fail.
        leader: the connections to other hosts, or None.
        call: ``call(hosts)`` starts the launchers of these hosts, which are missing; returns
            whether there is no point in waiting for them.
        record: the file about it.
        has_servers: a chief drives the others: it alone decides when the job has ended.
        may_lose_workers: the others go on without a worker.
        grace_seconds: from SIGTERM to SIGKILL.
        step_timeout: seconds without a step that are a hang, or None.
        startup_timeout: seconds until a host is given up.
    """

    def __init__(
        self,
        family: Family,
        *,
        here: str | None,
        plan: Callable[[Sequence[int]], list[Task]],
        start: Callable[[Task, Sequence[Task], int], Process],
        slots: Slots,
        budget: Budget,
        leader: Leader | None,
        call: Callable[[Collection[str]], bool],
        record: Record,
        has_servers: bool,
        may_lose_workers: bool,
        grace_seconds: float,
        step_timeout: float | None,
        startup_timeout: float,
    ):
        self._family = family
        self._here = here
        self._plan = plan
        self._start = start
        self._slots = slots
        self._budget = budget
        self._leader = leader
        self._call = call
        self._record = record
        self._has_servers = has_servers
        self._may_lose_workers = may_lose_workers
        self._grace = grace_seconds
        self._step_timeout = step_timeout
        self._startup_timeout = startup_timeout

    def run(self) -> int:
        """Returns the exit status.

        Raises:
            PeersUnreachable: too few hosts are there.
        """
        number, status, why = 0, None, ""
        try:
            while status is None:
                outcome, running = self._attempt(number)
                number += 1
                status, why = self._decide(outcome, running)
        except clusters.PeersUnreachable as error:
            status, why = 1, str(error)
            raise
        finally:
            self._record.end(1 if status is None else status, why)
            if self._leader is not None:
                self._leader.say_goodbye(1 if status is None else status)
        if why:
            say(f"tfdist run: the job is not started again: {why}.")
        return status

    def _decide(self, outcome: Outcome, running: Collection[int]) -> tuple[int | None, str]:
        """Returns the exit status and why it is the last; waits and returns None for a restart."""
        if outcome.kind in ("ended", "stopped"):
            return outcome.status, ""
        useful = got_somewhere(outcome.made_progress, outcome.seconds)
        if outcome.kind == "preempted":
            if not self._budget.total:
                return outcome.status, ""
            # Without a step in between it would go round and round: then it has to wait, too.
            pause = 0.0 if useful else self._budget.pause(got_somewhere=False)
            when = f"in {pause:.0f} s" if pause else "at once"
            say(f"tfdist run: {outcome.reason}; the job starts again {when}.")
        else:
            why = self._budget.spend()
            if why is not None:
                return outcome.status, why if self._budget.total else ""
            slot = outcome.culprit.slot if outcome.culprit else None
            if self._slots.failed(slot, running, got_somewhere=useful):
                say(f"tfdist run: {outcome.culprit.label} can't come back; the job does without.")
                useful = True  # the reason to wait is gone
            pause = self._budget.pause(got_somewhere=useful)
            say(
                f"tfdist run: the job starts again in {pause:.0f} s (restart "
                f"{self._budget.spent} of {self._budget.total})."
            )
        self._family.sleep(pause)
        if self._family.signal is not None:
            return 128 + self._family.signal, ""
        return None, ""

    def _attempt(self, number: int) -> tuple[Outcome, list[int]]:
        running = self._gather(number)
        if self._family.signal is not None:
            return Outcome("stopped", 128 + self._family.signal), running
        if len(running) < len(self._slots.hosts):
            say(f"tfdist run: {len(running)} of {len(self._slots.hosts)} workers take part.")
        self._record.begin(number=number, workers=len(running), slots=running)
        tasks = self._plan(running)
        members = [self._member(task, tasks, number, running) for task in tasks]
        attempt = Attempt(
            self._family,
            members,
            grace_seconds=self._grace,
            step_timeout=self._step_timeout,
            wants_to_grow=functools.partial(self._wants_to_grow, running),
        )
        outcome = attempt.run()
        self._record.end_attempt(outcome)
        return outcome, running

    def _member(
        self, task: Task, tasks: Sequence[Task], number: int, running: Sequence[int]
    ) -> Member:
        def start():
            if self._leader is None or task.host == self._here:
                return self._start(task, tasks, number)
            return self._leader.start(task.host, task.label, number, running)

        trains = task.job in ("chief", "worker")
        may_be_lost = self._may_lose_workers and task.job == "worker"
        return Member(
            start(),
            task.label,
            slot=task.slot,
            trains=trains,
            decides=task.job == "chief" if self._has_servers else trains,
            start_again=start if may_be_lost else None,
            spare=self._budget.total,
        )

    # -- hosts

    @property
    def _present(self) -> set[str]:
        if self._leader is None:
            return set(self._slots.hosts)
        return {self._here, *self._leader.present}

    def _gather(self, number: int) -> list[int]:
        """The slots of the next attempt; waits for hosts that are missing."""
        if self._leader is None:
            return self._slots.active(self._present)
        patience = self._startup_timeout
        if number > 0 and len(self._slots.active(self._present)) >= self._slots.min_workers:
            patience = min(patience, _MISSING_SECONDS)
        missing = self._leader.wait_for(patience, self._call)
        running = self._slots.active(self._present)
        if self._family.signal is None and len(running) < self._slots.min_workers:
            names = ", ".join(sorted(missing))
            raise clusters.PeersUnreachable(
                f"the launchers of these hosts are not there: {names}. {len(running)} of "
                f"{len(self._slots.hosts)} workers could start, and {self._slots.min_workers} are "
                "needed. Start the same command there.",
                sorted(missing),
            )
        return running

    def _wants_to_grow(self, running: Collection[int]) -> bool:
        if self._leader is not None:
            self._call(set(self._slots.hosts) - self._present)
        return self._slots.may_grow(running, self._present)
