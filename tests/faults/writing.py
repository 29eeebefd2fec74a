"""Kills the writer of checkpoints at each of its file operations in turn, and looks what is left.

``writing.py FOLDER SEED``: a child writes the steps 1, 2 and 3, tells each that is written, and
removes the one before. It is killed at its n-th operation, for each n there is. Another child goes
on, and is killed as well, at one drawn from the seed; another only reads, and is killed while it
does. After every kill the newest checkpoint must be whole, its tensors those of its step, and none
lost that was told as written. The last child is left alone and must end with step 3. Prints a line
of JSON: the numbers of kills and what was wrong.
"""

import json
import os
import random
import sys
import warnings
from pathlib import Path

import numpy as np
from stepwise import Killer

from tfdist import checkpoints

STEPS = 3


def tensors_of(step):
    values = np.random.default_rng(step)
    return {
        "model/kernel": values.normal(size=(40, 30)).astype("float32"),
        "model/bias": values.normal(size=30).astype("float16"),
        "optimizer/iterations": np.int64(step),
    }


def write(directory, tell):
    checkpoints.clean(directory)
    found = checkpoints.newest(directory)
    old = found.entry if found else None
    for step in range(old.step + 1 if old else 1, STEPS + 1):
        new = checkpoints.write(directory, step, tensors_of(step), {"epoch": step})
        tell(step)
        if old is not None:
            checkpoints.delete(old)
        old = new


def read(directory, tell):
    checkpoints.newest(directory)


def in_child(task, directory, at):
    """Runs the task; returns (whether it was killed, the steps told, operations)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            really_write = os.write
            killer = Killer(at)
            task(directory, lambda step: really_write(writer, f"{step} ".encode()))
            really_write(writer, f"count={killer.count}".encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        *told, last = pipe.read().split(" ")
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, -9):
        raise RuntimeError(f"the child ended with {code}")
    return code == -9, [int(step) for step in told], int(last[6:]) if code == 0 else None


class Checks:
    """What was promised, looked at after each kill."""

    def __init__(self, directory):
        self.directory = directory
        self.told = 0
        self.wrong = []

    def after(self, where, told):
        self.told = max([self.told, *told])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = checkpoints.newest(self.directory)
        step = found.entry.step if found else 0
        if warned:
            self.wrong.append(f"{where}: {warned[0].message}")
        if step < self.told:
            self.wrong.append(f"{where}: step {self.told} was told as written, {step} is there")
        if found:
            expected = tensors_of(step)
            same = found.tensors.keys() == expected.keys() and all(
                np.array_equal(found.tensors[name], value) for name, value in expected.items()
            )
            if not same:
                self.wrong.append(f"{where}: other tensors in step {step}")
        return step


def main(folder, seed):
    draw = random.Random(seed)
    _, _, total = in_child(write, str(folder / "whole"), None)
    _, _, total_read = in_child(read, str(folder / "whole"), None)
    kills = {"write": 0, "again": 0, "read": 0}
    wrong = []
    for at in range(total):
        directory = str(folder / f"killed-{at}")
        checks = Checks(directory)
        for kind, task, when in (
            ("write", write, at),
            ("again", write, draw.randrange(total)),
            ("read", read, draw.randrange(total_read)),
        ):
            killed, told, _ = in_child(task, directory, when)
            kills[kind] += killed
            checks.after(f"{kind}, operation {when} after {at}", told)
        _, told, _ = in_child(write, directory, None)
        if checks.after(f"the end after {at}", told) != STEPS:
            checks.wrong.append(f"it does not end after {at}")
        names = sorted(os.listdir(directory))
        # A child that had nothing to write left what the one before had not removed.
        if any(name.startswith(".writing") for name in names):
            checks.wrong.append(f"{names} is left after {at}")
        wrong += checks.wrong
    print(json.dumps({"operations": total, "kills": kills, "wrong": wrong}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
