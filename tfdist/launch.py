"""The command line: `tfdist run` starts the processes of a job, `tfdist doctor` looks at one.

The launcher works on POSIX systems. It does not import TensorFlow; only `doctor` does.
"""

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import functools
import importlib.metadata
import os
import platform
import selectors
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO

import tfdist
from tfdist import cluster as clusters
from tfdist.rendezvous import listen, rendezvous

_LOCAL_STARTUP_TIMEOUT_SECONDS = 30.0
_FIRST_PORT = 12345
_GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL
_REMOTE_GRACE_SECONDS = _GRACE_SECONDS + 5.0  # a launcher on another host gives its own grace
_DRAIN_SECONDS = 1.0  # for the last output of a process that has ended
_TICK_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 60.0  # before a job is started again
_LAST_LINES = 20
_LONGEST_LINE_BYTES = 1 << 20
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
_COLOURS = (36, 32, 33, 35, 34, 31)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return args.command(args)
    except UsageError as error:
        parser.exit(2, f"tfdist: {error}\n")


class UsageError(ValueError):
    """The options on the command line do not fit together."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tfdist", description=tfdist.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"tfdist {tfdist.__version__}")
    commands = parser.add_subparsers(required=True, metavar="run|doctor")

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
    add("--port", type=_positive, metavar="P", help=f"first port with --hosts ({_FIRST_PORT})")
    add(
        "--max-restarts",
        type=_count,
        default=0,
        metavar="R",
        help="times that the job is started again when it fails (default: 0)",
    )
    add(
        "--step-timeout",
        type=_seconds,
        metavar="S",
        help="with a chief and servers: seconds until a worker's step is given to another "
        "(default: 300)",
    )
    add("--log-dir", metavar="D", help="also write each process' output to D/worker-0.log, ...")
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
    doctor.set_defaults(command=_doctor)
    doctor.add_argument(
        "--startup-timeout", type=_seconds, metavar="S", help="seconds to wait for the peers"
    )
    return parser


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


# -- run: who runs where


@dataclasses.dataclass(frozen=True)
class Task:
    """One process of the job: its place in the cluster, and the host that runs it."""

    job: str
    index: int
    host: str
    address: str | None  # None for an evaluator, which nobody connects to

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
    first_port: int = _FIRST_PORT,
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
    """
    homes = [
        host for host, count in (hosts or {"127.0.0.1": workers}).items() for _ in range(count)
    ]
    with_address = [
        *([("chief", 0, homes[0])] if chief else []),
        *(("worker", index, host) for index, host in enumerate(homes)),
        *(("ps", index, homes[0]) for index in range(ps)),
    ]
    if hosts:
        taken = collections.Counter()
        ports = []
        for _, _, host in with_address:
            ports.append(first_port + taken[host])
            taken[host] += 1
        if max(ports) > 65535:
            raise UsageError(f"--port {first_port} leaves too few ports below 65536.")
    else:
        ports = clusters.local_ports(len(with_address))
    tasks = [
        Task(job, index, host, f"{host}:{port}")
        for (job, index, host), port in zip(with_address, ports, strict=True)
    ]
    return tasks + ([Task("evaluator", 0, homes[0], None)] if evaluator else [])


def task_config(task: Task, tasks: Sequence[Task], startup_timeout_seconds: float) -> str:
    """TF_CONFIG of one task."""
    jobs = {}
    for other in tasks:
        if other.address is not None:
            jobs[other.job] = (*jobs.get(other.job, ()), other.address)
    return clusters.Cluster(
        jobs, task.job, task.index, "TF_CONFIG", startup_timeout_seconds
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


def _num_gpus() -> int:
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


def ssh_command(host: str, args: argparse.Namespace, hosts: Mapping[str, int]) -> list[str]:
    """The command that starts another host's launcher.

    It runs the same Python, in the same folder, with the same options; both must be at the same
    place on each host.
    """
    options = ["--hosts", ",".join(f"{name}:{count}" for name, count in hosts.items())]
    for flag in ("chief", "evaluator"):
        options += [f"--{flag}"] if getattr(args, flag) else []
    for option in ("ps", "port", "log_dir", "threads", "startup_timeout"):
        if value := getattr(args, option):
            options += [f"--{option.replace('_', '-')}", str(value)]
    launcher = [sys.executable, "-m", "tfdist.launch", "run", "--stop-with-stdin", "--host", host]
    program = [*(["-m"] if args.module else []), args.script, *args.args]
    line = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(launcher + options + program)}"
    # Without BatchMode, ssh would ask for a password in the middle of the output.
    return ["ssh", "-o", "BatchMode=yes", host.strip("[]"), line]


def _run(args: argparse.Namespace) -> int:
    hosts = _hosts(args)
    here = own_host(list(hosts), name=args.host) if hosts else None
    args.chief = args.chief or args.ps > 0 or args.colocate_ps
    _refuse_contradictions(args, hosts, here)
    family = _run_once(args, hosts, here, 0)
    for number in range(1, args.max_restarts + 1):
        if family.has_ended_well:
            break
        pause = min(_LONGEST_PAUSE_SECONDS, 2.0 ** (number - 1))
        _say(
            f"tfdist run: the job starts again in {pause:.0f} s (restart {number} of "
            f"{args.max_restarts})."
        )
        time.sleep(pause)
        family = _run_once(args, hosts, here, number)
    return family.result


def _run_once(args: argparse.Namespace, hosts: Mapping[str, int], here: str | None, number: int):
    """Runs the job until it ends; returns its :class:`_Family`."""
    if hosts:
        default_timeout = clusters.DEFAULT_STARTUP_TIMEOUT_SECONDS
    else:
        default_timeout = _LOCAL_STARTUP_TIMEOUT_SECONDS
    tasks = plan(
        workers=args.workers or 1,
        ps=args.ps,
        chief=args.chief,
        evaluator=args.evaluator,
        hosts=hosts,
        first_port=args.port or _FIRST_PORT,
    )
    local = [task for task in tasks if not hosts or task.host == here]
    program = [sys.executable, "-u", *(["-m"] if args.module else []), args.script, *args.args]
    if args.log_dir:
        os.makedirs(args.log_dir, exist_ok=True)
    # The workers and servers of a chief that drives them serve until they are ended.
    has_servers = args.ps > 0 or args.colocate_ps
    chief_decides = has_servers and any(task.job == "chief" for task in local)
    spare = args.max_restarts if chief_decides and not args.colocate_ps else 0
    with _Family(stop_with_stdin=args.stop_with_stdin) as family:
        trainers = [task for task in local if task.job in ("chief", "worker")]
        for task in local:
            environ = {
                **os.environ,
                **gpu_variables(os.environ, task, trainers, _num_gpus()),
                **thread_variables(os.environ, processes=len(local), threads=args.threads),
                "TF_CONFIG": task_config(task, tasks, args.startup_timeout or default_timeout),
                "TFDIST_RESTART": str(number),
            }
            if args.step_timeout:
                environ["TFDIST_STEP_TIMEOUT"] = str(args.step_timeout)
            family.start(
                program,
                environ=environ,
                label=task.label,
                prefix=f"[{task.label}] ",
                log_path=_log_path(args.log_dir, task.label),
                decides=task.job == "chief" if chief_decides else task.job in ("chief", "worker"),
                # The others go on without a worker that is killed, and take it back.
                may_be_killed=chief_decides and not args.colocate_ps and task.job == "worker",
                spare=spare,
            )
        for host in (host for host in hosts if args.ssh and host != here):
            family.start(
                ssh_command(host, args, hosts),
                environ=os.environ,
                label=f"host {host}",
                prefix="",  # That launcher has put the tasks' names there.
                decides=not chief_decides,
                is_remote=True,
            )
        family.wait()
        return family


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
    if args.max_restarts and hosts:
        raise UsageError(
            f"--max-restarts {args.max_restarts}: jobs on several hosts are not restarted yet; "
            "use 0."
        )
    if args.ps and args.colocate_ps:
        raise UsageError("--ps and --colocate-ps contradict each other; give one of them.")
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
    if args.ps and len(hosts) > 1 and not args.stop_with_stdin:
        first = next(iter(hosts))
        if not args.ssh or here != first:
            raise UsageError(
                f"--ps with --hosts needs --ssh, on the first host ({first}): its launcher ends "
                "the parameter servers, and must know when the workers of all hosts have ended."
            )


def _log_path(folder: str | None, label: str) -> str | None:
    return os.path.join(folder, f"{label.replace(' ', '-')}.log") if folder else None


# -- run: processes
#
# Each child leads a session of its own, so a signal to its process group reaches the processes
# that it started, and Ctrl-C on a terminal reaches the launcher alone. If the launcher is killed
# outright, two things end the children: on Linux the kernel kills each one (PR_SET_PDEATHSIG); on
# every system a guard, a forked process that waits for the end of a pipe from the launcher, kills
# their groups. What leaves its group on purpose (setsid) is beyond both.


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


class _Output:
    """One of the two output streams of a child: adds the prefix and keeps the last lines."""

    def __init__(self, pipe: BinaryIO, target: BinaryIO, prefix: bytes, child: "_Child"):
        os.set_blocking(pipe.fileno(), False)
        self.pipe = pipe
        self._target = target
        self._prefix = prefix
        self._child = child
        self._pending = b""

    def pump(self) -> bool:
        """Passes on what has arrived. Returns whether the stream is still open."""
        try:
            chunk = os.read(self.pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        lines, self._pending = split_lines(self._pending, chunk)
        if not chunk and (rest := self._pending.strip(b"\r")):
            lines.append(rest)
        if self._child.log is not None:
            self._child.log.write(chunk)
        self._child.last_lines.extend(lines)
        self._target.write(b"".join(self._prefix + line + b"\n" for line in lines))
        self._target.flush()
        return bool(chunk)


class _Child:
    """One process that was started, with what the launcher must know about it."""

    def __init__(
        self,
        process: subprocess.Popen,
        label: str,
        *,
        decides: bool,
        is_remote: bool,
        may_be_killed: bool = False,
    ):
        self.process = process
        self.label = label
        self.decides = decides
        self.is_remote = is_remote
        self.may_be_killed = may_be_killed
        self.start_again: Callable[[], None] | None = None
        self.code: int | None = None
        self.outputs: list[_Output] = []
        self.last_lines: collections.deque[bytes] = collections.deque(maxlen=_LAST_LINES)
        self.log: BinaryIO | None = None

    def end(self) -> None:
        """Asks it to end: SIGTERM to its group; another host's launcher by closing its stdin."""
        if self.is_remote:
            self.process.stdin.close()
        else:
            self.kill(signal.SIGTERM)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Sends a signal to all processes of its group that are left."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signum)

    @property
    def status(self) -> int:
        """Exit code as a shell gives it: 128 + n for signal n."""
        return self.code if self.code >= 0 else 128 - self.code


class _Family:
    """All processes of one launcher: started, listened to, and ended together."""

    def __init__(self, *, stop_with_stdin: bool = False):
        self._children: list[_Child] = []
        self._selector = selectors.DefaultSelector()
        self.result: int | None = None  # set once the end has begun
        self._ending_since = 0.0
        self._failed: _Child | None = None
        self._signal: int | None = None
        self._handlers = {}
        self._guard = _Guard()
        if stop_with_stdin:
            self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)

    def __enter__(self):
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # What nohup or a shell has told this process to ignore stays ignored.
            if signal.getsignal(signum) != signal.SIG_IGN:
                self._handlers[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *exc_info):
        for child in self._children:
            if child.code is None:
                child.kill()
                child.process.wait()
            if child.process.stdin is not None:
                child.process.stdin.close()
            for output in child.outputs:
                output.pipe.close()
            if child.log is not None:
                child.log.close()
        self._selector.close()
        self._guard.close()
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def start(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        label: str,
        prefix: str,
        log_path: str | None = None,
        decides: bool,
        is_remote: bool = False,
        may_be_killed: bool = False,
        spare: int = 0,
    ) -> None:
        """Starts one process.

        Args:
            command: program and arguments.
            environ: its environment variables.
            label: its name in messages.
            prefix: what its output lines begin with.
            log_path: file for its output.
            decides: whether the job goes on until it ends; the others are ended then.
            is_remote: it is an ssh client that runs another host's launcher.
            may_be_killed: whether the others go on when a signal kills it.
            spare: how often it is then started again.
        """
        log = open(log_path, "ab", buffering=0) if log_path else None  # noqa: SIM115
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE if is_remote else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_parent(os.getpid()),
        )
        self._guard.add(process.pid)
        child = _Child(
            process, label, decides=decides, is_remote=is_remote, may_be_killed=may_be_killed
        )
        child.log = log
        if may_be_killed and spare > 0:
            child.start_again = functools.partial(
                self.start,
                command,
                environ=environ,
                label=label,
                prefix=prefix,
                log_path=log_path,
                decides=decides,
                may_be_killed=True,
                spare=spare - 1,
            )
        colour = _COLOURS[len({other.label for other in self._children}) % len(_COLOURS)]
        self._children.append(child)
        for pipe, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            shown = f"\x1b[{colour}m{prefix}\x1b[0m" if prefix and target.isatty() else prefix
            output = _Output(pipe, target.buffer, shown.encode(), child)
            child.outputs.append(output)
            self._selector.register(pipe, selectors.EVENT_READ, output)

    def wait(self) -> int:
        """Passes on the output until all have ended. Returns the launcher's exit status."""
        while any(child.code is None for child in self._children):
            try:
                self._pump(_TICK_SECONDS)
            except BrokenPipeError:
                return self._abandon()
            for child in self._children:
                if child.code is None and (code := child.process.poll()) is not None:
                    self._on_end(child, code)
            if self._signal is not None:
                self._end_all(128 + self._signal)
            self._kill_late_ones()
        return self._report()

    def _pump(self, seconds: float) -> bool:
        """Passes on what has arrived. Returns whether anything had."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if key.data is None:
                if not os.read(key.fd, 4096):
                    self._selector.unregister(key.fd)
                    self._end_all(128 + signal.SIGTERM)
            elif not key.data.pump():
                self._selector.unregister(key.fileobj)
        return bool(ready)

    def _on_end(self, child: _Child, code: int) -> None:
        child.code = code
        child.kill()  # Processes that it has left behind.
        self._guard.remove(child.process.pid)
        if self.result is not None:
            return
        if code < 0 and child.may_be_killed:
            # It counts as ended well: the job does without it, or has it again.
            how = f"{child.label} was killed by {signal.Signals(-code).name}"
            if child.start_again is None:
                _say(f"tfdist run: {how}; the others go on without it.")
            else:
                _say(f"tfdist run: {how}; it starts again.")
                child.start_again()
            return
        if code != 0:
            self._failed = child
            self._end_all(child.status)
        elif all(other.code == 0 for other in self._children if other.decides):
            self._end_all(0)

    def _end_all(self, result: int) -> None:
        if self.result is not None:
            return
        self.result = result
        self._ending_since = time.monotonic()
        for child in self._children:
            if child.code is None:
                child.end()

    def _kill_late_ones(self) -> None:
        if self.result is None:
            return
        waited = time.monotonic() - self._ending_since
        for child in self._children:
            grace = _REMOTE_GRACE_SECONDS if child.is_remote else _GRACE_SECONDS
            if child.code is None and waited > grace:
                child.kill()

    @property
    def has_ended_well(self) -> bool:
        """Whether nothing failed, or a signal or a lost output asked for the end."""
        return self._failed is None or self._signal is not None

    def _report(self) -> int:
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._open_outputs() and time.monotonic() < deadline:
            try:
                self._pump(_TICK_SECONDS)
            except BrokenPipeError:
                return self._abandon()
        if self._failed is not None:
            _say(_obituary(self._failed, others=len(self._children) - 1))
        return self.result

    def _open_outputs(self) -> list:
        return [key for key in self._selector.get_map().values() if key.data is not None]

    def _abandon(self) -> int:
        """Ends everything when nobody reads our output any more."""
        self._failed, self.result = None, 128 + signal.SIGPIPE
        for child in self._children:
            child.kill()
        # Python would fail once more when it flushes the rest at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE

    def _on_signal(self, signum: int, frame) -> None:
        if self._signal is not None:  # The second time: at once.
            for child in self._children:
                child.kill()
        self._signal = signum


def _obituary(child: _Child, *, others: int) -> str:
    if child.code < 0:
        how = f"was killed by {signal.Signals(-child.code).name}"
    else:
        how = f"failed with exit code {child.code}"
    if child.is_remote and child.code == 255:
        how += " (what ssh gives when it cannot connect)"
    rest = f"; the other {others} were ended" if others > 1 else "; the other was ended"
    lines = [f"tfdist run: {child.label} {how}{rest if others else ''}. Its last lines:"]
    lines += [f"  {line.decode(errors='replace')}" for line in child.last_lines]
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _die_with_parent(parent: int):
    """What a child does before it becomes its program: asks Linux to kill it with the launcher."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    pr_set_pdeathsig = 1

    def before_exec():
        libc.prctl(pr_set_pdeathsig, signal.SIGKILL)
        # The parent may have died before the kernel was asked.
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return before_exec


class _Guard:
    """A process that outlives the launcher just long enough to kill the groups it left."""

    def __init__(self):
        read_end, self._write_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._write_end)
                self._watch(read_end)
            finally:
                os._exit(0)
        os.close(read_end)

    def add(self, group: int) -> None:
        """Puts a process group under guard."""
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Takes a group out, before its number can belong to another."""
        self._write(f"-{group}\n")

    def close(self) -> None:
        """Ends the guard, which kills the groups that are still in its care."""
        os.close(self._write_end)
        os.waitpid(self._pid, 0)

    def _write(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # Somebody has killed the guard.
            os.write(self._write_end, line.encode())

    @staticmethod
    def _watch(read_end: int) -> None:
        os.setsid()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        # Who reads the launcher's output must not wait for the guard.
        with open(os.devnull, "r+") as nothing:
            for descriptor in (0, 1, 2):
                os.dup2(nothing.fileno(), descriptor)
        groups = set()
        with os.fdopen(read_end) as lines:
            for line in lines:
                group = int(line[1:])
                groups.add(group) if line[0] == "+" else groups.discard(group)
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)


# -- doctor

_PINGS = 20
_BULK_BYTES = 8 << 20
_ECHO_TIMEOUT_SECONDS = 20.0


def _doctor(args: argparse.Namespace) -> int:
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


if __name__ == "__main__":
    sys.exit(main())
