"""The command line: `tfdist run` starts the processes of a job, `tfdist doctor` looks at one.

The launcher works on POSIX systems. It does not import TensorFlow; only `doctor` does.
"""

import argparse
import os
import socket
import sys
from collections.abc import Mapping, Sequence

import tfdist
from tfdist import _doctor
from tfdist import cluster as clusters
from tfdist._alliance import Follower, Leader, digest
from tfdist._placement import (
    FIRST_PORT,
    Task,
    UsageError,
    gpu_variables,
    homes_of_workers,
    num_gpus,
    own_host,
    parse_hosts,
    parse_hosts_file,
    plan,
    task_config,
    thread_variables,
)
from tfdist._processes import Family, Process
from tfdist._restarts import Budget, Slots
from tfdist._ssh import Caller
from tfdist._supervise import Record, Supervisor

_LOCAL_STARTUP_TIMEOUT_SECONDS = 30.0
_GRACE_SECONDS = 30.0  # between SIGTERM and SIGKILL: what Kubernetes gives
_RESTARTS_PER_HOUR = 20
_RETRY_WORKERS_SECONDS = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return args.command(args)
    except UsageError as error:
        parser.exit(2, f"tfdist: {error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tfdist", description=tfdist.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"tfdist {tfdist.__version__}")
    commands = parser.add_subparsers(required=True, metavar="run|doctor|checkpoints")

    run = commands.add_parser(
        "run",
        help="start a script in several processes",
        usage="tfdist run [-n N] [options] script.py [args...]\n"
        "       tfdist run [-n N] [options] -m module [args...]",
    )
    run.set_defaults(command=_run)
    add = run.add_argument
    add("-n", "--workers", type=_positive, metavar="N", help="worker processes (default: 1)")
    add("--ps", type=_count, default=0, metavar="P", help="parameter servers, and a chief")
    add(
        "--colocate-ps",
        action="store_true",
        help="a chief; the workers hold the parameters, without servers",
    )
    add("--chief", action="store_true", help="a chief, besides the workers")
    add("--evaluator", action="store_true", help="an evaluator, which takes no part in training")
    add("--hosts", metavar="A:2,B:2", help="hosts, each with its number of workers")
    add("--hosts-file", metavar="F", help="file with one host a line: `A:2`, or `A slots=2`")
    add("--host", metavar="A", help="which of the hosts this is (default: found by its name)")
    add("--ssh", action="store_true", help="start the launchers of the other hosts with ssh")
    add("--port", type=_positive, metavar="P", help=f"first port with --hosts ({FIRST_PORT})")
    add(
        "--max-restarts",
        type=_count,
        default=0,
        metavar="R",
        help="times that the job is started again when it fails (default: 0)",
    )
    add(
        "--max-restarts-per-hour",
        type=_positive,
        default=_RESTARTS_PER_HOUR,
        metavar="R",
        help=f"the same, within any one hour (default: {_RESTARTS_PER_HOUR})",
    )
    add(
        "--min-workers",
        type=_positive,
        metavar="M",
        help="go on with as few workers as this when some can't come back (default: all)",
    )
    add(
        "--retry-workers",
        type=_seconds,
        default=_RETRY_WORKERS_SECONDS,
        metavar="S",
        help="with --min-workers: seconds until a lost worker is tried again, doubled each time "
        f"(default: {_RETRY_WORKERS_SECONDS:g})",
    )
    add(
        "--step-timeout",
        type=_seconds,
        metavar="S",
        help="seconds without a step after which the job hangs, and is started again (default: "
        "no limit); with --ps or --colocate-ps, until a worker's step is given to another (300)",
    )
    add(
        "--grace",
        type=_seconds,
        default=_GRACE_SECONDS,
        metavar="S",
        help="seconds to save and to end after SIGTERM, before SIGKILL "
        f"(default: {_GRACE_SECONDS:g})",
    )
    add(
        "--log-dir",
        metavar="D",
        help="also write each process' output to D/worker-0.log, ..., and the restarts to "
        "D/run.json",
    )
    add("--threads", type=_positive, metavar="T", help="threads per process (default: cores / n)")
    add(
        "--startup-timeout",
        type=_seconds,
        metavar="S",
        help="seconds until a worker gives up on peers that do not answer "
        f"(default: {_LOCAL_STARTUP_TIMEOUT_SECONDS:g}, with --hosts "
        f"{clusters.DEFAULT_STARTUP_TIMEOUT_SECONDS:g})",
    )
    # How a launcher that was started by ssh learns that the first one has ended, however it did.
    add("--stop-with-stdin", action="store_true", help=argparse.SUPPRESS)
    add("-m", dest="module", action="store_true", help="script is the name of a module")
    add("script", help="program to start in each process")
    add("args", nargs=argparse.REMAINDER, help="its arguments")

    doctor = commands.add_parser("doctor", help="print versions, devices, cluster and network")
    doctor.set_defaults(command=_doctor.run)
    doctor.add_argument(
        "--startup-timeout", type=_seconds, metavar="S", help="seconds to wait for the peers"
    )
    _add_checkpoints(commands)
    return parser


def _add_checkpoints(commands) -> None:
    parser = commands.add_parser("checkpoints", help="list, verify, show, compare checkpoints")
    parser.set_defaults(command=_checkpoints)
    actions = parser.add_subparsers(required=True, dest="action", metavar="ls|verify|inspect|diff")
    for name, text in (
        ("ls", "the checkpoints in a folder, the oldest first"),
        ("verify", "read all of them and compare the checksums; exit code 1 where one is damaged"),
        ("inspect", "the tensors of one: name, dtype, shape, bytes, least, most, not finite"),
        ("diff", "the tensors in which two differ; exit code 1 where they do"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("directory", metavar="DIR", help="folder of checkpoints, or one")
        if name == "diff":
            action.add_argument(
                "other",
                metavar="OTHER",
                nargs="?",
                help="the same (default: the newest two in DIR are compared)",
            )


def _checkpoints(args: argparse.Namespace) -> int:
    from tfdist import _checkpoints_command  # with numpy, which the launcher does without

    return _checkpoints_command.run(args)


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {number}")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text}")
    return number


class _Job:
    """What the command line says, and how this host's processes are started from it."""

    def __init__(self, args: argparse.Namespace, hosts: Mapping[str, int], family: Family):
        self._args = args
        self.hosts = hosts
        self._family = family
        # The workers and servers of a chief that drives them serve until they are ended.
        self.has_servers = args.ps > 0 or args.colocate_ps
        self.homes = homes_of_workers(args.workers or 1, hosts)
        default = (
            clusters.DEFAULT_STARTUP_TIMEOUT_SECONDS if hosts else _LOCAL_STARTUP_TIMEOUT_SECONDS
        )
        self.startup_timeout = args.startup_timeout or default
        # Fixed, so that a worker's GPUs are the same whoever else takes part.
        self._full = self.plan(range(len(self.homes)))

    def plan(self, slots: Sequence[int]) -> list[Task]:
        """The tasks of an attempt in which these workers take part."""
        args = self._args
        return plan(
            workers=args.workers or 1,
            ps=args.ps,
            chief=args.chief,
            evaluator=args.evaluator,
            hosts=self.hosts,
            first_port=args.port or FIRST_PORT,
            slots=slots,
        )

    @property
    def control_address(self) -> str:
        """Where the first host's launcher listens: at the port after those of its tasks."""
        first = self.homes[0]
        used = sum(task.host == first and task.address is not None for task in self._full)
        port = (self._args.port or FIRST_PORT) + used
        if port > 65535:
            raise UsageError(f"--port {self._args.port} leaves too few ports below 65536.")
        return f"{first}:{port}"

    @property
    def digest(self) -> str:
        """Differs between launchers whose jobs do."""
        args = self._args
        return digest(
            [
                tfdist.__version__,
                list(self.hosts.items()),
                [args.ps, args.colocate_ps, args.chief, args.evaluator, args.port],
                [args.module, args.script, args.args],
            ]
        )

    def start(self, task: Task, tasks: Sequence[Task], attempt: int) -> Process:
        """Starts one of this host's processes."""
        args = self._args
        local = [other for other in tasks if other.host == task.host]
        environ = {
            **os.environ,
            **self._gpus(task),
            **thread_variables(os.environ, processes=len(local), threads=args.threads),
            "TF_CONFIG": task_config(
                task, tasks, self.startup_timeout, len(self.homes) + bool(args.chief)
            ),
            "TFDIST_RESTART": str(attempt),
        }
        if args.step_timeout:
            environ["TFDIST_STEP_TIMEOUT"] = str(args.step_timeout)
        name = task.label.replace(" ", "-")
        return self._family.start(
            [sys.executable, "-u", *(["-m"] if args.module else []), args.script, *args.args],
            environ=environ,
            label=task.label,
            prefix=f"[{task.label}] ",
            log_path=os.path.join(args.log_dir, f"{name}.log") if args.log_dir else None,
            has_progress=True,
        )

    def _gpus(self, task: Task) -> dict[str, str]:
        trainers = [
            other
            for other in self._full
            if other.host == task.host and other.job in ("chief", "worker")
        ]
        same = [t for t in trainers if (t.job, t.slot) == (task.job, task.slot)]
        return gpu_variables(os.environ, same[0] if same else task, trainers, num_gpus())

    def start_by_label(self, label: str, attempt: int, slots: Sequence[int]) -> Process:
        """The same, as the first host's launcher asks for it."""
        tasks = self.plan(slots)
        (task,) = (task for task in tasks if task.label == label)
        return self.start(task, tasks, attempt)


def _run(args: argparse.Namespace) -> int:
    hosts = _hosts(args)
    here = own_host(list(hosts), name=args.host) if hosts else None
    args.chief = args.chief or args.ps > 0 or args.colocate_ps
    _refuse_contradictions(args, hosts, here)
    if args.log_dir:
        os.makedirs(args.log_dir, exist_ok=True)
    with Family(stop_with_stdin=args.stop_with_stdin) as family:
        job = _Job(args, hosts, family)
        caller = Caller(family, args, hosts) if args.ssh else None
        try:
            if not hosts or here == job.homes[0]:
                return _lead(args, job, family, here, caller)
            if caller is not None:
                caller.call([host for host in hosts if host != here])
            if here is not None:
                status = _follow(args, job, family, here)
            if caller is not None:
                ended = caller.wait()
                return ended if here is None else status
            return status
        except (clusters.ClusterError, clusters.PeersUnreachable) as error:
            print(f"tfdist run: {error}", file=sys.stderr)
            return 1


def _lead(args, job: _Job, family: Family, here: str | None, caller: Caller | None) -> int:
    others = [host for host in job.hosts if host != here]
    leader = Leader(family, others, job.control_address, job.digest) if others else None
    min_workers = args.min_workers or len(job.homes)
    supervisor = Supervisor(
        family,
        here=here,
        plan=job.plan,
        start=job.start,
        slots=Slots(job.homes, min_workers, args.retry_workers),
        budget=Budget(args.max_restarts, args.max_restarts_per_hour),
        leader=leader,
        call=caller.call if caller else lambda missing: False,
        record=Record(
            os.path.join(args.log_dir, "run.json") if args.log_dir else None,
            {
                "script": args.script,
                "arguments": args.args,
                "hosts": dict(job.hosts),
                "nominal_workers": len(job.homes),
            },
        ),
        has_servers=job.has_servers,
        may_lose_workers=job.has_servers and not args.colocate_ps,
        grace_seconds=args.grace,
        step_timeout=None if job.has_servers else args.step_timeout,
        startup_timeout=job.startup_timeout,
    )
    try:
        return supervisor.run()
    finally:
        if caller is not None:
            caller.close()


def _follow(args, job: _Job, family: Family, here: str) -> int:
    follower = Follower(
        family,
        host=here,
        leader=job.control_address,
        job=job.digest,
        start=job.start_by_label,
        grace_seconds=args.grace,
    )
    return follower.run(job.startup_timeout)


def _hosts(args: argparse.Namespace) -> dict[str, int]:
    if args.hosts and args.hosts_file:
        raise UsageError("--hosts and --hosts-file contradict each other; give one of them.")
    if args.hosts_file:
        try:
            with open(args.hosts_file) as file:
                return parse_hosts_file(file.read())
        except OSError as error:
            raise UsageError(f"--hosts-file {args.hosts_file}: {error.strerror}.") from None
    return parse_hosts(args.hosts) if args.hosts is not None else {}


def _refuse_contradictions(
    args: argparse.Namespace, hosts: Mapping[str, int], here: str | None
) -> None:
    if args.ps and args.colocate_ps:
        raise UsageError("--ps and --colocate-ps contradict each other; give one of them.")
    num_workers = len(homes_of_workers(args.workers or 1, hosts))
    if args.min_workers and args.chief:
        raise UsageError(
            "--min-workers is for workers that train together; with --ps the others go on without "
            "a worker by themselves, and with --chief or --colocate-ps all are needed."
        )
    if args.min_workers and args.min_workers > num_workers:
        raise UsageError(
            f"--min-workers {args.min_workers} is more than the number of workers, {num_workers}."
        )
    if args.min_workers and not args.max_restarts:
        raise UsageError(
            "--min-workers needs --max-restarts: a job goes on with fewer workers by a restart."
        )
    if not args.module and not os.path.isfile(args.script):
        raise UsageError(f"there is no script {args.script!r}.")
    if not hosts:
        for option in ("host", "ssh", "port"):
            if getattr(args, option):
                raise UsageError(f"--{option} needs --hosts or --hosts-file.")
        return
    if args.workers is not None:
        raise UsageError("-n and --hosts contradict each other; give each host its number, A:2.")
    if here is None and not args.ssh:
        raise UsageError(
            f"this machine ({socket.gethostname()}) is none of --hosts ({', '.join(hosts)}); say "
            "which one it is with --host, or start them all from here with --ssh."
        )
    first = next(iter(hosts))
    if args.ssh and args.max_restarts and here != first:
        raise UsageError(
            f"--max-restarts with --ssh must be given on the first host ({first}), whose launcher "
            "decides about restarts."
        )


if __name__ == "__main__":
    sys.exit(main())
