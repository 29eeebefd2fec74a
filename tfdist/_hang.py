"""Do the workers of a job still move? And which one holds up the others?"""

import time
from collections.abc import Sequence


class StepWatch:
    """Says when no worker has begun or ended a step for too long.

    Only a job that is in ``fit`` (see :func:`tfdist.progress.training`) can be stuck: before and
    after it, a worker may do what it likes for as long as it likes.

    Args:
        limit_seconds: how long.
        clock: what tells the time in seconds.
    """

    def __init__(self, limit_seconds: float, clock=time.monotonic):
        self.limit_seconds = limit_seconds
        self._clock = clock
        self._last_seen = None
        self._moved_at = clock()

    def is_stuck(self, members: Sequence) -> bool:
        """Looks at the counters of the members; to be called often."""
        seen = [member.process.progress for member in members]
        if seen != self._last_seen or not any(progress.active for progress in seen):
            self._last_seen, self._moved_at = seen, self._clock()
        return self._clock() - self._moved_at > self.limit_seconds

    def describe(self, members: Sequence):
        """Returns a sentence that says who is behind, and that member; None where all are level."""
        seen = {member.label: member.process.progress for member in members}
        stopped = [member for member in members if member.process.is_stopped]
        fewest = min(progress.begun for progress in seen.values())
        late = [member for member in members if seen[member.label].begun == fewest]
        behind = stopped or (late if len(late) < len(members) else [])
        steps = ", ".join(
            f"{label} has begun {progress.begun} and ended {progress.ended}"
            for label, progress in seen.items()
        )
        if stopped:
            verdict = f"{_and(stopped)} is stopped by a signal"
        elif behind:
            verdict = f"{_and(behind)} is behind"
        else:
            verdict = "none is behind: look at the stacks"
        text = f"no step for {self.limit_seconds:g} s; {verdict}. Steps: {steps}."
        return text, behind[0] if len(behind) == 1 else None


def _and(members: Sequence) -> str:
    return " and ".join(member.label for member in members)
