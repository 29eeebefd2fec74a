"""Parameter servers: what one process gives, under ``Sync()``, and promises of their own."""

from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("cases.py")
pytestmark = pytest.mark.timeout(900)


@pytest.mark.cases(lambda case: case.compare)
def test_same_as_one_process(topology, case, results, differences):
    (reference,) = results("single", case.name)
    (chief,) = results(topology, case.name)
    wrong = differences(reference, chief, case.compare, case.tolerance)
    assert not wrong, "\n".join(wrong)


@pytest.mark.cases(lambda case: case.check)
def test_promise_of_its_own(topology, case, results):
    case.check(results(topology, case.name))
