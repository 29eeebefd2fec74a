"""Kills its own process at a given file operation: the n-th that it does from now on."""

import os
import signal

_NAMES = (
    *("open", "write", "fsync", "close", "mkdir", "rename", "replace"),
    *("unlink", "rmdir", "preadv"),
)


class Killer:
    """Counts the file operations of this process, those of ``os`` in any thread.

    Args:
        at: int, the number of the operation before which it kills (from 0); it writes half of what
            the operation would write. None only counts.
        strike: what it does; by default it sends SIGKILL.

    Attributes:
        count: operations seen.
    """

    def __init__(self, at=None, strike=None):
        self.count = 0
        self._at = at
        self._strike = strike or (lambda: os.kill(os.getpid(), signal.SIGKILL))
        for name in _NAMES:
            setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name, stock):
        def operation(*args, **kwargs):
            if self.count == self._at:
                if name == "write":
                    descriptor, data = args
                    stock(descriptor, bytes(data)[: len(data) // 2])
                self._strike()
            self.count += 1
            return stock(*args, **kwargs)

        return operation
