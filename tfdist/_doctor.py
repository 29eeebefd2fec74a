"""`tfdist doctor`: versions, cluster, devices, and how fast the workers reach each other."""

import argparse
import contextlib
import importlib.metadata
import os
import platform
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Mapping

import tfdist
from tfdist import cluster as clusters
from tfdist.rendezvous import listen, rendezvous

_TICK_SECONDS = 0.05
_PINGS = 20
_BULK_BYTES = 8 << 20
_ECHO_TIMEOUT_SECONDS = 20.0


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    versions = _versions()
    print("versions", *(f"  {name} {version}" for name, version in versions.items()), sep="\n")
    healthy = "missing" not in versions.values()
    healthy &= _examine_cluster(versions, args.startup_timeout)
    healthy &= _examine_devices()
    print("healthy" if healthy else "not healthy: see above")
    return 0 if healthy else 1


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "tfdist": tfdist.__version__}
    for package in ("tensorflow", "keras", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    return versions


def _examine_cluster(versions: Mapping[str, str], timeout_seconds: float | None) -> bool:
    try:
        cluster = clusters.resolve()
    except clusters.ClusterError as error:
        print(f"cluster\n  {error}")
        return False
    print(f"cluster (from {cluster.source})")
    if not cluster.jobs:
        print("  a single process; no TF_CONFIG, MPI or Slurm variables")
        return True
    print(f"  this is {cluster.label}{', the chief' if cluster.is_chief else ''}")
    for job, addresses in cluster.jobs.items():
        print(f"  {job}: {', '.join(addresses)}")
    if cluster.task_type not in ("chief", "worker") or not cluster.peers():
        return True
    print("peers", flush=True)
    try:
        rendezvous(cluster, timeout_seconds=timeout_seconds, payload=versions)
        for label, address, seconds, rate in measure_peers(cluster):
            print(
                f"  {label} at {address}: round trip {seconds * 1e3:.2f} ms, "
                f"{rate / 1e6:.0f} MB/s to it"
            )
    except (clusters.ClusterError, OSError) as error:
        print(f"  {error}")
        return False
    return True


def _examine_devices() -> bool:
    print("devices", flush=True)
    try:
        import tensorflow as tf
    except ImportError as error:
        print(f"  TensorFlow cannot be imported: {error}")
        return False
    for device in tf.config.list_physical_devices():
        print(f"  {device.name.removeprefix('/physical_device:')}")
    return True


def measure_peers(cluster: clusters.Cluster) -> list[tuple[str, str, float, float]]:
    """Measures the way to each peer, all of which must call this at the same time.

    Listens on this task's address meanwhile. All tasks measure at once, so on a shared link the
    bandwidths are shares of it.

    Returns:
        (label, address, round trip in seconds, bytes per second) of each peer.

    Raises:
        OSError: a peer went away or is too slow.
    """
    peers = cluster.peers()
    deadline = time.monotonic() + _ECHO_TIMEOUT_SECONDS
    with _echoing(cluster, guests=len(peers), deadline=deadline):
        # Each begins with its successor, so that not all ask the same one first.
        first = cluster.rank % len(peers)
        results = {peer: _measure(peer[1], deadline) for peer in [*peers[first:], *peers[:first]]}
    return [(*peer, *results[peer]) for peer in peers]


@contextlib.contextmanager
def _echoing(cluster: clusters.Cluster, *, guests: int, deadline: float) -> Iterator[None]:
    """Echoes to this task's peers; on leaving, waits until all of them have been served."""
    with listen(cluster.address) as listener:
        listener.settimeout(_TICK_SECONDS)
        served = []
        thread = threading.Thread(target=_echo, args=(listener, guests, deadline, served))
        thread.start()
        try:
            yield
        finally:
            thread.join()
    if len(served) < guests:
        raise TimeoutError(f"only {len(served)} of {guests} peers came to measure this task")


def _echo(listener: socket.socket, guests: int, deadline: float, served: list) -> None:
    while len(served) < guests and time.monotonic() < deadline:
        try:
            connection, address = listener.accept()
        except TimeoutError:
            continue
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_ECHO_TIMEOUT_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(_PINGS):
                connection.sendall(_receive(connection, 1))
            left = _BULK_BYTES
            while left:
                left -= len(_receive(connection, min(left, 1 << 20)))
            connection.sendall(b"!")
            connection.recv(1)  # The client closes first: its end keeps no port busy.
            served.append(address)


def _measure(address: str, deadline: float) -> tuple[float, float]:
    where = clusters.split_address(address)
    while True:
        # Right after the rendezvous the peer may not listen yet, or its listener of the rendezvous
        # may still be there and about to close.
        try:
            return _measure_once(where)
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_TICK_SECONDS)


def _measure_once(where: tuple[str, int]) -> tuple[float, float]:
    with socket.create_connection(where, timeout=_ECHO_TIMEOUT_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        round_trips = []
        for _ in range(_PINGS):
            started = time.perf_counter()
            connection.sendall(b"?")
            _receive(connection, 1)
            round_trips.append(time.perf_counter() - started)
        started = time.perf_counter()
        connection.sendall(bytes(_BULK_BYTES))
        _receive(connection, 1)
        rate = _BULK_BYTES / (time.perf_counter() - started)
    return statistics.median(round_trips), rate


def _receive(connection: socket.socket, limit: int) -> bytes:
    if not (data := connection.recv(limit)):
        raise ConnectionResetError("the peer has closed the connection")
    return data
