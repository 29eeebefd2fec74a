"""Split models give the weights, metrics and predictions of the model in one piece."""

from pathlib import Path

import parity
import pytest

TABLE = Path(__file__).with_name("cases.py")
pytestmark = pytest.mark.timeout(900)

test_same_as_one_process = parity.test_same_as_one_process
test_workers_and_replicas_are_identical = parity.test_workers_and_replicas_are_identical
