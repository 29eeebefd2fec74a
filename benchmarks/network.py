"""A small network inside of this machine: hosts as network namespaces, links of a given speed.

Each host is a namespace with an interface ``eth0``; all hang on a bridge in one more namespace. A
token bucket filter shapes both directions of each link, like a network card that sends and
receives at the same time. There is no route out. Needs Linux, root, ``ip`` and ``tc``.
"""

import contextlib
import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

SUBNET = "10.77.0"
PORT = 20_000
LEAST_BURST = 70_000
"""Bytes. Kernels hand over segments of up to 64 kB at once; a smaller bucket would cut them up,
which takes five times the processor time and is not what network cards do."""

_RATE_UNITS = {"": 1, "bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_DELAY_UNITS = {"": 1, "s": 1, "ms": 1e-3, "us": 1e-6}
_QUEUE = "50ms"
_numbers = itertools.count()


class NetworkUnavailable(RuntimeError):
    """This machine, or this user, can't have such a network; the message says why."""


class Hosts(NamedTuple):
    """Where the workers run."""

    addresses: list[str]  # "host:port" of each worker
    prefixes: list[list[str]]  # what to put before a worker's command
    interface: str  # of each host, to the others
    is_private: bool  # whether nothing but the worker uses its interface
    how: str  # in words


def bits_per_second(rate):
    """The number that a text such as ``100mbit`` stands for; 0 is unlimited."""
    return _number(rate, _RATE_UNITS, "a rate such as 100mbit or 1gbit, or 0 for no limit")


def seconds(delay):
    """The number that a text such as ``1ms`` stands for."""
    return _number(delay, _DELAY_UNITS, "a delay such as 1ms or 500us, or 0 for none")


def loopback(count):
    """Workers side by side on this machine, without any network."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    interface = "lo0" if sys.platform == "darwin" else "lo"
    return Hosts(addresses, [[] for _ in range(count)], interface, False, "loopback")


def require():
    """Raises NetworkUnavailable unless this process may make namespaces."""
    reason = None
    if missing := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        reason = f"{' and '.join(missing)} not found (package iproute2)"
    elif os.geteuid() != 0:
        reason = "only root may make them"
    if reason:
        raise NetworkUnavailable(
            f"The workers run in network namespaces of their own, which can't be made here: "
            f"{reason}."
        )


@contextlib.contextmanager
def hosts(count, rate="0", delay="0"):
    """Makes a network of ``count`` hosts, and takes it away again however the body ends.

    Args:
        rate: of each link in each direction, such as ``100mbit``; ``0`` is unlimited.
        delay: on the way from a host to another, such as ``1ms``; by netem, or where the kernel
            has none by a switch in user space, which takes processor time for each packet.

    Raises:
        NetworkUnavailable: not permitted, or no means of adding the delay.
    """
    require()
    bits, wait = bits_per_second(rate), seconds(delay)
    run = f"tfdist-{os.getpid()}-{next(_numbers)}"  # so that two runs do not meet
    names = [f"{run}-{i}" for i in range(count)]
    switch = f"{run}-switch"
    with contextlib.ExitStack() as stack:
        for name in (switch, *names):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
            _ip("-n", name, "link", "set", "lo", "up")
        if wait and not _has_netem(switch):
            how = "namespaces, switch in user space"
            stack.enter_context(_user_space_switch(switch, names, bits, wait))
        else:
            how = "namespaces, bridge" + (", netem" if wait else "")
            _bridge(switch, names, bits)
        for i, name in enumerate(names):
            _ip("-n", name, "link", "set", "eth0", "address", f"02:77:00:00:00:{i:02x}")
            _ip("-n", name, "address", "add", f"{SUBNET}.{i + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _shape(name, "eth0", bits, wait if "netem" in how else 0)
        addresses = [f"{SUBNET}.{i + 1}:{PORT}" for i in range(count)]
        prefixes = [["ip", "netns", "exec", name] for name in names]
        yield Hosts(addresses, prefixes, "eth0", True, how)


# ------------------------------------------------------------------------------------------


def _number(text, units, expected):
    found = re.fullmatch(r"(\d+\.?\d*)([a-z]*)", text)
    if not found or found.group(2) not in units:
        raise ValueError(f"expected {expected}, got {text}")
    return float(found.group(1)) * units[found.group(2)]


def _ip(*arguments):
    _call("ip", *arguments)


def _call(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NetworkUnavailable(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def _bridge(switch, names, bits):
    _ip("-n", switch, "link", "add", "br0", "type", "bridge")
    _ip("-n", switch, "link", "set", "br0", "up")
    for i, name in enumerate(names):
        port = f"port{i}"
        end = ("peer", "name", port, "netns", switch)
        _ip("-n", name, "link", "add", "eth0", "type", "veth", *end)
        _ip("-n", switch, "link", "set", port, "master", "br0", "up")
        _shape(switch, port, bits, 0)


def _shape(name, device, bits, wait):
    """Limits what leaves through a device, and delays it."""
    add = ("tc", "-n", name, "qdisc", "add", "dev", device)
    parent = ("root",)
    if bits:
        burst = max(LEAST_BURST, int(bits / 8 * 1e-3))
        shaper = ("handle", "1:", "tbf", "rate", f"{bits:.0f}bit", "burst", str(burst))
        _call(*add, "root", *shaper, "latency", _QUEUE)
        parent = ("parent", "1:1", "handle", "10:")
    if wait:
        _call(*add, *parent, "netem", "delay", f"{wait * 1e6:.0f}us", "limit", "10000")


def _has_netem(name):
    command = ("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1us")
    if subprocess.run(command, capture_output=True).returncode:
        return False
    _call("tc", "-n", name, "qdisc", "delete", "dev", "lo", "root")
    return True


@contextlib.contextmanager
def _user_space_switch(switch, names, bits, wait):
    """The hosts on a program that passes on their frames, each after the delay."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if not compiler or not Path("/dev/net/tun").exists():
        raise NetworkUnavailable(
            "Delays are left out: this kernel has no netem, and the switch that takes its place "
            "needs g++ and /dev/net/tun."
        )
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        program, log = Path(folder) / "switch", Path(folder) / "log"
        _call(compiler, "-O2", "-std=c++17", "-o", program.as_posix(), _switch_source())
        numbers = (str(len(names)), f"{wait * 1e6:.0f}", f"{bits:.0f}")
        process = subprocess.Popen(
            ["ip", "netns", "exec", switch, program, *numbers],
            stdin=subprocess.DEVNULL,
            stdout=stack.enter_context(log.open("wb")),
            stderr=subprocess.STDOUT,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        deadline = time.monotonic() + 10
        while log.read_text() != "ready\n":
            if process.poll() is not None or time.monotonic() > deadline:
                raise NetworkUnavailable(f"The switch did not start: {log.read_text().strip()}")
            time.sleep(0.02)
        for i, name in enumerate(names):
            _ip("-n", switch, "link", "set", f"tap{i}", "netns", name, "name", "eth0")
        yield


def _switch_source():
    return (Path(__file__).resolve().parent / "switch.cc").as_posix()
