"""Which process of a job runs where, with which share of its machine. Starts nothing."""

import collections
import contextlib
import dataclasses
import os
import socket
from collections.abc import Mapping, Sequence

from tfdist import cluster as clusters

FIRST_PORT = 12345
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


class UsageError(ValueError):
    """The options on the command line do not fit together."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One process of the job: its place in the cluster, and the host that runs it."""

    job: str
    index: int
    host: str
    address: str | None  # None for an evaluator, which nobody connects to
    slot: int | None = None  # of a worker: which one of the full job it is

    @property
    def label(self) -> str:
        return self.job if self.job in ("chief", "evaluator") else f"{self.job} {self.index}"


def parse_hosts(text: str) -> dict[str, int]:
    """Reads ``"A:2,B:2"``; a host without a number has one worker.

    Returns:
        host -> number of workers, in the order given.

    Raises:
        UsageError: a host has no name, is there twice, or its number is not 1 or more.
    """
    hosts = {}
    for item in filter(None, map(str.strip, text.split(","))):
        host, colon, count = item.rpartition(":")
        if not colon or item.endswith("]"):
            host, count = item, "1"
        if not host or not count.isdecimal() or int(count) < 1:
            raise UsageError(f"--hosts must look like A:2,B:2, got {item!r}.")
        if host in hosts:
            raise UsageError(f"--hosts names {host} twice; give it once, with {host}:N.")
        hosts[host] = int(count)
    if not hosts:
        raise UsageError("--hosts names no host; give them as A:2,B:2.")
    return hosts


def parse_hosts_file(text: str) -> dict[str, int]:
    """Reads one host a line, as ``A``, ``A:2`` or ``A slots=2``; `#` starts a comment.

    Raises:
        UsageError: as :func:`parse_hosts`.
    """
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return parse_hosts(",".join(":".join(line.split()).replace("slots=", "") for line in lines))


def plan(
    *,
    workers: int,
    ps: int = 0,
    chief: bool = False,
    evaluator: bool = False,
    hosts: Mapping[str, int] | None = None,
    first_port: int = FIRST_PORT,
    slots: Sequence[int] | None = None,
) -> list[Task]:
    """Says which task runs where and at which address.

    With hosts, nothing but the arguments decides, so each host's launcher works out the same
    list: workers fill the hosts in the order given; a chief, parameter servers and an evaluator
    join the first host; a host's tasks take its ports from `first_port` on. Without hosts, all
    run here, at free loopback ports.

    Args:
        workers: number of workers on this machine; with hosts, their numbers count instead.
        ps: number of parameter servers.
        chief: whether there is a chief.
        evaluator: whether there is an evaluator.
        hosts: host -> number of workers.
        first_port: with hosts, the first port of each.
        slots: which of all these workers take part, by their numbers; the others leave no gap.
    """
    homes = homes_of_workers(workers, hosts)
    taking_part = range(len(homes)) if slots is None else slots
    with_address = [
        *([("chief", 0, homes[0], None)] if chief else []),
        *(("worker", index, homes[slot], slot) for index, slot in enumerate(taking_part)),
        *(("ps", index, homes[0], None) for index in range(ps)),
    ]
    if hosts:
        taken = collections.Counter()
        ports = []
        for _, _, host, _ in with_address:
            ports.append(first_port + taken[host])
            taken[host] += 1
        if max(ports) > 65535:
            raise UsageError(f"--port {first_port} leaves too few ports below 65536.")
    else:
        ports = clusters.local_ports(len(with_address))
    tasks = [
        Task(job, index, host, f"{host}:{port}", slot)
        for (job, index, host, slot), port in zip(with_address, ports, strict=True)
    ]
    return tasks + ([Task("evaluator", 0, homes[0], None)] if evaluator else [])


def homes_of_workers(workers: int, hosts: Mapping[str, int] | None = None) -> list[str]:
    """The host of each worker of the full job; see :func:`plan`."""
    return [host for host, count in (hosts or {"127.0.0.1": workers}).items() for _ in range(count)]


def task_config(
    task: Task,
    tasks: Sequence[Task],
    startup_timeout_seconds: float,
    nominal_workers: int | None = None,
) -> str:
    """TF_CONFIG of one task.

    Args:
        task: the task.
        tasks: all of them.
        startup_timeout_seconds: how long it waits for its peers.
        nominal_workers: how many train in the full job, where some may be missing now.
    """
    jobs = {}
    for other in tasks:
        if other.address is not None:
            jobs[other.job] = (*jobs.get(other.job, ()), other.address)
    return clusters.Cluster(
        jobs, task.job, task.index, "TF_CONFIG", startup_timeout_seconds, nominal_workers
    ).tf_config()


def thread_variables(
    environ: Mapping[str, str], *, processes: int, threads: int | None = None
) -> dict[str, str]:
    """Environment variables that share this machine's cores among the processes.

    Args:
        environ: variables that are already there, which stay as they are.
        processes: number of processes on this machine.
        threads: threads per process; wins over `environ`. By default cores / processes.
    """
    if threads is not None:
        return dict.fromkeys(_THREAD_VARIABLES, str(threads))
    share = str(max(1, _num_cores() // processes))
    return {name: share for name in _THREAD_VARIABLES if name not in environ}


def gpu_variables(
    environ: Mapping[str, str], task: Task, trainers: Sequence[Task], num_gpus: int
) -> dict[str, str]:
    """Environment variables that share this machine's GPUs among the processes that train.

    Args:
        environ: variables that are already there, which stay as they are.
        task: the task to start.
        trainers: all tasks on this machine that train.
        num_gpus: GPUs of this machine.

    Raises:
        UsageError: there are fewer GPUs than tasks that train.
    """
    if num_gpus == 0 or "CUDA_VISIBLE_DEVICES" in environ or len(trainers) < 2:
        return {}
    if task not in trainers:
        return {"CUDA_VISIBLE_DEVICES": "-1"}
    share = num_gpus // len(trainers)
    if share == 0:
        raise UsageError(
            f"{len(trainers)} workers on this machine need a GPU each, but it has {num_gpus}. "
            "Start fewer, or set CUDA_VISIBLE_DEVICES (-1 trains on the CPU)."
        )
    first = trainers.index(task) * share
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + share)))}


def num_gpus() -> int:
    """GPUs of this machine, as NVIDIA's driver shows them on Linux."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    return 0


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def own_host(hosts: Sequence[str], *, name: str | None = None) -> str | None:
    """Finds which of the hosts this machine is.

    Args:
        hosts: their names or addresses.
        name: the answer, when it is given.

    Returns:
        The host; None when it is none of them.

    Raises:
        UsageError: `name` is not among them, or several of them are this machine.
    """
    if name is not None:
        if name not in hosts:
            raise UsageError(f"--host {name} is not one of --hosts: {', '.join(hosts)}.")
        return name
    own = socket.gethostname()
    matches = [host for host in hosts if host in (own, own.partition(".")[0])]
    matches = matches or [host for host in hosts if _is_here(host)]
    if len(matches) > 1:
        raise UsageError(
            f"--hosts: {' and '.join(matches)} are all this machine; say which one with --host."
        )
    return matches[0] if matches else None


def _is_here(host: str) -> bool:
    """Whether an address of the host is one of this machine's."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(
            host.strip("[]"), 0, type=socket.SOCK_DGRAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    return False
