"""Launchers of other hosts, started with ssh."""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Collection, Mapping

from tfdist._processes import Family, Process, say

_RETRY_SECONDS = 10.0  # until a host that could not be reached is called again


def ssh_command(host: str, args: argparse.Namespace, hosts: Mapping[str, int]) -> list[str]:
    """The command that starts another host's launcher.

    It runs the same Python, in the same folder, with the same options; both must be at the same
    place on each host.
    """
    options = ["--hosts", ",".join(f"{name}:{count}" for name, count in hosts.items())]
    for flag in ("chief", "evaluator"):
        options += [f"--{flag}"] if getattr(args, flag) else []
    for option in ("ps", "port", "log_dir", "threads", "startup_timeout", "step_timeout", "grace"):
        if value := getattr(args, option):
            options += [f"--{option.replace('_', '-')}", str(value)]
    launcher = [sys.executable, "-m", "tfdist.launch", "run", "--stop-with-stdin", "--host", host]
    program = [*(["-m"] if args.module else []), args.script, *args.args]
    line = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(launcher + options + program)}"
    # Without BatchMode, ssh would ask for a password in the middle of the output.
    return ["ssh", "-o", "BatchMode=yes", host.strip("[]"), line]


class Caller:
    """Keeps one ssh client for each other host.

    Args:
        family: the launcher's processes.
        args: the command line.
        hosts: host -> number of workers.
    """

    def __init__(self, family: Family, args: argparse.Namespace, hosts: Mapping[str, int]):
        self._family = family
        self._args = args
        self._hosts = hosts
        self._clients: dict[str, Process] = {}
        self._called_at: dict[str, float] = {}

    def call(self, missing: Collection[str]) -> bool:
        """Starts the launchers of these hosts, unless that is under way or was tried just now.

        Returns:
            Whether one of them has just failed to start.
        """
        failed = False
        for host in missing:
            client = self._clients.get(host)
            if client is not None and client.code is not None:
                self._family.drain([client])
                del self._clients[host]
                failed |= client.code != 0
                say(f"tfdist run: {_end_of(client)}")
            elif client is None:
                now = time.monotonic()
                if now - self._called_at.get(host, -_RETRY_SECONDS) >= _RETRY_SECONDS:
                    self._called_at[host] = now
                    self._start(host)
        return failed

    def wait(self) -> int:
        """Waits until all clients have ended, and ends them all when one fails or a signal comes.

        Returns:
            The exit status: of the first one that failed, or 0.
        """
        status = None
        while any(client.code is None for client in self._clients.values()):
            self._family.poll()
            codes = [client.code for client in self._clients.values() if client.code]
            if status is None and (codes or self._family.signal is not None):
                signum = self._family.signal
                status = 128 + signum if signum else codes[0]
                status = 128 - status if status < 0 else status
                for client in self._clients.values():
                    if client.code is None:
                        client.ask_to_end()
            if self._family.is_hurried:
                for client in self._clients.values():
                    client.kill()
        self._family.drain(list(self._clients.values()))
        for client in self._clients.values():
            if client.code == 255:
                say(f"tfdist run: {_end_of(client)}")
        return status or 0

    def close(self, seconds: float = 5.0) -> None:
        """Waits for the clients to pass on what their launchers print last."""
        deadline = time.monotonic() + seconds
        clients = list(self._clients.values())
        for client in clients:
            client.ask_to_end()
        while any(client.code is None for client in clients) and time.monotonic() < deadline:
            self._family.poll()
        self._family.drain([client for client in clients if client.code is not None])

    def _start(self, host: str) -> None:
        # That launcher has put the tasks' names before their lines.
        self._clients[host] = self._family.start(
            ssh_command(host, self._args, self._hosts),
            environ=os.environ,
            label=f"host {host}",
            has_stdin=True,
        )


def _end_of(client: Process) -> str:
    hint = " (what ssh gives when it cannot connect)" if client.code == 255 else ""
    return f"the launcher of {client.label} ended with exit code {client.code}{hint}."
