"""Training that ends before its time is over."""

import datetime
import os
import time

import keras

_MOST_SECONDS_BETWEEN_LOOKS = 30.0


class DeadlineStop(keras.callbacks.Callback):
    """Ends training in time before a wall-clock limit, such as that of a batch job.

    At the end of a step near the limit, all workers stop, at the same one. ``fit`` then ends as
    it always does: it validates where it would have, and the callbacks' ``on_train_end`` run. So
    a :class:`FaultTolerantCheckpoint` beside this callback writes its last checkpoint, from which
    the next job goes on. (``keras.callbacks.BackupAndRestore`` deletes its backup when ``fit``
    ends; use ``ModelCheckpoint`` where you don't use the other one.)

    The chief's clock decides. It looks the more often the nearer the limit is, at least every
    30 seconds; the workers agree at each look when the next one is, so other steps cost nothing.
    Time for a validation as long as the longest so far is kept free.

    Under other strategies than tfdist's each process decides for itself.

    Args:
        minutes: float, from now, when the callback is made.
        at: the time of the limit instead: seconds since 1970, or a ``datetime.datetime`` with a
            time zone. Where neither is given, the end of the Slurm job (``SLURM_JOB_END_TIME``).
        reserve_minutes: float, how long before the limit to stop: for the last checkpoint, the
            last validation if there was none before, and a step that takes longer than others.

    Attributes:
        stopped: whether this callback ended the last ``fit``. A script may end with exit code 75
            then, so that it is started again.

    Raises:
        ValueError: the arguments are something else, or no limit is known.
    """

    def __init__(self, minutes=None, *, at=None, reserve_minutes=2.0):
        super().__init__()
        if minutes is not None and at is not None:
            raise ValueError(
                f"DeadlineStop: expected minutes or at, got both: minutes={minutes!r}, at={at!r}."
            )
        if minutes is not None and not _is_length(minutes):
            raise ValueError(f"DeadlineStop: minutes must be at least 0, got {minutes!r}.")
        if not _is_length(reserve_minutes):
            raise ValueError(
                f"DeadlineStop: reserve_minutes must be at least 0, got {reserve_minutes!r}."
            )
        self._limit = time.time() + 60 * minutes if minutes is not None else _timestamp(at)
        self._reserve = 60.0 * reserve_minutes
        self.stopped = False
        self._start_over()

    def _start_over(self):
        self._num_executions = 0
        self._next_look = 1
        self._began, self._since = time.monotonic(), 0  # of the executions that are timed
        self._validation_began = None
        self._longest_validation = 0.0

    def on_train_begin(self, logs=None):
        self.stopped = False
        self._start_over()

    def on_epoch_begin(self, epoch, logs=None):
        self._began, self._since = time.monotonic(), self._num_executions

    def on_train_batch_end(self, batch, logs=None):
        self._num_executions += 1
        if self._num_executions >= self._next_look:
            self._look(batch)

    def on_test_begin(self, logs=None):
        self._validation_began = time.monotonic()

    def on_test_end(self, logs=None):
        seconds = time.monotonic() - self._validation_began
        self._longest_validation = max(self._longest_validation, seconds)

    def on_epoch_end(self, epoch, logs=None):
        if not self.stopped:
            self._look(None)

    def _look(self, batch):
        """Decides on the chief, and does what it has decided on all workers."""
        board = getattr(self.model.distribute_strategy, "board", None)
        is_chief = board is None or board.rank == 0
        decision = self._decide(batch) if is_chief else None
        if board is not None:
            decision = board.from_chief("deadline", decision)
        self.stopped, self._next_look = decision
        if self.stopped:
            self.model.stop_training = True

    def _decide(self, batch):
        """Whether to stop now, and else the number of the execution after which to look again."""
        left = self._limit - self._reserve - self._longest_validation - time.time()
        done = self._num_executions - self._since
        each = (time.monotonic() - self._began) / max(1, done)
        # The first execution traces; what it takes says nothing of the next.
        is_known = batch is not None and self._num_executions > 1
        if left <= (each if is_known else 0):
            when = "after an epoch" if batch is None else f"after step {batch + 1} of an epoch"
            ahead = self._limit - time.time()
            print(f"tfdist: training stops {when}, {ahead:.0f} s before its limit.", flush=True)
            return True, 0
        if not is_known:
            return False, self._num_executions + 1
        seconds = min(_MOST_SECONDS_BETWEEN_LOOKS, left / 2)
        self._began, self._since = time.monotonic(), self._num_executions
        return False, self._num_executions + max(1, int(seconds / max(each, 1e-6)))


def _is_length(minutes):
    is_number = isinstance(minutes, int | float) and not isinstance(minutes, bool)
    return is_number and 0 <= minutes < float("inf")


def _timestamp(at):
    """Seconds since 1970 of the limit that is given, or that Slurm has set."""
    if isinstance(at, datetime.datetime):
        if at.tzinfo is None:
            raise ValueError(
                f"DeadlineStop: at must have a time zone, got {at!r}. Use at.astimezone() for "
                "that of this machine."
            )
        return at.timestamp()
    if at is not None:
        if isinstance(at, bool) or not isinstance(at, int | float):
            raise ValueError(
                f"DeadlineStop: at must be seconds since 1970 or a datetime, got {at!r}."
            )
        return float(at)
    end = os.environ.get("SLURM_JOB_END_TIME")
    if end is None:
        raise ValueError(
            "DeadlineStop: no limit is known: neither minutes nor at was given, and the "
            "environment variable SLURM_JOB_END_TIME is not set. Give one, for instance "
            "DeadlineStop(minutes=235)."
        )
    try:
        return float(end)
    except ValueError as error:
        raise ValueError(
            f"DeadlineStop: SLURM_JOB_END_TIME must be seconds since 1970, got {end!r}."
        ) from error
