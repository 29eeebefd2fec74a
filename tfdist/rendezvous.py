"""Is everybody there? Before TensorFlow starts a server and waits on anything.

Each task listens on its own address and asks every peer for its greeting over a connection of
its own. When all peers have answered a task, it says "ready" on the connections it opened. A
task leaves when all peers have answered it and all have said ready to it: then every task has
reached every other one, and nobody needs its listener any more. So nobody leaves, and starts
TensorFlow's server on the port, before everybody has met; a port at which something else
answers (a server of an earlier run) is never a peer of this rendezvous.
"""

import contextlib
import dataclasses
import errno
import hashlib
import ipaddress
import json
import os
import selectors
import socket
import time
from collections.abc import Mapping
from types import MappingProxyType

from tfdist._wire import MAX_LINE_BYTES, PROTOCOL, NotOurs, Wire
from tfdist.cluster import (
    JOBS,
    TRAINING_JOBS,
    Cluster,
    ClusterError,
    PeersUnreachable,
    shown,
    split_address,
    task_label,
    training_tasks,
)

_ATTEMPT_SECONDS = 5.0  # to connect and to be answered, until the next try
_LONGEST_PAUSE_SECONDS = 1.0  # between two tries
_MISMATCH_GRACE_SECONDS = 3.0  # to let the others see a mismatch too
_CLOSING_SECONDS = 1.0  # for the peers to close their ends first


def rendezvous(
    cluster: Cluster,
    *,
    timeout_seconds: float | None = None,
    payload: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Returns when all tasks that train have reached one another.

    Afterwards the task's port is free for TensorFlow's server. Nothing is left open, and no
    thread is used. Returns at once for a single worker, a parameter server and an evaluator.
    Nothing here is encrypted or authenticated, and neither is TensorFlow's own traffic.

    Args:
        cluster: the cluster as this task knows it; all must know the same one.
        timeout_seconds: how long to wait, by default `cluster.startup_timeout_seconds`. A name
            server that does not answer can prolong it by its own time-out.
        payload: settings in which all tasks must agree, at most about 60 kB. The key "cluster"
            is ours.

    Raises:
        ClusterError: the port is taken, or a peer has another cluster, payload or version.
        PeersUnreachable: some peers were not there in time.
    """
    if cluster.task_type not in TRAINING_JOBS or cluster.num_workers == 1:
        return
    if timeout_seconds is None:
        timeout_seconds = cluster.startup_timeout_seconds
    meeting = _Meeting(cluster, payload)
    with contextlib.closing(meeting):
        meeting.listen()
        meeting.run(timeout_seconds)


@dataclasses.dataclass
class _Peer:
    """What a task knows of one other task.

    The ids are drawn anew by each process, so that a restarted peer is not mistaken for
    the one that was there before.
    """

    rank: int
    label: str
    address: str
    wire: Wire | None = None  # the connection that we opened
    connected: bool = False
    answered: str | None = None  # id of the process that answered us on `wire`
    told: str | None = None  # id of the process that we said ready to
    ready: str | None = None  # id of the process that said ready to us
    has_asked: bool = False  # somebody of this rank greeted us
    has_answered: bool = False  # at any time
    next_try: float = 0.0
    pause: float = 0.05
    attempts: int = 0
    trouble: str = "no answer"

    @property
    def is_done(self) -> bool:
        sent = self.wire is None or not self.wire.wants_to_write
        return self.told is not None and self.told == self.ready and sent

    def __str__(self):
        return f"{self.label} at {self.address}"


@dataclasses.dataclass
class _Guest:
    """A connection that somebody opened to us."""

    wire: Wire
    peer: _Peer | None = None
    id: str | None = None


class _Meeting:
    """The state of one rendezvous; a single thread waits on all of its sockets."""

    def __init__(self, cluster: Cluster, payload: Mapping[str, str]):
        self._cluster = cluster
        self._id = os.urandom(8).hex()
        self._settings = {key: str(value) for key, value in payload.items()}
        self._settings["cluster"] = _summary(cluster.jobs)
        self._greeting = {
            **PROTOCOL,
            "rank": cluster.rank,
            "id": self._id,
            "settings": self._settings,
        }
        if len(json.dumps(self._greeting)) > MAX_LINE_BYTES:
            raise ClusterError(f"rendezvous: the payload must be below {MAX_LINE_BYTES} bytes.")
        self._peers = {
            rank: _Peer(rank, task_label(*task), address)
            for rank, (task, address) in enumerate(training_tasks(cluster.jobs))
            if rank != cluster.rank
        }
        self._guests: list[_Guest] = []
        self._listener: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._mismatch: str | None = None
        self._mismatch_at = 0.0

    def listen(self) -> None:
        self._listener = listen(self._cluster.address, backlog=max(128, len(self._peers)))
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        for peer in self._peers.values():
            self._hang_up(peer)
        for guest in list(self._guests):
            self._dismiss(guest)
        self._stop_listening()
        self._selector.close()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def run(self, timeout_seconds: float) -> None:
        started = time.monotonic()
        deadline = started + timeout_seconds
        while not all(peer.is_done for peer in self._peers.values()):
            if self._mismatch is not None:
                deadline = min(deadline, self._mismatch_at + _MISMATCH_GRACE_SECONDS)
                if all(peer.has_answered and peer.has_asked for peer in self._peers.values()):
                    break
            if time.monotonic() >= deadline:
                break
            self._open_connections()
            self._say_ready()
            self._wait(min(0.05, max(0.0, deadline - time.monotonic())))
        if self._mismatch is not None:
            raise ClusterError(self._mismatch)
        self._refuse_missing(timeout_seconds)
        self._part()

    # Our connections.

    def _open_connections(self) -> None:
        now = time.monotonic()
        for peer in self._peers.values():
            if peer.wire is not None:
                waited = now - peer.wire.opened_at
                if peer.answered is None and waited > _ATTEMPT_SECONDS:
                    self._retry(peer, "connected, but no answer" if peer.connected else "no answer")
            elif now >= peer.next_try and not peer.is_done:
                self._connect(peer)

    def _connect(self, peer: _Peer) -> None:
        host, port = split_address(peer.address)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self._retry(peer, f"unknown host: {getattr(error, 'strerror', None) or error}")
            return
        family, kind, protocol, _, address = found[peer.attempts % len(found)]
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        peer.wire, peer.connected = Wire(connection), False
        peer.wire.send(self._greeting)
        code = connection.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            connection.close()
            peer.wire = None
            self._retry(peer, os.strerror(code).lower())
            return
        self._selector.register(
            peer.wire,
            selectors.EVENT_READ | selectors.EVENT_WRITE,
            lambda events: self._serve_peer(peer, events),
        )

    def _serve_peer(self, peer: _Peer, events: int) -> None:
        wire = peer.wire
        try:
            if not peer.connected:
                if code := wire.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(code, os.strerror(code))
                if wire.socket.getsockname() == wire.socket.getpeername():
                    # A retry met its own source port: nobody listens there.
                    raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
                peer.connected = True
            wire.flush()
            if events & selectors.EVENT_READ:
                for message in wire.receive():
                    self._hear_answer(peer, message)
        except (EOFError, NotOurs):
            self._retry(peer, "another program answers there")
            return
        except OSError as error:
            self._retry(peer, (error.strerror or str(error)).lower())
            return
        self._watch(wire)

    def _hear_answer(self, peer: _Peer, message: Mapping) -> None:
        their_id = message.get("id")
        if not isinstance(their_id, str):
            raise NotOurs
        peer.answered, peer.has_answered = their_id, True
        if their_id == self._id:
            problem = f"is this very process, {self._cluster.label}"
        elif message.get("version") != PROTOCOL["version"]:
            problem = (
                f"speaks version {message.get('version')!r} of the rendezvous and this task "
                f"({self._cluster.label}) version {PROTOCOL['version']}; install the same tfdist"
            )
        elif message.get("rank") != peer.rank:
            problem = (
                f"says that its rank is {message.get('rank')!r} and not {peer.rank}; compare "
                "`cluster` and `task` of TF_CONFIG on both"
            )
        else:
            problem = self._difference(message.get("settings"))
        if problem is not None and self._mismatch is None:
            self._mismatch = f"{peer} {problem}."
            self._mismatch_at = time.monotonic()

    def _difference(self, theirs) -> str | None:
        if not isinstance(theirs, dict):
            return "sends no settings; install the same tfdist"
        for key in sorted(self._settings.keys() | theirs.keys(), key=lambda key: key != "cluster"):
            ours, other = (side.get(key, "not set") for side in (self._settings, theirs))
            if ours != other:
                return (
                    f"has another `{key}` than {self._cluster.label} at {self._cluster.address}: "
                    f"{shown(other)} there and {shown(ours)} here; make them equal"
                )
        return None

    def _retry(self, peer: _Peer, trouble: str) -> None:
        self._hang_up(peer)
        peer.answered = None
        peer.trouble = trouble
        peer.attempts += 1
        peer.next_try = time.monotonic() + peer.pause
        peer.pause = min(_LONGEST_PAUSE_SECONDS, peer.pause * 1.5)

    def _hang_up(self, peer: _Peer) -> None:
        if peer.wire is not None:
            self._selector.unregister(peer.wire)
            peer.wire.socket.close()
            peer.wire = None

    def _say_ready(self) -> None:
        if self._mismatch is not None:
            return
        if not all(peer.answered or peer.is_done for peer in self._peers.values()):
            return
        for peer in self._peers.values():
            if peer.wire is not None and peer.answered and peer.told != peer.answered:
                peer.wire.send({**PROTOCOL, "ready": True})
                peer.told = peer.answered
                try:
                    peer.wire.flush()
                except OSError as error:
                    self._retry(peer, (error.strerror or str(error)).lower())
                else:
                    self._watch(peer.wire)

    # Connections of others.

    def _accept(self, events: int) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._guests) > 4 * len(self._peers) + 64:
            connection.close()  # Not our peers: they need one or two each.
            return
        connection.setblocking(False)
        guest = _Guest(Wire(connection))
        self._guests.append(guest)
        self._selector.register(
            guest.wire, selectors.EVENT_READ, lambda events: self._serve_guest(guest)
        )

    def _serve_guest(self, guest: _Guest) -> None:
        try:
            guest.wire.flush()
            for message in guest.wire.receive():
                self._hear_guest(guest, message)
            guest.wire.flush()
        except (EOFError, OSError, NotOurs):
            self._dismiss(guest)
            return
        self._watch(guest.wire)

    def _hear_guest(self, guest: _Guest, message: Mapping) -> None:
        if message.get("ready") is True:
            if guest.peer is not None:
                guest.peer.ready = guest.id
            return
        rank, their_id = message.get("rank"), message.get("id")
        if not isinstance(their_id, str) or guest.id is not None:
            raise NotOurs
        guest.id = their_id
        guest.wire.send(self._greeting)
        peer = self._peers.get(rank) if isinstance(rank, int) else None
        if peer is None:
            return
        peer.has_asked = True
        # A task of another cluster has got its answer, and sees from it what differs. Whether that
        # concerns us is for the answers to our own questions to decide.
        if message.get("settings") != self._settings:
            return
        guest.peer = peer
        if peer.answered not in (None, their_id):
            self._retry(peer, "it was started again")
        if peer.wire is None:
            peer.next_try = 0.0  # It is there: no reason to pause.

    def _dismiss(self, guest: _Guest) -> None:
        self._selector.unregister(guest.wire)
        guest.wire.socket.close()
        self._guests.remove(guest)

    # Both.

    def _watch(self, wire: Wire) -> None:
        write = selectors.EVENT_WRITE if wire.wants_to_write else 0
        key = self._selector.get_key(wire)
        self._selector.modify(wire, selectors.EVENT_READ | write, key.data)

    def _wait(self, seconds: float) -> None:
        for key, events in self._selector.select(seconds):
            # An earlier event of this round may have closed the connection.
            if key.fileobj.fileno() >= 0:
                key.data(events)
        for guest in list(self._guests):
            if guest.id is None and time.monotonic() - guest.wire.opened_at > _ATTEMPT_SECONDS:
                self._dismiss(guest)

    def _refuse_missing(self, timeout_seconds: float) -> None:
        waiting = [peer for peer in self._peers.values() if not peer.is_done]
        if not waiting:
            return
        absent = [peer for peer in waiting if not peer.answered]
        # Those that answered and left have run out of time as well, for the same reason.
        absent = [peer for peer in absent if not peer.has_answered] or absent
        if absent:
            what = "did not answer"
            advice = (
                "Check that each of them was started, that the addresses are right and that no "
                "firewall is in the way."
            )
            named = [f"{peer} ({peer.trouble})" for peer in absent]
        else:
            what = "answered, but could not reach all tasks themselves"
            advice = "Look at what they report, and at the firewalls between the hosts."
            named = [str(peer) for peer in waiting]
        raise PeersUnreachable(
            f"{self._cluster.label} at {self._cluster.address} waited {timeout_seconds:g} s for "
            f"its {len(self._peers)} peers; {len(named)} {what}: {', '.join(named)}. {advice}",
            [str(peer) for peer in absent or waiting],
        )

    def _part(self) -> None:
        """Closes our connections first, and gives the peers a moment to close theirs.

        The side that closes first keeps the port of its end busy for a while, and the port of
        the peers' ends is the one that TensorFlow's server needs.
        """
        self._stop_listening()
        for peer in self._peers.values():
            self._hang_up(peer)
        deadline = time.monotonic() + _CLOSING_SECONDS
        while any(guest.peer for guest in self._guests) and time.monotonic() < deadline:
            self._wait(0.05)


def _summary(jobs: Mapping[str, tuple[str, ...]]) -> str:
    """The cluster in a few words that differ when it does."""
    # Evaluators stand beside the training, and not every task knows of them.
    known = {job: list(jobs.get(job, ())) for job in JOBS if job != "evaluator"}
    counts = ", ".join(f"{len(addresses)} {job}" for job, addresses in known.items() if addresses)
    text = json.dumps(known)
    return f"{counts} (digest {hashlib.sha256(text.encode()).hexdigest()[:12]})"


def listen(address: str, *, backlog: int = 128) -> socket.socket:
    """Listens on the address of this task.

    Loopback addresses are bound as they are. A name that resolves to a loopback address (as
    Debian's `/etc/hosts` has it for the machine's own name) or to an address that this machine
    does not have (behind a Kubernetes service or NAT) is bound on all interfaces.

    Args:
        address: ``"host:port"``.
        backlog: connections that may wait to be accepted.

    Raises:
        ClusterError: the port is taken or may not be used.
    """
    host, port = split_address(address)
    candidates = [*_bindable(host, port), *_all_interfaces(port)]
    for family, where in candidates:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # Old connections of the port, in TIME_WAIT, must not keep it from being used again.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if where == ("::", port):
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(where)
            listener.listen(backlog)
            return listener
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                raise ClusterError(
                    f"The address {address} of this task is already taken{_holder(port)}; end that "
                    "process, or give the task another port."
                ) from None
            if error.errno == errno.EACCES:
                raise ClusterError(
                    f"The address {address} of this task may not be used ({error.strerror}); give "
                    "the task a port above 1023."
                ) from None
            refusal = error
    raise ClusterError(f"The address {address} of this task cannot be used: {refusal}.")


def _bindable(host: str, port: int) -> list[tuple[int, tuple]]:
    """(family, socket address) of the host where it is sensible to bind it alone."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    addresses = [(family, where) for family, _, _, _, where in found]
    if host == "localhost" or _is_ip(host):
        return addresses
    return [
        (family, where)
        for family, where in addresses
        if not ipaddress.ip_address(where[0].partition("%")[0]).is_loopback
    ]


def _all_interfaces(port: int) -> list[tuple[int, tuple]]:
    both = [(socket.AF_INET6, ("::", port))] if socket.has_dualstack_ipv6() else []
    return [*both, (socket.AF_INET, ("", port))]


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _holder(port: int) -> str:
    """Who listens on a port, as " by process 12 (python train.py)"; "" where it is not known."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as lines:
            for fields in map(str.split, lines):
                if fields[1].endswith(f":{port:04X}") and fields[9].isdecimal():
                    inodes.add(f"socket:[{fields[9]}]")
    inodes.discard("socket:[0]")
    with contextlib.suppress(OSError):
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                descriptors = f"/proc/{pid}/fd"
                for number in os.listdir(descriptors):
                    if os.readlink(f"{descriptors}/{number}") in inodes:
                        with open(f"/proc/{pid}/cmdline") as cmdline:
                            command = cmdline.read().replace("\0", " ").strip()
                        return f" by process {pid} ({command[:80]})"
    return ""
