"""Parameter servers: what one process gives, under ``Sync()``, and promises of their own."""

from pathlib import Path

import parity
import pytest

TABLE = Path(__file__).with_name("cases.py")
pytestmark = pytest.mark.timeout(900)

test_same_as_one_process = parity.test_same_as_one_process
test_promise_of_its_own = parity.test_promise_of_its_own
