"""A machine that is to be taken away: the training saves, ends with 75, and goes on elsewhere.

Without a strategy. Several workers are in ``multi_worker/callback_cases.py``, and the launcher's
part is in ``faults``.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from case_table import AfterStep
from waiting import until

from tfdist import callbacks as C
from tfdist import checkpoints
from tfdist.callbacks import _preemption

X = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
Y = (X[:, :3].sum(1) > 0).astype("int32")
STEPS = 6  # of an epoch
HERE = Path(__file__).parent
FOLDERS = os.pathsep.join([str(HERE), str(HERE / "conformance")])


def fit(directory, *others, **options):
    """Two epochs, or what is left of them; returns the weights."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False)
    checkpoint = C.FaultTolerantCheckpoint(directory, save=C.on_preemption(**options))
    for callback in others:
        callback.checkpoint = checkpoint
    model.fit(X, Y, len(X) // STEPS, 2, verbose=0, callbacks=[checkpoint, *others])
    return model.get_weights()


def send(callback=None):
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def guard():
    """A SIGTERM that no training handles is an error of the test, and no end of all tests."""

    def handler(signum, frame):
        raise AssertionError("nobody handles SIGTERM")

    before = signal.signal(signal.SIGTERM, handler)
    yield
    assert signal.getsignal(signal.SIGTERM) is handler, "it was not given back"
    signal.signal(signal.SIGTERM, before)


def test_each_kind_of_notice(tmp_path, monkeypatch, capfd):
    """SIGTERM, one for each time that something is brought to the disk besides, and files."""
    expected = fit(tmp_path / "whole")
    directory, file = tmp_path / "interrupted", tmp_path / "notice"
    sync, trained = os.fsync, 0

    def sync_and_send(descriptor):
        send()
        sync(descriptor)

    def tell(callback):
        file.touch()
        until(lambda: callback.checkpoint._notice.given)

    def interrupted(do, **options):
        nonlocal trained
        after = AfterStep(2, do)
        with pytest.raises(checkpoints.Preempted) as caught:
            fit(directory, after, **options)
        assert caught.value.code == 75
        assert after.steps == 2
        trained += 2
        assert checkpoints.newest(directory).entry.step == trained
        assert f"preempted after step {trained}, which is saved" in capfd.readouterr().out
        file.unlink(missing_ok=True)

    interrupted(send)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", sync_and_send)
        interrupted(send)
    interrupted(tell, notice_file=file)
    monkeypatch.setenv("TFDIST_PREEMPTION_NOTICE", str(file))
    interrupted(tell)
    for one, other in zip(fit(directory), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_notice_while_the_last_checkpoint_is_written(tmp_path, monkeypatch, capfd):
    """The training has ended; the program shall end all the same, and then do the rest."""
    sync = os.fsync

    def sync_and_send(descriptor):
        send()
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_and_send)
    with pytest.raises(checkpoints.Preempted):
        fit(tmp_path)
    monkeypatch.setattr(os, "fsync", sync)
    never = AfterStep(1, send)
    fit(tmp_path, never)
    assert never.steps == 0
    assert "there is nothing left to do" in capfd.readouterr().out


HANGS = """
import os, sys, threading
import test_preemption  # with the folders of its modules in PYTHONPATH
from tfdist.callbacks import _writer

_writer._ALL_SECONDS = 600  # what a program that ends by itself waits for

def hangs(callback):
    def wait(descriptor):
        threading.Event().wait()

    os.fsync = wait
    test_preemption.send()

test_preemption.fit(sys.argv[1], test_preemption.AfterStep(2, hangs), grace_seconds=0.5)
"""


def test_disk_that_is_slower_than_the_grace(tmp_path):
    """The process ends all the same, and the next one goes on from the checkpoint before."""
    directory = tmp_path / "saved"
    with pytest.raises(checkpoints.Preempted):
        fit(directory, AfterStep(3, send))
    script = tmp_path / "script.py"
    script.write_text(HANGS)
    done = subprocess.run(
        [sys.executable, script, directory],
        env={**os.environ, "PYTHONPATH": FOLDERS},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 75, done.stderr
    assert "The checkpoint of step 5 is not written in the 0.5 s of grace_seconds" in done.stderr
    assert "preempted after step 5, which is not saved" in done.stdout
    assert [entry.step for entry in checkpoints.entries(directory)] == [3]
    for one, other in zip(fit(directory), fit(tmp_path / "whole"), strict=True):
        np.testing.assert_array_equal(one, other)


SIGNALS = """
import importlib.util, os, signal, sys, time

spec = importlib.util.spec_from_file_location("preemption", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
notice = module.Notice(0.5)
notice.start()
for _ in range(3):
    os.kill(os.getpid(), signal.SIGTERM)
print(notice.given, flush=True)
while notice.seconds_left:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


def test_signal_after_the_grace_ends_the_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SIGNALS)
    done = subprocess.run(
        [sys.executable, script, _preemption.__file__], capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "True\n"), done.stderr
    assert done.stderr.count("SIGTERM: saving after this step") == 1
