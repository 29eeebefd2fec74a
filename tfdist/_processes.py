"""The processes of one launcher: started, listened to, and never left behind."""

import collections
import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist._guard import Guard, die_with_parent
from tfdist._output import Output
from tfdist.progress import DUMP_SIGNAL, NOTHING, VARIABLE, Page, Progress

TICK_SECONDS = 0.05
_DRAIN_SECONDS = 1.0  # for the last output of a process that has ended
_LAST_LINES = 20
_COLOURS = (36, 32, 33, 35, 34, 31)


class Process:
    """One process that was started.

    Attributes:
        label: its name in messages.
        code: None while it runs, then its exit code; -n for signal n.
        last_lines: what it printed last, as bytes.
    """

    def __init__(self, label: str, popen: subprocess.Popen, page: Page | None):
        self.label = label
        self.code: int | None = None
        self.last_lines: collections.deque[bytes] = collections.deque(maxlen=_LAST_LINES)
        self.popen = popen
        self._page = page

    def ask_to_end(self) -> None:
        """SIGTERM to its group; to an ssh client, which passes none on, the end of its input."""
        if self.popen.stdin is not None:
            self.popen.stdin.close()
        else:
            self.send(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to all processes of its group that are left."""
        self.send(signal.SIGKILL)

    def send(self, signum: int) -> None:
        """Sends a signal to all processes of its group that are left."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signum)

    def dump_stacks(self) -> None:
        """Makes it print its Python stacks, where it is known to do so."""
        if self.code is None and self.progress.dumps:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.popen.pid, DUMP_SIGNAL)

    @property
    def progress(self) -> Progress:
        """Its counters; all 0 where it has none."""
        return self._page.read() if self._page else NOTHING

    @property
    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) has stopped it. Linux only; elsewhere False."""
        with contextlib.suppress(OSError), open(f"/proc/{self.popen.pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "Tt"
        return False


class Family:
    """All processes of one launcher, and the signals that it gets.

    Use it as a context manager: on leaving, what still runs is killed.

    Args:
        stop_with_stdin: the end of the launcher's input counts as SIGTERM.

    Attributes:
        signal: the first signal that the launcher got, or None. SIGPIPE when nobody reads its
            output any more.
        is_hurried: there was a second one.
    """

    def __init__(self, *, stop_with_stdin: bool = False):
        self._processes: list[Process] = []
        self._outputs: dict[Process, list[Output]] = {}
        self._logs = {}
        self._labels: list[str] = []
        self._selector = selectors.DefaultSelector()
        self._handlers = {}
        self._chores: list[Callable[[], None]] = []
        self._guard = Guard()
        self.signal: int | None = None
        self.is_hurried = False
        if stop_with_stdin:
            self.watch(sys.stdin, self._on_stdin)

    def __enter__(self):
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # What nohup or a shell has told this process to ignore stays ignored.
            if signal.getsignal(signum) != signal.SIG_IGN:
                self._handlers[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *exc_info):
        for process in self._processes:
            if process.code is None:
                process.kill()
                process.popen.wait()
        for process in list(self._processes):
            self._close(process)
        self._selector.close()
        self._guard.close()
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def start(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        label: str,
        prefix: str = "",
        log_path: str | None = None,
        has_progress: bool = False,
        has_stdin: bool = False,
    ) -> Process:
        """Starts one process.

        Args:
            command: program and arguments.
            environ: its environment variables.
            label: its name in messages.
            prefix: what its output lines begin with.
            log_path: file for its output; what is there stays.
            has_progress: whether it is given counters.
            has_stdin: whether it ends with its input, as an ssh client does.
        """
        page = Page() if has_progress else None
        log = open(log_path, "ab", buffering=0) if log_path else None  # noqa: SIM115
        popen = subprocess.Popen(
            command,
            env={**environ, VARIABLE: str(page.descriptor)} if page else environ,
            stdin=subprocess.PIPE if has_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(page.descriptor,) if page else (),
            preexec_fn=die_with_parent(os.getpid()),
        )
        self._guard.add(popen.pid)
        if page:
            page.belongs_to(popen.pid)
        process = Process(label, popen, page)
        if label not in self._labels:
            self._labels.append(label)
        colour = _COLOURS[self._labels.index(label) % len(_COLOURS)]
        self._processes.append(process)
        self._logs[process] = log
        self._outputs[process] = []
        for pipe, target in ((popen.stdout, sys.stdout), (popen.stderr, sys.stderr)):
            shown = f"\x1b[{colour}m{prefix}\x1b[0m" if prefix and target.isatty() else prefix
            output = Output(
                pipe,
                target.buffer,
                prefix=shown.encode(),
                log=log,
                last_lines=process.last_lines,
            )
            self._outputs[process].append(output)
            self._selector.register(pipe, selectors.EVENT_READ, output)
        return process

    def watch(self, file, callback: Callable[[], None]) -> None:
        """Calls the callback during :meth:`poll` when the file can be read."""
        self._selector.register(file, selectors.EVENT_READ, callback)

    def unwatch(self, file) -> None:
        """Ends :meth:`watch`."""
        self._selector.unregister(file)

    def add_chore(self, chore: Callable[[], None]) -> None:
        """Calls ``chore`` at the end of each :meth:`poll`."""
        self._chores.append(chore)

    def poll(self, seconds: float = TICK_SECONDS) -> None:
        """Passes on what is printed within the time, and notes which processes have ended."""
        try:
            self._pump(seconds)
        except BrokenPipeError:
            self._abandon()
        for process in self._processes:
            if process.code is None and (code := process.popen.poll()) is not None:
                process.code = code
                process.kill()  # Processes that it has left behind.
                self._guard.remove(process.popen.pid)
        for chore in self._chores:
            chore()

    def sleep(self, seconds: float) -> None:
        """Polls for the time, less when a signal comes."""
        deadline = time.monotonic() + seconds
        while self.signal is None and (left := deadline - time.monotonic()) > 0:
            self.poll(min(left, TICK_SECONDS))

    def drain(self, processes: Sequence[Process]) -> None:
        """Passes on the last output of processes that have ended, and closes their files."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        while time.monotonic() < deadline and any(map(self._is_open, processes)):
            self.poll()
        for process in processes:
            self._close(process)

    def _is_open(self, process: Process) -> bool:
        return any(o.pipe in self._selector.get_map() for o in self._outputs.get(process, ()))

    def _close(self, process: Process) -> None:
        if process not in self._outputs:
            return
        for output in self._outputs.pop(process):
            if output.pipe in self._selector.get_map():
                self._selector.unregister(output.pipe)
            output.pipe.close()
        if process.popen.stdin is not None:
            process.popen.stdin.close()
        if (log := self._logs.pop(process)) is not None:
            log.close()
        self._processes.remove(process)

    def _pump(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if not isinstance(key.data, Output):
                key.data()
            elif not key.data.pump():
                self._selector.unregister(key.fileobj)

    def _abandon(self) -> None:
        """Ends everything when nobody reads our output any more."""
        self.signal, self.is_hurried = signal.SIGPIPE, True
        # Python would fail once more when it flushes the rest at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def _on_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            self.unwatch(sys.stdin)
            self._on_signal(signal.SIGTERM, None)

    def _on_signal(self, signum: int, frame) -> None:
        if self.signal is not None:
            self.is_hurried = True
        else:
            self.signal = signum


def say(text: str) -> None:
    """A message of the launcher itself."""
    with contextlib.suppress(BrokenPipeError):
        print(text, file=sys.stderr, flush=True)
