"""Optimizers, precision, how steps are executed, and reductions of the loss."""

import keras
import numpy as np
import tensorflow as tf
from case_table import (
    LOCAL,
    TWO,
    WORKERS,
    Table,
    X,
    Y,
    adam,
    batches_of,
    by_name,
    cross_entropy,
    mlp,
    sgd,
    state,
    train,
    variables,
)
from keras import layers, optimizers

from tfdist.callbacks import LearningRateWarmup, ScaleLearningRate

CASES = Table()


def optimizer_case(name, make, topologies=TWO):
    CASES.case(name=name, topologies=topologies)(lambda env: train(env, optimizer=make)[1])


ALL = ("mirrored2", "2x1", "2x2", "3x1")

optimizer_case("sgd", sgd, ALL)
optimizer_case("momentum", lambda: sgd(momentum=0.9, nesterov=True), LOCAL)
optimizer_case("adam", adam, ALL)
optimizer_case("adamw", lambda: optimizers.AdamW(0.01, weight_decay=0.1))
optimizer_case("lion", lambda: optimizers.Lion(0.003), LOCAL)
optimizer_case("clipnorm", lambda: sgd(clipnorm=0.05), LOCAL)
optimizer_case("clipnorm_adam", lambda: adam(clipnorm=0.05), LOCAL)
optimizer_case("global_clipnorm", lambda: sgd(global_clipnorm=0.05), ALL)
optimizer_case("clipvalue", lambda: sgd(clipvalue=0.01), LOCAL)
optimizer_case("ema", lambda: sgd(use_ema=True, ema_momentum=0.9), LOCAL)
optimizer_case(
    "ema_overwrite",
    lambda: sgd(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=5),
    ("mirrored2", "2x1", "2x2"),
)
optimizer_case(
    "accumulation", lambda: adam(gradient_accumulation_steps=4), ("mirrored2", "2x1", "2x2")
)
optimizer_case(
    "accumulation_clipped", lambda: sgd(gradient_accumulation_steps=4, global_clipnorm=0.05), LOCAL
)
optimizer_case("schedule", lambda: optimizers.SGD(optimizers.schedules.CosineDecay(0.2, 20)), LOCAL)
for _make in (
    optimizers.RMSprop,
    optimizers.Adagrad,
    optimizers.Adadelta,
    optimizers.Adamax,
    optimizers.Nadam,
    optimizers.Ftrl,
    optimizers.Adafactor,
    optimizers.Lamb,
):
    optimizer_case(_make.__name__.lower(), lambda make=_make: make(0.01), LOCAL)


@CASES.case(topologies=TWO)
def accumulation_uneven(env):
    """Windows of three batches; one has a batch of 11 rows, one ends with a single row."""
    x = batches_of(16, 11, 16, 16, 16, 1, 16, 16, 16, 15, 16, 16)
    return train(
        env,
        optimizer=lambda: sgd(gradient_accumulation_steps=3),
        x=x,
        y=None,
        batch_size=None,
        shuffle=None,
    )[1]


class SideBySide(keras.Model):
    """Several models, each with its own optimizer, trained on the same batches in one step."""

    def __init__(self, members):
        super().__init__()
        self.members = [model for model, _ in members]
        self.own_optimizers = [optimizer for _, optimizer in members]
        self.loss_fn = cross_entropy()
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    def call(self, x):
        return self.members[0](x)

    def train_step(self, data):
        x, y = data
        for model, optimizer in zip(self.members, self.own_optimizers, strict=True):
            with tf.GradientTape() as tape:
                y_pred = model(x, training=True)
                loss = self.loss_fn(y, y_pred)
            optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
            self.accuracy.update_state(y, y_pred)
        return {"accuracy": self.accuracy.result()}

    def members_state(self):
        arrays = {}
        for i, optimizer in enumerate(self.own_optimizers):
            arrays |= variables(f"w/{i:02d}", self.members[i].weights)
            arrays |= variables(f"o/{i:02d} {optimizer.name}", optimizer.variables)
        return arrays


def side_by_side(env, make):
    with env.scope():
        model = SideBySide(make())
        model.compile()
        for member, optimizer in zip(model.members, model.own_optimizers, strict=True):
            optimizer.build(member.trainable_weights)
    history = model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    return model.members_state() | by_name("log", history.history)


@CASES.case(topologies=("2x1", "2x2"))
def optimizers_side_by_side(env):
    """Those that have a case of their own only on two devices of one process."""
    make = (
        lambda: sgd(momentum=0.9, nesterov=True),
        lambda: optimizers.AdamW(0.01, weight_decay=0.1),
        lambda: optimizers.Lion(0.003),
        lambda: sgd(clipnorm=0.05),
        lambda: sgd(clipvalue=0.01),
        lambda: sgd(use_ema=True, ema_momentum=0.9),
        lambda: sgd(gradient_accumulation_steps=4, global_clipnorm=0.05),
        lambda: optimizers.RMSprop(0.01),
        lambda: optimizers.Lamb(0.01),
    )
    return side_by_side(env, lambda: [(mlp(), optimizer()) for optimizer in make])


@CASES.case(topologies=("2x1", "2x2"))
def models_side_by_side(env):
    """Likewise: functional, shared, recurrent, convolutional, embedded, normalised."""

    def functional():
        x = keras.Input((8,))
        return keras.Model(x, layers.Dense(2)(layers.Concatenate()([layers.Dense(4)(x), x])))

    def shared():
        layer = layers.Dense(8, "tanh")
        x = keras.Input((8,))
        return keras.Model(x, layers.Dense(2)(layer(layer(x)) + layer(x * 0.5)))

    def stack(*middle):
        return keras.Sequential([keras.Input((8,)), *middle, layers.Dense(2)])

    def make():
        models = (
            functional(),
            shared(),
            stack(layers.Reshape((4, 2)), layers.LSTM(4)),
            stack(layers.Reshape((8, 1)), layers.Conv1D(3, 3), layers.Flatten()),
            stack(layers.Discretization([-1.0, 0, 1]), layers.Embedding(4, 3), layers.Flatten()),
            stack(
                layers.Dense(4, use_bias=False),
                layers.BatchNormalization(momentum=0.5, synchronized=True),
            ),
            stack(layers.Dense(4), layers.LayerNormalization()),
        )
        return [(model, adam()) for model in models]

    return side_by_side(env, make)


def mixed(policy):
    return lambda: keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, "tanh", dtype=keras.DTypePolicy(policy)),
            layers.Dense(2, dtype="float32"),
        ]
    )


@CASES.case(tolerance=2e-3)
def mixed_float16(env):
    """The step that ``compile`` makes for this policy, with the loss scale growing meanwhile."""

    def scaled():
        return optimizers.LossScaleOptimizer(sgd(), initial_scale=64.0, dynamic_growth_steps=8)

    return train(env, mixed("mixed_float16"), scaled)[1]


@CASES.case(tolerance=2e-2)
def mixed_bfloat16(env):
    return train(env, mixed("mixed_bfloat16"))[1]


@CASES.case
def overflow_on_one_replica(env):
    """A row whose gradient is infinite in float32 too: this step is skipped on all replicas."""
    x = X.copy()
    x[5 * 16 + 1, 2] = np.inf  # in the sixth batch, in the first replica's share
    x[9 * 16 + 15, 3] = np.inf  # in the tenth, in the last replica's

    def scaled():
        return optimizers.LossScaleOptimizer(sgd(), initial_scale=64.0)

    _, arrays = train(env, optimizer=scaled, x=x, metrics=(), batch_logs=False)
    del arrays["log/loss"]  # NaN, rightly
    assert all(np.isfinite(v).all() for v in arrays.values())
    return arrays


@CASES.case
def execution_3_steps(env):
    """20 steps by 3: the last execution has two."""
    model, arrays = train(env, compile_args={"steps_per_execution": 3}, epochs=2)
    return arrays | by_name("eval", model.evaluate(X, Y, 16, verbose=0, return_dict=True))


@CASES.case(topologies=WORKERS)
def execution_5_steps(env):
    return train(env, optimizer=adam, compile_args={"steps_per_execution": 5})[1]


@CASES.case(topologies=TWO)
def warmed_up(env):
    """The rate rises within executions, and the decay of the weights with it."""
    return train(
        env,
        optimizer=lambda: optimizers.AdamW(0.005, weight_decay=0.5),
        compile_args={"steps_per_execution": 3},
        callbacks=[LearningRateWarmup(0.5, start=0.25), ScaleLearningRate(4)],
        epochs=2,
    )[1]


@CASES.case(topologies=WORKERS)
def execution_3_steps_clipped_accumulated(env):
    return train(
        env,
        optimizer=lambda: sgd(global_clipnorm=0.05, gradient_accumulation_steps=2),
        compile_args={"steps_per_execution": 3},
        x=X[:311],
        y=Y[:311],
    )[1]


@CASES.case(topologies=TWO)
def eager(env):
    model, arrays = train(env, compile_args={"run_eagerly": True}, x=X[:91], y=Y[:91])
    return arrays | {"pred/y": model.predict(X[:37], verbose=0)}


@CASES.case(topologies=LOCAL)
def jit_auto(env):
    return train(env, compile_args={"jit_compile": "auto"})[1]


@CASES.case(topologies=LOCAL)
def jit_off(env):
    return train(env, compile_args={"jit_compile": False})[1]


def works_or_names_jit_compile(workers):
    for arrays in workers:
        assert "w/equal" in arrays or "jit_compile" in str(arrays["refusal"])


@CASES.case(topologies=TWO, compare=(), check=works_or_names_jit_compile)
def jit_on(env):
    """Works, or is refused before any collective with the option named."""
    try:
        train(env, compile_args={"jit_compile": True})
    except (ValueError, NotImplementedError) as error:
        return {"refusal": str(error)}
    return {"w/equal": True}


def loss_case(name, loss, topologies=LOCAL, **kwargs):
    CASES.case(name=name, topologies=topologies)(lambda env: train(env, loss=loss, **kwargs)[1])


_WEIGHTS = np.linspace(0.1, 2.0, 320).astype("float32")
_WEIGHTS[::7] = 0.0
_UNEVEN = {"x": X[:315], "y": Y[:315]}

loss_case("reduction_sum", lambda: cross_entropy(reduction="sum"), TWO)
loss_case("reduction_sum_uneven", lambda: cross_entropy(reduction="sum"), **_UNEVEN)
loss_case("reduction_mean", lambda: cross_entropy(reduction="sum_over_batch_size"), **_UNEVEN)
loss_case(
    "reduction_weighted_mean",
    lambda: cross_entropy(reduction="mean_with_sample_weight"),
    ("mirrored2", "2x1", "2x2"),
    sample_weight=_WEIGHTS,
)
loss_case("reduction_sum_weighted", lambda: cross_entropy(reduction="sum"), sample_weight=_WEIGHTS)
loss_case(
    "reduction_weighted_mean_unweighted",
    lambda: cross_entropy(reduction="mean_with_sample_weight"),
    LOCAL,
)
loss_case(
    "loss_function",
    lambda: lambda y, p: keras.ops.square(keras.ops.cast(y, "float32") - p[:, 0]),
    LOCAL,
    **_UNEVEN,
)


@CASES.case(topologies=LOCAL)
def weights_all_zero_on_one_replica(env):
    """The first half of each batch weighs nothing."""
    weights = np.where(np.arange(320) % 16 < 8, 0.0, 1.5).astype("float32")

    def loss():
        return cross_entropy(reduction="mean_with_sample_weight")

    return train(env, loss=loss, sample_weight=weights)[1]


@CASES.case(topologies=WORKERS)
def fit_twice_and_recompile(env):
    """Training goes on where it stopped; a new compile with a frozen layer takes effect."""
    model, first = train(env, optimizer=adam, x=X[:160], y=Y[:160])
    model.fit(X[160:], Y[160:], batch_size=16, shuffle=False, verbose=0)
    second = state(model)
    with env.scope():
        model.layers[0].trainable = False
        model.compile(adam(), cross_entropy())
    model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    third = state(model)
    return {
        **first,
        **{
            key.replace("w/", "w/second ").replace("o/", "o/second "): v
            for key, v in second.items()
        },
        **{key.replace("w/", "w/third ").replace("o/", "o/third "): v for key, v in third.items()},
    }


@CASES.case
def on_batch(env):
    """Each worker passes the same global batch; each replica trains on its share."""
    with env.scope():
        model = mlp()
        model.compile(sgd(), cross_entropy(), metrics=["accuracy"], weighted_metrics=["accuracy"])
    weights = np.linspace(0.5, 2, 320).astype("float32")
    logs, tests, predictions = [], [], []
    for start, size in [
        (0, 16),
        (16, 16),
        (32, 5),
        (37, 1),
        (38, 16),
        (54, 15),
        (69, 16),
        (85, 16),
    ]:
        rows = slice(start, start + size)
        logs.append(model.train_on_batch(X[rows], Y[rows], sample_weight=weights[rows]))
        tests.append(model.test_on_batch(X[rows], Y[rows]))
        predictions.append(model.predict_on_batch(X[rows]))
    named = model.train_on_batch(X[:16], Y[:16], class_weight={0: 1.0, 1: 3.0}, return_dict=True)
    return {
        **state(model),
        **by_name("log", named),
        "log/train": np.array(logs),
        "log/test": np.array(tests),
        "pred/y": np.concatenate(predictions),
    }


@CASES.case
def custom_loop(env):
    """A hand-written loop over a distributed dataset, as TensorFlow's guide has it."""
    dataset = tf.data.Dataset.from_tensor_slices((X[:315], Y[:315])).batch(16)
    with env.scope():
        model, optimizer = mlp(), adam()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        optimizer.build(model.trainable_variables)
    per_row = cross_entropy(reduction="none")

    def step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_sum(per_row(y, logits)) / 16
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, logits)
        return loss

    @tf.function
    def train_step(batch):
        if env.strategy is None:
            return step(*batch)
        losses = env.strategy.run(step, args=batch)
        return env.strategy.reduce("SUM", losses, axis=None)

    if env.strategy is not None:
        dataset = env.strategy.experimental_distribute_dataset(dataset)
    losses = [float(train_step(batch)) for batch in dataset]
    arrays = by_name("log", {"loss": losses, "accuracy": float(accuracy.result())})
    model.optimizer = optimizer
    return arrays | state(model)
