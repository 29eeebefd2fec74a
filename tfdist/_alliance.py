"""Launchers of several hosts do one job: the first host's decides, the others obey.

Each other launcher opens one connection to the first host's, and starts, ends and kills its own
processes as it is told; it reports how they get on and how they end. It decides nothing: when the
connection is lost, it ends what it has started. So there is nothing to agree on. A launcher that
has said nothing for some seconds is taken for gone, with all its processes.
"""

import contextlib
import hashlib
import json
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from tfdist import cluster as clusters
from tfdist._attempt import PREEMPTED
from tfdist._processes import Family, Process, say
from tfdist._wire import PROTOCOL, NotOurs, Wire
from tfdist.progress import NOTHING, Progress
from tfdist.rendezvous import listen

_REPORT_SECONDS = 0.5
_SILENCE_SECONDS = 10.0
_LEAVE_SECONDS = 2.0  # until what is left is killed when the first launcher is gone
_LINE_CHARACTERS = 500  # of each of the last lines of a process
_GONE = 255


def digest(settings) -> str:
    """A short text that differs when the settings (JSON-able) of two launchers do."""
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]


class RemoteProcess:
    """A process that another host's launcher runs; see :class:`tfdist._processes.Process`."""

    def __init__(self, label: str, host: "_Host", number: int):
        self.label = label
        self.code: int | None = None
        self.how: str | None = None
        self.last_lines: deque[bytes] = deque()
        self.progress = NOTHING
        self.is_stopped = False
        self._host = host
        self._number = number

    def ask_to_end(self) -> None:
        """SIGTERM."""
        self._host.send({"do": "end", "process": self._number})

    def kill(self) -> None:
        """SIGKILL."""
        self._host.send({"do": "kill", "process": self._number})

    def dump_stacks(self) -> None:
        """Makes it print its Python stacks."""
        self._host.send({"do": "dump", "process": self._number})

    def take(self, report) -> None:
        """Takes over what the other launcher has seen."""
        *counters, self.is_stopped = report
        self.progress = Progress(*counters)

    def lose(self) -> None:
        """Nobody will ever tell how it ended."""
        if self.code is None:
            self.code = _GONE
            self.how = f"is gone: the launcher of host {self._host.name} does not answer"


class _Host:
    """The first launcher's end of the connection to another one."""

    def __init__(self, name: str, wire: Wire):
        self.name = name
        self.wire = wire
        self.heard_at = time.monotonic()
        self.processes: dict[int, RemoteProcess] = {}
        self.is_broken = False

    def send(self, message) -> None:
        if self.is_broken:
            return
        self.wire.send({**PROTOCOL, **message})
        try:
            self.wire.flush()
        except OSError:
            self.is_broken = True


class Leader:
    """The first host's side.

    Args:
        family: the launcher's processes; their `poll` serves the connections.
        hosts: names of the other hosts.
        address: ``"host:port"`` to listen at.
        job: :func:`digest` of the job.

    Raises:
        ClusterError: the port is taken.
    """

    def __init__(self, family: Family, hosts: Sequence[str], address: str, job: str):
        self._family = family
        self._names = list(hosts)
        self._job = job
        self._hosts: dict[str, _Host] = {}
        self._guests: list[Wire] = []
        self._next_number = 0
        self._reported_at = 0.0
        self._listener = listen(address)
        self._listener.setblocking(False)
        family.watch(self._listener, self._accept)
        family.add_chore(self._look_after)

    @property
    def present(self) -> set[str]:
        """The hosts whose launchers are there."""
        return set(self._hosts)

    def wait_for(self, seconds: float, call: Callable[[Collection[str]], bool]) -> set[str]:
        """Waits for the other hosts. Returns those that are missing.

        Args:
            seconds: at most so long.
            call: ``call(missing)`` is tried all the while; returns whether it is hopeless.
        """
        deadline = time.monotonic() + seconds
        while missing := set(self._names) - self.present:
            if time.monotonic() > deadline or self._family.signal is not None or call(missing):
                return missing
            self._family.poll()
        return set()

    def start(self, host: str, label: str, attempt: int, slots: Collection[int]) -> RemoteProcess:
        """Has another host start one of its processes."""
        self._next_number += 1
        number = self._next_number
        if (there := self._hosts.get(host)) is None:
            there = _Host(host, None)
            there.is_broken = True
        process = RemoteProcess(label, there, number)
        there.processes[number] = process
        order = {"process": number, "label": label, "attempt": attempt, "slots": list(slots)}
        there.send({"do": "start", **order})
        if there.is_broken:
            process.lose()
        return process

    def say_goodbye(self, status: int, seconds: float = 5.0) -> None:
        """Ends the other launchers, with this exit status."""
        for host in self._hosts.values():
            host.send({"do": "leave", "status": status})
        deadline = time.monotonic() + seconds
        while self._hosts and time.monotonic() < deadline:
            self._family.poll()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            wire = Wire(connection)
            self._guests.append(wire)
            self._family.watch(wire, lambda: self._hear_guest(wire))

    def _hear_guest(self, wire: Wire) -> None:
        """The first message of a connection says who it is."""
        try:
            first, *_ = wire.receive() or [None]
        except (EOFError, OSError, NotOurs):
            self._dismiss(wire)
            return
        if first is None:
            return
        name = first.get("host")
        if name not in self._names:
            refusal = f"{name} is not one of the other hosts: {', '.join(self._names)}"
        elif first.get("job") != self._job:
            refusal = "it was started with other options; give the same ones on each host"
        elif name in self._hosts:
            refusal = f"a launcher of host {name} is there already"
        else:
            host = self._hosts[name] = _Host(name, wire)
            self._guests.remove(wire)
            self._family.unwatch(wire)
            self._family.watch(wire, lambda: self._hear(host))
            host.send({"do": "welcome"})
            return
        with contextlib.suppress(OSError):
            wire.send({**PROTOCOL, "do": "refused", "why": refusal})
            wire.flush()
        self._dismiss(wire)

    def _dismiss(self, wire: Wire) -> None:
        self._guests.remove(wire)
        self._family.unwatch(wire)
        wire.socket.close()

    def _hear(self, host: _Host) -> None:
        try:
            messages = host.wire.receive()
        except (EOFError, OSError, NotOurs):
            self._lose(host)
            return
        host.heard_at = time.monotonic()
        for message in messages:
            for number, report in message.get("reports", {}).items():
                if process := host.processes.get(int(number)):
                    process.take(report)
            if process := host.processes.pop(message.get("ended"), None):
                process.last_lines = deque(line.encode() for line in message["lines"])
                process.how = message.get("how")
                process.code = message["code"]

    def _look_after(self) -> None:
        now = time.monotonic()
        if now - self._reported_at > _REPORT_SECONDS:
            self._reported_at = now
            for host in self._hosts.values():
                host.send({"do": "stay"})
        for wire in list(self._guests):
            if time.monotonic() - wire.opened_at > _SILENCE_SECONDS:
                self._dismiss(wire)
        for host in list(self._hosts.values()):
            if host.is_broken or now - host.heard_at > _SILENCE_SECONDS:
                self._lose(host)

    def _lose(self, host: _Host) -> None:
        self._family.unwatch(host.wire)
        host.wire.socket.close()
        host.is_broken = True
        del self._hosts[host.name]
        for process in host.processes.values():
            process.lose()


class Follower:
    """The side of every other host.

    Args:
        family: the launcher's processes.
        host: which one this is.
        leader: ``"host:port"`` of the first host's launcher.
        job: :func:`digest` of the job.
        start: ``start(label, attempt, slots)`` starts one of this host's processes.
        grace_seconds: from SIGTERM to SIGKILL.
    """

    def __init__(
        self,
        family: Family,
        *,
        host: str,
        leader: str,
        job: str,
        start: Callable[[str, int, Sequence[int]], Process],
        grace_seconds: float,
    ):
        self._family = family
        self._host = host
        self._leader = leader
        self._job = job
        self._start = start
        self._grace = grace_seconds
        self._wire: Wire | None = None
        self._processes: dict[int, Process] = {}
        self._codes: list[int] = []  # of those that have ended in this attempt
        self._attempt = 0
        self._status: int | None = None  # set when the first launcher lets us go
        self._heard_at = self._reported_at = time.monotonic()

    def run(self, startup_timeout: float) -> int:
        """Serves the first launcher until it lets go, is gone, or a signal comes.

        Returns:
            The exit status.

        Raises:
            PeersUnreachable: the first launcher does not answer within ``startup_timeout``.
            ClusterError: it has another job.
        """
        self._connect(startup_timeout)
        while self._status is None and self._family.signal is None:
            self._family.poll()
            self._report()
            if time.monotonic() - self._heard_at > _SILENCE_SECONDS:
                self._lose()
        if self._family.signal is not None:
            self._status = self._obey_signal()
        elif self._processes:
            self._end_all(_LEAVE_SECONDS)
        self._hang_up()
        return self._status

    def _connect(self, startup_timeout: float) -> None:
        where = clusters.split_address(self._leader)
        deadline = time.monotonic() + startup_timeout
        while self._family.signal is None:
            try:
                connection = socket.create_connection(where, timeout=2.0)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise clusters.PeersUnreachable(
                        f"the launcher of the first host does not answer at {self._leader} "
                        f"({error}) within {startup_timeout:g} s; start it with the same command "
                        "there, and look at the firewalls between the hosts.",
                        [self._leader],
                    ) from None
                self._family.sleep(0.2)
        else:
            return
        connection.setblocking(False)
        self._wire = Wire(connection)
        self._heard_at = time.monotonic()
        self._family.watch(self._wire, self._hear)
        self._send({"host": self._host, "job": self._job})

    def _send(self, message) -> None:
        if self._wire is None:
            return
        self._wire.send({**PROTOCOL, **message})
        try:
            self._wire.flush()
        except OSError:
            self._lose()

    def _hear(self) -> None:
        try:
            messages = self._wire.receive()
        except (EOFError, OSError, NotOurs):
            self._lose()
            return
        self._heard_at = time.monotonic()
        for message in messages:
            self._obey(message)

    def _obey(self, order) -> None:
        what, number = order.get("do"), order.get("process")
        if what == "start":
            if order["attempt"] != self._attempt:
                self._attempt, self._codes = order["attempt"], []
            self._processes[number] = self._start(order["label"], self._attempt, order["slots"])
        elif what == "leave":
            self._status = order["status"]
        elif what == "refused":
            raise clusters.ClusterError(f"the first host's launcher refuses: {order['why']}.")
        elif process := self._processes.get(number):
            action = {"end": process.ask_to_end, "kill": process.kill, "dump": process.dump_stacks}
            action[what]()

    def _report(self) -> None:
        for number, process in list(self._processes.items()):
            if process.code is not None:
                self._family.drain([process])
                del self._processes[number]
                self._codes.append(process.code)
                lines = [line.decode(errors="replace") for line in process.last_lines]
                self._send(
                    {
                        "reports": {number: _report_of(process)},
                        "ended": number,
                        "code": process.code,
                        "lines": [line[:_LINE_CHARACTERS] for line in lines],
                    }
                )
        now = time.monotonic()
        if now - self._reported_at > _REPORT_SECONDS:
            self._reported_at = now
            self._send({"reports": {n: _report_of(p) for n, p in self._processes.items()}})
        elif self._wire is not None and self._wire.wants_to_write:
            with contextlib.suppress(OSError):
                self._wire.flush()

    def _lose(self) -> None:
        if self._status is None:
            say("tfdist run: the first host's launcher is gone; what runs here is ended.")
            self._status = 1
        self._hang_up()

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._family.unwatch(self._wire)
            self._wire.socket.close()
            self._wire = None

    def _obey_signal(self) -> int:
        self._end_all(self._grace)
        self._report()
        if self._codes and set(self._codes) <= {0, PREEMPTED} and PREEMPTED in self._codes:
            return PREEMPTED
        return 128 + self._family.signal

    def _end_all(self, grace_seconds: float) -> None:
        for process in self._processes.values():
            process.ask_to_end()
        deadline = time.monotonic() + grace_seconds
        while any(process.code is None for process in self._processes.values()):
            self._family.poll()
            if time.monotonic() > deadline or self._family.is_hurried:
                for process in self._processes.values():
                    process.kill()
            self._report()


def _report_of(process: Process) -> list:
    return [*process.progress, process.is_stopped]
