"""Split models give the weights, metrics and predictions of the model in one piece."""

from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("cases.py")
pytestmark = pytest.mark.timeout(900)


@pytest.mark.cases(lambda case: case.compare)
def test_same_as_one_process(topology, case, results, differences):
    (reference,) = results("single", case.name)
    worker = results(topology, case.name)[0]
    wrong = differences(reference, worker, case.compare, case.tolerance)
    assert not wrong, "\n".join(wrong)


@pytest.mark.cases(lambda case: case.identical)
def test_workers_and_replicas_are_identical(topology, case, results, disagreements):
    assert not disagreements(results(topology, case.name))
