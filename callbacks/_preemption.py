"""How a process learns that it is about to be ended: SIGTERM, or a file that appears."""

import os
import signal
import sys
import threading
import time
import warnings

_LOOK_SECONDS = 0.5


class Notice:
    """Notices while it is watched.

    Args:
        grace_seconds: float, how long this machine is left after a notice.
        file: path whose appearance is a notice; None for what ``TFDIST_PREEMPTION_NOTICE`` says.

    Attributes:
        given: whether there was a notice.
    """

    def __init__(self, grace_seconds, file=None):
        self.given = False
        self._grace_seconds = grace_seconds
        self._end = None  # of the grace, by the monotonic clock
        self._file = file or os.environ.get("TFDIST_PREEMPTION_NOTICE")
        self._previous = None
        self._is_watching = False
        self._ended = threading.Event()

    def start(self):
        """Begins to watch."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
            self._is_watching = True
        elif self._file is None:
            warnings.warn(
                "on_preemption: fit runs in a thread, where Python handles no signals, and there "
                "is no notice_file: this process will not notice that it is to be ended.",
                stacklevel=2,
            )
        if self._file is not None:
            threading.Thread(target=self._look, name="tfdist notice", daemon=True).start()

    def stop(self):
        """Ends the watch; SIGTERM is handled as it was before."""
        self._ended.set()
        if self._is_watching:
            self._is_watching = False
            # None: a handler that was not set from Python cannot be given back.
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)

    @property
    def seconds_left(self):
        """Float: of the grace; not negative."""
        if self._end is None:
            return self._grace_seconds
        return max(0.0, self._end - time.monotonic())

    def give(self):
        """Takes note; only the first time counts."""
        if not self.given:
            self._end = time.monotonic() + self._grace_seconds
            self.given = True

    def _on_signal(self, signum, frame):
        if self.given and not self.seconds_left:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        if self.given:  # Who signals a group and its launcher, which passes it on, signals twice.
            return
        self.give()
        os.write(sys.stderr.fileno() if _has_file(sys.stderr) else 2, _MESSAGE)

    def _look(self):
        while not self._ended.wait(_LOOK_SECONDS):
            if os.path.exists(self._file):
                self.give()
                return


_MESSAGE = b"tfdist: SIGTERM: saving after this step, then ending.\n"


def _has_file(stream):
    try:
        return stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False
