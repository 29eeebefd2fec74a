"""A limit on how long a step may take when workers wait for one another.

TensorFlow's own limit for collectives (``CommunicationOptions.timeout_seconds``) starts two threads
for each collective, which live until the limit is over: at a hundred collectives a second a process
runs out of threads within minutes. One thread that looks at the clock now and then does as well.
"""

import contextlib
import threading
import time

import tensorflow as tf
from tensorflow.python.eager import context


class Watchdog:
    """Aborts the collectives of this process when a step does not end.

    Args:
        limit_seconds: how long a step may take, tracing included.
    """

    def __init__(self, limit_seconds):
        self.limit_seconds = limit_seconds
        self._began = None
        self._thread = None

    @contextlib.contextmanager
    def watching(self):
        """What runs in this context may take ``limit_seconds``, then its collectives fail.

        They raise ``tf.errors.DeadlineExceededError``, or an error that follows from it.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="tfdist watchdog", daemon=True)
            self._thread.start()
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._began = None

    def _watch(self):
        pause = min(5.0, self.limit_seconds / 4)
        while True:
            time.sleep(pause)
            began = self._began
            if began is not None and time.monotonic() - began > self.limit_seconds:
                context.context().abort_collective_ops(
                    tf.errors.DEADLINE_EXCEEDED,
                    f"tfdist: a step did not end within {self.limit_seconds:.0f} s. Another worker "
                    "is stuck, busy with something else, or does not make the same calls as this "
                    "one. For longer steps, give the strategy "
                    "tf.distribute.experimental.CommunicationOptions(timeout_seconds=...).",
                )
                return
