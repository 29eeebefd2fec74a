"""Whatever is killed and whenever: the job ends, with the weights of one that nobody disturbed."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SEED = 20
pytestmark = pytest.mark.timeout(420)


def load(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


harness = load("harness")


def test_writer_killed_at_each_file_operation(tmp_path):
    done = subprocess.run(
        [sys.executable, str(HERE / "writing.py"), str(tmp_path), str(SEED)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["kills"]["write"] == found["operations"] >= 40
    assert found["kills"]["again"] > 10 and found["kills"]["read"] > 10


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """(folder of the undisturbed job, of the disturbed one, its plan, its status and messages)."""
    folder = tmp_path_factory.mktemp("faults")
    words = harness.draw(SEED, 10)
    epochs = harness.epochs_for(words)
    assert harness.run_job(folder / "calm", [], epochs, seconds=120)[0] == 0
    status, said = harness.run_job(folder / "harmed", words, epochs, seconds=300)
    return folder / "calm", folder / "harmed", words, (status, said)


def test_job_ends_after_each_kind_of_fault(jobs):
    _, harmed, words, (status, said) = jobs
    assert status == 0, said + (harmed / "output").read_text()[-3000:]
    sent = [word for _, _, word in harness.strikes(harmed)]
    assert sent == [word for word in words if not word.startswith("-")]
    assert harness.report(harmed)["attempt"] == len(words)
    assert "was killed by SIGKILL" in said
    assert "is stopped by a signal" in said
    assert "is behind" in said
    assert "was preempted after a checkpoint" in said


def test_each_attempt_is_recorded(jobs):
    """Also those of the launcher that was killed."""
    _, harmed, words, _ = jobs
    last = json.loads((harmed / "log" / "run.json").read_text())
    runs = [*last["earlier"], last]
    assert [run["state"] for run in runs] == ["lost"] * (len(runs) - 1) + ["ended"]
    assert len(runs) == 1 + sum(word.endswith(":launcher") for word in words)
    assert sum(len(run["attempts"]) for run in runs) == len(words) + 1
    preempted = [a for run in runs for a in run["attempts"] if a.get("outcome") == "preempted"]
    assert len(preempted) == sum(word.startswith("SIGTERM") for word in words)


def test_weights_are_those_of_the_undisturbed_job(jobs):
    calm, harmed = (harness.report(folder) for folder in jobs[:2])
    assert harmed["iterations"] == calm["iterations"]
    assert harmed["weights"] == calm["weights"]  # bit for bit
    # The means of an epoch are restored as sums over the replicas: another order of additions.
    assert harmed["losses"] == pytest.approx(calm["losses"], rel=1e-6)


def test_no_checkpoint_is_lost_that_was_reported(jobs):
    _, harmed, _, _ = jobs
    assert len((harmed / "written").read_text().splitlines()) >= 2  # a slow disk delays some
    assert harness.report(harmed)["lost_checkpoints"] == []


def test_training_goes_on_soon_after_each_fault(jobs):
    _, harmed, words, _ = jobs
    # How soon is measured by benchmarks/chaos.py.
    assert len(harness.recoveries(harmed)) == len([w for w in words if not w.startswith("-")])
