"""What a process prints, line by line, with its name before each line."""

import collections
import os
from typing import BinaryIO

_LONGEST_LINE_BYTES = 1 << 20


def split_lines(pending: bytes, chunk: bytes) -> tuple[list[bytes], bytes]:
    """Cuts output into complete lines, at line feeds and at carriage returns.

    A progress bar that rewrites its line thus becomes one line per state.

    Args:
        pending: what the previous call left.
        chunk: new output.

    Returns:
        The complete lines without their ends, and the rest.
    """
    data = (pending + chunk).replace(b"\r\n", b"\n").replace(b"\b", b"")
    held = b"\r" if data.endswith(b"\r") else b""  # Perhaps the first half of "\r\n".
    *complete, rest = data.removesuffix(b"\r").split(b"\n")
    lines = []
    for line in complete:
        lines += [state for state in line.split(b"\r") if state] or [b""]
    *states, rest = rest.split(b"\r")
    lines += [state for state in states if state]
    if len(rest) > _LONGEST_LINE_BYTES:
        lines, rest = [*lines, rest], b""
    return lines, rest + held


class Output:
    """One of the two output streams of a process: adds the prefix and keeps the last lines.

    Args:
        pipe: the stream.
        target: where the lines go.
        prefix: what each of them begins with.
        log: file that gets everything unchanged, or None.
        last_lines: gets each line; both streams of a process share it.
    """

    def __init__(
        self,
        pipe: BinaryIO,
        target: BinaryIO,
        *,
        prefix: bytes,
        log: BinaryIO | None,
        last_lines: collections.deque,
    ):
        os.set_blocking(pipe.fileno(), False)
        self.pipe = pipe
        self._target = target
        self._prefix = prefix
        self._log = log
        self._last_lines = last_lines
        self._pending = b""

    def pump(self) -> bool:
        """Passes on what has arrived. Returns whether the stream is still open.

        Raises:
            BrokenPipeError: nobody reads the launcher's output any more.
        """
        try:
            chunk = os.read(self.pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        lines, self._pending = split_lines(self._pending, chunk)
        if not chunk and (rest := self._pending.strip(b"\r")):
            lines.append(rest)
        if self._log is not None:
            self._log.write(chunk)
        self._last_lines.extend(lines)
        self._target.write(b"".join(self._prefix + line + b"\n" for line in lines))
        self._target.flush()
        return bool(chunk)
