"""The benchmarks run and write what their README promises. How fast things are is not tested."""

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
STEP_TIME = BENCHMARKS / "step_time.py"
COMPRESSION = BENCHMARKS / "compression.py"


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


def run_compression(command, *arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, COMPRESSION, command, "--no-venv", "--quick", *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_compression_encode_writes_its_figures(tmp_path):
    done = run_compression(
        "encode", "--contenders", "one_bit", "--out", "figures.json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "figures.json").read_text())
    assert report.keys() >= {"date", "command", "machine", "versions", "threads_per_process"}
    (row,) = report["results"]
    assert row["contender"] == "one_bit"
    assert row["bytes"] / 33 < row["payload_bytes"] < row["bytes"] / 30
    assert min(row[f"{w}_mb_per_s"] for w in ("encode", "encode_plain", "decode")) > 0
    assert [goal["goal"] for goal in report["goals"]] == ["one_bit: encode, MB/s"]


def test_compression_refuses_an_unknown_contender(tmp_path):
    done = run_compression("step", "--contenders", "none,zip", cwd=tmp_path)
    assert done.returncode == 2
    assert "expected some of stock,none,fp16," in done.stderr
    assert "got zip" in done.stderr


def test_compression_refuses_a_rate_that_it_does_not_know(tmp_path):
    done = run_compression("step", "--rates", "fast", cwd=tmp_path)
    assert done.returncode == 2
    assert "expected a rate such as 100mbit or 1gbit, or 0 for no limit, got fast" in done.stderr


def test_compression_says_why_there_is_no_network(tmp_path):
    done = run_compression("step", "--contenders", "none", cwd=tmp_path, PATH=str(tmp_path))
    assert done.returncode == 3
    assert "ip and tc not found (package iproute2)" in done.stderr


def test_the_limit_of_a_step(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from limits import limit_seconds

    # 25 MB at 100 Mbit/s take two seconds.
    assert limit_seconds(0.1, 25e6, 100e6, 0.0) == 2.0
    assert limit_seconds(3.0, 25e6, 100e6, 0.5) == 3.5
    assert limit_seconds(0.25, 25e6, 0.0, 0.5) == 0.75
