"""Training on replicas gives the weights, metrics and predictions of training in one process.

Every case of ``cases.py`` runs in one process without a strategy and on the clusters it names:
two devices in one process, two processes, two processes with two devices each, three processes.
"""

from pathlib import Path

import parity
import pytest

TABLE = Path(__file__).with_name("cases.py")
pytestmark = pytest.mark.timeout(900)  # the first of a topology waits for its cluster to start

test_same_as_one_process = parity.test_same_as_one_process
test_workers_and_replicas_are_identical = parity.test_workers_and_replicas_are_identical
test_promise_of_its_own = parity.test_promise_of_its_own
