"""A fit that is interrupted and started again trains as if nothing had been, in one process.

Without a strategy, on two devices, and with a split model. Several workers are in
``multi_worker/callback_cases.py``, parameter servers in ``parameter_server/cases.py``.
"""

import contextlib
import io
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist import callbacks as C
from tfdist.callbacks import _variables

RANDOM = np.random.RandomState(0)
X = RANDOM.randn(84, 8).astype("float32")  # five batches of 16 and one of 4
Y = (X[:, :3].sum(1) > 0).astype("int32")
BATCH, STEPS = 16, 6

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 8
)

SCOPES = {
    "alone": contextlib.nullcontext,
    "mirrored": lambda: tfdist.MirroredStrategy(["CPU:0", "CPU:1"]).scope(),
    "compressed": lambda: tfdist.MirroredStrategy(
        ["CPU:0", "CPU:1"], compression=tfdist.compression.error_feedback(_top_k())
    ).scope(),
    "split": lambda: tfdist.ModelParallelStrategy(["CPU:0", "CPU:1"], stages=2).scope(),
    "tensor": lambda: tfdist.ModelParallelStrategy(["CPU:0", "CPU:1"], tensor=2).scope(),
}


def _top_k():
    return tfdist.compression.top_k(0.2)


def mlp():
    layers = [
        keras.layers.Dense(8, "tanh"),
        keras.layers.Dropout(0.25, seed=3),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(2),
    ]
    return keras.Sequential([keras.Input((8,)), *layers])


def deferred():
    return keras.Sequential(mlp().layers)


def adam():
    return keras.optimizers.Adam(0.01)


def averaged_momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True)


def compiled(scope="alone", build=mlp, optimizer=adam, clears=True, **options):
    if clears:
        keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    with SCOPES[scope]() if isinstance(scope, str) else scope:
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, **{"metrics": ["accuracy"], **options})
    return model


class Interrupt(keras.callbacks.Callback):
    """Ends the fit like an error after some steps."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise InterruptedError


def arrays():
    return {"x": X, "y": Y, "batch_size": BATCH}


def dataset(*, seed=5, drop=False):
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(40, seed=seed)
    return rows.batch(BATCH, drop_remainder=drop).prefetch(2)


def generator():
    def batches():
        for i in range(1000):
            rows = np.arange(i * BATCH, (i + 1) * BATCH) % len(X)
            yield X[rows], Y[rows]

    return batches()


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, i):
        return X[i * BATCH : (i + 1) * BATCH], Y[i * BATCH : (i + 1) * BATCH]


def unknown_length():
    return tf.data.Dataset.from_generator(
        lambda: ((X[i : i + BATCH], Y[i : i + BATCH]) for i in range(0, 84, BATCH)),
        output_signature=(tf.TensorSpec((None, 8)), tf.TensorSpec((None,), tf.int32)),
    )


INPUTS = {
    "arrays": arrays,
    "arrays in order": lambda: {**arrays(), "shuffle": False},
    "arrays by batch": lambda: {**arrays(), "shuffle": "batch"},
    "dataset": lambda: {"x": dataset()},
    "dataset over epochs": lambda: {"x": dataset(drop=True).repeat(), "steps_per_epoch": 7},
    "generator": lambda: {"x": generator(), "steps_per_epoch": STEPS},
    "unknown length": lambda: {"x": unknown_length()},
    "PyDataset": lambda: {"x": Batches()},
    "PyDataset in threads": lambda: {"x": Batches(workers=2)},
}


def fit(model, directory, *others, save=None, **options):
    data = options.pop("data", arrays)()
    options = {**data, "epochs": 3, "verbose": 0, **options}
    save = save or C.every_steps(2)
    checkpoint = C.FaultTolerantCheckpoint(directory, save=save, keep=C.latest(2))
    return model.fit(callbacks=[checkpoint, *others], **options).history


def state(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(v) for v in variables]


def test_a_model_made_again_in_one_process(tmp_path):
    """Keras then gives its layers, and the optimizer's slots, other numbers."""
    with pytest.raises(InterruptedError):
        fit(compiled(), tmp_path, Interrupt(9))
    names = []
    for clears in (True, False):
        model = compiled(clears=clears)
        fit(model, tmp_path)
        names.append([v.path for v in model.optimizer.variables])
    assert names[0] != names[1]
    assert int(model.optimizer.iterations) == 3 * STEPS


def test_another_model_is_refused(tmp_path):
    fit(compiled(), tmp_path, epochs=1)
    other = compiled(optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    with pytest.raises(
        tfdist.checkpoints.CheckpointError, match="is of another model or optimizer"
    ):
        fit(other, tmp_path)


class Snapshots(keras.callbacks.Callback):
    """What is read after each step, and what it was then."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        read = _variables.read(_variables.state_of(self.model))
        self.seen.append((read, {name: np.copy(value) for name, value in read.items()}))


def embedded():
    layers = [keras.layers.Embedding(50, 4), keras.layers.Flatten(), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((8,)), *layers])


@pytest.mark.parametrize(
    ("scope", "jit"), [("alone", True), ("alone", False), ("mirrored", False), ("split", False)]
)
@pytest.mark.parametrize("build", [mlp, embedded])
def test_what_is_read_stays_as_it_was(build, scope, jit):
    """A checkpoint is written while the training goes on."""
    model = compiled(scope, build, averaged_momentum, jit_compile=jit)
    snapshots = Snapshots()
    model.fit(np.abs(X).round(), Y, epochs=2, batch_size=BATCH, verbose=0, callbacks=[snapshots])
    for read, was in snapshots.seen:
        for name, value in was.items():
            np.testing.assert_array_equal(read[name], value, name)
    first, last = snapshots.seen[0][1], snapshots.seen[-1][1]
    assert sum(not np.array_equal(first[name], last[name]) for name in first) > len(first) // 2


class RowsSeen(keras.metrics.Metric):
    """How often each row was trained in this epoch; the labels are the rows' numbers."""

    def __init__(self):
        super().__init__(name="rows_seen")
        self.counts = self.add_weight(name="counts", shape=(len(X),), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        rows = tf.one_hot(tf.cast(tf.reshape(y_true, [-1]), tf.int32), len(X))
        self.counts.assign_add(tf.reduce_sum(rows, 0))

    def result(self):
        return tf.reduce_sum(self.counts)


@pytest.mark.parametrize("batch", [8, 24, 32])
def test_another_global_batch(batch, tmp_path):
    """Is warned of; no row of the epoch is left out, and at most a batch's come again."""
    keras.utils.clear_session()
    rows = np.arange(len(X)).astype("float32")
    models = []
    for size in (BATCH, batch):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, name="dense")])
        model.compile(keras.optimizers.SGD(1e-6), "mse", metrics=[RowsSeen()])
        models.append((model, lambda size=size: {"x": X, "y": rows, "batch_size": size}))
    model, data = models[0]
    with pytest.raises(InterruptedError):
        fit(model, tmp_path, Interrupt(4), data=data, save=C.every_steps(3), epochs=1)
    model, data = models[1]
    with pytest.warns(UserWarning, match=f"batch of 16 rows, now it has {batch}"):
        fit(model, tmp_path, data=data, save=C.every_steps(1000), epochs=1)
    (counts,) = (np.array(v) for v in model.metrics_variables if "counts" in v.path)
    assert counts.min() == 1  # the three batches before and all those after, by the saved order
    assert counts.sum() - len(X) == 3 * BATCH % batch


def assert_resumes(directory, after, scope="alone", others=lambda: (), options=None, **model):
    """What is interrupted ``after`` so many executions ends like what is not."""
    options = options or {}
    whole = compiled(scope, **model)
    expected = fit(whole, directory / "whole", *others(), **options)
    for number in after:
        broken = compiled(scope, **model)
        with pytest.raises(InterruptedError):
            fit(broken, directory / "broken", *others(), Interrupt(number), **options)
    again = compiled(scope, **model)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        found = fit(again, directory / "broken", *others(), **options)
    assert "resumes at epoch" in printed.getvalue()
    assert found.keys() == expected.keys()
    for name in expected:
        # (Of several replicas a metric is saved as one sum, which rounds otherwise.)
        tolerance = 0 if scope == "alone" else 1e-6
        np.testing.assert_allclose(found[name], expected[name], tolerance, err_msg=name)
    for one, other in zip(state(again), state(whole), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("data", INPUTS)
def test_inputs(data, tmp_path):
    """Twice interrupted: in the first epoch, and after it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The dataset has a shuffle")
        assert_resumes(tmp_path, [3, 8], options={"data": INPUTS[data]})


@pytest.mark.parametrize("scope", [s for s in SCOPES if s != "alone"])
def test_strategies(scope, tmp_path):
    assert_resumes(tmp_path, [9], scope)


@pytest.mark.parametrize("data", ["dataset", "dataset over epochs"])
def test_inputs_under_a_strategy(data, tmp_path):
    assert_resumes(tmp_path, [9], "mirrored", options={"data": INPUTS[data]})


@pytest.mark.parametrize("after", [2, 3, 5])
@pytest.mark.parametrize("data", ["arrays", "unknown length"])
def test_several_steps_per_execution(after, data, tmp_path):
    """Of which four and two make an epoch."""
    options = {"data": INPUTS[data], "save": C.every_steps(1)}
    assert_resumes(tmp_path, [after], options=options, steps_per_execution=4)


@pytest.mark.parametrize(("each", "after"), [(1, 7), (4, 3)])
def test_where_data_of_unknown_length_has_ended(each, after, tmp_path):
    options = {"data": INPUTS["unknown length"], "save": C.every_steps(6)}
    assert_resumes(tmp_path, [after], options=options, steps_per_execution=each)


@pytest.mark.parametrize(("after", "scope"), [(6, "alone"), (7, "alone"), (12, "mirrored")])
def test_at_the_border_of_epochs(after, scope, tmp_path):
    assert_resumes(tmp_path, [after], scope, options={"save": C.every_steps(1)})


def test_at_the_end_of_an_epoch(tmp_path):
    assert_resumes(tmp_path, [9], options={"save": C.every_epochs(1)})


def other_callbacks():
    return [
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=10.0),
        keras.callbacks.EarlyStopping("val_loss", patience=3, min_delta=10.0),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        Counter(),
    ]


class Counter(keras.callbacks.Callback):
    """A callback with a state of its own, which changes the learning rate."""

    def __init__(self):
        super().__init__()
        self.steps = np.zeros(2, "int64")

    def get_state(self):
        return {"steps": self.steps, "more": [1.5, None, "text"]}

    def set_state(self, state):
        assert state["more"] == [1.5, None, "text"]
        self.steps = state["steps"]

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps[0] % 4 == 0:
            self.model.optimizer.learning_rate.assign(0.02 / self.steps[1])


@pytest.mark.parametrize("scope", ["alone", "mirrored"])
@pytest.mark.parametrize("after", [9, 21])
def test_other_callbacks_go_on(scope, after, tmp_path):
    options = {"epochs": 6, "validation_data": (X[:30], Y[:30]), "save": C.every_steps(3)}
    assert_resumes(tmp_path, [after], scope, other_callbacks, options)


@pytest.mark.parametrize(
    "model",
    [
        {"build": deferred},
        {"optimizer": averaged_momentum},
        {"optimizer": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)},
        {
            "optimizer": lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Adam(0.01), 2.0**10
            )
        },
        {"jit_compile": True},
        {"jit_compile": False, "run_eagerly": True},
    ],
    ids=lambda model: "-".join(model),
)
def test_models(model, tmp_path):
    assert_resumes(tmp_path, [4, 5], **model)
