"""What a worker wrote where."""

import contextlib
import os
import sys

import numpy as np
from tensorflow.python.checkpoint import functional_saver

_watched = {}
_hook_is_installed = False
_WRITING = ("open", "os.rename", "os.remove", "os.mkdir", "shutil.rmtree", "shutil.move")


def listing(directory):
    """Sorted paths of all files below, save for the harness' own."""
    found = []
    for folder, _, files in os.walk(directory):
        found += [os.path.relpath(os.path.join(folder, f), directory) for f in files]
    return np.array(sorted(f for f in found if not f.startswith("barrier-")) or [""])


@contextlib.contextmanager
def writes_of_this_worker(directory):
    """Collects what Python code of this process writes, renames or removes below the directory."""
    global _hook_is_installed
    if not _hook_is_installed:
        sys.addaudithook(_audit)  # can't be removed, so there is one, which looks in _watched
        _hook_is_installed = True
    written = _watched[os.fspath(directory)] = []
    try:
        yield written
    finally:
        del _watched[os.fspath(directory)]


def _audit(event, arguments):
    if not _watched or event not in _WRITING:
        return
    path = arguments[0]
    if not isinstance(path, str | bytes | os.PathLike):
        return
    if event == "open" and not (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")):
        return
    path = os.path.abspath(os.fsdecode(path))
    for directory, written in _watched.items():
        if path.startswith(directory + os.sep):
            written.append(f"{event} {os.path.relpath(path, directory)}")


@contextlib.contextmanager
def checkpoints_of_this_worker():
    """Collects the paths of TensorFlow checkpoints that this process writes (not in Python)."""
    written = []
    stock = functional_saver.MultiDeviceSaver.save

    def save(self, file_prefix, *args, **kwargs):
        written.append(str(file_prefix))
        return stock(self, file_prefix, *args, **kwargs)

    functional_saver.MultiDeviceSaver.save = save
    try:
        yield written
    finally:
        functional_saver.MultiDeviceSaver.save = stock
