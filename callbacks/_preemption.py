"""How a process learns that it is about to be ended: SIGTERM, or a file that appears."""

import os
import signal
import sys
import threading
import warnings

_LOOK_SECONDS = 0.5


class Notice:
    """Notices while it is watched.

    Args:
        file: path whose appearance is a notice; None for what ``TFDIST_PREEMPTION_NOTICE`` says.

    Attributes:
        given: whether there was a notice.
    """

    def __init__(self, file=None):
        self.given = False
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

    def _on_signal(self, signum, frame):
        if self.given:  # the second one: at once
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        self.given = True
        os.write(sys.stderr.fileno() if _has_file(sys.stderr) else 2, _MESSAGE)

    def _look(self):
        while not self._ended.wait(_LOOK_SECONDS):
            if os.path.exists(self._file):
                self.given = True
                return


_MESSAGE = b"tfdist: SIGTERM: saving after this step, then ending.\n"


def _has_file(stream):
    try:
        return stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False
