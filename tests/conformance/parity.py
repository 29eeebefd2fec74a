"""The tests that hold for the cases of a table; a test module imports those that its table has.

They take the ``TABLE`` of the module that imports them.
"""

import pytest


@pytest.mark.cases(lambda case: case.compare)
def test_same_as_one_process(topology, case, results, differences):
    (reference,) = results("single", case.name)
    worker = results(topology, case.name)[0]
    wrong = differences(reference, worker, case.compare, case.tolerance)
    assert not wrong, "\n".join(wrong)


@pytest.mark.cases(lambda case: case.identical)
def test_workers_and_replicas_are_identical(topology, case, results, disagreements):
    wrong = disagreements(results(topology, case.name))
    assert not wrong, "\n".join(wrong)


@pytest.mark.cases(lambda case: case.check)
def test_promise_of_its_own(topology, case, results):
    case.check(results(topology, case.name))
