"""Fresh processes for one measurement, one for each host; all are ended with it."""

import contextlib
import subprocess
import tempfile
import time
from pathlib import Path

from step_time import ContenderFailed, end, environment, last_lines, read_result

CONTENDERS = Path(__file__).resolve().parent / "contenders"


def run_workers(python, script, arguments, hosts, *, threads, timeout, together=True):
    """Runs a contender on all hosts at once.

    Args:
        script: its name in ``contenders/``.
        arguments: list of its arguments; rank, world size and interface are added.
        hosts: a ``network.Hosts``.
        together: whether the workers are a cluster; if not, they only run side by side.

    Returns:
        What each worker has reported.

    Raises:
        ContenderFailed: a worker ended early, or they took longer than ``timeout`` seconds.
    """
    count = len(hosts.addresses)
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        logs = [Path(folder) / f"worker_{index}.log" for index in range(count)]
        workers = []
        for index, log in enumerate(logs):
            place = [f"--rank={index}", f"--world-size={count}", f"--interface={hosts.interface}"]
            worker = subprocess.Popen(
                [*hosts.prefixes[index], python, CONTENDERS / script, *arguments, *place],
                cwd=folder,
                env=_environment(hosts, index, threads, together),
                stdin=subprocess.PIPE,
                stdout=stack.enter_context(log.open("wb")),
                stderr=subprocess.STDOUT,
            )
            workers.append(worker)
            stack.callback(end, worker)
        while None in (results := [read_result(log) for log in logs]):
            codes = [worker.poll() for worker in workers]
            if any(code is not None for code in codes):
                raise ContenderFailed(f"a worker ended early, exit codes {codes}{last_lines(logs)}")
            if time.monotonic() > deadline:
                raise ContenderFailed(f"not done after {timeout} s{last_lines(logs)}")
            time.sleep(0.1)
    return results


def _environment(hosts, index, threads, together):
    values = environment(hosts.addresses, index, threads)
    values["GLOO_SOCKET_IFNAME"] = hosts.interface
    values["TF_CPP_MIN_LOG_LEVEL"] = "2"
    if not together:
        del values["TF_CONFIG"]
    # gRPC would ask a proxy for the other hosts.
    proxies = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
    return {name: value for name, value in values.items() if name.lower() not in proxies}
