"""Decisions that all workers take together, over TensorFlow's coordination service.

The service is a small key-value store kept by the first task. A key is written once (an insert
of a key that exists fails), so "who came first" has one answer for everyone. These exchanges are
for the host's control flow (once per ``fit``, per epoch, per stop request), never for tensors.
"""

import contextlib
import json
import zlib
from collections import defaultdict

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

_ROUNDS_KEPT = 1000


class WorkersDisagree(RuntimeError):
    """Raised on every worker when a setting that all must share differs between them."""


class Board:
    """A notice board that every worker reads and writes.

    Calls with the same topic must come in the same order on every worker.

    Args:
        rank: this worker's rank, 0 being the chief.
        labels: the name of each worker by rank, for messages ("worker 1").
        wait_seconds: how long a worker waits for another's notice before it gives up.
    """

    def __init__(self, rank, labels, wait_seconds):
        self.rank = rank
        self.labels = list(labels)
        self.wait_seconds = wait_seconds
        self._rounds = defaultdict(int)

    @property
    def size(self):
        return len(self.labels)

    def gather(self, topic, value):
        """Returns the list of every worker's ``value`` (JSON-able), ordered by rank.

        Raises:
            TimeoutError: a worker did not post its value in ``wait_seconds``; names it.
        """
        round_ = self._next_round(topic)
        key = f"tfdist/{topic}/{round_}"
        self._insert(f"{key}/{self.rank}", json.dumps(value))
        values = [json.loads(self._read(f"{key}/{rank}", topic, rank)) for rank in range(self.size)]
        # Everyone has read round n - 1 once everyone has posted in round n.
        self._forget(f"tfdist/{topic}/{round_ - 1}/{self.rank}")
        return values

    def from_chief(self, topic, value):
        """Returns the chief's ``value`` on every worker.

        Raises:
            TimeoutError: the chief did not post its value in ``wait_seconds``.
        """
        round_ = self._next_round(topic)
        key = f"tfdist/{topic}/{round_}"
        if self.rank == 0:
            self._insert(key, json.dumps(value))
            if round_ > _ROUNDS_KEPT:  # nobody is that far behind
                self._forget(f"tfdist/{topic}/{round_ - _ROUNDS_KEPT}")
            return value
        return json.loads(self._read(key, topic, 0))

    def require_same(self, topic, settings):
        """Checks that the dict ``settings`` is the same on all workers.

        Raises:
            WorkersDisagree: on every worker, naming the setting and what each worker has.
        """
        everyone = self.gather(topic, settings)
        for name in settings:
            values = [json.dumps(theirs.get(name)) for theirs in everyone]
            if len(set(values)) > 1:
                listed = ", ".join(
                    f"{label}: {value}" for label, value in zip(self.labels, values, strict=True)
                )
                raise WorkersDisagree(
                    f"{topic}: {name} must be the same on all workers, but it differs. {listed}. "
                    "Run the same script with the same data and arguments on every worker."
                )

    def barrier(self, topic):
        """Waits until every worker is here."""
        self.gather(topic, None)

    def unanimous(self, topic, patience_seconds):
        """Whether every worker calls this within about ``patience_seconds`` of the first.

        For wishes that usually all workers have at the same point, without making those that
        don't have the wish call anything. All callers get the same answer.
        """
        key = f"tfdist/{topic}"
        self._insert(f"{key}/{self.rank}", "1")
        try:
            for rank in range(self.size):
                context.context().get_config_key_value(
                    f"{key}/{rank}", int(patience_seconds * 1000)
                )
            verdict = "yes"
        except tf.errors.DeadlineExceededError:
            verdict = "no"
        # Whoever is first decides for all, the late ones included.
        with contextlib.suppress(tf.errors.AlreadyExistsError):
            self._insert(f"{key}/verdict", verdict)
        return self._read(f"{key}/verdict", topic, self.rank) == "yes"

    def next_number(self, topic):
        """1, 2, 3, ...: how often this was called for ``topic`` (no communication)."""
        return self._next_round(topic)

    def post(self, key, value="1"):
        """Posts a notice that others may wait for; posting it again is harmless."""
        with contextlib.suppress(tf.errors.AlreadyExistsError):
            self._insert(f"tfdist/{key}", value)

    def take_down(self, key):
        """Removes what was posted as ``key``."""
        self._forget(f"tfdist/{key}")

    def wait_for(self, key, seconds):
        """What was posted as ``key``; None when nothing is within ``seconds``."""
        try:
            return context.context().get_config_key_value(
                f"tfdist/{key}", max(1, int(seconds * 1000))
            )
        except tf.errors.DeadlineExceededError:
            return None

    def _next_round(self, topic):
        self._rounds[topic] += 1
        return self._rounds[topic]

    def _insert(self, key, value):
        context.context().set_config_key_value(key, value)

    def _read(self, key, topic, rank):
        try:
            return context.context().get_config_key_value(key, int(self.wait_seconds * 1000))
        except tf.errors.DeadlineExceededError as error:
            raise TimeoutError(
                f"{topic}: {self.labels[rank]} did not answer within {self.wait_seconds:.0f} s. "
                "It is busy, stuck, or does not make the same calls as this worker."
            ) from error

    def _forget(self, key):
        with contextlib.suppress(tf.errors.OpError):
            context.context().delete_config_key_value(key)


def digest(arrays):
    """A checksum (int) of a sequence of numpy arrays: shapes, dtypes and every bit."""
    total = 0
    for array in arrays:
        array = np.ascontiguousarray(array)
        total = zlib.crc32(f"{array.shape}{array.dtype}".encode(), total)
        total = zlib.crc32(array.view(np.uint8).reshape(-1), total)
    return total
