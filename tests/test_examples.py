"""Every example runs, for two steps; those for two workers under ``tfdist run``."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example, tmp_path):
    command = [sys.executable, str(example), "--epochs", "1", "--steps", "2"]
    if "two_workers" in example.stem:
        command[1:1] = ["-m", "tfdist.launch", "run", "-n", "2"]
    if "parameter_servers" in example.stem:
        command[1:1] = ["-m", "tfdist.launch", "run", "-n", "2", "--ps", "1"]
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    signs = {"digits_parameter_servers": "steps by worker", "gpt_split": "split over 2 devices"}
    sign = signs.get(example.stem, "2 replicas")
    assert sign in done.stdout


def test_program_of_the_readme_runs(tmp_path):
    page = (Path(__file__).parents[1] / "README.md").read_text()
    (program,) = re.findall(r"`train.py`:\n\n```python\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "train.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "val_accuracy" in done.stdout
    assert (tmp_path / "model.keras").exists()


def test_there_are_examples():
    assert len(EXAMPLES) >= 3
