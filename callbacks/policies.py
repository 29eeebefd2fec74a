"""When to save and what to keep: small values that combine.

A save policy has ``due(moment) -> bool``. ``by_chief`` says who may ask it: True where the answer
depends on a clock or a signal, so that only the chief's counts; False where it follows from the
step alone, so that all workers find the same. A keep policy has ``kept(saved) -> set``.
"""

import dataclasses
import math
import os
from typing import NamedTuple


class Moment(NamedTuple):
    """What a save policy is asked about.

    Attributes:
        step: int, the steps trained since the beginning, over restarts.
        epoch: int, the epochs that are complete.
        is_epoch_end: whether the last of them has just ended, validation included.
        last_step: int, ``step`` of the last save, or 0.
        seconds: float, since the last save, or since the training began or was resumed.
        preempted: whether this job has been asked to end.
    """

    step: int
    epoch: int
    is_epoch_end: bool
    last_step: int
    seconds: float
    preempted: bool


class Saved(NamedTuple):
    """A checkpoint that a keep policy decides about.

    Attributes:
        step: int.
        logs: dict from names to floats: at the end of an epoch, the epoch's, else the batch's.
        path: its folder.
    """

    step: int
    logs: dict
    path: str


@dataclasses.dataclass(frozen=True)
class _EverySteps:
    n: int
    by_chief = False

    def due(self, moment):
        return moment.step // self.n > moment.last_step // self.n


@dataclasses.dataclass(frozen=True)
class _EveryEpochs:
    n: int
    by_chief = False

    def due(self, moment):
        return moment.is_epoch_end and moment.epoch % self.n == 0


@dataclasses.dataclass(frozen=True)
class _EveryMinutes:
    m: float
    by_chief = True

    def due(self, moment):
        return moment.seconds >= 60 * self.m


@dataclasses.dataclass(frozen=True)
class _OnPreemption:
    grace_seconds: float
    notice_file: str | None
    by_chief = True

    def due(self, moment):
        return moment.preempted


@dataclasses.dataclass(frozen=True)
class _AnyOf:
    policies: tuple

    @property
    def by_chief(self):
        return any(policy.by_chief for policy in self.policies)

    def due(self, moment):
        return any(policy.due(moment) for policy in self.policies)


@dataclasses.dataclass(frozen=True)
class _Latest:
    n: int

    def kept(self, saved):
        return {s.path for s in saved[-self.n :]}


@dataclasses.dataclass(frozen=True)
class _Best:
    monitor: str
    n: int
    mode: str

    def kept(self, saved):
        scored = [s for s in saved if math.isfinite(s.logs.get(self.monitor, math.nan))]
        sign = -1 if self.mode == "max" else 1
        # Of equal ones the older, as in ModelCheckpoint.
        best = sorted(scored, key=lambda s: (sign * s.logs[self.monitor], s.step))
        return {s.path for s in best[: self.n]}


@dataclasses.dataclass(frozen=True)
class _Union:
    policies: tuple

    def kept(self, saved):
        return set().union(*(policy.kept(saved) for policy in self.policies))


def every_steps(n):
    """Save whenever the number of training steps passes a multiple of ``n``.

    With ``steps_per_execution`` at the end of the execution in which it does.
    """
    return _EverySteps(_positive_integer("every_steps", "n", n))


def every_epochs(n):
    """Save at the end of every ``n``-th epoch, after its validation."""
    return _EveryEpochs(_positive_integer("every_epochs", "n", n))


def every_minutes(m):
    """Save when ``m`` minutes (a float) have passed since the last save, by the chief's clock."""
    return _EveryMinutes(_positive_number("every_minutes", "m", m))


def on_preemption(grace_seconds=25.0, notice_file=None):
    """Save and end when this machine is about to be taken away.

    On SIGTERM, or when the file ``notice_file`` appears (also where the environment variable
    ``TFDIST_PREEMPTION_NOTICE`` names one), on any worker, all workers save after the same step,
    wait until the checkpoint is written, and end with exit code 75
    (``tfdist.checkpoints.PREEMPTED``), which ``tfdist run --max-restarts`` takes as "start again".
    Further SIGTERMs change nothing until ``grace_seconds`` have passed; then one ends the process.

    Args:
        grace_seconds: float, how long the machine is left. What is not written by then is given
            up with a warning, and the checkpoint before it counts.
        notice_file: path, or None. A file that is there when the training begins is a notice, too.
    """
    grace = _positive_number("on_preemption", "grace_seconds", grace_seconds)
    if notice_file is not None and not isinstance(notice_file, str | os.PathLike):
        raise ValueError(f"on_preemption: notice_file must be a path or None, got {notice_file!r}.")
    return _OnPreemption(grace, None if notice_file is None else os.fspath(notice_file))


def any_of(*policies):
    """Save when one of these save policies says so."""
    return _AnyOf(_all_with("any_of", "due", policies))


def latest(n):
    """Keep the ``n`` newest checkpoints."""
    return _Latest(_positive_integer("latest", "n", n))


def best(monitor, n=1, mode="auto"):
    """Keep the ``n`` checkpoints with the best value of a log, such as ``"val_loss"``.

    Only checkpoints saved at the end of an epoch have logs of validation: combine it with
    ``save=every_epochs(...)``.

    Args:
        monitor: name of the log.
        n: int.
        mode: "min", "max", or "auto": "max" for names with ``acc``, ``auc``, ``precision``,
            ``recall`` or ``f1`` in it.
    """
    if mode not in ("auto", "min", "max"):
        raise ValueError(f"best: mode must be 'auto', 'min' or 'max', got {mode!r}.")
    if not isinstance(monitor, str):
        raise ValueError(f"best: monitor must be the name of a log, got {monitor!r}.")
    if mode == "auto":
        grows = any(part in monitor for part in ("acc", "auc", "precision", "recall", "f1"))
        mode = "max" if grows else "min"
    return _Best(monitor, _positive_integer("best", "n", n), mode)


def union(*policies):
    """Keep what any of these keep policies keeps."""
    return _Union(_all_with("union", "kept", policies))


def members(policy):
    """The save policies that a policy is made of."""
    if isinstance(policy, _AnyOf):
        return [member for part in policy.policies for member in members(part)]
    return [policy]


def preemption_of(policy):
    """The :func:`on_preemption` in a save policy, or None."""
    return next((p for p in members(policy) if isinstance(p, _OnPreemption)), None)


def _positive_integer(function, argument, value):
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{function}: {argument} must be an integer of at least 1, got {value!r}.")
    return value


def _positive_number(function, argument, value):
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ValueError(f"{function}: {argument} must be a positive number, got {value!r}.")
    return float(value)


def _all_with(function, method, policies):
    bad = [p for p in policies if not callable(getattr(p, method, None))]
    if bad or not policies:
        raise ValueError(
            f"{function}: expected policies (objects with {method}()), got "
            f"{bad[0] if bad else 'none'!r}."
        )
    return tuple(policies)
