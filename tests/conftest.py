"""Runs tables of training cases on small clusters on this machine, and hands out the results.

A table is a module with ``CASES`` (see ``conformance/cases.py``). ``conformance/runner.py`` runs
many of its cases in one process, since TensorFlow takes seconds to start. The ``results`` fixture
starts one cluster per topology, feeds it the cases that the selected tests ask for, and returns
each result as soon as all workers have written it. A cluster whose case failed is started again
for the cases that remain: after one collective error every later collective in a process fails.
"""

import gc
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest

RUNNER = Path(__file__).parent / "conformance" / "runner.py"
# For tables, for the tests in parity.py, and for launching.py.
sys.path += [str(RUNNER.parent), str(Path(__file__).parent)]

START_SECONDS = 180  # from process start to the first case
CASE_SECONDS = 300  # for one case on all workers, also beside other tests
POLL_SECONDS = 0.1
GRACE_SECONDS = 20  # for the peers of a worker that failed to report their side


class Topology(NamedTuple):
    """How many worker processes, each with how many logical CPU devices."""

    workers: int  # 0: no strategy at all, the reference
    devices: int
    servers: int = 0  # parameter servers; then there is a chief, which alone reports
    options: tuple = ()  # further arguments of the runner

    @property
    def replicas(self):
        return max(self.workers, 1) * self.devices

    @property
    def has_chief(self):
        return self.servers > 0 or "--colocate-ps" in self.options

    @property
    def is_led(self):
        """Whether the first process drives the others, and alone reports."""
        return self.has_chief or any("/job:" in option for option in self.options)

    def tasks(self):
        """``(addresses, [(job, index), ...])`` of the processes to start."""
        if not self.has_chief:
            addresses = free_addresses(self.workers) if self.workers > 1 else ()
            return addresses, [("worker", i) for i in range(max(self.workers, 1))]
        counts = {"chief": 1, "worker": self.workers, "ps": self.servers}
        free = iter(free_addresses(sum(counts.values())))
        jobs = {job: [next(free) for _ in range(count)] for job, count in counts.items() if count}
        return jobs, [(job, i) for job, own in jobs.items() for i in range(len(own))]


_SPLIT_PROCESSES = """{"stages": 2, "micro_batches": 2,
    "devices": ["/job:worker/task:0/CPU:0", "/job:worker/task:1/CPU:0"]}"""
_SPLIT_ALL = '{"stages": 2, "tensor": 2, "data": 2, "micro_batches": 2, "schedule": "gpipe"}'
TOPOLOGIES = {
    "single": Topology(0, 1),
    "one_process": Topology(0, 8),  # which makes strategies of its own
    "mirrored2": Topology(1, 2),
    "2x1": Topology(2, 1),
    "2x2": Topology(2, 2),
    "3x1": Topology(3, 1),
    "split_stages": Topology(1, 4, options=("--split", '{"stages": 2, "data": 2}')),
    "split_all": Topology(1, 8, options=("--split", _SPLIT_ALL)),
    "split_workers": Topology(2, 2, options=("--split", '{"stages": 2}')),
    "split_compressed": Topology(2, 4, options=("--split", '{"tensor": 2}', "--compressed")),
    "split_processes": Topology(2, 1, options=("--split", _SPLIT_PROCESSES)),
    "ps": Topology(2, 1, 2),
    "ps_shards": Topology(2, 1, 2, ("--shards",)),
    "ps_2x2": Topology(2, 2, 1),
    "ps_async": Topology(2, 1, 1, ("--consistency", "Async")),
    "ps_all": Topology(2, 1, 2, ("--consistency", "everything", "--shards", "--compressed")),
    "ps_colocated": Topology(2, 1, 0, ("--colocate-ps",)),
}


class CaseFailedError(Exception):
    """A case raised, crashed or hung; the message holds every worker's account of it."""


def free_addresses(count):
    """Loopback addresses whose ports are free now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    finally:
        for s in sockets:
            s.close()


def worker_environment(addresses=(), index=0, job="worker"):
    """The environment of one process: one TensorFlow thread, TF_CONFIG when there are peers.

    ``addresses``: of the workers, or of all jobs by name.
    """
    env = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    env |= {
        "CUDA_VISIBLE_DEVICES": "-1",
        "KERAS_BACKEND": "tensorflow",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_NUM_INTRAOP_THREADS": "1",
    }
    if addresses:
        jobs = addresses if isinstance(addresses, dict) else {"worker": list(addresses)}
        env["TF_CONFIG"] = json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})
    return env


class CaseCluster:
    """One topology working through a list of cases in a background thread."""

    CaseFailedError = CaseFailedError  # for tests, which can't import this module

    def __init__(
        self,
        table,
        topology,
        cases,
        directory,
        strategies="tfdist",
        grace_seconds=GRACE_SECONDS,
    ):
        self.grace_seconds = grace_seconds
        self.table = Path(table)
        self.topology = topology
        self.shape = TOPOLOGIES[topology]
        self.cases = list(cases)
        self.directory = Path(directory)
        self.strategies = strategies
        self.indices = range(1 if self.shape.is_led else max(self.shape.workers, 1))
        self._processes = []
        self._attempt = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._drive, daemon=True)
        self._thread.start()

    def get(self, case):
        """Waits for the case; returns the path of each worker's result file."""
        while not self._reported(case):
            if not self._thread.is_alive() and not self._reported(case):
                raise CaseFailedError(f"{self.topology} ended without running {case!r}")
            time.sleep(POLL_SECONDS)
        errors = {i: self._error(case, i) for i in self.indices if self._error(case, i).exists()}
        if errors:
            accounts = [f"[worker {i}] {path.read_text().strip()}" for i, path in errors.items()]
            raise CaseFailedError(f"{case!r} on {self.topology}:\n" + "\n".join(accounts))
        return [self._result(case, i) for i in self.indices]

    def close(self):
        self._closed.set()
        self._end_processes()
        self._thread.join()

    def _result(self, case, index):
        return self.directory / f"{case}.{index}.npz"

    def _error(self, case, index):
        return self.directory / f"{case}.{index}.error"

    def _reported(self, case):
        return all(
            self._result(case, i).exists() or self._error(case, i).exists() for i in self.indices
        )

    def _drive(self):
        self.directory.mkdir(parents=True)
        remaining = self.cases
        while remaining and not self._closed.is_set():
            why = self._run_once(remaining)
            bad = [
                c for c in remaining if not all(self._result(c, i).exists() for i in self.indices)
            ]
            if not bad or self._closed.is_set():
                return
            culprit = bad[0]
            after = remaining[remaining.index(culprit) + 1 :]
            if self.shape.workers == 0:  # no collectives: one failure says nothing of the next case
                after = [c for c in after if not self._reported(c)]
            for case in after:  # what was reported after the first failure is its consequence
                for i in self.indices:
                    self._result(case, i).unlink(missing_ok=True)
                    self._error(case, i).unlink(missing_ok=True)
            for i in self.indices:
                if not self._result(culprit, i).exists() and not self._error(culprit, i).exists():
                    account = f"{why}\n{self._last_lines(i)}"
                    self._error(culprit, i).write_text(account)
            remaining = after

    def _run_once(self, cases):
        """Starts the workers on the cases and waits; returns why they ended."""
        self._attempt += 1
        addresses, tasks = self.shape.tasks()
        logs = []
        for number, (job, i) in enumerate(tasks):
            logs.append(self._log(number).open("w"))
            command = [sys.executable, str(RUNNER), "--table", str(self.table)]
            command += ["--workers", str(self.shape.workers), "--devices", str(self.shape.devices)]
            command += ["--index", str(i), "--strategies", self.strategies, *self.shape.options]
            command += ["--servers"] if self.shape.has_chief else []
            command += ["--out", str(self.directory), "--cases", ",".join(cases)]
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=logs[-1],
                    stderr=subprocess.STDOUT,
                    env=worker_environment(addresses, i, job),
                    cwd=self.directory,
                )
            )
        try:
            return self._watch(cases)
        finally:
            self._end_processes()
            for log in logs:
                log.close()

    def _watch(self, cases):
        deadline = time.monotonic() + START_SECONDS + CASE_SECONDS
        pending, failed = list(cases), False
        # Who drives comes first, and what it drives serves until it is ended.
        waits_for = self._processes[:1] if self.shape.is_led else self._processes
        while any(p.poll() is None for p in waits_for):
            time.sleep(POLL_SECONDS)
            while pending and self._reported(pending[0]):
                pending.pop(0)
                deadline = time.monotonic() + CASE_SECONDS
            ended_badly = any(p.poll() not in (None, 0) for p in self._processes)  # also servers
            if ended_badly and not failed:
                failed, deadline = True, time.monotonic() + self.grace_seconds
            if time.monotonic() > deadline:
                if failed:
                    return f"stopped {self.grace_seconds} s after a peer had failed"
                return f"no progress for {CASE_SECONDS} s (a hang)"
        return f"ended with exit codes {[p.returncode for p in self._processes]}"

    def _end_processes(self):
        for p in self._processes:
            if p.poll() is None:
                p.kill()
            p.wait()
        self._processes = []

    def _log(self, index):
        return self.directory / f"output.{self._attempt}.{index}.txt"

    def _last_lines(self, index, count=25):
        lines = self._log(index).read_text(errors="replace").splitlines()
        return "\n".join(lines[-count:])


class Results:
    """Results of the selected cases of one table: ``results(topology, case)``."""

    def __init__(self, table, wanted, directory):
        self._table = table
        self._wanted = wanted  # topology -> list of cases
        self._directory = directory
        self._clusters = {}

    def __call__(self, topology, case):
        """One dict of arrays per worker."""
        import numpy as np

        # The one-process reference runs beside the first topology: each keeps one core busy.
        for name in dict.fromkeys(["single", topology]):
            if name not in self._clusters and self._wanted.get(name):
                self._clusters[name] = CaseCluster(
                    self._table, name, self._wanted[name], self._directory / name
                )
        out = []
        for path in self._clusters[topology].get(case):
            with np.load(path, allow_pickle=False) as arrays:
                out.append(dict(arrays))
        return out

    def close(self):
        for cluster in self._clusters.values():
            cluster.close()


def load_cases(table):
    """The rows of a table module; tables import their siblings and ``conformance/``."""
    if str(Path(table).parent) not in sys.path:
        sys.path.append(str(Path(table).parent))
    spec = importlib.util.spec_from_file_location(f"table_{Path(table).parent.name}", table)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CASES


def skip_without(packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return [pytest.mark.skip(reason=f"needs {', '.join(missing)}")] if missing else []


class FailureTeller:
    """Says what failed when it fails: of a run that is killed, that is all one has."""

    def __init__(self, terminal):
        self._terminal = terminal

    def pytest_runtest_logreport(self, report):
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else str(report.longrepr)
            where = "" if report.when == "call" else f" ({report.when})"
            self._terminal.ensure_newline()
            self._terminal.write_line(f"FAILED {report.nodeid}{where}, {report.duration:.0f} s")
            for line in message.splitlines()[:5]:
                self._terminal.write_line(f"  {line[:200]}")


def pytest_configure(config):
    config.addinivalue_line("markers", "cases(which): the rows of TABLE that the test is for")


def pytest_sessionstart(session):
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if not hasattr(session.config, "workerinput"):  # once, not in each process of pytest-xdist
        session.config.pluginmanager.register(FailureTeller(terminal))


def pytest_collection_finish():
    # As in runner.py: what the test modules have imported stays, and need not be visited again.
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc):
    """Parametrises by topology and case, topology first, the order in which clusters run."""
    if not {"topology", "case"} <= set(metafunc.fixturenames):
        return
    module = metafunc.module
    if not hasattr(module, "ROWS"):
        module.ROWS = load_cases(module.TABLE)
    (which,) = metafunc.definition.get_closest_marker("cases").args
    pairs = [
        pytest.param(topology, case, id=f"{topology}-{case}", marks=skip_without(case.needs))
        for topology in TOPOLOGIES
        for case in module.ROWS
        if topology in case.topologies and which(case)
    ]
    metafunc.parametrize("topology, case", pairs)


def list_differences(reference, actual, prefixes, tolerance):
    """One line for each key that is missing or off by more than the tolerance."""
    import numpy as np

    compared = [k for k in reference if k.startswith(tuple(prefixes))]
    assert compared, f"nothing to compare among {list(reference)}"
    unexpected = [k for k in actual if k.startswith(tuple(prefixes)) and k not in reference]
    lines = [f"{key}: not in the reference" for key in unexpected]
    for key in compared:
        a, b = reference[key], actual.get(key)
        if b is None:
            lines.append(f"{key}: missing")
        elif a.shape != b.shape:
            lines.append(f"{key}: shape {b.shape}, expected {a.shape}")
        elif not np.issubdtype(a.dtype, np.number):
            if not np.array_equal(a, b):
                lines.append(f"{key}: {b}, expected {a}")
        elif not np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            off = np.abs(a.astype("float64") - b)
            lines.append(f"{key}: off by {np.nanmax(off):.2g}, {b.ravel()[:4]} for {a.ravel()[:4]}")
    return lines


@pytest.fixture(scope="session")
def differences():
    """``differences(reference, actual, prefixes, tolerance)``: a list of what differs."""
    return list_differences


def list_disagreements(workers):
    """Keys whose values are not the same, bit for bit, on all workers and their replicas."""

    wrong = []
    for index, worker in enumerate(workers):
        if worker.keys() != workers[0].keys():
            wrong.append(f"worker {index} has other keys: {worker.keys() ^ workers[0].keys()}")
            continue
        for key, value in worker.items():
            first = workers[0][key.split("/", 1)[1] if key.startswith("replica") else key]
            same = value.shape == first.shape and value.dtype == first.dtype
            same = same and value.tobytes() == first.tobytes()
            if not same and not key.startswith("local/"):
                wrong.append(f"worker {index}, {key}: {value.ravel()[:4]}, {first.ravel()[:4]}")
    return wrong


@pytest.fixture(scope="session")
def disagreements():
    """``disagreements(workers)``: what is not identical among the workers' arrays."""
    return list_disagreements


@pytest.fixture(scope="session", name="worker_environment")
def worker_environment_fixture():
    """``worker_environment(addresses, index)``: environment variables of a worker process."""
    return worker_environment


@pytest.fixture(scope="session", name="free_addresses")
def free_addresses_fixture():
    """``free_addresses(count)``: loopback addresses whose ports are free now."""
    return free_addresses


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Runs the cases of the module's ``TABLE`` that its selected tests need."""
    wanted = {}
    for item in request.session.items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if item.fspath != request.node.fspath or not {"topology", "case"} <= set(params):
            continue
        if item.get_closest_marker("skip"):
            continue
        for topology in (params["topology"], "single"):
            if topology == "single" and not params["case"].compare:
                continue
            wanted.setdefault(topology, {})[params["case"].name] = None
    out = Results(
        request.module.TABLE,
        {topology: list(cases) for topology, cases in wanted.items()},
        tmp_path_factory.mktemp(request.module.__name__.split(".")[-1]),
    )
    yield out
    out.close()


@pytest.fixture(scope="module")
def cases(request):
    """The rows of the module's ``TABLE`` by name."""
    return {case.name: case for case in load_cases(request.module.TABLE)}


@pytest.fixture(scope="session")
def case_names():
    """The names of the cases of all tables."""
    tests = RUNNER.parents[1]
    folders = ("conformance", "multi_worker", "compression", "parameter_server")
    tables = [tests / name / "cases.py" for name in folders]
    return {case.name for table in tables for case in load_cases(table)}


@pytest.fixture(scope="session")
def case_cluster():
    """``case_cluster(table, topology, names, directory)``: starts it; to be closed."""
    return CaseCluster


@pytest.fixture
def run_cases(tmp_path):
    """Runs cases of any table on a cluster of their own: ``run_cases(table, topology, names)``."""
    clusters = []

    def run(table, topology, names, **options):
        directory = tmp_path / f"{len(clusters)}-{topology}"
        clusters.append(CaseCluster(table, topology, names, directory, **options))
        return clusters[-1]

    yield run
    for cluster in clusters:
        cluster.close()
