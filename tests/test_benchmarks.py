"""The benchmarks run and write what their README promises. How fast things are is not tested."""

import json
import subprocess
import sys
from pathlib import Path

STEP_TIME = Path(__file__).resolve().parent.parent / "benchmarks" / "step_time.py"


def run(*arguments, cwd):
    return subprocess.run(
        [sys.executable, STEP_TIME, "--no-venv", "--quick", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_step_time_writes_its_figures(tmp_path):
    done = run("--contenders", "loop", "--out", "figures.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "figures.json").read_text())
    assert report.keys() >= {"date", "command", "machine", "versions", "threads_per_process"}
    assert report["machine"]["cpu"]
    assert {"python", "tensorflow", "keras"} <= report["versions"].keys()
    (row,) = report["results"]
    assert (row["model"], row["input"], row["contender"]) == ("1M", "finite", "loop")
    assert row["status"] == "ok"
    assert row["parameters"] == 995_978
    assert 0 < row["step_ms"]["min"] <= row["step_ms"]["median"] <= row["step_ms"]["max"]
    assert row["start_seconds"].keys() == {"import", "cluster", "first_step"}
    assert all(seconds > 0 for seconds in row["start_seconds"].values())
    assert row["to_first_step_seconds"]["median"] > 0
    assert "(b) custom loop" in done.stdout


def test_step_time_shows_why_a_contender_failed(tmp_path):
    done = run("--contenders", "loop", "--timeout", "1", cwd=tmp_path)
    assert done.returncode == 1
    assert "failed: not done after 1 s" in done.stdout


def test_step_time_refuses_an_unknown_contender(tmp_path):
    done = run("--contenders", "loop,horovod", cwd=tmp_path)
    assert done.returncode == 2
    assert "expected some of tfdist,tf_keras,loop,torch, got horovod" in done.stderr
