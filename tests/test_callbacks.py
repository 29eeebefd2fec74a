"""The callbacks in one process: without a strategy, on two devices, and with a split model.

Those of several workers are in ``multi_worker/callback_cases.py``, those of parameter servers in
``parameter_server/cases.py``.
"""

import contextlib
import datetime
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.callbacks import (
    DeadlineStop,
    LearningRateWarmup,
    MetricAverage,
    ScaleLearningRate,
    WorkerMonitor,
    deadline,
)
from tfdist.callbacks.workers import straggler

RANDOM = np.random.RandomState(0)
X = RANDOM.randn(96, 8).astype("float32")
Y = (X[:, :3].sum(1) > 0).astype("int32")
BATCH = 16  # six steps in an epoch

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 8
)

SCOPES = {
    "alone": contextlib.nullcontext,
    "mirrored": lambda: tfdist.MirroredStrategy(["CPU:0", "CPU:1"]).scope(),
    "split": lambda: tfdist.ModelParallelStrategy(["CPU:0", "CPU:1"], stages=2).scope(),
}
RATE = 0.05


def adamw(rate=RATE, **options):
    return keras.optimizers.AdamW(rate, weight_decay=0.5, **options)


def compiled(scope="alone", optimizer=adamw, **options):
    keras.utils.set_random_seed(1)
    with SCOPES[scope]():
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, **options)
    return model


def fit(model, *callbacks, epochs=2, **options):
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0} | options
    history = model.fit(X, Y, epochs=epochs, callbacks=list(callbacks), **options)
    return history.history


def assert_same(model, other, tolerance=1e-6):
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


class Rates(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that looks the rate of each update up in a list."""

    def __init__(self, rates):
        self.rates = [float(rate) for rate in rates]

    def __call__(self, step):
        last = len(self.rates) - 1
        return tf.gather(tf.constant(self.rates), tf.minimum(tf.cast(step, tf.int32), last))


class Note(keras.callbacks.Callback):
    """The rate that others see, at the end of each batch."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_end(self, batch, logs=None):
        self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))


def warm(num, start=0.0, steps=20):
    return np.array([start + (1 - start) * min((t + 1) / num, 1) for t in range(steps)])


# ---------------------------------------------------------------------------- learning rate


@pytest.mark.parametrize(
    ("scope", "steps_per_execution"),
    [("alone", 1), ("alone", 4), ("mirrored", 4), ("split", 1)],
)
def test_warmup_is_that_of_a_schedule(scope, steps_per_execution):
    """In each update, weight decay included, also in the middle of an execution."""
    warmup, scale, note = LearningRateWarmup(1.5, start=0.25), ScaleLearningRate(4), Note()
    model = compiled(scope, steps_per_execution=steps_per_execution)
    logs = fit(model, warmup, scale, note)
    expected = RATE * 4 * warm(9, start=0.25)
    reference = compiled(optimizer=lambda: adamw(Rates(expected)))
    fit(reference)
    assert_same(model, reference)
    np.testing.assert_allclose(logs["effective_learning_rate"], expected[[5, 11]], rtol=1e-5)
    np.testing.assert_allclose(note.rates, RATE)  # what is shown, and saved
    plain = compiled()
    fit(plain)
    with pytest.raises(AssertionError):  # the factors do matter
        assert_same(plain, reference, tolerance=1e-3)


def test_warmup_without_a_graph():
    model = compiled("mirrored", run_eagerly=True)
    fit(model, LearningRateWarmup(steps=4), epochs=1)
    reference = compiled(optimizer=lambda: adamw(Rates(RATE * warm(4))))
    fit(reference, epochs=1)
    assert_same(model, reference)


def test_factors_multiply_a_schedule():
    schedule = RATE * np.linspace(1, 0.5, 20)
    model = compiled("mirrored", lambda: adamw(Rates(schedule)))
    fit(model, LearningRateWarmup(steps=5), ScaleLearningRate(4, rule="sqrt"))
    reference = compiled(optimizer=lambda: adamw(Rates(2 * schedule * warm(5))))
    fit(reference)
    assert_same(model, reference)


def test_warmup_counts_updates_not_steps():
    """With accumulation, and around a loss scaler."""

    def optimizer(rate=RATE):
        inner = adamw(rate, gradient_accumulation_steps=2)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)

    model = compiled("mirrored", optimizer)
    fit(model, LearningRateWarmup(1.0), epochs=2)
    reference = compiled(
        optimizer=lambda: adamw(Rates(np.repeat(RATE * warm(3), 2)), gradient_accumulation_steps=2)
    )
    fit(reference, epochs=2)
    assert_same(model, reference)


@pytest.mark.parametrize("scope", ["alone", "mirrored"])
def test_warmup_goes_on_where_it_was(scope, tmp_path):
    """A file from within the warm-up is one of plain Keras, with the rate that others see."""
    path = tmp_path / "model.keras"
    save = keras.callbacks.ModelCheckpoint(path, save_freq=4)  # keeps the last: that of step 8
    whole = compiled(scope)
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(whole, "stop_training", batch == 3)
    )
    fit(whole, save, LearningRateWarmup(steps=10), stop, epochs=1)
    with SCOPES[scope]():
        resumed = keras.models.load_model(path)
    assert type(resumed.optimizer) is keras.optimizers.AdamW
    assert float(resumed.optimizer.learning_rate) == pytest.approx(RATE)
    assert int(resumed.optimizer.iterations) == 4
    for model in (whole, resumed):
        fit(model, LearningRateWarmup(steps=10))
    assert_same(resumed, whole, tolerance=0 if scope == "alone" else 1e-6)
    reference = compiled(optimizer=lambda: adamw(Rates(RATE * warm(10))))
    keras.Sequential.fit(reference, X[:64], Y[:64], batch_size=BATCH, shuffle=False, verbose=0)
    fit(reference)
    assert_same(whole, reference)


def test_other_callbacks_go_on_as_without_factors():
    def rates(*callbacks):
        note = Note()
        plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=9.0)
        schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
        fit(compiled(), *callbacks, schedule, plateau, note, epochs=4)
        return note.rates

    shown = rates(LearningRateWarmup(steps=20), ScaleLearningRate(3))
    np.testing.assert_allclose(shown, rates(), rtol=1e-6)
    assert shown[-1] < 0.4 * RATE


def test_factors_end_with_their_fit():
    """And with one that is broken off, as soon as there are others."""

    def raise_at(batch, logs):
        if batch == 2:
            raise KeyboardInterrupt

    model = compiled()
    broken = keras.callbacks.LambdaCallback(on_train_batch_end=raise_at)
    with pytest.raises(KeyboardInterrupt):
        fit(model, ScaleLearningRate(2), broken)
    fit(model, ScaleLearningRate(2), epochs=1)
    fit(model, epochs=1)
    rates = [2 * RATE] * 9 + [RATE]
    reference = compiled(optimizer=lambda: adamw(Rates(rates)))
    keras.Sequential.fit(reference, X[:48], Y[:48], batch_size=BATCH, shuffle=False, verbose=0)
    fit(reference)
    assert_same(model, reference)


@pytest.mark.parametrize(("scope", "times"), [("alone", 1), ("mirrored", 2), ("split", 1)])
def test_rate_is_scaled_by_the_replicas(scope, times):
    logs = fit(compiled(scope), ScaleLearningRate(), epochs=1)
    np.testing.assert_allclose(logs["effective_learning_rate"], [RATE * times])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LearningRateWarmup(), "expected one of epochs and steps, got epochs=None"),
        (lambda: LearningRateWarmup(2, steps=5), "expected one of epochs and steps"),
        (lambda: LearningRateWarmup(0), "epochs must be above 0, got 0"),
        (lambda: LearningRateWarmup(steps="5"), "steps must be above 0, got '5'"),
        (lambda: LearningRateWarmup(5, start=2), r"start must be in \[0, 1\], got 2"),
        (lambda: ScaleLearningRate(0), "by must be above 0, got 0"),
        (lambda: ScaleLearningRate(2, rule="cubic"), "rule must be 'linear' or 'sqrt', got 'cub"),
        (lambda: MetricAverage("loss"), "names must be a list of names of logs, got 'loss'"),
        (lambda: WorkerMonitor(straggler_ratio=1), "straggler_ratio must be above 1, got 1"),
        (lambda: DeadlineStop(-1), "minutes must be at least 0, got -1"),
        (lambda: DeadlineStop(5, at=7.0), "got both: minutes=5, at=7.0"),
        (lambda: DeadlineStop(5, reserve_minutes=None), "reserve_minutes must be at least 0"),
        (lambda: DeadlineStop(at="18:00"), "seconds since 1970 or a datetime, got '18:00'"),
        (lambda: DeadlineStop(at=datetime.datetime(2030, 1, 1)), "at must have a time zone"),
        (lambda: DeadlineStop(), "no limit is known.*SLURM_JOB_END_TIME is not set"),
    ],
)
def test_wrong_arguments_are_refused(make, message, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    with pytest.raises(ValueError, match=message):
        make()


def test_warmup_in_epochs_of_unknown_length_is_refused():
    batches = ((X[:16], Y[:16]) for _ in range(3))
    with pytest.raises(ValueError, match="how many steps an epoch has is not known"):
        compiled().fit(batches, callbacks=[LearningRateWarmup(2)], verbose=0)


# ---------------------------------------------------------------------------------- logs


@pytest.mark.parametrize("scope", ["alone", "mirrored", "split"])
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_worker_monitor_adds_to_the_logs(scope, steps_per_execution):
    model = compiled(scope, steps_per_execution=steps_per_execution)
    validation = (X[:40], Y[:40])  # whose rows must not count
    logs = fit(model, WorkerMonitor(), validation_data=validation)
    rows = np.multiply(logs["examples_per_second"], logs["step_seconds"])
    np.testing.assert_allclose(rows, BATCH)
    assert all(size > 50 for size in logs["memory_megabytes"])  # TensorFlow alone takes more
    assert set(logs) == {
        "loss",
        "val_loss",
        "examples_per_second",
        "step_seconds",
        "memory_megabytes",
    } | ({"device_memory_megabytes"} if tf.config.list_physical_devices("GPU") else set())


def test_logs_of_the_monitor_can_be_shown(capsys):
    fit(compiled(), WorkerMonitor(), epochs=1, verbose=1)
    assert "examples_per_second" in capsys.readouterr().out


def test_straggler_is_much_slower_than_the_others():
    nan = float("nan")
    assert straggler([1.0, 1.2, 5.0, 0.9], 1.5) == (2, 5.0)
    assert straggler([1.0, 1.6], 1.5) == (1, 1.6)
    assert straggler([1.0, 1.4], 1.5)[0] == -1
    assert straggler([1.0, nan, 3.0], 1.5) == (2, 3.0)
    assert straggler([nan, 3.0], 1.5)[0] == -1
    assert straggler([0.0, 0.0], 1.5)[0] == -1
    assert straggler([0.0, 1.0], 1.5)[0] == 1


def test_one_worker_has_nothing_to_average():
    logs = fit(compiled("mirrored"), MetricAverage())
    assert set(logs) == {"loss"}
    assert logs == fit(compiled("mirrored"))


# ------------------------------------------------------------------------------- deadline


class Clock(keras.callbacks.Callback):
    """Time that goes on by so many seconds in each step, and in each validation."""

    def __init__(self, monkeypatch, step, validation=0.0):
        super().__init__()
        self.now, self.step, self.validation, self.num_steps = 1e9, step, validation, 0
        told = types.SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now)
        monkeypatch.setattr(deadline, "time", told)

    def on_train_batch_end(self, batch, logs=None):
        self.num_steps += 1
        self.now += self.step

    def on_test_batch_end(self, batch, logs=None):
        self.now += self.validation


def deadline_at(clock, seconds, **arguments):
    return DeadlineStop(at=clock.now + seconds, **arguments)


def test_training_stops_before_the_limit(monkeypatch):
    clock = Clock(monkeypatch, step=10.0)
    stop = deadline_at(clock, 145.0, reserve_minutes=0.5)
    history = fit(compiled(), clock, stop, epochs=9)
    assert clock.num_steps == 11  # the 12th would end after 120 s, in the last half minute
    assert stop.stopped
    assert len(history["loss"]) == 2


def test_validation_has_its_time(monkeypatch):
    """One took 40 s. The last, after 13 steps, would not fit in after 14."""
    clock = Clock(monkeypatch, step=10.0, validation=40.0)
    stop = deadline_at(clock, 255.0, reserve_minutes=0)
    history = fit(compiled(), clock, stop, epochs=9, validation_data=(X[:BATCH], Y[:BATCH]))
    assert clock.now - 1e9 <= 255
    assert stop.stopped
    assert clock.num_steps == 13
    assert len(history["val_loss"]) == 3


def test_a_limit_in_the_past_stops_after_a_step():
    stop = DeadlineStop(at=time.time() - 60)
    model = compiled()
    fit(model, stop)
    assert int(model.optimizer.iterations) == 1
    assert stop.stopped


def test_far_limits_leave_training_alone(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 86400))
    zone = datetime.UTC
    for stop in (
        DeadlineStop(),
        DeadlineStop(1440),
        DeadlineStop(at=datetime.datetime.now(zone) + datetime.timedelta(days=1)),
    ):
        model = compiled()
        fit(model, stop)
        assert int(model.optimizer.iterations) == 12
        assert not stop.stopped


def test_the_clock_is_read_rarely_far_from_the_limit(monkeypatch):
    clock = Clock(monkeypatch, step=1.0)
    stop = deadline_at(clock, 1e6)
    looks = []
    decide = stop._decide
    monkeypatch.setattr(stop, "_decide", lambda batch: looks.append(batch) or decide(batch))
    fit(compiled(), clock, stop, epochs=1, steps_per_epoch=90, batch_size=1)
    assert looks == [0, 1, 31, 61, None]
