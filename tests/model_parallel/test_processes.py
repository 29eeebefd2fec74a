"""Stages in two processes, one of which dies or hangs."""

import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("harmed.py")
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def harmed(tmp_path, worker_environment, free_addresses):
    """``harmed(signal)``: exit status and output of the process that runs the program."""
    processes = []

    def harmed(signal):
        addresses = free_addresses(2)
        for i in range(2):
            with (tmp_path / f"{i}.txt").open("w") as log:
                env = worker_environment(addresses, i) | {"TFDIST_STEP_TIMEOUT": "8"}
                command = [sys.executable, str(JOB), signal, str(tmp_path)]
                processes.append(
                    subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
                )
        status = processes[0].wait(timeout=120)
        return status, (tmp_path / "0.txt").read_text()

    yield harmed
    for process in processes:
        process.kill()
        process.wait()


def test_death_of_a_stage_is_an_error_of_fit(harmed):
    status, output = harmed("SIGKILL")
    assert "harmed" in output
    assert "UnavailableError" in output
    assert "/job:worker/replica:0/task:1" in output
    assert status == 0  # the program has caught the error


def test_stage_that_hangs_ends_the_program(harmed):
    status, output = harmed("SIGSTOP")
    assert "harmed" in output
    assert "a step did not end within 8 s" in output
    assert status == 69  # EX_UNAVAILABLE
