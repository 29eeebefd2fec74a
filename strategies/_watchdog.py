"""A limit on how long a step may take when workers wait for one another.

TensorFlow's own limit for collectives (``CommunicationOptions.timeout_seconds``) starts two threads
for each collective, which live until the limit is over: at a hundred collectives a second a process
runs out of threads within minutes. One thread that looks at the clock now and then does as well.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time

import tensorflow as tf
from tensorflow.python.eager import cancellation, context

_CANCEL_SECONDS = 5.0


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
        if self._thread is None or not self._thread.is_alive():
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
                self._abort()
                return

    def _abort(self):
        context.context().abort_collective_ops(
            tf.errors.DEADLINE_EXCEEDED,
            f"tfdist: a step did not end within {self.limit_seconds:.0f} s. Another worker "
            "is stuck, busy with something else, or does not make the same calls as this "
            "one. For longer steps, give the strategy "
            "tf.distribute.experimental.CommunicationOptions(timeout_seconds=...).",
        )


class CancellingWatchdog(Watchdog):
    """Cancels a step that runs on devices of other processes, too, when it does not end.

    TensorFlow gives up what runs here, but goes on to wait for the answer of a process that has
    stopped. Where that does not come either, this process ends, so that a launcher can start anew.

    Args:
        limit_seconds: how long a step may take, tracing included.
    """

    @contextlib.contextmanager
    def watching(self):
        """What runs in this context may take ``limit_seconds``, then it is cancelled.

        Raises:
            tf.errors.DeadlineExceededError: it was.
        """
        self._manager = manager = cancellation.CancellationManager()
        self._cancelled = None
        try:
            with super().watching(), cancellation.CancellationManagerContext(manager):
                yield
        except tf.errors.OpError as error:
            if self._cancelled is not manager:
                raise
            raise tf.errors.DeadlineExceededError(None, None, self._message()) from error

    def _message(self):
        return (
            f"tfdist: a step did not end within {self.limit_seconds:.0f} s. A process whose "
            "devices it uses is stuck or can't be reached. For longer steps, set "
            "TFDIST_STEP_TIMEOUT (seconds)."
        )

    def _abort(self):
        self._cancelled = self._manager
        self._manager.start_cancel()
        limit = time.monotonic() + _CANCEL_SECONDS
        while self._began is not None and time.monotonic() < limit:
            time.sleep(0.1)
        if self._began is not None:
            print(f"{self._message()} It can't be cancelled; this process ends.", file=sys.stderr)
            faulthandler.dump_traceback()
            sys.stdout.flush()
            os._exit(os.EX_UNAVAILABLE)
