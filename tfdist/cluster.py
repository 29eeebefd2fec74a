"""Who takes part in this job, and is everybody there?

:func:`resolve` reads the cluster from the environment and checks it, and
:func:`rendezvous` proves that all workers can reach one another, both before TensorFlow starts a
server and waits on anything. This module does not import TensorFlow.
"""

import contextlib
import dataclasses
import errno
import hashlib
import ipaddress
import json
import math
import os
import random
import re
import selectors
import socket
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

DEFAULT_STARTUP_TIMEOUT_SECONDS = 120.0

_TRAINING_JOBS = ("chief", "worker")
_JOBS = (*_TRAINING_JOBS, "ps", "evaluator")

# Ports that we choose come from this range. It lies below the ports that systems give to outgoing
# connections (32768 and up on Linux), so that no connection takes a port before its server does,
# and no client that retries an unused loopback port ever connects to itself.
_FIRST_PORT, _LAST_PORT = 10_000, 32_000


class ClusterError(ValueError):
    """The description of the cluster is malformed, or its tasks do not agree on it."""


class PeersUnreachable(TimeoutError):
    """Some tasks did not take part in the rendezvous in time.

    Attributes:
        peers: the missing tasks, each as ``"worker 1 at host:port"``.
    """

    def __init__(self, message: str, peers: Iterable[str]):
        super().__init__(message)
        self.peers = list(peers)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The tasks of a job and which of them this process is.

    Args:
        jobs: job name ("chief", "worker", "ps", "evaluator") to ``"host:port"`` addresses;
            empty for a single process that no cluster was described to.
        task_type: the job of this process. An evaluator may be missing in ``jobs``.
        task_index: this process' position in its job, from 0.
        source: where the description comes from: "TF_CONFIG", "Slurm", "Open MPI", "PMI" or
            "none".
        startup_timeout_seconds: how long :func:`rendezvous` waits for the peers.
    """

    jobs: Mapping[str, tuple[str, ...]]
    task_type: str
    task_index: int
    source: str
    startup_timeout_seconds: float = DEFAULT_STARTUP_TIMEOUT_SECONDS

    @property
    def address(self) -> str | None:
        """``"host:port"`` of this task; None when the cluster gives it none."""
        addresses = self.jobs.get(self.task_type, ())
        return addresses[self.task_index] if self.task_index < len(addresses) else None

    @property
    def label(self) -> str:
        """This task in words: ``"worker 0"``."""
        return _label(self.task_type, self.task_index)

    @property
    def is_chief(self) -> bool:
        """Whether this task writes the files: the chief, or worker 0 where there is no chief."""
        if self.task_type == "chief":
            return True
        return self.task_type == "worker" and self.task_index == 0 and not self.jobs.get("chief")

    @property
    def num_workers(self) -> int:
        """Number of tasks that train: chief and workers; 1 for a single process."""
        return max(1, sum(len(self.jobs.get(job, ())) for job in _TRAINING_JOBS))

    @property
    def rank(self) -> int:
        """Position among the tasks that train, from 0: the chief first, then the workers.

        Raises:
            ClusterError: this task is a parameter server or an evaluator.
        """
        if self.task_type not in _TRAINING_JOBS:
            raise ClusterError(f"{self.label} does not train, so it has no rank.")
        before = len(self.jobs.get("chief", ())) if self.task_type == "worker" else 0
        return before + self.task_index

    @property
    def is_distributed(self) -> bool:
        """Whether other tasks (chief, worker, ps) take part in the training.

        A cluster of one worker is False: it behaves as a single process.
        """
        return self.num_workers + len(self.jobs.get("ps", ())) > 1

    def peers(self) -> list[tuple[str, str]]:
        """The other tasks that train, in the order of their ranks.

        Returns:
            (label, address) of each, for example ``("worker 1", "10.0.0.2:2222")``.
        """
        own = (self.task_type, self.task_index)
        return [(_label(*task), address) for task, address in _trainers(self.jobs) if task != own]

    def tf_config(self) -> str:
        """The cluster as TF_CONFIG: JSON that TensorFlow and :func:`resolve` read.

        Raises:
            ClusterError: a single process has no cluster to describe.
        """
        if not self.jobs:
            raise ClusterError("A single process has no cluster, so there is no TF_CONFIG for it.")
        return json.dumps(
            {
                "cluster": {job: list(addresses) for job, addresses in self.jobs.items()},
                "task": {"type": self.task_type, "index": self.task_index},
                # TensorFlow ignores keys that it does not know.
                "tfdist": {"startup_timeout_seconds": self.startup_timeout_seconds},
            }
        )


def resolve(environ: Mapping[str, str] = os.environ) -> Cluster:
    """Reads the cluster from the environment and checks it.

    The first of these that is there decides: TF_CONFIG (set by hand, by `tfdist run` or by
    Kubernetes' TFJob), Open MPI's variables, PMI's (MPICH's and Intel MPI's `mpiexec`), and those
    of a Slurm step (`srun`). Where there is none, this is a single process.

    Args:
        environ: the environment variables.

    Raises:
        ClusterError: one sentence that says which field is wrong, what it holds and what to do.
    """
    if "TF_CONFIG" in environ:
        return _from_tf_config(environ["TF_CONFIG"])
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _from_open_mpi(environ)
    if "PMI_RANK" in environ and not _is_slurm_rank(environ):
        return _from_pmi(environ)
    if "SLURM_STEP_NODELIST" in environ and "SLURM_PROCID" in environ:
        return _from_slurm(environ)
    return Cluster(jobs={}, task_type="worker", task_index=0, source="none")


def require_no_ps(cluster: Cluster, strategy_name: str) -> None:
    """Refuses a cluster with parameter servers.

    Raises:
        ClusterError: the cluster has a job "ps".
    """
    if servers := cluster.jobs.get("ps"):
        raise ClusterError(
            f"{strategy_name} has no parameter servers, but the cluster ({cluster.source}) has "
            f"ps tasks: {', '.join(servers)}. Remove `ps` from the cluster (`tfdist run` without "
            "--ps), or use a ParameterServerStrategy."
        )


def local_ports(n: int) -> list[int]:
    """Finds ports of this machine that are free now.

    All are held until the last is found, so they differ; then they are released. Another
    process may take one before its user does: :func:`rendezvous` then says so.

    Args:
        n: how many.

    Raises:
        OSError: there are not enough.
    """
    # TensorFlow's servers listen on all interfaces, so a port must be free on all of them.
    with contextlib.ExitStack() as held:
        ports = []
        for port in random.sample(range(_FIRST_PORT, _LAST_PORT), _LAST_PORT - _FIRST_PORT):
            if len(ports) == n:
                break
            probe = socket.socket()
            held.callback(probe.close)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            ports.append(port)
    if len(ports) < n:
        raise OSError(errno.EADDRINUSE, f"only {len(ports)} of {n} ports are free")
    return ports


def split_address(address: str) -> tuple[str, int]:
    """Splits ``"host:port"`` or ``"[ipv6]:port"`` into host and port.

    Raises:
        ClusterError: the text is not an address.
    """
    return _split_address(address, "address")


# -- TF_CONFIG


def _from_tf_config(text: str) -> Cluster:
    if not text.strip():
        raise ClusterError(
            "TF_CONFIG is set but empty; unset it for a single process, or describe the cluster as "
            '{"cluster": {"worker": ["host:port"]}, "task": {"type": "worker", "index": 0}}.'
        )
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ClusterError(
            f"TF_CONFIG is not valid JSON ({error}); got {_shown(text)}. Use double quotes around "
            "names and no trailing commas."
        ) from None
    if not isinstance(config, dict):
        raise ClusterError(
            f"TF_CONFIG must be a JSON object with `cluster` and `task`, got {_shown(config)}."
        )
    jobs = _checked_jobs(config)
    task_type, task_index = _checked_task(config, jobs)
    return Cluster(
        jobs=jobs,
        task_type=task_type,
        task_index=task_index,
        source="TF_CONFIG",
        startup_timeout_seconds=_checked_timeout(config),
    )


def _checked_jobs(config: Mapping) -> dict[str, tuple[str, ...]]:
    if "cluster" not in config:
        raise ClusterError(
            f"TF_CONFIG has no `cluster`, only {_shown(sorted(config))}; add "
            '"cluster": {"worker": ["host:port", ...]}, or unset TF_CONFIG for a single process.'
        )
    cluster = config["cluster"]
    if not isinstance(cluster, dict):
        raise ClusterError(
            "TF_CONFIG: `cluster` must be an object from job name to a list of addresses, got "
            f"{_shown(cluster)}."
        )
    if not cluster:
        raise ClusterError(
            'TF_CONFIG: `cluster` is empty; list the workers, as {"worker": ["host:port", ...]}, '
            "or unset TF_CONFIG for a single process."
        )
    jobs = {job: _checked_addresses(job, tasks) for job, tasks in cluster.items()}
    if len(jobs.get("chief", ())) > 1:
        raise ClusterError(
            f"TF_CONFIG: `cluster.chief` has {len(jobs['chief'])} addresses, but there can be only "
            "one chief; list the others under `worker`."
        )
    if not any(jobs.get(job) for job in _TRAINING_JOBS):
        raise ClusterError(
            f"TF_CONFIG: `cluster` has no `worker` and no `chief`, only {_shown(sorted(jobs))}; "
            "add the tasks that train."
        )
    _refuse_duplicates(jobs)
    return jobs


def _checked_addresses(job: str, tasks) -> tuple[str, ...]:
    if job not in _JOBS:
        raise ClusterError(
            f"TF_CONFIG: `cluster` has the unknown job {_shown(job)}; the jobs are "
            f"{', '.join(_JOBS)}."
        )
    field = f"cluster.{job}"
    if isinstance(tasks, dict):
        # TensorFlow's sparse form. A gap in it would be a task that nobody can reach.
        if sorted(tasks) != sorted(map(str, range(len(tasks)))):
            raise ClusterError(
                f"TF_CONFIG: `{field}` as an object must have the indices 0 to {len(tasks) - 1}, "
                f"got {_shown(sorted(tasks))}; write a list of addresses instead."
            )
        tasks = [tasks[str(index)] for index in range(len(tasks))]
    if not isinstance(tasks, list):
        raise ClusterError(
            f'TF_CONFIG: `{field}` must be a list of "host:port" addresses, got {_shown(tasks)}.'
        )
    for index, address in enumerate(tasks):
        _split_address(address, f"TF_CONFIG: `{field}[{index}]`")
    return tuple(tasks)


def _split_address(address, field: str) -> tuple[str, int]:
    wanted = f'{field} must be "host:port", got {_shown(address)}'
    if not isinstance(address, str):
        raise ClusterError(f"{wanted}, which is not a text.")
    if not address.strip():
        raise ClusterError(f"{wanted}, which is empty; remove it or name the task's host and port.")
    if "://" in address:
        raise ClusterError(f"{wanted}; leave out the scheme {_shown(address.split('://')[0])}.")
    host, colon, port = address.rpartition(":")
    if not colon:
        raise ClusterError(f"{wanted}, which has no port; add one, as {_shown(address + ':2222')}.")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ClusterError(f"{wanted}; write an IPv6 address in brackets, as [::1]:2222.")
    if not host or re.search(r"[\s/@\[\]]", host):
        raise ClusterError(f"{wanted}; {_shown(host)} is not a host name.")
    if not re.fullmatch(r"[0-9]+", port):
        raise ClusterError(f"{wanted}; the port {_shown(port)} is not a number.")
    if len(port) > 5 or not 1 <= int(port) <= 65535:
        raise ClusterError(f"{wanted}; the port {_shown(port)} must lie between 1 and 65535.")
    return host, int(port)


def _refuse_duplicates(jobs: Mapping[str, tuple[str, ...]]) -> None:
    seen = {}
    for job, addresses in jobs.items():
        for index, address in enumerate(addresses):
            task = f"`cluster.{job}[{index}]`"
            first = seen.setdefault(address, task)
            if first != task:
                raise ClusterError(
                    f"TF_CONFIG: the address {_shown(address)} is there twice, as {first} and "
                    f"{task}; give each task a port of its own."
                )


def _checked_task(config: Mapping, jobs: Mapping[str, tuple[str, ...]]) -> tuple[str, int]:
    if "task" not in config:
        raise ClusterError(
            'TF_CONFIG has no `task`; add "task": {"type": "worker", "index": 0} with the '
            "position of this process."
        )
    task = config["task"]
    if not isinstance(task, dict):
        raise ClusterError(
            'TF_CONFIG: `task` must be an object such as {"type": "worker", "index": 0}, got '
            f"{_shown(task)}."
        )
    for key, example in (("type", "worker"), ("index", 0)):
        if key not in task:
            raise ClusterError(
                f"TF_CONFIG: `task` has no `{key}`, got {_shown(task)}; add "
                f'"{key}": {json.dumps(example)}.'
            )
    task_type, index = task["type"], task["index"]
    if task_type not in _JOBS:
        raise ClusterError(
            f"TF_CONFIG: `task.type` {_shown(task_type)} is unknown; the types are "
            f"{', '.join(_JOBS)}."
        )
    # An evaluator may stand beside the cluster: it has no address that others need.
    if not jobs.get(task_type) and task_type != "evaluator":
        raise ClusterError(
            f"TF_CONFIG: `task.type` is {_shown(task_type)}, but `cluster` has no such tasks, only "
            f"{_shown(sorted(jobs))}."
        )
    if isinstance(index, str) and re.fullmatch(r"[0-9]{1,9}", index):
        index = int(index)  # Some tools write "1".
    if not isinstance(index, int) or isinstance(index, bool):
        raise ClusterError(
            f"TF_CONFIG: `task.index` must be an integer, got {_shown(task['index'])}."
        )
    if index < 0:
        raise ClusterError(f"TF_CONFIG: `task.index` must be 0 or more, got {index}.")
    if jobs.get(task_type) and index >= len(jobs[task_type]):
        raise ClusterError(
            f"TF_CONFIG: `task.index` is {index}, but `cluster.{task_type}` has "
            f"{len(jobs[task_type])} addresses; the index must be at most "
            f"{len(jobs[task_type]) - 1}."
        )
    return task_type, index


def _checked_timeout(config: Mapping) -> float:
    own = config.get("tfdist", {})
    if not isinstance(own, dict):
        raise ClusterError(f"TF_CONFIG: `tfdist` must be an object, got {_shown(own)}.")
    seconds = own.get("startup_timeout_seconds", DEFAULT_STARTUP_TIMEOUT_SECONDS)
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not (is_number and 0 < seconds < math.inf):
        raise ClusterError(
            "TF_CONFIG: `tfdist.startup_timeout_seconds` must be a positive number of seconds, got "
            f"{_shown(seconds)}."
        )
    return float(seconds)


def _shown(value) -> str:
    """A value as it is quoted in an error, cut when it is long."""
    text = value if isinstance(value, str) else json.dumps(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return repr(text) if isinstance(value, str) else text


def _label(job: str, index: int) -> str:
    return job if job == "chief" else f"{job} {index}"


def _trainers(jobs: Mapping[str, tuple[str, ...]]) -> list[tuple[tuple[str, int], str]]:
    """((job, index), address) of each task that trains, in the order of the ranks."""
    return [
        ((job, index), address)
        for job in _TRAINING_JOBS
        for index, address in enumerate(jobs.get(job, ()))
    ]


# -- MPI and Slurm: every rank works out the same addresses without asking anybody


def _from_open_mpi(environ: Mapping[str, str]) -> Cluster:
    return _on_one_host(
        source="Open MPI",
        rank=_integer(environ, "OMPI_COMM_WORLD_RANK"),
        size=_integer(environ, "OMPI_COMM_WORLD_SIZE"),
        local_size=_integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        job=environ.get("PMIX_NAMESPACE", ""),
    )


def _from_pmi(environ: Mapping[str, str]) -> Cluster:
    size = _integer(environ, "PMI_SIZE")
    local_size = 1 if size == 1 else _integer(environ, "MPI_LOCALNRANKS")
    return _on_one_host(
        source="PMI",
        rank=_integer(environ, "PMI_RANK"),
        size=size,
        local_size=local_size,
        job=_mpiexec_process(),
    )


def _on_one_host(*, source: str, rank: int, size: int, local_size: int, job: str) -> Cluster:
    if not 0 <= rank < size:
        raise ClusterError(f"{source}: the rank must lie in 0 to {size - 1}, got {rank}.")
    if local_size != size:
        raise ClusterError(
            f"{source}: {local_size} of the {size} processes run on this host, and the environment "
            "does not say where the others run; start them with `tfdist run --hosts "
            "hostA:2,hostB:2`, or set TF_CONFIG in each."
        )
    first = _first_port(f"{source} {job}", size)
    addresses = tuple(f"127.0.0.1:{first + index}" for index in range(size))
    return Cluster({"worker": addresses}, "worker", rank, source)


def _first_port(job: str, n: int) -> int:
    """The first of n ports in a row, the same in each process that names the same job."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % max(1, _LAST_PORT - _FIRST_PORT - n)


def _mpiexec_process() -> str:
    """What tells this job from another one of MPICH's on the host: the process that started it.

    MPICH exports nothing that does, so the parents are searched (Linux; elsewhere the answer is
    empty, and two jobs at once on one host meet on the same ports, which is reported).
    """
    pid = os.getpid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                name, _, rest = stat.read().partition("(")[2].rpartition(")")
        except OSError:
            break
        if "hydra" in name or "mpiexec" in name:
            return str(pid)
        pid = int(rest.split()[1])
    return ""


def _is_slurm_rank(environ: Mapping[str, str]) -> bool:
    """Whether PMI's variables were set by `srun`, whose own variables say more."""
    return "SLURM_STEP_NODELIST" in environ and (
        environ.get("SLURM_PROCID"),
        environ.get("SLURM_STEP_NUM_TASKS"),
    ) == (environ.get("PMI_RANK"), environ.get("PMI_SIZE"))


def _from_slurm(environ: Mapping[str, str]) -> Cluster:
    # Not TensorFlow's SlurmClusterResolver: it fails where there is no GPU, and it sorts the host
    # names (n10 before n2), so that ranks get addresses of hosts on which they do not run.
    rank, size = _integer(environ, "SLURM_PROCID"), _integer(environ, "SLURM_STEP_NUM_TASKS")
    hosts = _expanded_hosts(environ["SLURM_STEP_NODELIST"])
    counts = _expanded_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(hosts) != len(counts) or sum(counts) != size or not 0 <= rank < size:
        raise ClusterError(
            "Slurm: the variables contradict one another: SLURM_PROCID="
            f"{rank}, SLURM_STEP_NUM_TASKS={size}, SLURM_STEP_NODELIST="
            f"{environ['SLURM_STEP_NODELIST']}, SLURM_STEP_TASKS_PER_NODE="
            f"{environ.get('SLURM_STEP_TASKS_PER_NODE')}; start the script with `srun`, or set "
            "TF_CONFIG."
        )
    slots = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    own = environ.get("SLURM_NODEID"), environ.get("SLURM_LOCALID")
    if None not in own and own != tuple(map(str, slots[rank])):
        raise ClusterError(
            f"Slurm: rank {rank} runs as task {own[1]} of node {own[0]}, not in blocks; start the "
            "step with `srun --distribution=block`."
        )
    # Steps that share a node must not share ports.
    job = f"Slurm {environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    first = _first_port(job, max(counts))
    addresses = tuple(f"{hosts[node]}:{first + local}" for node, local in slots)
    return Cluster({"worker": addresses}, "worker", rank, "Slurm")


def _expanded_hosts(text: str) -> list[str]:
    """Slurm's list of hosts: "n[08-10,12],m1" is n08, n09, n10, n12 and m1."""
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(parts) != text:
        raise ClusterError(
            f"Slurm: SLURM_STEP_NODELIST is not a list of hosts, got {_shown(text)}."
        )
    return [host for part in parts for host in _expanded_ranges(part)]


def _expanded_ranges(pattern: str) -> Iterator[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", pattern)
    if match is None:
        yield pattern
        return
    prefix, ranges, rest = match.groups()
    for item in ranges.split(","):
        bounds = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", item)
        if bounds is None:
            raise ClusterError(
                f"Slurm: SLURM_STEP_NODELIST has the range {_shown(item)}, expected 3 or 3-7."
            )
        low, high = bounds[1], bounds[2] or bounds[1]
        for number in range(int(low), int(high) + 1):
            for suffix in _expanded_ranges(rest):
                yield f"{prefix}{number:0{len(low)}}{suffix}"


def _expanded_counts(text: str) -> list[int]:
    """Slurm's numbers of tasks per node: "3(x2),1" is 3, 3 and 1."""
    counts = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", item)
        if match is None:
            raise ClusterError(
                f"Slurm: SLURM_STEP_TASKS_PER_NODE must look like 3(x2),1, got {_shown(text)}."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None:
        raise ClusterError(
            f"{name} is not set, although others of its kind are; start the script with "
            "`tfdist run`, or set TF_CONFIG."
        )
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise ClusterError(f"{name} must be an integer, got {_shown(text)}.")
    return int(text)


# -- Rendezvous
#
# Each task listens on its own address and asks every peer for its greeting over a connection of
# its own. When all peers have answered a task, it says "ready" on the connections it opened. A
# task leaves when all peers have answered it and all have said ready to it: then every task has
# reached every other one, and nobody needs its listener any more. So nobody leaves, and starts
# TensorFlow's server on the port, before everybody has met; a port at which something else
# answers (a server of an earlier run) is never a peer of this rendezvous.

_PROTOCOL = {"magic": "tfdist", "version": 1}
_MAX_LINE_BYTES = 1 << 16
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
    if cluster.task_type not in _TRAINING_JOBS or cluster.num_workers == 1:
        return
    if timeout_seconds is None:
        timeout_seconds = cluster.startup_timeout_seconds
    meeting = _Meeting(cluster, payload)
    with contextlib.closing(meeting):
        meeting.listen()
        meeting.run(timeout_seconds)


class _NotOurs(Exception):
    """What arrived is not a line of this protocol."""


class _Wire:
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
            _NotOurs: something else speaks there.
        """
        ended = False
        with contextlib.suppress(BlockingIOError):
            while len(self._inbox) <= _MAX_LINE_BYTES:
                if not (chunk := self.socket.recv(1 << 16)):
                    ended = True
                    break
                self._inbox += chunk
        *lines, rest = bytes(self._inbox).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            raise _NotOurs
        self._inbox[:] = rest
        messages = [_parsed(line) for line in lines]
        if ended and not messages:
            raise EOFError
        return messages


def _parsed(line: bytes) -> dict:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise _NotOurs from None
    if not isinstance(message, dict) or message.get("magic") != _PROTOCOL["magic"]:
        raise _NotOurs
    return message


@dataclasses.dataclass
class _Peer:
    """What a task knows of one other task.

    The ids are drawn anew by each process, so that a restarted peer is not mistaken for
    the one that was there before.
    """

    rank: int
    label: str
    address: str
    wire: _Wire | None = None  # the connection that we opened
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

    wire: _Wire
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
            **_PROTOCOL,
            "rank": cluster.rank,
            "id": self._id,
            "settings": self._settings,
        }
        if len(json.dumps(self._greeting)) > _MAX_LINE_BYTES:
            raise ClusterError(f"rendezvous: the payload must be below {_MAX_LINE_BYTES} bytes.")
        self._peers = {
            rank: _Peer(rank, _label(*task), address)
            for rank, (task, address) in enumerate(_trainers(cluster.jobs))
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
        peer.wire, peer.connected = _Wire(connection), False
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
        except (EOFError, _NotOurs):
            self._retry(peer, "another program answers there")
            return
        except OSError as error:
            self._retry(peer, (error.strerror or str(error)).lower())
            return
        self._watch(wire)

    def _hear_answer(self, peer: _Peer, message: Mapping) -> None:
        their_id = message.get("id")
        if not isinstance(their_id, str):
            raise _NotOurs
        peer.answered, peer.has_answered = their_id, True
        if their_id == self._id:
            problem = f"is this very process, {self._cluster.label}"
        elif message.get("version") != _PROTOCOL["version"]:
            problem = (
                f"speaks version {message.get('version')!r} of the rendezvous and this task "
                f"({self._cluster.label}) version {_PROTOCOL['version']}; install the same tfdist"
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
                    f"{_shown(other)} there and {_shown(ours)} here; make them equal"
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
                peer.wire.send({**_PROTOCOL, "ready": True})
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
        guest = _Guest(_Wire(connection))
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
        except (EOFError, OSError, _NotOurs):
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
            raise _NotOurs
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

    def _watch(self, wire: _Wire) -> None:
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
    known = {job: list(jobs.get(job, ())) for job in _JOBS if job != "evaluator"}
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
