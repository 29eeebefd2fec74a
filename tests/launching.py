"""What the tests of the launcher share."""

import contextlib
import subprocess
import sys

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
