"""Models split over the logical devices of this process."""

import contextlib
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tfdist.schedules import Task
from tfdist.schedules import schedule as tasks_of_stages
from tfdist.strategies import _keras

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 8
)

RNG = np.random.default_rng(0)
STEPS, BATCH = 20, 12
VOCABULARY, LENGTH, CLASSES = 32, 8, 4


def dense_model():
    model = keras.Sequential([keras.Input((12,))])
    for units, activation in ((32, "relu"), (24, "tanh"), (16, "relu"), (8, None)):
        model.add(layers.Dense(units, activation=activation))
    return model


def network_with_skips():
    inputs = keras.Input((6, 6, 3))
    x = layers.Conv2D(4, 3, padding="same", name="stem")(inputs)
    for number in range(3):
        skipped = x
        x = layers.Conv2D(4, 3, padding="same", activation="gelu")(x)
        x = layers.LayerNormalization()(x)
        x = layers.Add(name=f"block{number}")([x, skipped])
        x = keras.ops.silu(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def transformer():
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 16)(inputs)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 4)(y, y, use_causal_mask=True)])
        y = layers.Dense(64, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(16)(y)])
    return keras.Model(inputs, layers.Dense(VOCABULARY)(layers.LayerNormalization()(x)))


ROWS = STEPS * BATCH
DATA = {
    dense_model: (RNG.standard_normal((ROWS, 12), np.float32), RNG.integers(0, 8, ROWS)),
    network_with_skips: (
        RNG.standard_normal((ROWS, 6, 6, 3), np.float32),
        RNG.integers(0, CLASSES, ROWS),
    ),
    transformer: tuple(RNG.integers(0, VOCABULARY, (2, ROWS, LENGTH))),
}
CLIPPED = lambda: keras.optimizers.Adam(0.003, global_clipnorm=0.1)  # noqa: E731
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.003),
}
SPLITS = {
    "2 stages": {"stages": 2, "micro_batches": 4, "data": 1},
    "4 stages": {"stages": 4, "micro_batches": 3, "data": 1},
    "4 stages, gpipe": {"stages": 4, "micro_batches": 3, "schedule": "gpipe", "data": 1},
    "tensor 2": {"tensor": 2, "data": 1},
    "2 stages, tensor 2": {"stages": 2, "tensor": 2, "micro_batches": 2, "data": 1},
    "2 copies, 2 stages, tensor 2": {"stages": 2, "tensor": 2, "micro_batches": 2, "data": 2},
    "2 stages, recomputed": {"stages": 2, "micro_batches": 2, "recompute": True, "data": 1},
}
_references = {}


def train(build, optimizer, strategy=None, rows=ROWS):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build()
        model.compile(
            optimizer() if callable(optimizer) else optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=None if build is own_step else ["accuracy"],
        )
    x, y = DATA[build]
    history = model.fit(
        x[:rows], y[:rows], batch_size=BATCH, epochs=1, shuffle=False, verbose=0
    ).history
    return model, history


def weights(model):
    """All but the biases of keys, whose gradient is zero, so that Adam makes steps of its noise."""
    return {
        v.path.partition("/")[2]: np.array(v) for v in model.weights if "key/bias" not in v.path
    }


def difference(a, b):
    a, b = weights(a), weights(b)
    return max(np.abs(x - y).max() for x, y in zip(a.values(), b.values(), strict=True))


def reference(build, name):
    if (build, name) not in _references:
        _references[build, name] = train(build, OPTIMIZERS[name])
    return _references[build, name]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("build", tuple(DATA), ids=lambda build: build.__name__)
def test_20_steps_give_the_weights_of_one_device(build, optimizer, split):
    expected, history = reference(build, optimizer)
    strategy = tfdist.ModelParallelStrategy(**SPLITS[split])
    model, split_history = train(build, OPTIMIZERS[optimizer], strategy)
    assert difference(expected, model) < 1e-5
    for name, values in history.items():
        np.testing.assert_allclose(split_history[name], values, atol=1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_clipping_by_the_norm_of_all_parts(schedule):
    """A table's clipped gradient comes in other clothes than the gradient."""
    expected, _ = train(transformer, CLIPPED)
    strategy = tfdist.ModelParallelStrategy(
        stages=2, tensor=2, micro_batches=2, data=1, schedule=schedule
    )
    model, _ = train(transformer, CLIPPED, strategy)
    assert difference(expected, model) < 1e-5


def test_own_loop():
    expected, _ = reference(dense_model, "adam")
    strategy = tfdist.ModelParallelStrategy(stages=2, tensor=2, data=2)
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = dense_model()
        optimizer = OPTIMIZERS["adam"]()
        optimizer.build(model.trainable_variables)
    strategy.split(model)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            # Keras divides the loss by the number of replicas.
            loss = loss_of(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    @tf.function
    def step(x, y):
        strategy.run(replica_step, args=(x, y))

    x, y = DATA[dense_model]
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    for batch in strategy.experimental_distribute_dataset(dataset):
        step(*batch)
    assert difference(expected, model) < 1e-5
    assert [d for d, _ in devices_of(model.weights[0])] == ["0", "4", "1", "5"]


def tables_and_sums():
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY + 1, 16)(inputs)  # can only be split by width
    x = layers.EinsumDense("abc,cd->abd", (None, 24), bias_axes="d", activation="relu")(x)
    return keras.Model(inputs, layers.Dense(VOCABULARY)(layers.Dropout(0.0)(x)))


DATA[tables_and_sums] = DATA[transformer]


def test_layout_and_what_is_split_by_default():
    expected, _ = train(tables_and_sums, "adam")
    kinds = {}
    for layout in (None, {"embed": None, "einsum.*kernel": 1, "dense/kernel": None}):
        strategy = tfdist.ModelParallelStrategy(tensor=2, data=1, layout=layout)
        model, _ = train(tables_and_sums, "adam", strategy)
        assert difference(expected, model) < 1e-5
        kinds[bool(layout)] = [strategy.plan.splits.get(id(layer)) for layer in model.layers[1:]]
    assert kinds == {
        False: ["width", "column", None, "column"],
        True: [None, "column", None, None],
    }


def with_dropout():
    model = dense_model()
    x = layers.Dropout(0.5)(model.layers[1].output)
    x = layers.BatchNormalization()(x)
    return keras.Model(model.inputs, layers.Dense(8)(x))


def with_activity():
    inputs = keras.Input((12,))
    x = layers.Dense(8, activity_regularizer="l2")(inputs)
    return keras.Model(inputs, layers.Dense(8)(x))


DATA[with_dropout] = DATA[with_activity] = DATA[dense_model]


def test_recomputation_has_the_same_masks_and_statistics():
    models = [
        train(
            with_dropout,
            "adam",
            tfdist.ModelParallelStrategy(stages=2, data=1, micro_batches=2, recompute=recompute),
        )[0]
        for recompute in (False, True)
    ]
    assert difference(*models) == 0
    with pytest.raises(ValueError, match="recompute=True: a layer of this model calls add_loss"):
        train(
            with_activity,
            "adam",
            tfdist.ModelParallelStrategy(stages=2, data=1, recompute=True),
            rows=BATCH,
        )


def test_xla_is_refused():
    strategy = tfdist.ModelParallelStrategy(stages=2, data=1)
    with strategy.scope():
        model = dense_model()
        model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(ValueError, match="jit_compile=True cannot be honoured"):
        model.fit(*DATA[dense_model], verbose=0)


def devices_of(variable):
    """The local devices on which the pieces of a Keras variable are, and their shapes."""
    value = _keras.tf_variable(variable)
    shards = getattr(value, "shards", [value])
    return [(piece.device[-1], piece.shape) for shard in shards for piece in shard.values]


def test_a_device_holds_its_part_of_weights_and_slots():
    strategy = tfdist.ModelParallelStrategy(tensor=4, data=1)
    model, _ = train(transformer, "adam", strategy, rows=BATCH)
    held = dict.fromkeys("0123", 0)
    for variable in [*model.variables, *model.optimizer.variables]:
        for device, shape in devices_of(variable):
            held[device] += shape.num_elements()
    block = [v for v in model.variables if "dense/" in v.path or "multi_head" in v.path]
    for variable in block:
        if len(variable.shape) > 1:
            assert [d for d, _ in devices_of(variable)] == list("0123"), variable.path
    assert held["1"] == held["2"] == held["3"]
    assert held["1"] < 0.26 * sum(held.values())


def test_stages_are_on_their_devices_forward_and_backward():
    strategy = tfdist.ModelParallelStrategy(stages=2, data=1, cut=["block0"])
    model, _ = train(network_with_skips, "sgd", strategy, rows=BATCH)
    (stem,) = (v for v in model.weights if v.path.endswith("stem/kernel"))
    assert devices_of(stem)[0][0] == "0"
    assert devices_of(model.weights[-1])[0][0] == "1"
    function = tf.function(
        lambda x, y: strategy.run(model.train_step, args=((x, y),)), autograph=False
    )
    x, y = DATA[network_with_skips]
    graph = function.get_concrete_function(tf.constant(x[:4]), tf.constant(y[:4])).graph
    convolutions = {
        kind: sorted(op.device[-1] for op in graph.get_operations() if op.type == kind)
        for kind in ("Conv2D", "Conv2DBackpropFilter")
    }
    assert convolutions == {
        "Conv2D": ["0", "0", "1", "1"],
        "Conv2DBackpropFilter": ["0", "0", "1", "1"],
    }


def test_loss_of_split_logits_moves_no_logits(monkeypatch):
    calls = []
    split = _keras.split_cross_entropy
    monkeypatch.setattr(
        _keras, "split_cross_entropy", lambda *args: calls.append(args) or split(*args)
    )
    strategy = tfdist.ModelParallelStrategy(tensor=2, data=1)
    train(transformer, "sgd", strategy, rows=BATCH)
    ((_, parts, devices),) = calls[:1]
    assert [part.shape[-1] for part in parts] == [VOCABULARY // 2] * 2
    assert [device[-1] for device in devices] == ["0", "1"]


def test_files_fit_other_splits_and_no_split(tmp_path):
    strategy = tfdist.ModelParallelStrategy(stages=2, tensor=2, micro_batches=2, data=2)
    model, _ = train(transformer, "adam", strategy, rows=4 * BATCH)
    model.save(tmp_path / "model.keras")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(str(tmp_path / "checkpoint"))
    plain = keras.saving.load_model(tmp_path / "model.keras")
    assert difference(model, plain) == 0
    other = tfdist.ModelParallelStrategy(stages=4, data=1)
    with other.scope():
        resplit = keras.saving.load_model(tmp_path / "model.keras")
    x, y = DATA[transformer]
    for each in (model, plain, resplit):
        each.fit(x[:60], y[:60], batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    assert difference(model, plain) < 1e-5
    assert difference(resplit, plain) < 1e-5
    tf.train.Checkpoint(model=plain, optimizer=plain.optimizer).restore(path)
    resplit.save_weights(tmp_path / "resplit.weights.h5")
    model.load_weights(tmp_path / "resplit.weights.h5")
    assert difference(resplit, model) == 0


class Halves(keras.Model):
    def __init__(self):
        super().__init__()
        with tfdist.parallel.stage(0):
            self.first = layers.Dense(16, activation="relu")
            self.norm = layers.LayerNormalization()
        with tfdist.parallel.stage(1):
            self.last = layers.Dense(8)

    def call(self, inputs, training=None):
        return self.last(self.norm(self.first(inputs)))


DATA[Halves] = DATA[dense_model]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_of_a_subclassed_model(schedule):
    expected, _ = train(Halves, "adam")
    strategy = tfdist.ModelParallelStrategy(stages=2, data=1, micro_batches=3, schedule=schedule)
    model, _ = train(Halves, "adam", strategy)
    assert difference(expected, model) < 1e-5
    assert [devices_of(v)[0][0] for v in model.weights] == ["0", "0", "0", "0", "1", "1"]


class OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def own_step():
    model = dense_model()
    return OwnStep(model.inputs, model.outputs)


DATA[own_step] = DATA[dense_model]


def test_own_training_step_needs_gpipe():
    expected, _ = train(own_step, "adam")
    split = {"stages": 2, "data": 1, "micro_batches": 4}
    model, _ = train(own_step, "adam", tfdist.ModelParallelStrategy(**split, schedule="gpipe"))
    assert difference(expected, model) < 1e-5
    with pytest.raises(ValueError, match="OwnStep has a train_step of its own.*gpipe"):
        train(own_step, "adam", tfdist.ModelParallelStrategy(**split))


class Noting(layers.Layer):
    """Notes when its passes begin and end; a micro-batch holds its number in all its rows."""

    def __init__(self, stage, write, has_side_effects):
        super().__init__()
        self._stage, self._write, self._stateful = stage, write, has_side_effects
        self._scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        def noted(is_forward, number, value):
            def note(number, value):
                task = self._stage, Task(is_forward, round(float(number.flat[0])))
                self._write((*task, "begins"))
                time.sleep(0.01)  # others have the time to begin too soon
                self._write((*task, "ends"))
                return value

            # Without (known) side effects TensorFlow may run it in any order.
            result = tf.numpy_function(note, [number, value], tf.float32, stateful=self._stateful)
            return tf.ensure_shape(result, value.shape)

        @tf.custom_gradient
        def both(x):
            return noted(True, x, x), lambda gradient: noted(False, x, gradient)

        return both(x * self._scale)


@pytest.mark.parametrize("has_side_effects", [False, True])
def test_1f1b_keeps_its_order(has_side_effects):
    """Where backward passes have side effects, only forward passes can be made to wait."""
    events, num_stages, number = [], 3, 5
    strategy = tfdist.ModelParallelStrategy(stages=num_stages, micro_batches=number, data=1)
    with strategy.scope():
        noting = [Noting(stage, events.append, has_side_effects) for stage in range(num_stages)]
        model = keras.Sequential([keras.Input((1,)), *noting])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.repeat(np.arange(number, dtype=np.float32), 2)[:, None]
    model.fit(x, 2 * x + 1, batch_size=len(x), shuffle=False, verbose=0)
    assert len(events) == 4 * num_stages * number
    for stage, tasks in enumerate(tasks_of_stages("1f1b", num_stages, number)):
        for i, task in enumerate(tasks):
            waits_for = tasks[:i] if task.is_forward or not has_side_effects else ()
            begin = events.index((stage, task, "begins"))
            for before in waits_for:
                assert events.index((stage, before, "ends")) < begin, (stage, before, task)


def test_uneven_batches_in_micro_batches():
    expected, _ = train(dense_model, "adam", rows=2 * BATCH + 2)  # the last has 2 rows
    for schedule in ("1f1b", "gpipe"):
        strategy = tfdist.ModelParallelStrategy(
            stages=2, data=1, micro_batches=4, schedule=schedule
        )
        model, _ = train(dense_model, "adam", strategy, rows=2 * BATCH + 2)
        assert difference(expected, model) < 1e-5


def test_compressed_gradients_between_copies():
    strategy = tfdist.ModelParallelStrategy(
        stages=2, tensor=2, data=2, compression=tfdist.compression.top_k(1.0, error_feedback=False)
    )
    expected, _ = reference(dense_model, "sgd")
    model, _ = train(dense_model, OPTIMIZERS["sgd"], strategy)
    assert difference(expected, model) < 1e-4


def test_plan_tells_what_is_where(tmp_path):
    strategy = tfdist.ModelParallelStrategy(stages=2, tensor=2, data=1)
    with strategy.scope():
        model = transformer()
    plan = strategy.split(model)
    assert plan is strategy.plan
    lines = []
    plan.summary(lines.append)
    text = "\n".join(lines)
    assert "embedding" in text and "vocabulary" in text and "heads" in text
    assert "whole on the first of them: layer_normalization" in text
    assert sum(len(units) for units in plan.stages) == len(_keras.nodes_of(model))
    assert sum(u.parameters for units in plan.stages for u in units) == model.count_params()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stages": 9}, "needs 9 devices, found 8"),
        ({"stages": 0}, "stages: expected an integer of at least 1, got 0"),
        ({"stages": 5, "data": 1}, "only 4 layers that can be told apart; use stages=4"),
        ({"devices": ["CPU:99"]}, "there is no /device:CPU:99"),
        ({"devices": ["/job:worker/task:1/CPU:0"]}, "CPU:0 is of no task of the cluster"),
        ({"schedule": "both"}, "schedule: expected one of"),
        ({"cut": 3}, "cut: expected None"),
        ({"stages": 2, "cut": ["other"], "data": 1}, "the model has no layer 'other'"),
        ({"layout": {"kernel": 7}, "tensor": 2, "data": 1}, "expected None or an axis of"),
        ({"layout": {"dense/kernel": 0}, "tensor": 2, "data": 1}, "has an activation"),
        ({"layout": {"nothing": 0}, "data": 1}, "match no variable that can be split"),
        ({"layout": {"dense_3/kernel": 1}, "tensor": 3, "data": 1}, "tensor=2 fits"),
        ({"stages": 2, "data": 1, "cut": tfdist.parallel.automatic(8000)}, "memory limit: "),
        (
            {"tensor": 2, "data": 1, "optimizer": keras.optimizers.Lamb},
            "Lamb looks at a variable as a whole",
        ),
    ],
)
def test_splits_that_cannot_be_are_refused(settings, message):
    settings = dict(settings)
    optimizer = settings.pop("optimizer", "sgd")
    with pytest.raises(ValueError, match=message):
        train(dense_model, optimizer, tfdist.ModelParallelStrategy(**settings), rows=BATCH)


def test_subclassed_models_need_stages_by_hand():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(8)

        def call(self, inputs):
            return self.dense(inputs)

    DATA[Own] = DATA[dense_model]
    with pytest.raises(ValueError, match="tfdist.parallel.stage"):
        train(Own, "sgd", tfdist.ModelParallelStrategy(stages=2, data=1), rows=BATCH)


class Slow(layers.Layer):
    """Takes long without arithmetic that shows in shapes."""

    def call(self, x):
        matrix = tf.eye(64)
        _, matrix = tf.while_loop(
            lambda i, m: i < 300, lambda i, m: (i + 1, tf.linalg.matmul(m, m)), (0, matrix)
        )
        return x + 0.0 * matrix[0, 0]

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def slow_then_dense():
    hidden = [layers.Dense(32, "relu", name=f"hidden{i}") for i in range(4)]
    return keras.Sequential([keras.Input((16,)), Slow(name="slow"), *hidden, layers.Dense(4)])


DATA[slow_then_dense] = (np.ones((BATCH, 16), "float32"), np.zeros(BATCH, "int32"))


def test_stages_are_cut_by_measured_costs():
    first = {}
    for cost in ("estimated", "measured"):
        cut = tfdist.parallel.automatic(cost=cost, rows=4)
        strategy = tfdist.ModelParallelStrategy(stages=2, data=1, cut=cut)
        expected, _ = train(slow_then_dense, "sgd")
        model, _ = train(slow_then_dense, "sgd", strategy)
        assert difference(expected, model) < 1e-5
        first[cost] = [unit.operation.name for unit in strategy.plan.stages[0]]
    assert first["measured"] == ["slow"]
    assert len(first["estimated"]) > 1


def test_plan_is_drawn(tmp_path):
    strategy = tfdist.ModelParallelStrategy(stages=3, data=1)
    train(dense_model, "sgd", strategy, rows=BATCH)
    strategy.plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    work, parameters = strategy.plan.plot().axes
    assert [bar.get_height() for bar in work.patches] == pytest.approx(
        [100 * share for share in strategy.plan.shares()]
    )
    counts = [sum(u.parameters for u in units) / 1e6 for units in strategy.plan.stages]
    assert [bar.get_height() for bar in parameters.patches] == pytest.approx(counts)


def nested():
    def residual(name):
        inputs = keras.Input((16,))
        x = layers.Dense(16, activation="relu", name="wide")(inputs)
        return keras.Model(inputs, layers.Add(name="sum")([x, inputs]), name=name)

    tail = keras.Sequential([keras.Input((16,)), layers.Dense(16, "tanh"), residual("deep")])
    shared, inputs = residual("shared"), keras.Input((12,))
    x = shared(layers.Dense(16)(inputs))
    x = shared(layers.Dropout(0.0)(x))
    return keras.Model(inputs, layers.Dense(8)(tail(x)))


def nested_with_mask():
    words = keras.Input((LENGTH,), dtype="int32")
    table = keras.Model(words, layers.Embedding(VOCABULARY, 8, mask_zero=True)(words), name="table")
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(layers.Dropout(0.0)(table(inputs)))
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


DATA[nested] = DATA[dense_model]
DATA[nested_with_mask] = DATA[transformer][0] // 4, RNG.integers(0, CLASSES, ROWS)


@pytest.mark.parametrize(
    ("build", "stages", "cut", "last"),
    [
        (nested, 5, None, None),
        (
            nested,
            3,
            ["shared", "sequential/deep/wide"],
            ["shared/sum", "sequential/deep/wide", "dense_2"],
        ),
        (nested_with_mask, 2, ["table"], ["table/embedding", "dense"]),
    ],
)
def test_models_in_the_model_are_cut(build, stages, cut, last):
    expected, _ = train(build, "adam")
    strategy = tfdist.ModelParallelStrategy(stages=stages, data=1, micro_batches=2, cut=cut)
    model, _ = train(build, "adam", strategy)
    assert difference(expected, model) < 1e-5
    assert last is None or last == [units[-1].name for units in strategy.plan.stages]


def test_a_model_with_settings_of_its_own_in_the_model_stays_whole():
    inputs = keras.Input((12,))
    inner = keras.Sequential([keras.Input((12,)), layers.Dense(8), layers.BatchNormalization()])
    model = keras.Model(inputs, layers.Dense(2)(inner(inputs, training=False)))
    assert [_keras.name_of_node(node) for node in _keras.nodes_of(model)][0] == inner.name
