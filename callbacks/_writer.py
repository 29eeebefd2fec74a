"""One write at a time, beside the training."""

import atexit
import threading
import time
import weakref

_ALL_SECONDS = 60.0
_writers = weakref.WeakSet()


class Writer:
    """Runs one function at a time in a thread of its own."""

    def __init__(self):
        self._thread = None
        self._error = None
        _writers.add(self)

    @property
    def is_busy(self):
        """Whether a function runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, function):
        """Runs ``function()`` in the thread; nothing else may run in it."""
        self._thread = threading.Thread(
            target=self._run, args=(function,), name="tfdist checkpoint", daemon=True
        )
        self._thread.start()

    def _run(self, function):
        try:
            function()
        except Exception as error:
            self._error = error

    def wait(self, seconds):
        """Waits until nothing runs; whether that was within ``seconds``."""
        if self._thread is not None:
            self._thread.join(max(0.0, seconds))
        return not self.is_busy

    def abandon(self):
        """Nobody waits for what runs, not even the end of the process."""
        _writers.discard(self)

    def take_error(self):
        """The error of the last function, once; None where there was none."""
        if self.is_busy:
            return None
        error, self._error = self._error, None
        return error


@atexit.register
def wait_for_all():
    """Waits, but not forever, for what is being written.

    A program that ends by an error in its loop still has the checkpoint that it began to write.
    """
    deadline = time.monotonic() + _ALL_SECONDS
    for writer in list(_writers):
        writer.wait(deadline - time.monotonic())
