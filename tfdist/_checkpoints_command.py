"""`tfdist checkpoints ls|verify|inspect|diff DIR`: what is there, is it whole, what is in it.

TensorFlow is imported only for paths with a scheme (``gs://``, ``s3://``).
"""

import argparse
import math
import os
import sys

import numpy as np

from tfdist import checkpoints
from tfdist.storage import storage_of


class _NotFound(Exception):
    pass


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code: 1 for a damaged checkpoint or a difference."""
    command = {"ls": _ls, "verify": _verify, "inspect": _inspect, "diff": _diff}[args.action]
    try:
        return command(args)
    except (_NotFound, checkpoints.CheckpointError, OSError) as error:
        print(f"tfdist checkpoints: {error}", file=sys.stderr)
        return 2


def _all_in(path):
    """The entries in a folder of checkpoints, or the one that the path is."""
    storage = storage_of(path)
    if os.path.basename(os.fspath(path).rstrip("/")).startswith("step-"):
        if not storage.exists(path):
            raise _NotFound(f"there is no checkpoint {path}.")
        return [checkpoints.entry_of(path)]
    found = checkpoints.entries(path)
    if not found:
        what = "no checkpoint in" if storage.exists(path) else "no folder"
        raise _NotFound(f"there is {what} {path}.")
    return found


def _ls(args):
    rows = [("CHECKPOINT", "STEP", "EPOCH", "SAVED (UTC)", "BYTES", "REPLICAS", "STRATEGY")]
    status = 0
    for entry in _all_in(args.directory):
        name = os.path.basename(entry.path.rstrip("/"))
        try:
            manifest = checkpoints.read_manifest(entry.path)
        except checkpoints.CheckpointError:
            rows.append((name, entry.step, "", "damaged", "", "", ""))
            status = 1
            continue
        size = sum(file["size"] for file in manifest["files"].values())
        about = [manifest.get(key, "") for key in ("epoch", "created", "world_size", "strategy")]
        saved = about[1].split("+")[0].replace("T", " ")
        rows.append((name, entry.step, about[0], saved, size, about[2], about[3]))
    _print_table(rows)
    return status


def _verify(args):
    status = 0
    for entry in _all_in(args.directory):
        problems = checkpoints.verify(entry.path)
        print(f"{entry.path}: {'; '.join(problems) or 'whole'}")
        status = status or int(bool(problems))
    return status


def _inspect(args):
    checkpoint = checkpoints.load(_all_in(args.directory)[-1])
    print(checkpoint.entry.path)
    for key, value in checkpoint.manifest.items():
        if key not in ("files", "tensors", "state"):
            print(f"  {key}: {value}")
    rows = [("TENSOR", "DTYPE", "SHAPE", "BYTES", "LEAST", "MOST", "NOT FINITE")]
    for name, array in checkpoint.tensors.items():
        shape = "x".join(map(str, array.shape)) or "scalar"
        rows.append((name, array.dtype.name, shape, array.nbytes, *_range(array)))
    _print_table(rows)
    return 0


def _range(array):
    if array.size == 0:
        return "", "", 0
    if array.dtype.kind == "c":
        return "", "", int((~np.isfinite(array)).sum())
    values = array if array.dtype.kind in "biu" else array.astype(np.float64)
    finite = np.isfinite(values)
    if not finite.any():
        return "", "", array.size
    least, most = values[finite].min(), values[finite].max()
    return f"{least:.6g}", f"{most:.6g}", int((~finite).sum())


def _diff(args):
    found = _all_in(args.directory)
    if args.other is not None:
        first, second = found[-1], _all_in(args.other)[-1]
    elif len(found) > 1:
        first, second = found[-2:]
    else:
        raise _NotFound(f"there is one checkpoint in {args.directory}; say which other to compare.")
    first, second = checkpoints.load(first), checkpoints.load(second)
    print(f"- {first.entry.path}\n+ {second.entry.path}")
    rows = [("TENSOR", "DIFFERENCE", "LARGEST")]
    for name in first.tensors | second.tensors:
        row = _difference(first.tensors.get(name), second.tensors.get(name))
        if row is not None:
            rows.append((name, *row))
    if len(rows) == 1:
        print("The tensors are the same.")
        return 0
    _print_table(rows)
    return 1


def _difference(a, b):
    """None for the same bits; else what differs, and the largest absolute difference."""
    if a is None or b is None:
        return "only in +" if a is None else "only in -", ""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype.name}{list(a.shape)} and {b.dtype.name}{list(b.shape)}", ""
    if a.tobytes() == b.tobytes():
        return None
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    apart = np.abs(a.astype(wide) - b.astype(wide))
    largest = math.nan if np.isnan(apart).any() else apart.max()
    return f"{int((a != b).sum())} of {a.size} values", f"{largest:.6g}"


def _print_table(rows):
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(str(cell).ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
