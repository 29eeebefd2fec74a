"""Compressed gradients under the strategies, through ``fit`` and loops of one's own.

Without loss, training must equal one process; with loss, all workers must hold the same bits.
"""

import warnings

import keras
import numpy as np
import tensorflow as tf
from case_table import (
    BATCH,
    LOCAL,
    TOKENS,
    TWO,
    WORKERS,
    Table,
    X,
    Y,
    adam,
    by_name,
    cross_entropy,
    mlp,
    sgd,
    state,
    train,
    variables,
)
from keras import layers
from training_cases import custom_loop

from tfdist import compression as C

CASES = Table()
EVERY = ("mirrored2", "2x1", "2x2", "3x1")
LOSSLESS = C.through(C.top_k(1.0), bucket_bytes=256)  # several buckets, a tensor in two of them


def compress(env, compression):
    """Gives the cluster's one strategy another compression, for the models made from now on."""
    if env.strategy is not None:
        env.strategy.extended.compression = C.as_exchange(compression)


# ------------------------------------------------------------- every compressor, bit for bit

COMPRESSORS = {
    "fp16": C.fp16,
    "bf16": C.bf16,
    "int8": lambda: C.int8(block=32),
    "qsgd": lambda: C.qsgd(7, block=32),
    "natural": C.natural,
    "one_bit": lambda: C.one_bit(block=32),
    "tern_grad": lambda: C.tern_grad(block=16),
    "threshold": lambda: C.threshold(0.01),
    "top_k": lambda: C.top_k(0.2),
    "top_k_exact": lambda: C.top_k(0.2, exact=True),
    "random_k": lambda: C.random_k(0.2),
    "dgc": lambda: C.dgc(0.1, momentum=0.5),
    "dgc_warming_up": lambda: C.dgc(0.1, momentum=0.5, warmup_steps=8),
    "power_sgd": lambda: C.power_sgd(2),
    "by_size": lambda: C.by_size(20, None, C.power_sgd(1)),
    "by_variable": lambda: C.by_variable({"kernel": C.one_bit(block=32), "bias": C.fp16()}),
    "everywhere": lambda: C.everywhere(C.one_bit(block=32)),
}
FEW = ("power_sgd", "one_bit", "everywhere", "by_variable")  # the others do the same in a host


def it_learns(workers):
    losses = workers[0]["log/loss"]
    assert losses[-1] < 0.85 * losses[0]


def training_with(make):
    def run(env):
        compress(env, make())
        return train(env, optimizer=sgd, epochs=4, batch_logs=False)[1]

    return run


for _name, _make in COMPRESSORS.items():
    CASES.case(
        name=f"compressed_{_name}",
        topologies=EVERY if _name in FEW else ("2x1", "3x1"),
        compare=(),
        check=it_learns,
    )(training_with(_make))


@CASES.case(topologies=EVERY)
def compressed_without_loss(env):
    compress(env, LOSSLESS)
    return train(env, optimizer=adam)[1]


# ------------------------------------------------------------------- with all else of Keras


@CASES.case(topologies=TWO)
def compressed_uneven(env):
    compress(env, LOSSLESS)
    return train(env, optimizer=adam, x=X[:91], y=Y[:91])[1]


@CASES.case(topologies=("2x1", "2x2"))
def compressed_clipnorm(env):
    """Clipped after the exchange, as without compression."""
    compress(env, LOSSLESS)
    return train(env, optimizer=lambda: adam(clipnorm=0.02))[1]


@CASES.case(topologies=WORKERS)
def compressed_global_clipnorm_accumulated(env):
    """One exchange for each accumulation."""
    compress(env, C.everywhere(LOSSLESS))
    return train(env, optimizer=lambda: sgd(global_clipnorm=0.05, gradient_accumulation_steps=2))[1]


@CASES.case(topologies=("2x2",))
def compressed_execution_3_steps(env):
    compress(env, LOSSLESS)
    return train(env, optimizer=adam, compile_args={"steps_per_execution": 3})[1]


@CASES.case(topologies=WORKERS)
def compressed_ema(env):
    compress(env, LOSSLESS)
    return train(env, optimizer=lambda: sgd(use_ema=True, ema_overwrite_frequency=4))[1]


@CASES.case(topologies=TWO)
def compressed_loss_scale(env):
    """A scale that changes, and a step on which one replica's gradient is infinite."""
    compress(env, LOSSLESS)
    x = X.copy()
    x[5 * 16 + 1, 2] = np.inf

    def scaled():
        return keras.optimizers.LossScaleOptimizer(
            sgd(), initial_scale=64.0, dynamic_growth_steps=4
        )

    _, arrays = train(env, optimizer=scaled, x=x, metrics=(), batch_logs=False)
    del arrays["log/loss"]  # NaN, rightly
    assert all(np.isfinite(v).all() for v in arrays.values())
    return arrays


def residual_is_in_the_gradients_units(workers):
    for arrays in workers:
        assert 0.0 < arrays["local/residual"] < 10.0


@CASES.case(topologies=TWO, compare=(), check=residual_is_in_the_gradients_units)
def compressed_residual_without_loss_scale(env):
    """The residual of float16 training does not grow with the loss scale, 32,768."""
    compress(env, C.one_bit(block=32))
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model, arrays = train(env, optimizer=sgd, batch_logs=False)
    finally:
        keras.config.set_dtype_policy(policy)
    if env.strategy is None:
        return arrays
    exchange = model.optimizer.inner_optimizer.gradient_exchange
    return arrays | {"local/residual": exchange.read_statistics()["residual_norm"]}


class Gated(keras.Model):
    """A frozen layer, a variable of one element, one that no gradient reaches, an embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(20, 4)
        self.frozen = layers.Dense(8, "tanh", trainable=False)
        self.dense = layers.Dense(2)
        self.gate = self.add_weight(shape=(), initializer="ones", name="gate")
        self.unused = self.add_weight(shape=(3,), initializer="ones", name="unused")

    def call(self, tokens):
        words = keras.ops.mean(self.embedding(tokens), axis=1)
        return self.dense(self.frozen(words)) * self.gate


def _gated(env, compression):
    compress(env, compression)
    return train(env, Gated, sgd, x=TOKENS, metrics=())[1]


@CASES.case(topologies=("2x1", "2x2"))
def compressed_frozen_absent_sparse_and_single(env):
    return _gated(env, C.by_variable({"embedding": C.power_sgd(1), "kernel|gate|bias": LOSSLESS}))


@CASES.case(topologies=WORKERS)
def compressed_small_embedding_with_static_batches(env):
    """With batches of a known size, slices of a small table are added up first."""
    compress(env, LOSSLESS)
    dataset = tf.data.Dataset.from_tensor_slices((TOKENS, Y)).batch(BATCH, drop_remainder=True)
    return train(env, Gated, sgd, x=dataset, y=None, batch_size=None, metrics=())[1]


@CASES.case(topologies=WORKERS)
def compressed_eager(env):
    compress(env, LOSSLESS)
    return train(env, optimizer=adam, compile_args={"run_eagerly": True}, x=X[:96], y=Y[:96])[1]


def refused(workers):
    assert "can be compressed eagerly only with one device" in str(workers[0]["local/error"])


@CASES.case(topologies=LOCAL, compare=(), check=refused)
def compressed_eager_on_two_devices(env):
    compress(env, LOSSLESS)
    try:
        train(env, compile_args={"run_eagerly": True})
    except ValueError as error:
        return {"local/error": str(error)}
    return {"local/error": ""}


@CASES.case(topologies=("2x1", "2x2"))
def compressed_custom_loop(env):
    compress(env, LOSSLESS)
    return custom_loop(env)


class TwoOptimizers(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(8, "tanh"), layers.Dense(2)

    def compile(self, first_optimizer, second_optimizer):
        super().compile()
        self.first_optimizer, self.second_optimizer = first_optimizer, second_optimizer

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        loss_of = cross_entropy()
        with tf.GradientTape(persistent=True) as tape:
            loss = loss_of(y, self(x, training=True))
        for layer, optimizer in (
            (self.first, self.first_optimizer),
            (self.second, self.second_optimizer),
        ):
            weights = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def _two_optimizers(env):
    with env.scope():
        model = TwoOptimizers()
        model.compile(sgd(), adam())
        model.build((None, 8))
    return model


@CASES.case(topologies=TWO)
def compressed_two_optimizers(env):
    """Each has residuals of its own; a checkpoint holds both."""
    compress(env, C.through(C.error_feedback(C.top_k(1.0, error_feedback=False)), 256))
    model = _two_optimizers(env)
    history = model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    path = str(env.directory / "both")
    tf.train.Checkpoint(model=model).write(path)
    return variables("w", model.weights) | by_name("log", history.history)


# --------------------------------------------------------------------------------- saving


def _resume(env, compression, save, restore):
    """Trains, saves, goes on; a fresh model restores and goes on: bit for bit the same."""
    compress(env, compression)

    def fresh():
        with env.scope():
            model = mlp()
            model.compile(adam(), cross_entropy())
            model.optimizer.build(model.trainable_variables)
        return model

    def fit(model, rows):
        model.fit(X[rows], Y[rows], batch_size=BATCH, shuffle=False, verbose=0)

    model = fresh()
    fit(model, slice(0, 160))
    save(model, env.directory)
    fit(model, slice(160, 320))
    restored = fresh()
    restored = restore(restored, env.directory) or restored
    fit(restored, slice(160, 320))
    for a, b in zip(model.get_weights(), restored.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    return state(model)


def _resumed_with_weights(env, compression):
    return _resume(
        env,
        compression,
        lambda model, folder: model.save_weights(folder / "saved.weights.h5"),
        lambda model, folder: model.load_weights(folder / "saved.weights.h5"),
    )


@CASES.case(topologies=EVERY, compare=())
def compressed_and_resumed_from_weights(env):
    return _resumed_with_weights(env, C.one_bit(block=32))


@CASES.case(topologies=("2x2", "3x1"), compare=())
def compressed_everywhere_and_resumed(env):
    return _resumed_with_weights(env, C.everywhere(C.top_k(0.1)))


@CASES.case(topologies=("mirrored2", "2x1", "2x2"), compare=())
def compressed_in_bfloat16_and_resumed(env):
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("bfloat16")
    try:
        return _resumed_with_weights(env, C.one_bit(block=32))
    finally:
        keras.config.set_dtype_policy(policy)


@CASES.case(topologies=TWO, compare=())
def compressed_and_resumed_from_a_checkpoint(env):
    def save(model, folder):
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(folder / "c"))

    def restore(model, folder):
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        checkpoint.restore(str(folder / "c-1")).assert_existing_objects_matched()

    return _resume(env, C.power_sgd(1), save, restore)


@CASES.case(topologies=TWO, compare=())
def compressed_and_resumed_from_a_model(env):
    def load(model, folder):
        with env.scope():
            return keras.models.load_model(folder / "saved.keras")

    return _resume(
        env, C.power_sgd(1), lambda model, folder: model.save(folder / "saved.keras"), load
    )


class _Interrupt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise InterruptedError


@CASES.case(topologies=WORKERS, compare=())
def compressed_backup_and_restore(env):
    """The backup has all workers' residuals, and each worker may have a directory of its own."""
    compress(env, C.one_bit(block=32))

    def once(*callbacks):
        keras.utils.set_random_seed(1)
        with env.scope():
            model = mlp()
            model.compile(sgd(), cross_entropy())
        model.fit(X, Y, BATCH, epochs=4, shuffle=False, verbose=0, callbacks=list(callbacks))
        return state(model)

    undisturbed = once()
    backup = env.directory / ("backup" if env.index == 0 else "nothing-here")
    try:
        once(keras.callbacks.BackupAndRestore(backup), _Interrupt())
    except InterruptedError:
        env.barrier("interrupted")
    resumed = once(keras.callbacks.BackupAndRestore(env.directory / "backup"))
    for a, b in zip(undisturbed.values(), resumed.values(), strict=True):
        np.testing.assert_array_equal(a, b)
    return resumed


def the_chief_warned(workers):
    assert "residuals of this worker only, since worker 1 did not save" in str(
        workers[0]["local/warnings"]
    )


@CASES.case(topologies=WORKERS, compare=(), check=the_chief_warned)
def compressed_and_saved_by_the_chief_alone(env):
    """Nobody waits for those who do not save; the file lacks their residuals, and this is said."""
    compress(env, C.one_bit(block=32))
    model, arrays = train(env, batch_logs=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if env.index == 0:
            model.save_weights(env.directory / "chief.weights.h5")
    env.barrier("saved")
    return arrays | {"local/warnings": " ".join(str(w.message) for w in caught)}
