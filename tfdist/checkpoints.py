"""Checkpoints that are there whole or not at all, and that are verified when they are read.

A checkpoint is a folder ``step-0000001234`` with the values of tensors in ``tensors-00000.bin``,
and ``manifest.json``, which says what is where and holds checksums of everything, itself included.
It is written under another name beside, brought to the disk, and renamed; on object stores, which
cannot rename, the manifest comes last. Nothing in it is code: names, JSON and numbers.

This module knows neither Keras nor TensorFlow; it needs the latter only for ``gs://`` and the like.
"""

import concurrent.futures
import contextlib
import datetime
import hashlib
import itertools
import json
import math
import os
import re
import warnings
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import tfdist
from tfdist.storage import storage_of

__all__ = [
    "PREEMPTED",
    "Checkpoint",
    "CheckpointError",
    "CorruptCheckpointError",
    "Entry",
    "Preempted",
    "clean",
    "delete",
    "dtype_of",
    "entries",
    "entry_of",
    "load",
    "newest",
    "pack",
    "read_manifest",
    "unpack",
    "verify",
    "write",
]

FORMAT = 1
PREEMPTED = 75  # exit code (EX_TEMPFAIL): saved, to be started again; the launcher knows it, too
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{10,})(?:-r(\d+))?")
_TENSORS = "tensors-00000.bin"
_FILE = re.compile(r"tensors-\d{5}\.bin")  # a reader takes any number of them
_UNFINISHED = re.compile(r"\.(?:writing|deleting)-.*")
_ALIGNMENT = 64  # bytes; TensorFlow takes over such arrays without a copy
_PIECE_BYTES = 1 << 24  # what has a checksum of its own, so that several threads verify a file
_REFERENCE = "__tensor__"
_counter = itertools.count()


class Preempted(SystemExit):
    """Ends the process with the exit code 75, which the launcher takes for "start it again"."""

    def __init__(self):
        super().__init__(PREEMPTED)


class CheckpointError(RuntimeError):
    """A checkpoint does not fit what shall be restored."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is not what was written.

    Attributes:
        path: the checkpoint's folder.
        problems: list of str, each naming a file and what is wrong with it.
    """

    def __init__(self, path, problems):
        self.path, self.problems = path, list(problems)
        super().__init__(f"The checkpoint {path} is damaged: {'; '.join(self.problems)}.")


class Entry(NamedTuple):
    """A checkpoint in a folder of checkpoints.

    Attributes:
        step: int, the training steps that it has behind it.
        revision: int; of two checkpoints of one step the larger is the newer.
        path: its folder.
    """

    step: int
    revision: int
    path: str


class Checkpoint(NamedTuple):
    """What :func:`load` has read.

    Attributes:
        entry: the :class:`Entry`.
        manifest: dict, as in ``manifest.json``.
        tensors: dict from names to numpy arrays.
    """

    entry: Entry
    manifest: dict[str, Any]
    tensors: dict[str, np.ndarray]


# ---------------------------------------------------------------------------------- writing


def write(directory, step, tensors, info, *, storage=None):
    """Writes a checkpoint; it is complete and on the disk on return.

    Args:
        directory: the folder of the checkpoints; made where it is missing.
        step: int, not negative.
        tensors: dict from names to numpy arrays of numbers or bools, of any shape.
        info: dict that can be written as JSON, for the manifest.
        storage: of :mod:`tfdist.storage`; by default what fits ``directory``.

    Returns:
        The :class:`Entry`.

    Raises:
        TypeError: a tensor is not an array of numbers, or ``info`` is not JSON.
        OSError: it cannot be written; what was there before still is.
    """
    storage = storage or storage_of(directory)
    directory = os.fspath(directory)
    storage.make_folder(directory)
    same_step = [e.revision for e in _names(directory, storage) if e.step == step]
    revision = max(same_step, default=-1) + 1
    name = f"step-{step:010d}" + (f"-r{revision}" if revision else "")
    path = storage.join(directory, name)
    folder = path
    if storage.renames:
        folder = storage.join(directory, f".writing-{name}-{os.getpid()}-{next(_counter)}")
    storage.make_folder(folder)
    try:
        contents, listed = _write_tensors(folder, tensors, storage)
        manifest = {
            "format": FORMAT,
            "step": step,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "tfdist": tfdist.__version__,
            **info,
            "files": {_TENSORS: contents},
            "tensors": listed,
        }
        storage.write(storage.join(folder, MANIFEST), [_with_checksum(manifest)])
        if storage.renames:
            storage.sync_folder(folder)
            storage.rename(folder, path)
            storage.sync_folder(directory)
    except BaseException:
        with contextlib.suppress(OSError):
            storage.remove(folder)
        raise
    return Entry(step, revision, path)


def _write_tensors(folder, tensors, storage):
    """Writes their file; returns what the manifest says of it, and of each of them."""
    views, listed, size = [], [], 0
    for name, array in tensors.items():
        array = np.asarray(array)
        dtype = _name_of_dtype(array.dtype, name)
        padding = -size % _ALIGNMENT
        views += [bytes(padding)] if padding else []
        size += padding
        listed.append(
            {
                "name": name,
                "dtype": dtype,
                "shape": list(array.shape),
                "file": _TENSORS,
                "offset": size,
            }
        )
        views.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        size += array.nbytes
    hashes = _Hashes()
    storage.write(storage.join(folder, _TENSORS), hashes.over(views))
    return {"size": size, "piece": _PIECE_BYTES, "sha256": hashes.finish()}, listed


class _Hashes:
    """Checksums of the consecutive pieces of what goes through."""

    def __init__(self):
        self._done, self._now, self._room = [], hashlib.sha256(), _PIECE_BYTES

    def over(self, views):
        for view in views:
            view = memoryview(view)
            while view:
                head, view = view[: self._room], view[self._room :]
                self._now.update(head)
                self._room -= len(head)
                if self._room == 0:
                    self._done.append(self._now.hexdigest())
                    self._now, self._room = hashlib.sha256(), _PIECE_BYTES
                yield head

    def finish(self):
        rest = [self._now.hexdigest()] if self._room < _PIECE_BYTES else []
        return self._done + rest


def _name_of_dtype(dtype, name):
    is_number = dtype.kind in "biufc" or hasattr(ml_dtypes, dtype.name)
    if not is_number or dtype.byteorder == ">":
        raise TypeError(f"A checkpoint holds numbers; {name} has the dtype {dtype}.")
    return dtype.name


def _with_checksum(manifest):
    try:
        digest = hashlib.sha256(_json(manifest)).hexdigest()
    except (TypeError, ValueError) as error:
        raise TypeError(f"The manifest of a checkpoint must be JSON: {error}.") from error
    return _json({**manifest, "sha256": digest})


def _json(value):
    return json.dumps(value, indent=1).encode()


def delete(entry, storage=None):
    """Removes a checkpoint; at no moment is there half of one under its name."""
    storage = storage or storage_of(entry.path)
    if not storage.renames:
        storage.remove(entry.path)
        return
    directory, name = os.path.split(entry.path)
    aside = storage.join(directory, f".deleting-{name}-{os.getpid()}-{next(_counter)}")
    storage.rename(entry.path, aside)
    storage.remove(aside)


def clean(directory, storage=None):
    """Removes what interrupted writes have left. Nobody else may be writing."""
    storage = storage or storage_of(directory)
    directory = os.fspath(directory)
    unfinished = [n for n in storage.names(directory) if _UNFINISHED.fullmatch(n)]
    remains = [storage.join(directory, name) for name in unfinished]
    if not storage.renames:
        complete = entries(directory, storage)
        remains += [entry.path for entry in _names(directory, storage) if entry not in complete]
    for folder in remains:
        storage.remove(folder)


# ---------------------------------------------------------------------------------- reading


def entries(directory, storage=None):
    """The complete checkpoints in a folder, the oldest first: list of :class:`Entry`.

    (Complete says nothing of what has happened to the files since: see :func:`verify`.)
    """
    storage = storage or storage_of(directory)
    found = _names(os.fspath(directory), storage)
    if not storage.renames:
        found = [e for e in found if storage.exists(storage.join(e.path, MANIFEST))]
    return found


def _names(directory, storage):
    matches = [_NAME.fullmatch(name) for name in storage.names(directory)]
    return sorted(
        Entry(int(m[1]), int(m[2] or 0), storage.join(directory, m[0])) for m in matches if m
    )


def read_manifest(path, storage=None):
    """The manifest of a checkpoint, a dict.

    Raises:
        CorruptCheckpointError: it is missing or not what was written.
        OSError: it cannot be read.
    """
    storage = storage or storage_of(path)
    path = os.fspath(path)
    try:
        data = storage.read(storage.join(path, MANIFEST))
    except FileNotFoundError:
        raise CorruptCheckpointError(path, [f"{MANIFEST} is missing"]) from None
    try:
        manifest = json.loads(data)
        manifest.pop("sha256")
        is_whole = isinstance(manifest, dict) and _with_checksum(manifest) == data
    except (ValueError, KeyError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        raise CorruptCheckpointError(
            path, [f"{MANIFEST} ({len(data)} bytes) does not match its checksum"]
        )
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"The checkpoint {path} has format {manifest['format']}, this tfdist "
            f"({tfdist.__version__}) reads format {FORMAT}. Use the tfdist that wrote it "
            f"({manifest.get('tfdist')})."
        )
    return manifest


def verify(path, storage=None):
    """Reads all of a checkpoint and compares the checksums.

    Returns:
        What is wrong: a list of str, empty for a good checkpoint.
    """
    try:
        load(path, storage)
    except CorruptCheckpointError as error:
        return error.problems
    except (CheckpointError, OSError) as error:
        return [str(error)]
    return []


def load(path, storage=None):
    """Reads a checkpoint, and verifies it on the way.

    Args:
        path: its folder, or an :class:`Entry`.

    Returns:
        A :class:`Checkpoint`. Its arrays share the memory of the files.

    Raises:
        CorruptCheckpointError: it is not what was written.
        OSError: it cannot be read.
    """
    entry = path if isinstance(path, Entry) else entry_of(path)
    storage = storage or storage_of(entry.path)
    manifest = read_manifest(entry.path, storage)
    problems, buffers = [], {}
    for file, contents in manifest["files"].items():
        if not _FILE.fullmatch(file):
            raise CheckpointError(f"The checkpoint {entry.path} names a file {file!r}.")
        try:
            buffers[file] = _read_verified(storage, storage.join(entry.path, file), contents)
        except _Damaged as damage:
            problems.append(f"{file} {damage}")
        except FileNotFoundError:
            problems.append(f"{file} is missing")
    if problems:
        raise CorruptCheckpointError(entry.path, problems)
    tensors = {t["name"]: _tensor(buffers[t["file"]], t) for t in manifest["tensors"]}
    return Checkpoint(entry, manifest, tensors)


def entry_of(path):
    """The :class:`Entry` of a checkpoint's path. Raises CheckpointError: it has another name."""
    path = os.fspath(path)
    match = _NAME.fullmatch(path.rstrip("/").rsplit("/", 1)[-1])
    if match is None:
        raise CheckpointError(
            f"{path} is not a checkpoint: expected a folder with a name like step-0000001234."
        )
    return Entry(int(match[1]), int(match[2] or 0), path)


class _Damaged(Exception):
    pass


def _read_verified(storage, path, contents):
    size, piece, expected = contents["size"], contents["piece"], contents["sha256"]
    found = storage.size(path)
    if found != size:
        raise _Damaged(f"has {found} bytes, {size} were written")
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    buffer = memory[start : start + size]
    pieces = [buffer[at : at + piece] for at in range(0, size, piece)]

    def read(number):
        view = pieces[number]
        if read_into(view, number * piece) != len(view):
            raise _Damaged("was cut while it was read")
        return hashlib.sha256(view).hexdigest()

    with (
        storage.reading(path) as read_into,
        concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
    ):
        for number, digest in enumerate(pool.map(read, range(len(pieces)))):
            if digest != expected[number]:
                end = min(size, (number + 1) * piece)
                raise _Damaged(f"does not match its checksum in bytes {number * piece} to {end}")
    return buffer


def _tensor(buffer, entry):
    dtype = dtype_of(entry["dtype"])
    size = math.prod(entry["shape"]) * dtype.itemsize
    data = buffer[entry["offset"] : entry["offset"] + size]
    return data.view(dtype).reshape(entry["shape"])


def dtype_of(name):
    """The numpy dtype of a name in a manifest, such as "float32" or "bfloat16"."""
    return np.dtype(getattr(ml_dtypes, name, name))


def newest(directory, storage=None):
    """The newest checkpoint that is whole, or None where there is no checkpoint.

    Warns of each newer one that is not, and says what is wrong with it.

    Raises:
        CorruptCheckpointError: there are checkpoints, but none is whole.
    """
    storage = storage or storage_of(directory)
    damaged = []
    for entry in reversed(entries(directory, storage)):
        try:
            checkpoint = load(entry, storage)
        except (CorruptCheckpointError, OSError) as error:
            problems = getattr(error, "problems", None) or [str(error)]
            damaged.append((entry, "; ".join(problems)))
            continue
        for bad, why in damaged:
            warnings.warn(
                f"The checkpoint {bad.path} is damaged ({why}). The one before it, {entry.path}, "
                "is used.",
                stacklevel=2,
            )
        return checkpoint
    if damaged:
        entry, _ = damaged[0]
        raise CorruptCheckpointError(
            directory,
            [f"{os.path.basename(bad.path)}: {why}" for bad, why in damaged]
            + ["none of its checkpoints is whole; move them away to start anew"],
        )
    return None


# -------------------------------------------------------------------------- nested values


def pack(value, prefix, tensors):
    """Takes the arrays out of a nest of dicts, lists, numbers and strings, so that JSON is left.

    Args:
        value: the nest; keys are strings. Tuples become lists, numpy's scalars Python's.
        prefix: of the names of the arrays.
        tensors: dict to which the arrays are added.

    Raises:
        TypeError: there is something else in it; names the place.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, np.ndarray):
        tensors[prefix] = value
        return {_REFERENCE: prefix}
    if isinstance(value, list | tuple):
        return [pack(item, f"{prefix}/{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: pack(item, f"{prefix}/{key}", tensors) for key, item in value.items()}
    raise TypeError(
        f"{prefix}: expected dicts with names as keys, lists, numbers, strings and numpy arrays, "
        f"got {type(value).__name__}."
    )


def unpack(value, tensors):
    """The inverse of :func:`pack`."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_REFERENCE}:
        return np.array(tensors[value[_REFERENCE]])
    return {key: unpack(item, tensors) for key, item in value.items()}
