"""Who takes part in this job?

:func:`resolve` reads the cluster from the environment and checks it. This module does not import
TensorFlow.
"""

import contextlib
import dataclasses
import errno
import json
import math
import os
import random
import re
import socket
import zlib
from collections.abc import Iterable, Iterator, Mapping

DEFAULT_STARTUP_TIMEOUT_SECONDS = 120.0

TRAINING_JOBS = ("chief", "worker")
JOBS = (*TRAINING_JOBS, "ps", "evaluator")

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


class ServerLost(ConnectionError):
    """A task that holds parameters is gone, and with it what was not saved."""


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
        nominal_workers: how many tasks train when the job is complete, where the launcher tells;
            an elastic job (`tfdist run --min-workers`) may have fewer at the moment.
    """

    jobs: Mapping[str, tuple[str, ...]]
    task_type: str
    task_index: int
    source: str
    startup_timeout_seconds: float = DEFAULT_STARTUP_TIMEOUT_SECONDS
    nominal_workers: int | None = None

    @property
    def address(self) -> str | None:
        """``"host:port"`` of this task; None when the cluster gives it none."""
        addresses = self.jobs.get(self.task_type, ())
        return addresses[self.task_index] if self.task_index < len(addresses) else None

    @property
    def label(self) -> str:
        """This task in words: ``"worker 0"``."""
        return task_label(self.task_type, self.task_index)

    @property
    def is_chief(self) -> bool:
        """Whether this task writes the files: the chief, or worker 0 where there is no chief."""
        if self.task_type == "chief":
            return True
        return self.task_type == "worker" and self.task_index == 0 and not self.jobs.get("chief")

    @property
    def num_workers(self) -> int:
        """Number of tasks that train: chief and workers; 1 for a single process."""
        return max(1, sum(len(self.jobs.get(job, ())) for job in TRAINING_JOBS))

    @property
    def rank(self) -> int:
        """Position among the tasks that train, from 0: the chief first, then the workers.

        Raises:
            ClusterError: this task is a parameter server or an evaluator.
        """
        if self.task_type not in TRAINING_JOBS:
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
        return [
            (task_label(*task), address)
            for task, address in training_tasks(self.jobs)
            if task != own
        ]

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
                "tfdist": {
                    "startup_timeout_seconds": self.startup_timeout_seconds,
                    **({"nominal_workers": self.nominal_workers} if self.nominal_workers else {}),
                },
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


def per_worker_batch(global_batch: int, cluster: Cluster | None = None) -> int:
    """This worker's rows of a global batch; those of all workers sum up to it exactly.

    For input that is made per worker (``distribute_datasets_from_function``, a loop of one's own).
    The ``batch_size`` of ``model.fit``, and of datasets that tfdist's strategies distribute, is
    that of the whole cluster already.

    Args:
        global_batch: rows of a step on all workers.
        cluster: by default that of the environment.

    Raises:
        ValueError: there are fewer rows than workers.
    """
    cluster = resolve() if cluster is None else cluster
    workers = cluster.num_workers
    if global_batch < workers:
        raise ValueError(
            f"per_worker_batch: global_batch must be at least the number of workers ({workers}), "
            f"got {global_batch}; use a larger batch or fewer workers."
        )
    return global_batch // workers + (cluster.rank < global_batch % workers)


def elastic_batch(
    global_batch: int, policy: str = "keep_global_batch", cluster: Cluster | None = None
) -> tuple[int, float]:
    """What a job does whose number of workers is not the full one at the moment.

    Args:
        global_batch: rows of a step with all workers.
        policy: "keep_global_batch": the same steps on fewer workers, each with more rows;
            "keep_worker_batch": each worker keeps its rows, so that a step has fewer, and the
            learning rate is scaled as the batch is (Goyal et al. 2017, arXiv:1706.02677, 2.1).
        cluster: by default that of the environment.

    Returns:
        (rows of a step, factor for the learning rate).

    Raises:
        ValueError: the policy is another one.
    """
    if policy not in ("keep_global_batch", "keep_worker_batch"):
        raise ValueError(
            "elastic_batch: policy must be 'keep_global_batch' or 'keep_worker_batch', got "
            f"{policy!r}."
        )
    cluster = resolve() if cluster is None else cluster
    nominal = cluster.nominal_workers or cluster.num_workers
    if policy == "keep_global_batch" or cluster.num_workers == nominal:
        return global_batch, 1.0
    rows = max(1, round(global_batch * cluster.num_workers / nominal))
    return rows, rows / global_batch


def from_resolver(resolver) -> Cluster:
    """The cluster that a ``tf.distribute.cluster_resolver.ClusterResolver`` describes.

    Raises:
        ClusterError: it describes it wrongly.
    """
    jobs = resolver.cluster_spec().as_dict()
    if not jobs:
        return Cluster({}, "worker", 0, "cluster_resolver")
    task = {"type": resolver.task_type, "index": resolver.task_id}
    config = json.dumps({"cluster": jobs, "task": task})
    return dataclasses.replace(resolve({"TF_CONFIG": config}), source="cluster_resolver")


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
            f"TF_CONFIG is not valid JSON ({error}); got {shown(text)}. Use double quotes around "
            "names and no trailing commas."
        ) from None
    if not isinstance(config, dict):
        raise ClusterError(
            f"TF_CONFIG must be a JSON object with `cluster` and `task`, got {shown(config)}."
        )
    jobs = _checked_jobs(config)
    task_type, task_index = _checked_task(config, jobs)
    return Cluster(
        jobs=jobs,
        task_type=task_type,
        task_index=task_index,
        source="TF_CONFIG",
        startup_timeout_seconds=_checked_timeout(config),
        nominal_workers=_checked_nominal_workers(config),
    )


def _checked_jobs(config: Mapping) -> dict[str, tuple[str, ...]]:
    if "cluster" not in config:
        raise ClusterError(
            f"TF_CONFIG has no `cluster`, only {shown(sorted(config))}; add "
            '"cluster": {"worker": ["host:port", ...]}, or unset TF_CONFIG for a single process.'
        )
    cluster = config["cluster"]
    if not isinstance(cluster, dict):
        raise ClusterError(
            "TF_CONFIG: `cluster` must be an object from job name to a list of addresses, got "
            f"{shown(cluster)}."
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
    if not any(jobs.get(job) for job in TRAINING_JOBS):
        raise ClusterError(
            f"TF_CONFIG: `cluster` has no `worker` and no `chief`, only {shown(sorted(jobs))}; "
            "add the tasks that train."
        )
    _refuse_duplicates(jobs)
    return jobs


def _checked_addresses(job: str, tasks) -> tuple[str, ...]:
    if job not in JOBS:
        raise ClusterError(
            f"TF_CONFIG: `cluster` has the unknown job {shown(job)}; the jobs are "
            f"{', '.join(JOBS)}."
        )
    field = f"cluster.{job}"
    if isinstance(tasks, dict):
        # TensorFlow's sparse form. A gap in it would be a task that nobody can reach.
        if sorted(tasks) != sorted(map(str, range(len(tasks)))):
            raise ClusterError(
                f"TF_CONFIG: `{field}` as an object must have the indices 0 to {len(tasks) - 1}, "
                f"got {shown(sorted(tasks))}; write a list of addresses instead."
            )
        tasks = [tasks[str(index)] for index in range(len(tasks))]
    if not isinstance(tasks, list):
        raise ClusterError(
            f'TF_CONFIG: `{field}` must be a list of "host:port" addresses, got {shown(tasks)}.'
        )
    for index, address in enumerate(tasks):
        _split_address(address, f"TF_CONFIG: `{field}[{index}]`")
    return tuple(tasks)


def _split_address(address, field: str) -> tuple[str, int]:
    wanted = f'{field} must be "host:port", got {shown(address)}'
    if not isinstance(address, str):
        raise ClusterError(f"{wanted}, which is not a text.")
    if not address.strip():
        raise ClusterError(f"{wanted}, which is empty; remove it or name the task's host and port.")
    if "://" in address:
        raise ClusterError(f"{wanted}; leave out the scheme {shown(address.split('://')[0])}.")
    host, colon, port = address.rpartition(":")
    if not colon:
        raise ClusterError(f"{wanted}, which has no port; add one, as {shown(address + ':2222')}.")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ClusterError(f"{wanted}; write an IPv6 address in brackets, as [::1]:2222.")
    if not host or re.search(r"[\s/@\[\]]", host):
        raise ClusterError(f"{wanted}; {shown(host)} is not a host name.")
    if not re.fullmatch(r"[0-9]+", port):
        raise ClusterError(f"{wanted}; the port {shown(port)} is not a number.")
    if len(port) > 5 or not 1 <= int(port) <= 65535:
        raise ClusterError(f"{wanted}; the port {shown(port)} must lie between 1 and 65535.")
    return host, int(port)


def _refuse_duplicates(jobs: Mapping[str, tuple[str, ...]]) -> None:
    seen = {}
    for job, addresses in jobs.items():
        for index, address in enumerate(addresses):
            task = f"`cluster.{job}[{index}]`"
            first = seen.setdefault(address, task)
            if first != task:
                raise ClusterError(
                    f"TF_CONFIG: the address {shown(address)} is there twice, as {first} and "
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
            f"{shown(task)}."
        )
    for key, example in (("type", "worker"), ("index", 0)):
        if key not in task:
            raise ClusterError(
                f"TF_CONFIG: `task` has no `{key}`, got {shown(task)}; add "
                f'"{key}": {json.dumps(example)}.'
            )
    task_type, index = task["type"], task["index"]
    if task_type not in JOBS:
        raise ClusterError(
            f"TF_CONFIG: `task.type` {shown(task_type)} is unknown; the types are "
            f"{', '.join(JOBS)}."
        )
    # An evaluator may stand beside the cluster: it has no address that others need.
    if not jobs.get(task_type) and task_type != "evaluator":
        raise ClusterError(
            f"TF_CONFIG: `task.type` is {shown(task_type)}, but `cluster` has no such tasks, only "
            f"{shown(sorted(jobs))}."
        )
    if isinstance(index, str) and re.fullmatch(r"[0-9]{1,9}", index):
        index = int(index)  # Some tools write "1".
    if not isinstance(index, int) or isinstance(index, bool):
        raise ClusterError(
            f"TF_CONFIG: `task.index` must be an integer, got {shown(task['index'])}."
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
        raise ClusterError(f"TF_CONFIG: `tfdist` must be an object, got {shown(own)}.")
    seconds = own.get("startup_timeout_seconds", DEFAULT_STARTUP_TIMEOUT_SECONDS)
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not (is_number and 0 < seconds < math.inf):
        raise ClusterError(
            "TF_CONFIG: `tfdist.startup_timeout_seconds` must be a positive number of seconds, got "
            f"{shown(seconds)}."
        )
    return float(seconds)


def _checked_nominal_workers(config: Mapping) -> int | None:
    options = config.get("tfdist", {})
    number = options.get("nominal_workers") if isinstance(options, dict) else None
    if number is not None and (type(number) is not int or number < 1):
        raise ClusterError(
            f"TF_CONFIG: `tfdist.nominal_workers` must be a positive integer, got {shown(number)}."
        )
    return number


def shown(value) -> str:
    """A value as it is quoted in an error, cut when it is long."""
    text = value if isinstance(value, str) else json.dumps(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return repr(text) if isinstance(value, str) else text


def task_label(job: str, index: int) -> str:
    """A task in words: ``"chief"``, ``"worker 1"``."""
    return job if job == "chief" else f"{job} {index}"


def training_tasks(jobs: Mapping[str, tuple[str, ...]]) -> list[tuple[tuple[str, int], str]]:
    """((job, index), address) of each task that trains, in the order of the ranks."""
    return [
        ((job, index), address)
        for job in TRAINING_JOBS
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
        raise ClusterError(f"Slurm: SLURM_STEP_NODELIST is not a list of hosts, got {shown(text)}.")
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
                f"Slurm: SLURM_STEP_NODELIST has the range {shown(item)}, expected 3 or 3-7."
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
                f"Slurm: SLURM_STEP_TASKS_PER_NODE must look like 3(x2),1, got {shown(text)}."
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
        raise ClusterError(f"{name} must be an integer, got {shown(text)}.")
    return int(text)
