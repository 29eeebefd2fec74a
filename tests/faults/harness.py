"""Runs `job.py` under `tfdist run` with kills drawn from a seed, and says what came of it."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

JOB = Path(__file__).with_name("job.py")
STEPS = 6  # of an epoch of the job
STEP_TIMEOUT = 5  # seconds; what SIGSTOP costs
# All there are, so that each is met once in as many attempts. A checkpoint of the job has some tens
# of file operations; a restore at least three, on every worker.
_KINDS = (
    *("SIGKILL::begin", "SIGKILL::forward", "SIGKILL::collective", "SIGTERM::begin"),
    *("SIGKILL:0:save", "SIGKILL::restore", "SIGKILL::restore", "SIGSTOP::begin", "-::stuck"),
    "SIGKILL::launcher",
)
SLOW = ("SIGSTOP", "-")  # signals whose attempt ends only by a time-out


def draw(seed, kills, workers=2, kinds=_KINDS):
    """A plan for ``job.py`` with so many words; its steps grow, so that each is reached."""
    random_ = random.Random(seed)
    words, step, order = [], 0, []
    for _ in range(kills):
        if not order:
            order = random_.sample(kinds, len(kinds))
        signal, rank, place = order.pop().split(":")
        step += random_.randint(1, 2)
        rank = rank or str(random_.randrange(workers))
        if place in ("save", "restore"):
            place += f"-{random_.randrange(30 if place == 'save' else 3)}"
        words.append(f"{signal}:{rank}:{step}:{place}")
    return words


def epochs_for(words):
    """How many epochs the job needs, so that the last word is reached and training goes on."""
    return (max((int(word.split(":")[2]) for word in words), default=0) + 4) // STEPS + 1


def run_job(folder, words, epochs, *, workers=2, seconds=900.0):
    """Runs the job until it has ended; starts a launcher that was killed again.

    Returns:
        (exit status, the launcher's own messages as one text).
    """
    folder.mkdir(parents=True, exist_ok=True)
    first, deadline, said = 0, time.monotonic() + seconds, []
    environ = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
    restarts = str(len(words) + 3)  # a job that fails by itself is not tried for hours
    while True:
        command = [
            *(sys.executable, "-m", "tfdist.launch", "run", "-n", str(workers)),
            *("--max-restarts", restarts, "--max-restarts-per-hour", restarts),
            *("--step-timeout", str(STEP_TIMEOUT), "--grace", "20"),
            *("--log-dir", str(folder / "log"), str(JOB), str(folder)),
            *(f"--harm={','.join(words)}", "--epochs", str(epochs), "--first", str(first)),
        ]
        with open(folder / "output", "ab") as output:
            done = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
                env=environ,
                timeout=max(1.0, deadline - time.monotonic()),
            )
        said.append("\n".join(x for x in done.stderr.splitlines() if x.startswith("tfdist run:")))
        if done.returncode != -9:
            return done.returncode, "\n".join(said)
        (*_, (attempt, _, word)) = strikes(folder)
        if not word.endswith(":launcher"):
            return done.returncode, "\n".join(said)
        first = attempt + 1


def strikes(folder):
    """(attempt, time, word) of each signal that was sent."""
    lines = (Path(folder) / "strikes").read_text().splitlines()
    return [(int(a), float(when), word) for a, when, word in map(str.split, lines)]


def recoveries(folder):
    """(word, seconds from the signal to the next trained step of any worker, attempts until it)
    of each strike. Where that is more than one attempt, further faults came before the step."""
    steps = []
    for path in Path(folder).glob("steps.*"):
        for line in path.read_text().splitlines():
            attempt, _, when = line.split()
            steps.append((int(attempt), float(when)))
    found = []
    for attempt, when, word in strikes(folder):
        later = [step for step in steps if step[0] > attempt]
        if later:
            number, next_step = min(later)
            found.append((word, next_step - when, number - attempt))
    return found


def report(folder):
    """What the chief wrote at the end; None where it did not get there."""
    path = Path(folder) / "report.json"
    return json.loads(path.read_text()) if path.exists() else None
