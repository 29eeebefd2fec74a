"""What tests and cases wait with."""

import time


def until(condition, seconds=60.0, what="it"):
    """Waits until the condition holds; returns what it gave."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:.0f} s"
        time.sleep(0.01)
    return result
