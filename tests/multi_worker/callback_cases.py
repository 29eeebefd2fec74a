"""Keras' callbacks: every worker decides the same at the same step, the chief writes the files."""

import csv
import itertools
import os
import signal
import time
import warnings
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from case_table import (
    BATCH,
    TWO,
    WORKERS,
    AfterStep,
    Table,
    X,
    Y,
    adam,
    cross_entropy,
    mlp,
    sgd,
    state,
    train,
)
from keras import callbacks
from waiting import until
from written_files import listing, writes_of_this_worker

import tfdist

CASES = Table()

HALF = {"x": X[:160], "y": Y[:160]}
VALIDATION = {"validation_data": (X[160:], Y[160:])}


def only_the_chief_wrote(workers):
    for arrays in workers[1:]:
        assert list(arrays["local/writes"]) == [], "only the chief writes"


def file_case(function=None, topologies=TWO, **flags):
    return CASES.case(
        topologies=topologies,
        compare=("w/", "o/", "log/", "batch/", "files", "content/"),
        check=only_the_chief_wrote,
        **flags,
    )(function)


class Interrupt(callbacks.Callback):
    """Ends training on all workers like an error in the middle of it."""

    def __init__(self, epoch=None, batch=None):
        super().__init__()
        self.epoch, self.batch = epoch, batch
        self.batches = 0

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise InterruptedError

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches == self.batch:
            raise InterruptedError


# ------------------------------------------------------------------------------------ files


@file_case
def model_checkpoint(env):
    """The best by validation loss, every epoch's weights by name, and one every 4 batches."""
    with writes_of_this_worker(env.directory) as writes:
        _, arrays = train(
            env,
            optimizer=lambda: sgd(momentum=0.9),
            **HALF,
            **VALIDATION,
            epochs=3,
            callbacks=[
                callbacks.ModelCheckpoint(
                    env.directory / "best.keras", monitor="val_loss", save_best_only=True
                ),
                callbacks.ModelCheckpoint(
                    str(env.directory / "{epoch:02d}-{val_loss:.3f}.weights.h5"),
                    save_weights_only=True,
                ),
                callbacks.ModelCheckpoint(
                    str(env.directory / "batch.weights.h5"), save_weights_only=True, save_freq=4
                ),
            ],
        )
    env.barrier("done")
    best = keras.models.load_model(env.directory / "best.keras")
    last = mlp()
    last.load_weights(sorted(env.directory.glob("03-*.weights.h5"))[0])
    for key, value in zip([k for k in arrays if k.startswith("w/")], last.weights, strict=True):
        np.testing.assert_array_equal(arrays[key], np.array(value))
    return {
        **arrays,
        **{f"content/best {i}": np.array(w) for i, w in enumerate(best.weights)},
        "files": listing(env.directory),
        "local/writes": writes,
    }


def resumed_as_if_nothing_had_happened(workers):
    only_the_chief_wrote(workers)
    for arrays in workers:
        for key, value in arrays.items():
            if key.startswith("undisturbed/"):
                other = arrays[key.split("/", 1)[1]]
                np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-5, err_msg=key)


def resumed(env, interrupt, **backup_args):
    """Trains 4 epochs with an interruption, and 4 without."""

    def once(stem, *extra):
        with env.scope():
            model = mlp()
            model.compile(adam(), cross_entropy())
        model.fit(
            X,
            Y,
            batch_size=BATCH,
            epochs=4,
            shuffle=False,
            verbose=0,
            callbacks=[*stem, *extra],
        )
        return state(model)

    directory = env.directory / "backup"
    keras.utils.set_random_seed(1)
    undisturbed = once([])
    with writes_of_this_worker(env.directory) as writes:
        keras.utils.set_random_seed(1)
        try:
            once([callbacks.BackupAndRestore(directory, **backup_args)], interrupt)
        except InterruptedError:
            pass
        else:
            raise AssertionError("was not interrupted")
        env.barrier("interrupted")
        files = listing(env.directory)
        keras.utils.set_random_seed(2)  # the weights must come from the backup
        arrays = once([callbacks.BackupAndRestore(directory, **backup_args)])
    env.barrier("done")
    assert not list(directory.glob("**/*")), "the backup is deleted at the end"
    return {
        **arrays,
        # (in order, since the second model's variables have names of their own)
        **{f"undisturbed/{k}": v for k, v in zip(arrays, undisturbed.values(), strict=True)},
        "files": files,
        "local/writes": writes,
    }


@CASES.case(compare=("w/", "o/", "files"), check=resumed_as_if_nothing_had_happened)
def backup_and_restore(env):
    return resumed(env, Interrupt(epoch=2))


@CASES.case(topologies=WORKERS, compare=("w/", "o/"), check=only_the_chief_wrote)
def backup_and_restore_every_batches(env):
    """As Keras resumes from a backup within an epoch: at the epoch's begin."""
    return resumed(env, Interrupt(batch=47), save_freq=5)


@CASES.case(topologies=WORKERS, compare=("w/", "o/"))
def backups_that_differ(env):
    """Worker 1 has lost its own disk's backup: the chief's decides for all."""

    def once(directory, *extra):
        with env.scope():
            model = mlp()
            model.compile(adam(), cross_entropy())
        model.fit(
            X,
            Y,
            batch_size=BATCH,
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=[callbacks.BackupAndRestore(directory), *extra],
        )
        return state(model)

    try:
        once(env.directory / "chief", Interrupt(epoch=2))
    except InterruptedError:
        env.barrier("interrupted")
    return once(env.directory / ("chief" if env.index == 0 else "nothing-here"))


def goes_on_exactly(workers):
    for arrays in workers:
        for key, value in arrays.items():
            if key.startswith("undisturbed/"):
                np.testing.assert_array_equal(value, arrays[key.split("/", 1)[1]], key)


def saving(env, directory, *extra, save=None, **options):
    """Trains 3 epochs, or what is left of them; returns the state."""
    save = save or tfdist.callbacks.every_steps(3)
    keras.utils.set_random_seed(1)
    with env.scope():
        model = mlp()
        model.compile(adam(), cross_entropy())
    checkpoint = tfdist.callbacks.FaultTolerantCheckpoint(
        directory, save=save, keep=tfdist.callbacks.latest(2), **options
    )
    for callback in extra:
        callback.checkpoint = checkpoint
    model.fit(X, Y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[checkpoint, *extra])
    return state(model)


def beside(arrays, undisturbed):
    """What ``goes_on_exactly`` compares."""
    pairs = zip(arrays, undisturbed.values(), strict=True)
    return {**arrays, **{f"undisturbed/{key}": value for key, value in pairs}}


def gone_on(env, folder):
    """Trains 3 epochs in one go, and interrupted in the middle of the second one."""
    undisturbed = saving(env, env.directory / f"whole-{folder}")
    try:
        saving(env, env.directory / folder, Interrupt(batch=len(X) // BATCH + 5))
    except InterruptedError:
        env.barrier("interrupted")
    else:
        raise AssertionError("was not interrupted")
    return beside(saving(env, env.directory / folder), undisturbed)


@CASES.case(topologies=WORKERS, compare=(), check=goes_on_exactly)
def fault_tolerant_checkpoint(env):
    return gone_on(env, "checkpoints")


@CASES.case(topologies=("2x1",), compare=(), check=goes_on_exactly)
def fault_tolerant_checkpoint_that_the_chief_alone_sees(env):
    """The workers' folders are their own: the chief sends what it has read."""
    return gone_on(env, f"checkpoints-{env.index}")


def fails_alike_and_goes_on(workers):
    goes_on_exactly(workers)
    messages = {str(arrays["message"]) for arrays in workers}
    assert len(messages) == 1, messages
    (message,) = messages
    assert "The checkpoint of step 6 could not be written to" in message, message
    assert "checkpoints: FileExistsError" in message, message


@CASES.case(topologies=WORKERS, compare=(), check=fails_alike_and_goes_on)
def fault_tolerant_checkpoint_on_a_disk_that_fails(env):
    """The chief's: training goes on, and with ``strict`` ends on all workers."""
    undisturbed = saving(env, env.directory / "whole")
    folder = env.directory / "checkpoints"

    def harm(callback):
        if env.index == 0:
            until(lambda: not callback.checkpoint._writer.is_busy)
            folder.rename(env.directory / "aside")
            folder.touch()

    def repair(callback):
        if env.index == 0:
            until(lambda: not callback.checkpoint._writer.is_busy)
            folder.unlink()
            (env.directory / "aside").rename(folder)

    harms = AfterStep(5, harm)
    try:
        saving(env, folder, harms, strict=True)
    except OSError as error:
        message = str(error)
    else:
        raise AssertionError("was not interrupted")
    repair(harms)
    env.barrier("interrupted")
    newest = tfdist.checkpoints.newest(folder).entry.step
    assert newest == 3, newest
    env.barrier("seen")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        arrays = saving(env, folder, AfterStep(5, harm), AfterStep(20, repair))  # 8 and 23 in all
    assert (env.index == 0) == any("could not be written" in str(w.message) for w in caught)
    if env.index == 0:
        before, last = tfdist.checkpoints.entries(folder)
        # (57 and 60 where the disk was fast enough.)
        assert 23 < before.step < last.step == 60, (before, last)
        assert not tfdist.checkpoints.verify(before.path) + tfdist.checkpoints.verify(last.path)
    return {**beside(arrays, undisturbed), "message": np.array(message)}


def ended_and_goes_on(workers):
    goes_on_exactly(workers)
    steps = workers[0]["steps"].tolist()
    assert all(a < b for a, b in itertools.pairwise(steps)) and steps[-1] < 60, steps


@CASES.case(topologies=WORKERS, compare=(), check=ended_and_goes_on)
def preempted(env):
    """A worker, the chief, one that is told by a file: all save after the same step, and end."""
    undisturbed = saving(env, env.directory / "whole")
    file = env.directory / f"notice-{env.index}"
    sync = os.fsync

    def signal_itself():
        os.kill(os.getpid(), signal.SIGTERM)

    def sync_and_signal(descriptor):
        signal_itself()
        sync(descriptor)

    def be_told(callback):
        file.touch()
        until(lambda: callback.checkpoint._notice.given)

    steps = []

    def interrupted(victim, do, notice_file=None):
        harm = AfterStep(4, do if env.index == victim else lambda callback: None)
        on_preemption = tfdist.callbacks.on_preemption(notice_file=notice_file)
        save = tfdist.callbacks.any_of(tfdist.callbacks.every_steps(50), on_preemption)
        try:
            saving(env, env.directory / "checkpoints", harm, save=save)
        except tfdist.checkpoints.Preempted as end:
            assert end.code == 75
        else:
            raise AssertionError("was not interrupted")
        newest = tfdist.checkpoints.newest(env.directory / "checkpoints").entry.step
        steps.append(newest)
        assert newest == harm.steps + (steps[-2] if steps[1:] else 0)
        env.barrier(f"interrupted-{len(steps)}")

    interrupted(1, lambda callback: signal_itself())
    # The chief, and each time that it brings something to the disk once more.
    with mock.patch.object(os, "fsync", sync_and_signal if env.index == 0 else sync):
        interrupted(0, lambda callback: signal_itself())
    interrupted(1, be_told, file)
    file.unlink(missing_ok=True)
    with mock.patch.dict(os.environ, {"TFDIST_PREEMPTION_NOTICE": str(file)}):
        interrupted(0, be_told)
    arrays = saving(env, env.directory / "checkpoints")
    return {**beside(arrays, undisturbed), "steps": np.array(steps)}


@file_case
def csv_logger(env):
    """Two fits, the second appended: one header, one row for each epoch."""
    path = env.directory / "log.csv"
    with env.scope():
        model = mlp()
        model.compile(sgd(), cross_entropy(), metrics=["accuracy"])
    with writes_of_this_worker(env.directory) as writes:
        for append in (False, True):
            model.fit(
                *HALF.values(),
                batch_size=BATCH,
                epochs=2,
                shuffle=False,
                verbose=0,
                callbacks=[callbacks.CSVLogger(path, append=append)],
                **VALIDATION,
            )
    env.barrier("done")
    with path.open(newline="") as f:
        header, *rows = csv.reader(f)
    return {
        **state(model),
        "content/header": np.array(header),
        "content/rows": np.array(rows, "float64"),
        "files": listing(env.directory),
        "local/writes": writes,
    }


@CASES.case(
    topologies=TWO,
    compare=("w/", "content/"),
    check=only_the_chief_wrote,
    needs=("tensorboard",),
)
def tensor_board(env):
    """Scalars by epoch and by batch, and histograms: one event file each for fit and validation."""
    with writes_of_this_worker(env.directory) as writes:
        _, arrays = train(
            env,
            **HALF,
            **VALIDATION,
            epochs=2,
            callbacks=[callbacks.TensorBoard(env.directory, histogram_freq=1, update_freq=5)],
        )
    env.barrier("done")
    for kind in ("train", "validation"):
        (path,) = env.directory.glob(f"{kind}/events*.v2")
        scalars = {}
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    name = f"content/{kind} {value.tag}"
                    scalars.setdefault(name, []).append(tf.make_ndarray(value.tensor))
        arrays |= {key: np.array(v) for key, v in scalars.items() if "per_second" not in key}
    return arrays | {"local/writes": writes}


# -------------------------------------------------------------------------------- decisions


@CASES.case
def early_stopping(env):
    """Stops at the same epoch as one process does and takes back the same weights."""
    stop = callbacks.EarlyStopping("val_loss", patience=0, restore_best_weights=True)
    _, arrays = train(
        env,
        optimizer=lambda: keras.optimizers.SGD(0.5, 0.9),
        **HALF,
        **VALIDATION,
        epochs=12,
        callbacks=[stop],
    )
    assert stop.stopped_epoch > 0, "the case must stop early"
    return arrays | {"log/stopped": stop.stopped_epoch}


def same_number_of_epochs(workers):
    assert len({int(arrays["own/epochs"]) for arrays in workers}) == 1
    assert workers[0]["own/epochs"] < 6, "the wish to stop was lost"


@CASES.case(topologies=("2x1", "2x2"), compare=(), check=same_number_of_epochs)
def one_worker_wants_to_stop_after_an_epoch(env):
    class Stop(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if env.index == 1 and epoch == 1:
                self.model.stop_training = True

    model, arrays = train(env, **HALF, epochs=6, callbacks=[Stop()], batch_logs=False)
    return arrays | {"own/epochs": len(arrays["log/loss"])}


@CASES.case(topologies=WORKERS, compare=(), check=same_number_of_epochs)
def one_worker_wants_to_stop_after_a_batch(env):
    class Stop(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if env.index == 1 and self.model.optimizer.iterations == 14:
                self.model.stop_training = True

    model, arrays = train(env, **HALF, epochs=6, callbacks=[Stop()], batch_logs=False)
    return arrays | {"own/epochs": len(arrays["log/loss"])}


@CASES.case(topologies=TWO)
def stop_at_a_batch(env):
    """All workers stop in the middle of an epoch, as one process does."""

    class Stop(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 6:
                self.model.stop_training = True

    return train(env, epochs=3, callbacks=[Stop()])[1]


@CASES.case(topologies=TWO)
def reduce_lr_on_plateau(env):
    reduce = callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.01)
    _, arrays = train(
        env,
        optimizer=lambda: keras.optimizers.SGD(1.0),
        **HALF,
        **VALIDATION,
        epochs=8,
        callbacks=[reduce],
    )
    assert arrays["log/learning_rate"][-1] < 1.0, "the case must reduce the rate"
    return arrays


@CASES.case(topologies=("2x1",), compare=())
def one_worker_lowers_its_learning_rate(env):
    """One rate holds for all from the next epoch on: the workers' weights stay the same."""

    class Lower(callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if env.index == 1:
                self.model.optimizer.learning_rate = 0.01

    return train(env, **HALF, epochs=2, callbacks=[Lower()], batch_logs=False)[1]


@CASES.case(topologies=TWO)
def learning_rate_scheduler(env):
    scheduler = callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    return train(env, **HALF, epochs=3, callbacks=[scheduler])[1]


@CASES.case(topologies=TWO)
def swap_ema_weights(env):
    """Validation, and the weights at the end, are those of the moving average."""
    return train(
        env,
        optimizer=lambda: adam(use_ema=True, ema_momentum=0.9),
        **HALF,
        **VALIDATION,
        epochs=2,
        callbacks=[callbacks.SwapEMAWeights(swap_on_epoch=True)],
    )[1]


@CASES.case
def terminate_on_nan(env):
    """A NaN in one replica's rows of the eighth batch ends training there, on all workers."""
    x = X.copy()
    x[7 * BATCH + 15] = np.nan
    return train(env, x=x, epochs=2, callbacks=[callbacks.TerminateOnNaN()], metrics=())[1]


@CASES.case(topologies=TWO)
def callback_that_looks_and_evaluates(env):
    """Reads the counters as numbers, evaluates and predicts between epochs."""

    class Looks(callbacks.Callback):
        seen = ()

        def on_train_batch_end(self, batch, logs=None):
            optimizer = self.model.optimizer
            counters = int(optimizer.iterations), float(optimizer.learning_rate)
            self.seen = (*self.seen, counters)

        def on_epoch_end(self, epoch, logs=None):
            self.result = self.model.evaluate(X[:37], Y[:37], verbose=0)
            self.rows = self.model.predict(X[:21], verbose=0)

    looks = Looks()
    _, arrays = train(env, **HALF, epochs=2, callbacks=[looks])
    return arrays | {"batch/seen": looks.seen, "eval/own": looks.result, "pred/own": looks.rows}


def stopped_where_the_chief_said(workers):
    for arrays in workers:
        assert arrays["own/stopped"]
        assert arrays["own/updates"] == 9  # three executions


@CASES.case(topologies=WORKERS, compare=(), check=stopped_where_the_chief_said)
def deadline_stop(env):
    """The chief's clock runs out at its third look; the other worker's does not."""
    stop = tfdist.callbacks.DeadlineStop(60 if env.index == 0 else 1440, reserve_minutes=0)

    class RunsOut(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 8 and env.index == 0:
                stop._limit = time.time()

    options = {"compile_args": {"steps_per_execution": 3}, "batch_logs": False}
    with mock.patch("tfdist.callbacks.deadline._MOST_SECONDS_BETWEEN_LOOKS", 0.0):
        model, arrays = train(env, epochs=3, callbacks=[RunsOut(), stop], **options)
    own = {"own/stopped": stop.stopped, "own/updates": int(model.optimizer.iterations)}
    return arrays | own


def averaged_and_decided_alike(workers):
    for arrays in workers:
        np.testing.assert_array_equal(arrays["log/own"], [1.0, 1.5, 1.5])
        np.testing.assert_array_equal(arrays["log/only_one"], [7.0, 7.0, 7.0])
        assert len(arrays["log/loss"]) == 3, "no longer better after two epochs"


@CASES.case(topologies=WORKERS, compare=(), check=averaged_and_decided_alike)
def metric_average(env):
    """Values of each worker's own; without the mean only one worker would want to stop."""

    class Own(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["own"] = np.float32(2.0 if env.index == 0 else min(epoch, 1))
            if env.index == 1:
                logs["only_one"] = 7.0

    stop = callbacks.EarlyStopping("own", mode="min", patience=2)
    average = tfdist.callbacks.MetricAverage()
    return train(env, epochs=6, callbacks=[Own(), average, stop], batch_logs=False)[1]


def the_slow_one_is_named(workers):
    for arrays in workers:
        assert arrays["log/straggler"][-1] == 1
        slow = arrays["log/busy_seconds_by_worker"][-1]
        assert slow[1] > slow[0] > 0
        assert (arrays["log/memory_megabytes_by_worker"] > 50).all()
        rows = arrays["log/examples_per_second"] * arrays["log/step_seconds"]
        np.testing.assert_allclose(rows, BATCH)


@CASES.case(topologies=WORKERS, compare=(), check=the_slow_one_is_named, identical=False)
def worker_monitor(env):
    """Both take as long for a step; only the second worker has work to do for that long."""

    class Slow(callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if env.index == 1:
                time.sleep(0.3)

    small = {"x": X[:80], "y": Y[:80]}
    monitors = [Slow(), tfdist.callbacks.WorkerMonitor(), tfdist.callbacks.CommunicationMonitor()]
    return train(env, **small, epochs=2, callbacks=monitors, batch_logs=False)[1]


def both_are_told(workers):
    for arrays in workers:
        message = str(arrays["own/message"])
        assert "LearningRateWarmup: start must be the same on all workers" in message
        assert "worker 0: 0.0, worker 1: 0.5" in message


@CASES.case(topologies=WORKERS, compare=(), check=both_are_told)
def warmups_that_differ(env):
    warmup = tfdist.callbacks.LearningRateWarmup(steps=4, start=0.5 * env.index)
    message = "nothing was raised"
    try:
        train(env, callbacks=[warmup])
    except RuntimeError as error:
        message = str(error)
    return {"own/message": message}
