"""Disks that are full, read-only, gone or slow in the middle of a fit: it goes on, and so do saves.

The weights are always those of a fit that nothing happened to.
"""

import errno
import os
import resource
import shlex
import shutil
import subprocess
import threading
import warnings
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import pytest
from waiting import until

from tfdist import callbacks as C
from tfdist import checkpoints

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(96, 8)).astype("float32")
Y = (X[:, :3].sum(1) > 0).astype("int32")
STEPS = 6  # of an epoch, of which there are two
CHECKPOINT_BYTES = 400_000  # a checkpoint has more


class Events(keras.callbacks.Callback):
    """Does something after a step, once what is being written then is written, or has failed.

    The checkpoint's turn comes after that, since it is always the last of the callbacks.
    """

    def __init__(self, **after):
        super().__init__()
        self.after = {int(name.removeprefix("step")): do for name, do in after.items()}
        self.step = 0
        self.settles = True

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        if self.settles:
            until(lambda: not self.checkpoint._writer.is_busy)
        if self.step in self.after:
            self.after[self.step]()


def trained(directory, events=None, save=None, epochs=2, **options):
    """Returns (weights, what was warned of)."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    sizes = (8, 180, 180)
    hidden = [keras.layers.Dense(n, "relu") for n in sizes[1:]]
    model = keras.Sequential([keras.Input(sizes[:1]), *hidden, keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False)
    checkpoint = C.FaultTolerantCheckpoint(
        directory, save=save or C.every_steps(2), keep=C.latest(9), **options
    )
    events = events or Events()
    events.checkpoint = checkpoint
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # what Python shows: a text that is the same only once
        model.fit(
            *(X, Y, len(X) // STEPS),
            epochs=epochs,
            verbose=0,
            callbacks=[checkpoint, events],
        )
    return model.get_weights(), [str(warning.message) for warning in caught]


def assert_same(weights, expected):
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def whole(directory, undisturbed=None):
    """The steps of which there are checkpoints; all must be whole, and nothing beside them.

    What they hold must be what those of the undisturbed fit of the same step do.
    """
    found = checkpoints.entries(directory)
    for entry in found:
        tensors = checkpoints.load(entry).tensors
        same = undisturbed.tensors.get(entry.step, {}) if undisturbed else {}
        names = [name for name in same if not name.startswith("metrics/")]
        assert not same or len(names) > 10
        for name in names:
            np.testing.assert_array_equal(tensors[name], same[name], f"{entry.path}, {name}")
    names = os.listdir(str(directory).removeprefix("file://"))
    assert sorted(names) == sorted(os.path.basename(e.path) for e in found)
    return sorted({entry.step for entry in found})


class Undisturbed(NamedTuple):
    """A fit that nothing has happened to: its weights, the tensors of its checkpoints by step."""

    weights: list
    tensors: dict


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    weights, warned = trained(directory)
    assert warned == [] and whole(directory) == [2, 4, 6, 8, 10, 12]
    found = [checkpoints.load(entry) for entry in checkpoints.entries(directory)]
    (file,) = Path(found[-1].entry.path).glob("*.bin")
    assert file.stat().st_size > CHECKPOINT_BYTES
    return Undisturbed(weights, {one.entry.step: one.tensors for one in found})


class Mounts:
    """A process that sees file systems of its own, for which no privileges are needed."""

    def __init__(self):
        command = ["unshare", "--map-root-user", "--mount", "sh"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def do(self, *command):
        """Returns what the command said where it has failed."""
        try:
            self.process.stdin.write(f"{shlex.join(map(str, command))}; echo done=$?\n".encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            return self.process.stdout.read().decode()
        said = ""
        for line in self.process.stdout:
            before, is_done, status = line.decode().partition("done=")
            said += before
            if is_done:
                return said if int(status) else ""
        return said or "it has ended"


@pytest.fixture
def mounted(tmp_path):
    """A small file system: (its folder as others see it, what gives commands about it)."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    mounts = Mounts()
    try:
        (tmp_path / "disk").mkdir()
        why = mounts.do("mount", "-t", "tmpfs", "-o", "size=8m", "none", tmp_path / "disk")
        seen = Path(f"/proc/{mounts.process.pid}/root{tmp_path}/disk")
        if why or not os.access(seen, os.W_OK):
            pytest.skip(f"no file system can be mounted here: {why}")
        yield seen, lambda *command: mounts.do(*command, tmp_path / "disk")
    finally:
        mounts.process.kill()
        mounts.process.communicate()


@pytest.fixture
def full(mounted):
    disk, _ = mounted

    def fill():
        with pytest.raises(OSError) as caught, open(disk / "ballast", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        assert caught.value.errno == errno.ENOSPC

    return disk / "saved", fill, lambda: os.remove(disk / "ballast"), os.strerror(errno.ENOSPC)


@pytest.fixture
def read_only(mounted):
    disk, command = mounted

    def remount(how):
        assert command("mount", "-o", f"remount,{how}") == ""

    return disk / "saved", lambda: remount("ro"), lambda: remount("rw"), os.strerror(errno.EROFS)


@pytest.fixture
def limited(tmp_path):
    """As with a quota: no file may be larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (CHECKPOINT_BYTES, before[1]))

    def lift():
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    yield tmp_path, limit, lift, os.strerror(errno.EFBIG)
    lift()


@pytest.fixture
def replaced(tmp_path):
    """Where the folder was, there is a file."""
    directory, aside = tmp_path / "saved", tmp_path / "aside"

    def replace():
        directory.rename(aside)
        directory.touch()

    def put_back():
        directory.unlink()
        aside.rename(directory)

    return directory, replace, put_back, os.strerror(errno.EEXIST)


@pytest.fixture
def remote(replaced):
    """The same through TensorFlow's file systems, as for object stores."""
    directory, *harm_and_repair, _ = replaced
    return f"file://{directory}", *harm_and_repair, "FailedPreconditionError"


@pytest.mark.parametrize("kind", ["full", "read_only", "limited", "replaced", "remote"])
def test_failed_saves_are_warned_of_and_come_again(kind, undisturbed, request):
    directory, harm, repair, error = request.getfixturevalue(kind)
    weights, warned = trained(directory, Events(step5=harm, step9=repair))
    assert_same(weights, undisturbed.weights)
    assert len(warned) == 2, warned
    for step, text in zip((6, 8), warned, strict=True):
        assert f"The checkpoint of step {step} could not be written to {directory}: " in text
        assert error in text
        assert "saves again when that is due" in text
    assert whole(directory, undisturbed) == [2, 4, 10, 12]


@pytest.mark.parametrize("kind", ["full", "replaced"])
def test_strict_ends_the_training(kind, request):
    directory, harm, repair, error = request.getfixturevalue(kind)
    events = Events(step5=harm)
    with pytest.raises(OSError) as caught:
        trained(directory, events, strict=True)
    assert f"step 6 could not be written to {directory}: " in str(caught.value)
    assert error in str(caught.value)
    assert events.step == 8  # the next at which a save is due
    repair()
    assert whole(directory) == [2, 4]


def test_last_save_that_fails(replaced, undisturbed):
    directory, harm, repair, _ = replaced
    weights, (text,) = trained(directory, Events(step8=harm), save=C.every_epochs(1))
    assert_same(weights, undisturbed.weights)
    assert "The checkpoint of step 12 could not be written" in text
    assert text.endswith("It was to be the last one.")
    repair()
    assert whole(directory, undisturbed) == [6]
    with pytest.raises(OSError, match="The checkpoint of step 12 could not be written"):
        trained(directory, Events(step5=harm), save=C.every_epochs(1), strict=True)


class Syncs:
    """What is done in place of ``os.fsync``."""

    def __init__(self, really):
        self.really, self.before = really, None
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = 0

    def __call__(self, descriptor):
        if self.before is not None:
            before, self.before = self.before, None
            before()
        self.waiting += 1
        assert self.gate.wait(60)
        self.waiting -= 1
        self.really(descriptor)


@pytest.fixture
def syncs(monkeypatch):
    syncs = Syncs(os.fsync)
    monkeypatch.setattr(os, "fsync", syncs)
    yield syncs
    syncs.gate.set()


def test_folder_that_is_away_during_a_save(tmp_path, syncs, undisturbed):
    """What the save has left is removed once the folder is back."""
    directory, aside = tmp_path / "saved", tmp_path / "aside"

    def harm():
        syncs.before = lambda: directory.rename(aside)

    def repair():
        assert any(path.name.startswith(".writing-") for path in aside.iterdir())
        aside.rename(directory)

    weights, (text,) = trained(directory, Events(step5=harm, step7=repair))
    assert_same(weights, undisturbed.weights)
    assert "The checkpoint of step 6 could not be written" in text
    assert whole(directory, undisturbed) == [2, 4, 8, 10, 12]


def test_folder_that_is_removed_is_made_again(tmp_path, undisturbed):
    directory = tmp_path / "saved"
    weights, warned = trained(directory, Events(step5=lambda: shutil.rmtree(directory)))
    assert_same(weights, undisturbed.weights)
    assert warned == []
    assert whole(directory, undisturbed) == [6, 8, 10, 12]


def test_slow_disk_delays_saves(tmp_path, syncs, undisturbed):
    """One save at a time; the one that was due meanwhile comes as soon as it can."""
    seen = set()

    class Watching(Events):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            if not self.settles and self.step > 4:
                until(lambda: syncs.waiting)
                seen.add((syncs.waiting, len(list(tmp_path.glob(".writing-*")))))

    def slow():
        syncs.gate.clear()
        events.settles = False

    def fast():
        syncs.gate.set()
        until(lambda: not events.checkpoint._writer.is_busy)
        events.settles = True

    events = Watching(step3=slow, step9=fast)
    weights, warned = trained(tmp_path, events, save=C.every_steps(4))
    assert_same(weights, undisturbed.weights)
    assert warned == []
    assert seen == {(1, 1)}
    assert whole(tmp_path, undisturbed) == [4, 9, 12]


def test_disk_that_hangs_at_the_end(tmp_path, syncs, undisturbed):
    save = C.every_epochs(1)
    events = Events(step8=syncs.gate.clear)
    weights, (text,) = trained(tmp_path, events, save=save, last_write_seconds=0.2)
    assert_same(weights, undisturbed.weights)
    assert "The checkpoint of step 12 is not written in time" in text
    assert f"{tmp_path} is slow or hangs" in text
    syncs.gate.set()
    until(lambda: not events.checkpoint._writer.is_busy)
    assert whole(tmp_path, undisturbed) == [6, 12]


def test_read_only_disk_from_the_start(read_only, undisturbed):
    """What is there is restored."""
    directory, harm, *_ = read_only
    trained(directory, epochs=1)
    (directory / ".writing-something").mkdir()
    harm()
    weights, warned = trained(directory, save=C.every_epochs(1))
    assert_same(weights, undisturbed.weights)
    assert len(warned) == 2 and all(str(directory) in text for text in warned), warned
    assert "cannot be removed" in warned[0] and "step 12 could not be written" in warned[1]
    with pytest.raises(OSError, match="Read-only file system: .*elsewhere"):
        trained(directory.parent / "elsewhere")
