"""A checkpoint of one strategy and world size is that of every other; see ``cases.py``."""

from pathlib import Path

import numpy as np
import pytest

TABLE = Path(__file__).with_name("cases.py")
KINDS = {
    "alone": "one_process",
    "mirrored": "one_process",
    "stages": "one_process",
    "tensor": "one_process",
    "copies": "one_process",
    "2x1": "2x1",
    "2x2": "2x2",
    "3x1": "3x1",
    "split_workers": "split_workers",
    "ps": "ps",
    "ps_shards": "ps",
}
TOPOLOGIES = list(dict.fromkeys(KINDS.values()))
pytestmark = pytest.mark.timeout(900)  # the first waits for all clusters to start


@pytest.fixture(scope="module")
def clusters(case_cluster, tmp_path_factory):
    """All clusters, by topology, once each has written its checkpoints."""
    folder, started = tmp_path_factory.mktemp("restoring"), {}
    names = ["write", *(f"from_{topology}" for topology in TOPOLOGIES)]
    try:
        for topology in TOPOLOGIES:
            # One after the other: while one starts, those before it go on from one another.
            started[topology] = case_cluster(TABLE, topology, names, folder / topology)
            started[topology].get("write")
        yield started
    finally:
        for cluster in started.values():
            cluster.close()


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", KINDS)
def test_goes_on_as_one_process_that_nobody_disturbed(
    source, target, clusters, differences, disagreements
):
    with np.load(clusters["one_process"].get("write")[0]) as arrays:
        undisturbed = dict(arrays)
    workers = []
    for path in clusters[KINDS[target]].get(f"from_{KINDS[source]}"):
        prefix = f"{source}/{target}/"
        with np.load(path) as arrays:
            own = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
        workers.append(own)
    wrong = differences(undisturbed, workers[0], ("w/", "o/", "log/"), 1e-5)
    wrong += disagreements(workers)
    assert not wrong, "\n".join(wrong)
