"""Training with compressed gradients: equal to one process where nothing is lost, and always the
same bits on all workers."""

from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("cases.py")
pytestmark = pytest.mark.timeout(900)  # the first of a topology waits for its cluster to start


@pytest.mark.cases(lambda case: case.compare)
def test_same_as_one_process(topology, case, results, differences):
    (reference,) = results("single", case.name)
    worker = results(topology, case.name)[0]
    wrong = differences(reference, worker, case.compare, case.tolerance)
    assert not wrong, "\n".join(wrong)


@pytest.mark.cases(lambda case: case.identical)
def test_workers_and_replicas_are_identical(topology, case, results, disagreements):
    assert not disagreements(results(topology, case.name))


@pytest.mark.cases(lambda case: case.check)
def test_promise_of_its_own(topology, case, results):
    case.check(results(topology, case.name))
