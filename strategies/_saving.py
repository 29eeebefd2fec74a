"""Files that every worker asks for are written once, by the chief, whole or not at all."""

import contextlib
import functools
import inspect
import os
import shutil
import threading
import warnings
from collections import Counter

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint as checkpoint_lib
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.distribute import values

from tfdist.strategies._exchange import GradientExchange
from tfdist.strategies._whole_variable import WholeVariable

_CHIEF_BEGINS_SECONDS = 10.0
_OTHERS_COME_SECONDS = 10.0
_CHIEF_WRITES_SECONDS = 3600.0
_thread = threading.local()
_asked = Counter()  # how often this process asked for a path to be written


def write_once(strategy, path, write, exchanges=()):
    """Writes the file or folder ``path`` once for all workers.

    On the chief (or with one worker) calls ``write(path_beside)`` and renames what it wrote. The
    others wait until it is there. So a chief that saves alone does not wait for anyone, and a
    worker that saves alone, or to a path of its own, still gets its file, after a wait of
    10 s for the chief to begin.

    Args:
        strategy: one of tfdist's strategies.
        path: where the file or folder shall be.
        write: ``write(path)``, makes it.
        exchanges: the GradientExchanges whose state goes into the file.

    Returns:
        What ``write`` returned, None where another worker wrote.
    """
    path = os.fspath(path)
    return _once(strategy.board, path, lambda: _write_atomically(path, write), exchanges)


def exchanges_in(trackable):
    """The GradientExchanges with a state to save among what ``trackable`` holds, in its order."""
    found = [node for node in _nodes(trackable) if isinstance(node, GradientExchange)]
    return [exchange for exchange in found if exchange.has_state()]


def _once(board, path, write, exchanges):
    """Calls ``write()`` on the chief, and waits for it on the others."""
    if board is None:
        return write()
    _asked[path] += 1
    notice = f"saved/{os.path.abspath(path)}/{_asked[path]}"
    if board.rank == 0:
        board.post(f"{notice}/begun")
        try:
            _collect_as_chief(board, notice, exchanges)
            result = write()
        except BaseException as error:
            board.post(f"{notice}/done", f"{type(error).__name__}: {error}")
            raise
        board.post(f"{notice}/done", "written")
        return result
    if board.wait_for(f"{notice}/begun", _CHIEF_BEGINS_SECONDS) is None:
        return write()
    _collect_as_other(board, notice, exchanges)
    outcome = board.wait_for(f"{notice}/done", _CHIEF_WRITES_SECONDS)
    if outcome is None:
        raise TimeoutError(
            f"The chief began to write {path} but did not finish within "
            f"{_CHIEF_WRITES_SECONDS:.0f} s. Look at its disk and its log."
        )
    if outcome != "written":
        raise OSError(f"The chief could not write {path}. {outcome}")
    return None


def _collect_as_chief(board, notice, exchanges):
    """Gets the state of gradient exchanges, which each worker has for itself, from the others."""
    if not exchanges:
        return
    late = [
        label
        for rank, label in enumerate(board.labels)
        if rank != 0 and board.wait_for(f"{notice}/here/{rank}", _OTHERS_COME_SECONDS) is None
    ]
    board.post(f"{notice}/collect", "" if late else "all")
    if late:
        warnings.warn(
            f"The file has the gradient compression's residuals of this worker only, since "
            f"{', '.join(late)} did not save with it. Save on all workers.",
            stacklevel=2,
        )
    for exchange in exchanges:
        exchange.collect(from_all=not late)


def _collect_as_other(board, notice, exchanges):
    if not exchanges:
        return
    board.post(f"{notice}/here/{board.rank}")
    if board.wait_for(f"{notice}/collect", _CHIEF_WRITES_SECONDS) == "all":
        for exchange in exchanges:
            exchange.collect(from_all=True)


def _write_atomically(path, write):
    if "://" in path:
        return write(path)  # object stores make a file visible when it is complete
    folder, name = os.path.split(os.path.abspath(path))
    beside = os.path.join(folder, f".{os.getpid()}.writing.{name}")
    try:
        result = write(beside)
        if os.path.isdir(beside) and os.path.isdir(path):
            aside = os.path.join(folder, f".{os.getpid()}.old.{name}")
            os.rename(path, aside)
            os.rename(beside, path)
            shutil.rmtree(aside)
        else:
            os.replace(beside, path)
    finally:
        _remove(beside)
    return result


def _remove(path):
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)


# ---------------------------------------------------------------- tf.train.Checkpoint


def install():
    """Makes ``tf.train.Checkpoint`` write once under tfdist's strategies; safe to call again.

    ``write``, ``save`` and ``tf.train.CheckpointManager`` all end in ``Checkpoint._write``. A
    worker that waits for the chief's files there keeps its own books (what the latest checkpoint
    is, which ones to keep), but leaves the files to the chief.
    """
    stock = tf.train.Checkpoint._write
    if hasattr(stock, "_tfdist_stock"):
        return
    _require_parameters(stock, ["self", "file_prefix", "options"])
    run_callbacks = checkpoint_lib._execute_callbacks
    _require_parameters(run_callbacks, ["callbacks", "save_path"])

    def _write(self, file_prefix, options=None):
        strategy = _strategy_of(self)
        if strategy is None:
            return stock(self, file_prefix, options=options)
        path = os.fspath(file_prefix)
        written = _once(
            strategy.board,
            path,
            lambda: stock(self, file_prefix, options=options),
            exchanges_in(self),
        )
        if written is not None:
            return written
        callbacks = getattr(options, "experimental_write_callbacks", None)
        with _following():
            run_callbacks(callbacks or [], path)
        return path

    _write._tfdist_stock = stock
    tf.train.Checkpoint._write = _write
    for name in ("update_checkpoint_state_internal", "_delete_file_if_exists"):
        function = getattr(checkpoint_management, name)
        setattr(checkpoint_management, name, _unless_following(function))


def _require_parameters(function, expected):
    found = list(inspect.signature(function).parameters)
    if found != expected:
        raise RuntimeError(
            f"tfdist does not know {function.__qualname__} of TensorFlow {tf.__version__}: "
            f"expected the parameters {', '.join(expected)}, found {found}. "
            "Install a TensorFlow that tfdist was tried with (see its README)."
        )


@contextlib.contextmanager
def _following():
    """While this thread repeats what the chief has done, it touches no files."""
    _thread.is_following = True
    try:
        yield
    finally:
        _thread.is_following = False


def _unless_following(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        if not getattr(_thread, "is_following", False):
            function(*args, **kwargs)

    return call


def _strategy_of(trackable):
    """The strategy with a Board whose variables ``trackable`` holds; None where there is none."""
    for node in _nodes(trackable):
        variable = getattr(node, "value", None) if not callable(node) else None
        for candidate in (node, variable):
            if isinstance(candidate, values.DistributedVariable | WholeVariable):
                strategy = candidate.distribute_strategy
                if getattr(strategy, "board", None) is not None:
                    return strategy
    return None


def _nodes(trackable):
    """All objects that a TensorFlow checkpoint of ``trackable`` would hold."""
    seen = set()
    pending = [trackable]
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        children = getattr(node, "_trackable_children", None)
        if children is not None:
            pending.extend(children().values())
