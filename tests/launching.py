"""What the tests of the launcher share."""

import contextlib
import subprocess
import sys
import time

LAUNCH = [sys.executable, "-m", "tfdist.launch"]


@contextlib.contextmanager
def running(*args, **options):
    """Starts ``tfdist run``; ends it at last."""
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | options
    with subprocess.Popen([*LAUNCH, "run", *args], **options) as process:
        try:
            yield process
        finally:
            process.kill()


def until(condition, seconds=20.0):
    """Waits until the condition holds; returns what it gave."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return result
