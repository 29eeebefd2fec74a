"""Nothing is left behind when the launcher is killed.

Each child leads a session of its own, so a signal to its process group reaches the processes that
it started, and Ctrl-C on a terminal reaches the launcher alone. If the launcher is killed outright,
two things end the children: on Linux the kernel kills each one (PR_SET_PDEATHSIG); on every system
a guard, a forked process that waits for the end of a pipe from the launcher, kills their groups.
What leaves its group on purpose (setsid) is beyond both.
"""

import contextlib
import ctypes
import os
import signal
import sys


def die_with_parent(parent: int):
    """What a child does before it becomes its program: asks Linux to kill it with the launcher."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    pr_set_pdeathsig = 1

    def before_exec():
        libc.prctl(pr_set_pdeathsig, signal.SIGKILL)
        # The parent may have died before the kernel was asked.
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return before_exec


class Guard:
    """A process that outlives the launcher just long enough to kill the groups it left."""

    def __init__(self):
        read_end, self._write_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._write_end)
                self._watch(read_end)
            finally:
                os._exit(0)
        os.close(read_end)

    def add(self, group: int) -> None:
        """Puts a process group under guard."""
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Takes a group out, before its number can belong to another."""
        self._write(f"-{group}\n")

    def close(self) -> None:
        """Ends the guard, which kills the groups that are still in its care."""
        os.close(self._write_end)
        os.waitpid(self._pid, 0)

    def _write(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # Somebody has killed the guard.
            os.write(self._write_end, line.encode())

    @staticmethod
    def _watch(read_end: int) -> None:
        os.setsid()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        # Who reads the launcher's output must not wait for the guard.
        with open(os.devnull, "r+") as nothing:
            for descriptor in (0, 1, 2):
                os.dup2(nothing.fileno(), descriptor)
        groups = set()
        with os.fdopen(read_end) as lines:
            for line in lines:
                group = int(line[1:])
                groups.add(group) if line[0] == "+" else groups.discard(group)
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
