"""One attempt at a job: its processes from the first one's start to the last one's end."""

import dataclasses
import signal
import time
from collections.abc import Callable, Sequence

from tfdist._hang import StepWatch
from tfdist._processes import Family, Process, say
from tfdist._restarts import LONGEST_PAUSE_SECONDS

PREEMPTED = 75  # EX_TEMPFAIL: the process has saved, and wants to be started again
HUNG = 124  # what timeout(1) gives
_FAILURE_GRACE_SECONDS = 2.0  # what has lost a peer has nothing to finish
_DUMP_SECONDS = 1.5  # for the stacks to arrive
_LOOK_SECONDS = 0.5  # between two looks for workers that could come back


@dataclasses.dataclass
class Member:
    """A process of the job, here or on another host, and what its end means.

    Attributes:
        process: a :class:`tfdist._processes.Process`, or what stands for one on another host.
        label: its name in messages.
        slot: which of the workers of the full job it is; None for other tasks.
        trains: it is a chief or a worker.
        decides: the job goes on until it ends.
        start_again: where the others go on without it: starts it again, returns the new process.
        spare: how often it is started again.
    """

    process: object
    label: str
    slot: int | None = None
    trains: bool = True
    decides: bool = True
    start_again: Callable[[], object] | None = None
    spare: int = 0
    lives: int = 0
    starts_at: float | None = None  # where it waits for its next start

    @property
    def has_ended(self) -> bool:
        return self.process.code is not None and self.starts_at is None


@dataclasses.dataclass
class Outcome:
    """How an attempt ended.

    Attributes:
        kind: "ended" (well), "failed", "hung", "preempted" (saved, and asks for a restart), or
            "stopped" (by a signal to the launcher).
        status: exit status that the launcher gives if this was the last attempt.
        reason: one sentence, for messages and for the record; "" where it ended well.
        culprit: the member that failed, hung or is behind, where one is known.
        made_progress: whether the culprit, or where there is none, anybody, has ended a step; None
            where nobody counts steps.
        seconds: how long it lasted.
    """

    kind: str
    status: int
    reason: str = ""
    culprit: Member | None = None
    made_progress: bool | None = None
    seconds: float = 0.0
    steps: dict[str, int] = dataclasses.field(default_factory=dict)


class Attempt:
    """Runs until all members have ended.

    Args:
        family: the launcher's processes.
        members: all processes of the job.
        grace_seconds: from SIGTERM to SIGKILL.
        step_timeout: seconds without a step that are a hang, or None.
        wants_to_grow: asked now and then: whether the job should be preempted, so that workers it
            does without can come back. Only a job whose workers all save on SIGTERM is.
    """

    def __init__(
        self,
        family: Family,
        members: Sequence[Member],
        *,
        grace_seconds: float,
        step_timeout: float | None = None,
        wants_to_grow: Callable[[], bool] = lambda: False,
    ):
        self._family = family
        self._members = list(members)
        self._old = []  # processes that were replaced
        self._grace = grace_seconds
        self._watch = StepWatch(step_timeout) if step_timeout else None
        self._wants_to_grow = wants_to_grow
        self._noted: set[int] = set()  # ids of processes whose end was dealt with
        self._outcome: Outcome | None = None
        self._deadline: float | None = None  # when what is left is killed
        self._asked_to_save = False
        self._signal_seen = False
        self._next_look = 0.0
        self._began = time.monotonic()

    def run(self) -> Outcome:
        """Returns how it ended; the reason has been printed."""
        while not all(member.has_ended for member in self._members):
            self._family.poll()
            for member in self._members:
                if member.process.code is not None and id(member.process) not in self._noted:
                    self._noted.add(id(member.process))
                    self._on_end(member)
            self._obey_signals()
            self._start_again()
            if self._outcome is None and self._deadline is None:
                self._look_for_hang()
                self._ask_to_save()
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._on_deadline()
        return self._conclude()

    # -- what happens

    def _on_end(self, member: Member) -> None:
        code = member.process.code
        if self._outcome is not None or (self._signal_seen and not member.decides):
            return
        if code == PREEMPTED and member.trains:
            self._on_preempted(member)
        elif code == 0:
            self._end_if_all_decided()
        elif member.start_again is not None and (code < 0 or member.spare > member.lives):
            self._lose(member)
        elif self._family.signal is None:
            self._fail(member)

    def _on_preempted(self, member: Member) -> None:
        if member.start_again is not None:
            self._lose(member, counts=False)
            return
        # Its peers have agreed to save at the same step; some still write.
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace
        self._end_if_all_decided()

    def _end_if_all_decided(self) -> None:
        codes = [member.process.code for member in self._members if member.decides]
        if any(code is None for code in codes):
            return
        if PREEMPTED in codes and set(codes) <= {0, PREEMPTED}:
            first = next(m for m in self._members if m.process.code == PREEMPTED)
            self._end(
                Outcome(
                    "preempted",
                    PREEMPTED,
                    f"{first.label} was preempted after a checkpoint (exit code {PREEMPTED})",
                ),
                self._grace,
            )
        elif set(codes) == {0}:
            self._end(Outcome("ended", 0), self._grace)

    def _lose(self, member: Member, *, counts: bool = True) -> None:
        """The others go on without it, and it comes back when it is started again."""
        how = f"{member.label} {how_it_ended(member.process)}"
        if counts and member.lives >= member.spare:
            say(f"tfdist run: {how}; the others go on without it.")
            return
        # At once when it has lived well; the pause grows when it dies again and again.
        pause = min(LONGEST_PAUSE_SECONDS, 2.0 ** (member.lives - 1)) if member.lives else 0.0
        member.lives += counts
        member.starts_at = time.monotonic() + pause
        when = f" in {pause:.0f} s" if pause else ""
        say(f"tfdist run: {how}; it starts again{when}.")

    def _start_again(self) -> None:
        if self._outcome is not None or self._family.signal is not None:
            for member in self._members:
                member.starts_at = None
            return
        for member in self._members:
            if member.starts_at is not None and time.monotonic() >= member.starts_at:
                member.starts_at = None
                self._old.append(member.process)
                member.process = member.start_again()

    def _fail(self, member: Member) -> None:
        code = member.process.code
        status = code if code >= 0 else 128 - code
        reason = f"{member.label} {how_it_ended(member.process)}"
        self._end(Outcome("failed", status, reason, member), _FAILURE_GRACE_SECONDS)

    def _obey_signals(self) -> None:
        family = self._family
        if family.signal is None:
            return
        if not self._signal_seen:
            self._signal_seen = True
            if self._outcome is None:
                self._deadline = time.monotonic() + self._grace
                self._ask_all()
        if family.is_hurried:
            self._kill_all()

    def _look_for_hang(self) -> None:
        trainers = [m for m in self._members if m.trains and not m.has_ended]
        if self._watch is None or not self._watch.is_stuck(trainers):
            return
        report, behind = self._watch.describe(trainers)
        say(f"tfdist run: {report} The stacks of all workers:")
        for member in self._members:
            member.process.dump_stacks()
        self._family.sleep(_DUMP_SECONDS)
        self._end(Outcome("hung", HUNG, report, behind), 0.0)

    def _ask_to_save(self) -> None:
        """Asks the job to save and to exit with 75, so that it can go on with more workers."""
        trainers = [m for m in self._members if m.trains]
        now = time.monotonic()
        if self._asked_to_save or now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        if not self._wants_to_grow() or not all(m.process.progress.saves for m in trainers):
            return  # it would end without a checkpoint
        self._asked_to_save = True
        say("tfdist run: workers can come back; the job is asked to save, and to start again.")
        self._deadline = time.monotonic() + self._grace
        for member in trainers:
            member.process.ask_to_end()

    # -- the end

    def _end(self, outcome: Outcome, grace_seconds: float) -> None:
        if self._outcome is not None:
            return
        self._outcome = outcome
        self._deadline = time.monotonic() + grace_seconds
        if grace_seconds:
            self._ask_all()

    def _ask_all(self) -> None:
        for member in self._members:
            if member.process.code is None:
                member.process.ask_to_end()

    def _kill_all(self) -> None:
        for member in self._members:
            if member.process.code is None:
                member.process.kill()

    def _on_deadline(self) -> None:
        if self._outcome is None and self._family.signal is None:
            late = [m for m in self._members if m.decides and m.process.code is None]
            self._outcome = Outcome(
                "failed",
                128 + signal.SIGKILL,
                f"{late[0].label} did not end within {self._grace:g} s after it was asked to save",
                late[0],
            )
        self._kill_all()

    def _conclude(self) -> Outcome:
        processes = [*self._old, *(member.process for member in self._members)]
        self._family.drain([process for process in processes if isinstance(process, Process)])
        outcome = self._outcome
        if self._family.signal is not None and (outcome is None or outcome.kind != "ended"):
            codes = {m.process.code for m in self._members if m.decides}
            # A scheduler that asked for the end learns that everything was saved.
            saved = PREEMPTED in codes and codes <= {0, PREEMPTED}
            status = PREEMPTED if saved else 128 + self._family.signal
            name = signal.Signals(self._family.signal).name
            outcome = Outcome("stopped", status, f"the launcher got {name}")
        elif outcome is None:
            outcome = Outcome("ended", 0)
        outcome.seconds = time.monotonic() - self._began
        progress = {m.label: m.process.progress for m in self._members if m.trains}
        outcome.steps = {label: seen.ended for label, seen in progress.items()}
        if any(seen.begun or seen.dumps for seen in progress.values()):
            culprit = outcome.culprit
            if culprit is not None and culprit.trains and culprit.start_again is None:
                outcome.made_progress = outcome.steps[culprit.label] > 0
            else:
                outcome.made_progress = any(outcome.steps.values())
        if outcome.kind == "failed":
            say(_obituary(outcome, others=len(self._members) - 1))
        return outcome


def how_it_ended(process) -> str:
    """The end of a process in words, after its name."""
    if process.code < 0:
        how = f"was killed by {signal.Signals(-process.code).name}"
    else:
        how = f"failed with exit code {process.code}"
    return getattr(process, "how", None) or how


def _obituary(outcome: Outcome, *, others: int) -> str:
    rest = f"; the other {others} were ended" if others > 1 else "; the other was ended"
    lines = [f"tfdist run: {outcome.reason}{rest if others else ''}. Its last lines:"]
    lines += [f"  {line.decode(errors='replace')}" for line in outcome.culprit.process.last_lines]
    return "\n".join(lines)
