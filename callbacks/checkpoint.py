"""Checkpoints of a training, from which it goes on as if nothing had happened."""

import contextlib
import functools
import importlib
import json
import math
import os
import time
import warnings

import keras
import numpy as np
import tensorflow as tf

from tfdist import checkpoints
from tfdist.callbacks import _callback_states, _variables
from tfdist.callbacks._preemption import Notice
from tfdist.callbacks._writer import Writer, wait_for_all
from tfdist.callbacks.deadline import DeadlineStop
from tfdist.callbacks.policies import (
    Moment,
    Saved,
    any_of,
    every_minutes,
    latest,
    members,
    on_preemption,
    preemption_of,
)
from tfdist.storage import storage_of

_LOOK_SECONDS = 1.0  # between two questions to the chief whether there is anything to do
_PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.001
_AGAIN = "Training goes on, and saves again when that is due."
_LAST = "It was to be the last one."
_BEFORE = "The one before it will be used."


class FaultTolerantCheckpoint(keras.callbacks.Callback):
    """Saves all that a training is, and lets the next run of the same script go on with it.

    At the start of ``fit`` the newest checkpoint in ``directory`` that is whole is restored:
    weights, optimizers, metrics, seed generators, residuals of compression, the callbacks, the
    history, the epoch and step, and the position in the data. The run then gives the weights of one
    that was never interrupted. A damaged checkpoint is named in a warning, and the one before is
    used. Use one directory for each ``fit`` of a program: where the ``fit`` of a directory has
    ended, the next call with the same ``epochs`` trains nothing, and one with more goes on.

    A step waits only until the values have left the device; a thread writes them. A write that
    fails is warned of, and tried again at the next save.

    Under strategies of tfdist, all workers take part; the chief decides and writes. The
    number of replicas and the strategy may change between runs.

    Args:
        directory: path; also ``gs://`` and the like, as far as TensorFlow has them.
        save: when to save: of :func:`every_steps`, :func:`every_minutes`, :func:`every_epochs`,
            :func:`on_preemption` and :func:`any_of`. There is always one more save at the end.
        keep: which checkpoints to keep: of :func:`latest`, :func:`best` and :func:`union`. The
            newest one is always kept.
        strict: whether a checkpoint that cannot be written ends the training, with an OSError on
            all workers, at the latest when the next save is due.
        last_write_seconds: float, how long the end of ``fit`` waits for the last write.

    Attributes:
        last_written: the :class:`tfdist.checkpoints.Entry` of the last checkpoint that is complete
            and on the disk, on the chief; None before.

    Raises:
        ValueError: an argument is something else.
        tfdist.checkpoints.CheckpointError: (in ``fit``) the checkpoint is of another model, or none
            is whole.
        tfdist.checkpoints.Preempted: (in ``fit``, a SystemExit) see :func:`on_preemption`.
    """

    def __init__(self, directory, *, save=None, keep=None, strict=False, last_write_seconds=600.0):
        super().__init__()
        save = any_of(every_minutes(10), on_preemption()) if save is None else save
        keep = latest(3) if keep is None else keep
        if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
            raise ValueError(
                f"FaultTolerantCheckpoint: directory must be a path, got {directory!r}."
            )
        if not callable(getattr(save, "due", None)):
            raise ValueError(
                "FaultTolerantCheckpoint: save must be a save policy such as every_minutes(10), "
                f"got {save!r}."
            )
        if not callable(getattr(keep, "kept", None)):
            raise ValueError(
                "FaultTolerantCheckpoint: keep must be a keep policy such as latest(3), "
                f"got {keep!r}."
            )
        self.last_written = None
        self._directory = os.fspath(directory)
        self._keep, self._strict = keep, strict
        self._last_write_seconds = last_write_seconds
        self._by_chief = [p for p in members(save) if getattr(p, "by_chief", True)]
        self._by_all = [p for p in members(save) if not getattr(p, "by_chief", True)]
        self._on_preemption = preemption_of(save)
        self._writer = Writer()
        self._storage = None
        self._notice = None
        self._position, self._callbacks = None, []
        # The one place where callbacks meet the strategies' package: the input of Keras' fit can
        # be entered in the middle only from where the inside of Keras is known.
        importlib.import_module("tfdist.strategies").prepare_keras()

    def use_position(self, position, callbacks):
        """Is called by ``fit``: where its input is, and which callbacks it has."""
        self._position, self._callbacks = position, callbacks
        if position is None:
            self._stop_watching()  # also where fit has failed

    # --------------------------------------------------------------------- begin and end

    def on_train_begin(self, logs=None):
        if self._position is None:
            raise RuntimeError(
                "FaultTolerantCheckpoint works in model.fit, which tells it where the input is; "
                "this loop is another one. Use tfdist.checkpoints.write and load there."
            )
        _callback_states.check(self._callbacks)
        strategy = self.model.distribute_strategy
        self._board = getattr(strategy, "board", None)
        self._is_chief = self._board is None or self._board.rank == 0
        self._storage = storage_of(self._directory)
        self._step = self._last_step = self._trained = 0
        self._epoch = self._steps_in_epoch = 0
        self._num_executions = self._next_look = 0
        self._gap = 1  # executions between two looks
        self._looked = time.monotonic()
        self._saved_step = 0  # the last that was tried
        self._has_failed = False  # the last write
        self._is_owed = False  # a save was due while another one was being written
        self._is_over = False  # no more saves in this fit
        self._within_epoch = None  # what is restored once the epoch has begun
        self._logs_of = {}  # of the checkpoints, by path
        self._damaged = set()
        self._deadlines = [c for c in self._callbacks if isinstance(c, DeadlineStop)]
        if not self._position.is_reproducible:
            warnings.warn(
                "The dataset has a shuffle() without a seed. A run that goes on in the middle of "
                "an epoch reads the rest in another order: some rows are seen twice, others not "
                "at all. Use dataset.shuffle(n, seed=...).",
                stacklevel=2,
            )
        self._restore()
        self._saved_at = time.monotonic()
        if self._on_preemption is not None:
            self._notice = Notice(
                self._on_preemption.grace_seconds, self._on_preemption.notice_file
            )
            self._notice.start()

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        if self._within_epoch is not None:
            # Keras has reset the metrics, and callbacks have begun an epoch that had begun before.
            self._apply_within_epoch(*self._within_epoch)
            self._within_epoch = None

    def on_train_batch_end(self, batch, logs=None):
        done = min(batch + 1, self._position.num_batches or batch + 1)
        self._step += done - self._steps_in_epoch
        self._trained += done - self._steps_in_epoch
        self._steps_in_epoch = done
        self._num_executions += 1
        self._look(logs, is_epoch_end=False)

    def on_epoch_end(self, epoch, logs=None):
        self._epoch, self._steps_in_epoch = epoch + 1, 0
        if self._epoch < self.params["epochs"]:  # else the last save comes now
            self._look(logs, is_epoch_end=True)

    def on_train_end(self, logs=None):
        decision = None
        if self._is_chief:
            decision = self._end_of_write(_LAST if self._is_over else _AGAIN)
        decision = self._agreed_in_time(decision)
        if decision["failure"]:
            raise OSError(decision["failure"])
        if decision["free"]:
            if self._trained and not self._is_over and not self._is_spoilt(logs):
                self._save(logs, is_epoch_end=True, finished=True)
            decision = self._end_of_write(_LAST) if self._is_chief else None
            decision = self._agreed_in_time(decision)
        if decision["failure"]:
            raise OSError(decision["failure"])
        if decision["end"]:
            raise checkpoints.Preempted

    def _end_of_write(self, outlook):
        """The chief waits for what is being written; says what has come of it."""
        limit = time.monotonic() + self._last_write_seconds
        while not (is_free := self._writer.wait(min(_LOOK_SECONDS, limit - time.monotonic()))):
            is_noticed = self._notice is not None and self._is_noticed()
            if time.monotonic() >= limit or is_noticed and not self._notice.seconds_left:
                break
        end = self._notice is not None and self._is_noticed()
        if end and not is_free:
            self._writer.abandon()
        failure = self._take_failure(outlook) if is_free else self._complain_of_waiting()
        return {"free": is_free, "failure": failure, "end": end}

    def _agreed_in_time(self, decision):
        """The chief's, on every worker, also where it first waits for a write."""
        if self._board is None:
            return decision
        self._tell_of_notice()
        key = f"checkpoint/end/{self._board.next_number('checkpoint/end')}"
        if self._is_chief:
            self._board.post(key, json.dumps(decision))
            return decision
        found = self._board.wait_for(key, self._last_write_seconds + _PATIENCE_SECONDS)
        if found is None:
            raise TimeoutError(
                "The chief did not say whether the last checkpoint is written within "
                f"{self._last_write_seconds + _PATIENCE_SECONDS:.0f} s. Look at its log."
            )
        return json.loads(found)

    def _is_spoilt(self, logs):
        """Whether the training was ended because of its weights."""
        ends = any(isinstance(c, keras.callbacks.TerminateOnNaN) for c in self._callbacks)
        loss = (logs or {}).get("loss")
        return ends and loss is not None and not math.isfinite(loss)

    def _complain_of_waiting(self):
        """With ``strict`` returns what to raise."""
        message = (
            f"The checkpoint of step {self._saved_step} is not written in time "
            f"({time.monotonic() - self._saved_at:.1f} s): {self._directory} is slow or hangs."
        )
        if self._strict:
            return message
        warnings.warn(message, stacklevel=2)
        return None

    def _stop_watching(self):
        if self._notice is not None:
            self._notice.stop()
            self._notice = None

    # -------------------------------------------------------------------- when to save

    def _moment(self, is_epoch_end, preempted=False):
        return Moment(
            step=self._step,
            epoch=self._epoch,
            is_epoch_end=is_epoch_end,
            last_step=self._last_step,
            seconds=time.monotonic() - self._saved_at,
            preempted=preempted,
        )

    def _look(self, logs, is_epoch_end):
        """Saves where that is due. All workers come to the same decision at the same step."""
        if self._is_over:
            return
        moment = self._moment(is_epoch_end)
        stops = any(deadline.stopped for deadline in self._deadlines)
        is_due = stops or any(policy.due(moment) for policy in self._by_all)
        # Without other workers a look costs nothing.
        asks = (self._by_chief or self._is_owed) and (
            is_epoch_end or self._board is None or self._num_executions >= self._next_look
        )
        if not is_due and not asks:
            return
        decision = self._agreed(self._decide(is_due, stops, is_epoch_end))
        if decision["failure"]:
            raise OSError(decision["failure"])
        self._is_owed = decision["owed"]
        self._next_look = self._num_executions + decision["gap"]
        if is_due or decision["save"]:
            self._last_step = self._step
        if decision["save"]:
            self._save(logs, is_epoch_end)
        self._is_over = stops or decision["end"]
        if decision["end"]:
            self._leave()

    def _decide(self, is_due, stops, is_epoch_end):
        if not self._is_chief:
            return None
        preempted = self._notice is not None and self._is_noticed()
        moment = self._moment(is_epoch_end, preempted)
        wants = is_due or self._is_owed or any(p.due(moment) for p in self._by_chief)
        if stops:
            self._writer.wait(min(self._last_write_seconds, _PATIENCE_SECONDS))
        elif preempted:
            self._writer.wait(self._notice.seconds_left / 2)
        saves = wants and not self._writer.is_busy
        failure = self._take_failure(_AGAIN)
        now = time.monotonic()
        each = (now - self._looked) / self._gap
        self._looked = now
        self._gap = max(1, min(2 * self._gap, int(_LOOK_SECONDS / max(each, 1e-6))))
        return {
            "save": saves,
            "owed": wants and not saves,
            "end": preempted,
            "gap": self._gap,
            "failure": failure,
        }

    def _agreed(self, decision):
        """The chief's decision, on every worker."""
        if self._board is None:
            return decision
        self._tell_of_notice()
        return self._board.from_chief("checkpoint", decision)

    def _tell_of_notice(self):
        if not self._is_chief and self._notice is not None and self._notice.given:
            self._board.post("preempted")

    def _is_noticed(self):
        if self._notice.given or self._board is None:
            return self._notice.given
        if self._board.wait_for("preempted", _POLL_SECONDS) is not None:
            self._notice.give()
        return self._notice.given

    def _leave(self):
        """Ends the process of every worker, once the checkpoint is written or time is over."""
        grace = self._on_preemption.grace_seconds
        number = self._board.next_number("preempted/saved") if self._board is not None else None
        if self._is_chief:
            if not self._writer.wait(self._notice.seconds_left):
                warnings.warn(
                    f"The checkpoint of step {self._saved_step} is not written in the {grace:g} s "
                    f"of grace_seconds: {self._directory} is slow or hangs. {_BEFORE}",
                    stacklevel=2,
                )
                self._writer.abandon()
            failure = self._take_failure(_BEFORE)
            if failure:
                warnings.warn(failure, stacklevel=2)
            is_saved = self.last_written is not None and self.last_written.step == self._step
            print(
                f"tfdist: preempted after step {self._step}, which is "
                f"{'saved' if is_saved else 'not saved'}. Exit code {checkpoints.PREEMPTED}.",
                flush=True,
            )
            if self._board is not None:
                self._board.take_down("preempted")  # this one has been seen to
                self._board.post(f"preempted/{number}/saved")
        else:
            self._board.wait_for(f"preempted/{number}/saved", grace + 5.0)
        raise checkpoints.Preempted

    # -------------------------------------------------------------------------- saving

    def _save(self, logs, is_epoch_end, finished=False):
        """Takes the values, on all workers, and lets the chief's thread write them."""
        # What needs all workers comes first; and what may be wrong is so on all of them.
        arrays = {}
        callback_states = _callback_states.get_states(self._callbacks)
        callback_states = checkpoints.pack(callback_states, "callbacks", arrays)
        is_within = not is_epoch_end
        metrics = _variables.read(_variables.metrics_of(self.model)) if is_within else {}
        residuals = _variables.residuals(_variables.exchanges_of(self.model), self._board)
        self._saved_at = time.monotonic()
        self._last_step = self._saved_step = self._step
        if not self._is_chief:
            return
        state = _variables.read(_variables.state_of(self.model))
        tensors = {**state, **metrics, **residuals, **arrays}
        strategy = self.model.distribute_strategy
        info = {
            "epoch": self._epoch,
            "step_in_epoch": self._steps_in_epoch,
            "finished": finished,
            "epochs": self.params["epochs"],
            "world_size": strategy.num_replicas_in_sync,
            "strategy": _name_of(strategy),
            "global_batch": self._position.batch_size,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "logs": _numbers(logs),
            "state": {
                "position": self._position.get(),
                "callbacks": callback_states,
            },
        }
        self._writer.start(functools.partial(self._write, self._step, tensors, info))

    def _write(self, step, tensors, info):
        """In the writer's thread."""
        if self._has_failed:
            with contextlib.suppress(OSError):  # then the next write fails as well, and says so
                checkpoints.clean(self._directory, self._storage)
        self._has_failed = True
        entry = checkpoints.write(self._directory, step, tensors, info, storage=self._storage)
        self._has_failed = False
        self.last_written = entry
        self._logs_of[entry.path] = info["logs"]
        try:
            self._remove_old(entry)
        except OSError as error:  # this one is written all the same
            warnings.warn(
                f"Old checkpoints in {self._directory} could not be removed: {error}.",
                stacklevel=2,
            )

    def _remove_old(self, newest):
        found = [e for e in checkpoints.entries(self._directory, self._storage)]
        revisions = {entry.step: entry for entry in found}  # the newest of each step
        good = [e for e in revisions.values() if e.path not in self._damaged]
        saved, unknown = [], set()
        for entry in good:
            try:
                saved.append(Saved(entry.step, self._logs(entry), entry.path))
            except checkpoints.CorruptCheckpointError:
                continue
            except (OSError, checkpoints.CheckpointError):
                unknown.add(entry.path)
        kept = self._keep.kept(saved) | {newest.path} | unknown
        for entry in found:
            if entry.path in kept:
                continue
            self._logs_of.pop(entry.path, None)
            try:
                checkpoints.delete(entry, self._storage)
            except OSError as error:
                warnings.warn(f"{entry.path} could not be removed: {error}.", stacklevel=2)

    def _logs(self, entry):
        if entry.path not in self._logs_of:
            manifest = checkpoints.read_manifest(entry.path, self._storage)
            self._logs_of[entry.path] = manifest.get("logs", {})
        return self._logs_of[entry.path]

    def _take_failure(self, outlook):
        """Warns of a write that has failed; where that ends the training, returns what to raise."""
        error = self._writer.take_error()
        if error is None:
            return None
        message = (
            f"The checkpoint of step {self._saved_step} could not be written to "
            f"{self._directory}: {type(error).__name__}: {error}."
        )
        if self._strict or not isinstance(error, OSError):
            return message
        warnings.warn(f"{message} {outlook}", stacklevel=2)
        return None

    # ------------------------------------------------------------------------ restoring

    def _restore(self):
        checkpoint = self._read() if self._is_chief else None
        if self._board is not None:
            checkpoint = self._shared(checkpoint)
        if isinstance(checkpoint, Exception):
            raise checkpoint
        if checkpoint is None:
            return
        try:
            self._apply(checkpoint)
        except KeyError as error:
            raise checkpoints.CheckpointError(
                f"The checkpoint {checkpoint.entry.path} was not written by "
                f"FaultTolerantCheckpoint: it has no {error}."
            ) from error

    def _read(self):
        """On the chief: the newest good checkpoint, None, or the error to raise on all workers."""
        try:
            wait_for_all()  # of an earlier fit of this process, which has failed
            self._storage.make_folder(self._directory)
            self._clean()
            checkpoint = checkpoints.newest(self._directory, self._storage)
        except (OSError, checkpoints.CheckpointError) as error:
            return error
        if checkpoint is not None:
            newer = checkpoints.entries(self._directory, self._storage)
            self._damaged = {e.path for e in newer if e > checkpoint.entry}
        return checkpoint

    def _clean(self):
        try:
            checkpoints.clean(self._directory, self._storage)
        except OSError as error:  # it can be read, perhaps; each save will say what is wrong
            warnings.warn(
                f"What an interrupted save has left in {self._directory} cannot be removed: "
                f"{error}.",
                stacklevel=2,
            )

    def _shared(self, checkpoint):
        """The chief's checkpoint on all workers: from the same folder, or sent by the chief."""
        notice = None
        if isinstance(checkpoint, Exception):
            notice = {"error": str(checkpoint)}
        elif checkpoint is not None:
            notice = {
                "entry": list(checkpoint.entry),
                "sha256": checkpoint.manifest["files"],
            }
        notice = self._board.from_chief("restore", notice)
        if notice is None or "error" in notice:
            if self._is_chief or notice is None:
                return checkpoint
            return checkpoints.CheckpointError(f"On the chief: {notice['error']}")
        if not self._is_chief:
            checkpoint = self._same(checkpoints.Entry(*notice["entry"]), notice["sha256"])
        if all(self._board.gather("restore", checkpoint is not None)):
            return checkpoint
        return self._sent(checkpoint)

    def _sent(self, checkpoint):
        """Sends the checkpoint to the workers, of which some don't see the chief's folder."""
        manifest = self._board.from_chief("restore", checkpoint and checkpoint.manifest)
        group = self.model.distribute_strategy.extended.host_group()
        tensors = {}
        for listed in manifest["tensors"]:
            name, shape = listed["name"], tuple(listed["shape"])
            like = np.empty(shape, checkpoints.dtype_of(listed["dtype"]))
            value = checkpoint.tensors[name] if self._is_chief else like
            data = np.ascontiguousarray(value).tobytes()
            words = tf.constant(np.frombuffer(data + bytes(-len(data) % 4), np.int32))
            words = group.broadcast(words, self._is_chief).numpy() if data else words.numpy()
            tensors[name] = np.frombuffer(words.tobytes()[: len(data)], like.dtype).reshape(shape)
        entry = checkpoints.Entry(manifest["step"], 0, f"{self._directory} of the chief")
        return checkpoints.Checkpoint(entry, manifest, tensors)

    def _same(self, entry, files):
        """The checkpoint that the chief has read, or None where this worker does not see it."""
        try:
            name = os.path.basename(entry.path)
            path = self._storage.join(self._directory, name)
            found = checkpoints.load(entry._replace(path=path), self._storage)
        except (OSError, checkpoints.CheckpointError):
            return None
        return found if found.manifest["files"] == files else None

    def _apply(self, checkpoint):
        manifest, tensors, path = checkpoint.manifest, checkpoint.tensors, checkpoint.entry.path
        state = manifest["state"]
        groups = {}
        for name, value in tensors.items():
            groups.setdefault(name.split("/", 1)[0], {})[name] = value
        metrics = groups.pop("metrics", {})
        residuals = groups.pop("residuals", {})
        groups.pop("callbacks", None)
        weights = {name: value for group in groups.values() for name, value in group.items()}
        _variables.assign(_variables.state_of(self.model), weights, path)
        for name, exchange in _variables.exchanges_of(self.model).items():
            if f"residuals/{name}" in residuals:
                exchange.from_bytes(residuals[f"residuals/{name}"].tobytes())
        states = checkpoints.unpack(state["callbacks"], tensors)
        _callback_states.set_states(self._callbacks, states)
        self._step = self._last_step = manifest["step"]
        epochs, epoch, steps = self.params["epochs"], manifest["epoch"], manifest["step_in_epoch"]
        if manifest["finished"] and epochs <= manifest["epochs"]:
            self.model._initial_epoch = epochs
            self._is_over = True
            self._say(
                f"tfdist: {path} is of a training that has ended; there is nothing left to do. "
                "Give more epochs, or another directory."
            )
            return
        steps, batches = self._same_rows(manifest, steps, state["position"]["batches"])
        position = {**state["position"], "batches": batches}
        self._position.set(position, steps, manifest["logs"])
        self.model._initial_epoch = epoch
        self._epoch, self._steps_in_epoch = epoch, steps
        if steps:
            rates = {
                name: _rate(optimizer)
                for name, optimizer in _variables.optimizers_of(self.model).items()
            }
            self._within_epoch = (metrics, rates, state["callbacks"], tensors, path)
        self._say(
            f"tfdist: resumes at epoch {epoch + 1}, step {steps} from {path} "
            f"({manifest['step']} steps, {manifest['strategy']} with {manifest['world_size']} "
            "replicas)."
        )

    def _apply_within_epoch(self, metrics, rates, callback_states, tensors, path):
        _variables.assign(_variables.metrics_of(self.model), metrics, path)
        for name, optimizer in _variables.optimizers_of(self.model).items():
            if rates[name] is not None:
                optimizer.learning_rate.assign(rates[name])
        states = checkpoints.unpack(callback_states, tensors)
        _callback_states.set_states(self._callbacks, states)

    def _same_rows(self, manifest, steps, batches):
        """The position where the global batch has changed: no row of the epoch is left out."""
        was, now = manifest["global_batch"], self._position.batch_size
        if was is None or now is None or was == now:
            return steps, batches
        each = self._position.steps_per_execution
        converted = [n * was // now // each * each for n in (steps, batches)]
        warnings.warn(
            f"The checkpoint is of a training with a global batch of {was} rows, now it has {now}. "
            "So the learning rate means something else, and the epoch goes on after "
            f"{converted[0]} batches of {now} instead of {steps} of {was}.",
            stacklevel=2,
        )
        return converted

    def _say(self, message):
        if self._is_chief:
            print(message, flush=True)


def _rate(optimizer):
    """The learning rate as a number, None where a schedule gives it."""
    rate = optimizer.learning_rate
    return np.asarray(rate.value) if hasattr(rate, "assign") else None


def _numbers(logs):
    """What of the logs a manifest can hold."""
    found = {}
    for name, value in (logs or {}).items():
        try:
            value = float(value)
        except (TypeError, ValueError):
            continue
        found[name] = value if math.isfinite(value) else None
    return {name: value for name, value in found.items() if value is not None}


def _name_of(strategy):
    name = type(strategy).__name__
    return "no strategy" if name == "_DefaultDistributionStrategy" else name
