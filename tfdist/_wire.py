"""Lines of JSON over a connection that never blocks: how tasks, and how launchers, talk.

Nothing here is encrypted or authenticated, and neither is TensorFlow's own traffic.
"""

import contextlib
import json
import socket
import time
from collections.abc import Mapping

PROTOCOL = {"magic": "tfdist", "version": 1}
MAX_LINE_BYTES = 1 << 16


class NotOurs(Exception):
    """What arrived is not a line of this protocol."""


class Wire:
    """One non-blocking connection that carries lines of JSON."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.opened_at = time.monotonic()
        self._inbox = bytearray()
        self._outbox = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def wants_to_write(self) -> bool:
        return bool(self._outbox)

    def send(self, message: Mapping) -> None:
        """Queues a message; :meth:`flush` sends it."""
        self._outbox += json.dumps(message).encode() + b"\n"

    def flush(self) -> None:
        """Sends what the system takes now. Raises OSError when the connection is broken."""
        with contextlib.suppress(BlockingIOError):
            while self._outbox:
                del self._outbox[: self.socket.send(self._outbox)]

    def receive(self) -> list[dict]:
        """Returns the messages that have arrived.

        Raises:
            EOFError: the other side has closed the connection.
            OSError: the connection is broken.
            NotOurs: something else speaks there.
        """
        ended = False
        with contextlib.suppress(BlockingIOError):
            while len(self._inbox) <= MAX_LINE_BYTES:
                if not (chunk := self.socket.recv(1 << 16)):
                    ended = True
                    break
                self._inbox += chunk
        *lines, rest = bytes(self._inbox).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise NotOurs
        self._inbox[:] = rest
        messages = [_parsed(line) for line in lines]
        if ended and not messages:
            raise EOFError
        return messages


def _parsed(line: bytes) -> dict:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise NotOurs from None
    if not isinstance(message, dict) or message.get("magic") != PROTOCOL["magic"]:
        raise NotOurs
    return message
