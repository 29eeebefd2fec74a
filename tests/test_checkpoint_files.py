"""Damaged checkpoints are recognised, named, and never read as if they were whole."""

import os
import shutil
import warnings

import ml_dtypes
import numpy as np
import pytest

from tfdist import checkpoints, launch

ARRAYS = {
    "model/kernel": np.random.default_rng(0).normal(size=(7, 5)).astype("float32"),
    "model/half": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "model/empty": np.zeros((0, 4), "float16"),
    "optimizer/iterations": np.int64(3),
    "metrics/flag": np.array([True, False]),
}


@pytest.fixture
def directory(tmp_path):
    for step in (1, 2):
        tensors = {**ARRAYS, "optimizer/iterations": np.int64(step)}
        checkpoints.write(tmp_path / "saved", step, tensors, {"epoch": step})
    return tmp_path / "saved"


def bitwise(arrays):
    return {n: (a.dtype, a.shape, a.tobytes()) for n, a in arrays.items()}


def test_reads_what_was_written(directory):
    found = checkpoints.newest(directory)
    expected = {**ARRAYS, "optimizer/iterations": np.asarray(np.int64(2))}
    assert found.entry.step == 2
    assert found.manifest["epoch"] == 2
    assert bitwise(found.tensors) == bitwise(expected)


def damages(path):
    """For each file: each byte of it changed, twenty cuts, the file gone."""
    for file in sorted(os.listdir(path)):
        content = (path / file).read_bytes()
        for at in range(len(content)):
            yield file, content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        for cut in {len(content) * i // 20 for i in range(20)}:
            yield file, content[:cut]
        yield file, content + b"\0"
        yield file, None


def test_every_damage_is_recognised_and_the_one_before_is_used(directory, tmp_path):
    newest = checkpoints.entries(directory)[-1]
    before = bitwise(checkpoints.load(checkpoints.entries(directory)[0]).tensors)
    spare = shutil.copytree(newest.path, tmp_path / "spare")
    seen = 0
    for file, content in damages(spare):
        path = os.path.join(newest.path, file)
        if content is None:
            os.remove(path)
        else:
            with open(path, "wb") as damaged:
                damaged.write(content)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = checkpoints.newest(directory)
        where = f"{file}, {'deleted' if content is None else len(content)}"
        assert found.entry.step == 1, where
        assert bitwise(found.tensors) == before, where
        assert len(caught) == 1 and newest.path in str(caught[0].message), where
        assert file in str(caught[0].message), where
        shutil.copy(spare / file, path)
        seen += 1
    assert seen > 500
    assert checkpoints.newest(directory).entry == newest


def test_no_good_one_is_an_error(directory):
    for entry in checkpoints.entries(directory):
        os.remove(os.path.join(entry.path, "manifest.json"))
    with pytest.raises(checkpoints.CorruptCheckpointError, match="none .* is whole"):
        checkpoints.newest(directory)


def test_folder_without_checkpoints(tmp_path):
    assert checkpoints.newest(tmp_path) is None
    assert checkpoints.newest(tmp_path / "missing") is None


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_remains_of_interrupted_writes_are_removed(scheme, directory):
    """Where folders can't be renamed, a checkpoint is complete once it has a manifest."""
    stays = sorted(os.listdir(directory))
    remains = directory / (".writing-step-0000000003-7-0" if not scheme else "step-0000000003")
    remains.mkdir()
    (remains / "tensors-00000.bin").write_bytes(b"half")
    (directory / "notes").mkdir()
    assert [e.step for e in checkpoints.entries(f"{scheme}{directory}")] == [1, 2]
    checkpoints.clean(f"{scheme}{directory}")
    assert sorted(os.listdir(directory)) == sorted([*stays, "notes"])


def run_command(capsys, *args):
    status = launch.main(["checkpoints", *map(str, args)])
    return status, capsys.readouterr()


def test_command_lists_and_verifies(directory, capsys):
    status, text = run_command(capsys, "ls", directory)
    assert status == 0
    assert [line.split()[0] for line in text.out.splitlines()[1:]] == [
        os.path.basename(entry.path) for entry in checkpoints.entries(directory)
    ]
    assert run_command(capsys, "verify", directory)[0] == 0
    damaged = directory / "step-0000000002" / "tensors-00000.bin"
    content = bytearray(damaged.read_bytes())
    content[3] ^= 1
    damaged.write_bytes(content)
    status, text = run_command(capsys, "verify", directory)
    first, second = text.out.splitlines()
    assert status == 1 and first.endswith("whole") and damaged.name in second


def test_command_inspects_and_compares(directory, capsys):
    status, text = run_command(capsys, "inspect", directory)
    rows = {line.split()[0]: line.split() for line in text.out.splitlines()}
    assert status == 0
    assert rows["model/half"] == ["model/half", "bfloat16", "2x3", "12", "0", "5", "0"]
    status, text = run_command(capsys, "diff", directory)
    assert status == 1
    (row,) = text.out.splitlines()[3:]
    assert row.split() == ["optimizer/iterations", "1", "of", "1", "values", "1"]
    one = directory / "step-0000000001"
    assert run_command(capsys, "diff", one, one)[0] == 0


def test_command_says_what_is_missing(tmp_path, capsys):
    status, text = run_command(capsys, "ls", tmp_path / "nothing")
    assert status == 2 and "nothing" in text.err
