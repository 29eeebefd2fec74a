"""Saving and callbacks on all workers do once, and alike, what they do in one process."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import parity
import pytest

TABLE = Path(__file__).with_name("cases.py")
LOADER = Path(__file__).with_name("load_saved.py")
pytestmark = pytest.mark.timeout(900)  # the first of a topology waits for its cluster to start

test_same_as_one_process = parity.test_same_as_one_process
test_workers_and_replicas_are_identical = parity.test_workers_and_replicas_are_identical
test_promise_of_its_own = parity.test_promise_of_its_own


@pytest.mark.parametrize("devices", [0, 3])
@pytest.mark.cases(lambda case: case.name == "saves_in_every_way")
def test_saved_files_restore_into_another_number_of_replicas(
    topology, case, devices, results, worker_environment, tmp_path
):
    """0 devices: a plain process, which must not import tfdist."""
    (reference,) = results("single", case.name)
    directory = str(results(topology, case.name)[0]["local/directory"])
    out = tmp_path / "loaded.npz"
    command = [sys.executable, LOADER, directory, "--devices", str(devices), "--out", out]
    done = subprocess.run(
        command, env=worker_environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(out) as loaded:
        for way in ("keras", "weights", "checkpoint", "exported"):
            np.testing.assert_allclose(
                loaded[f"{way}/pred"], reference["pred/half"], rtol=1e-5, atol=1e-5, err_msg=way
            )
        expected = [v for k, v in reference.items() if k.startswith("w/") and "half" not in k]
        for way in ("keras", "weights", "checkpoint"):
            for i, value in enumerate(expected):
                np.testing.assert_allclose(
                    loaded[f"{way}/w/{i:02d}"], value, rtol=1e-5, atol=1e-5, err_msg=f"{way} {i}"
                )
