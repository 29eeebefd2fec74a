"""Training with compressed gradients: equal to one process where nothing is lost, and always the
same bits on all workers."""

from pathlib import Path

import parity
import pytest

TABLE = Path(__file__).with_name("cases.py")
pytestmark = pytest.mark.timeout(900)  # the first of a topology waits for its cluster to start

test_same_as_one_process = parity.test_same_as_one_process
test_workers_and_replicas_are_identical = parity.test_workers_and_replicas_are_identical
test_promise_of_its_own = parity.test_promise_of_its_own
