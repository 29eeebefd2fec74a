"""Kinds of models: how they are built, what state they have, what their training step does."""

import keras
import numpy as np
import tensorflow as tf
from case_table import (
    BATCH,
    LOCAL,
    PADDED,
    TOKENS,
    TWO,
    WORDS,
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
from keras import layers, ops

CASES = Table()


# ------------------------------------------------------------------------------ how it is built


@CASES.case(topologies=LOCAL)
def functional(env):
    def build():
        x = keras.Input((8,))
        hidden = layers.Dense(16, "tanh")(x)
        return keras.Model(x, layers.Dense(2)(layers.Concatenate()([hidden, x])))

    return train(env, build, adam)[1]


@CASES.case
def sequential_deferred(env):
    """No Input: ``fit`` builds the model from the data, under the strategy."""

    def build():
        return keras.Sequential([layers.Dense(16, "tanh"), layers.Dense(2)])

    return train(env, build, adam)[1]


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(16, "tanh")
        self.out = layers.Dense(2)

    def call(self, x):
        return self.out(self.hidden(x))


@CASES.case(topologies=TWO)
def subclassed(env):
    model, arrays = train(env, Subclassed, adam)
    return arrays | {"pred/y": model.predict(X[:45], verbose=0)}


@CASES.case(topologies=WORKERS)
def subclassed_lazy_layers(env):
    """Weights made in ``build``, among them a scalar and a non-trainable counter."""

    class Scale(layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(), initializer="ones")
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x, training=False):
            if training:
                self.calls.assign_add(1.0)
            return x * self.scale

    def build():
        return keras.Sequential([layers.Dense(16, "tanh"), Scale(), layers.Dense(2)])

    return train(env, build, sgd)[1]


@CASES.case(topologies=LOCAL)
def shared_layers(env):
    def build():
        shared = layers.Dense(8, "tanh")
        x = keras.Input((8,))
        return keras.Model(x, layers.Dense(2)(shared(shared(x)) + shared(x * 0.5)))

    return train(env, build, sgd)[1]


def two_heads():
    a, b = keras.Input((8,), name="a"), keras.Input((4,), name="b")
    hidden = layers.Dense(8, "tanh")(layers.Concatenate()([a, b]))
    outputs = {
        "label": layers.Dense(2, name="label")(hidden),
        "value": layers.Dense(1, name="value")(hidden),
    }
    return keras.Model({"a": a, "b": b}, outputs)


DICT_X = {"a": X, "b": X[:, 4:] * 2}
DICT_Y = {"label": Y, "value": X.sum(axis=1, keepdims=True)}


@CASES.case
def dict_inputs_and_outputs(env):
    """Losses and metrics by name, loss weights, an uneven last batch."""
    rows = slice(0, 313)
    x = {key: value[rows] for key, value in DICT_X.items()}
    y = {key: value[rows] for key, value in DICT_Y.items()}
    with env.scope():
        model = two_heads()
        model.compile(
            adam(),
            {"label": cross_entropy(), "value": "mse"},
            loss_weights={"label": 1.0, "value": 0.3},
            metrics={"label": ["accuracy"], "value": ["mae"]},
        )
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return {
        **state(model),
        **by_name("log", history.history),
        **by_name("eval", model.evaluate(x, y, BATCH, verbose=0, return_dict=True)),
        **by_name("pred", model.predict(x, BATCH, verbose=0)),
    }


@CASES.case(topologies=WORKERS)
def several_models_under_one_strategy(env):
    """Two models trained in turn do not mix their state."""
    arrays = {}
    with env.scope():
        models = [mlp(), mlp(layers.Dense(4, "tanh"))]
        for model in models:
            model.compile(adam(), cross_entropy())
    for part in (slice(0, 160), slice(160, 320)):
        for model in models:
            model.fit(X[part], Y[part], batch_size=BATCH, shuffle=False, verbose=0)
    for i, model in enumerate(models):
        arrays |= {f"{key} of model {i}": value for key, value in state(model).items()}
    return arrays


# --------------------------------------------------------------------- its own training step


class CustomStep(Subclassed):
    """Keras' guide to ``train_step``, with a vector among the logs."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(self.compute_loss(y=y, y_pred=y_pred))
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


@CASES.case
def custom_train_step(env):
    model, arrays = train(env, CustomStep, adam, epochs=2, validation_data=(X[:64], Y[:64]))
    return arrays | by_name("eval", model.evaluate(X, Y, BATCH, verbose=0, return_dict=True))


@CASES.case(topologies=WORKERS)
def custom_train_step_returns_tensors(env):
    """Logs that are no metrics: the batch's loss and a vector, both means over the global batch."""

    class Model(Subclassed):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"own_loss": loss, "mean_output": tf.reduce_mean(y_pred, axis=0)}

    return train(env, Model, sgd, metrics=())[1]


class GAN(keras.Model):
    """As in Keras' guide: no ``call``, two models, two optimizers, trackers of its own."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(8)]
        )
        self.discriminator = keras.Sequential(
            [keras.Input((8,)), layers.Dense(8, "tanh"), layers.Dense(1)]
        )
        self.d_tracker = keras.metrics.Mean(name="d_loss")
        self.g_tracker = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, data):
        real, noise = data
        fake = self.generator(noise)
        with tf.GradientTape() as tape:
            on_real, on_fake = self.discriminator(real), self.discriminator(fake)
            d_loss = self.loss_fn(ops.ones_like(on_real), on_real)
            d_loss += self.loss_fn(ops.zeros_like(on_fake), on_fake)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            on_fake = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(ops.ones_like(on_fake), on_fake)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}


@CASES.case
def gan_with_two_optimizers(env):
    noise = np.random.RandomState(3).randn(320, 4).astype("float32")
    with env.scope():
        model = GAN()
        model.compile(adam(), sgd())
    history = model.fit(X, noise, batch_size=BATCH, shuffle=False, verbose=0)
    return {
        **variables("w", model.weights),
        **variables("o/d", model.d_optimizer.variables),
        **variables("o/g", model.g_optimizer.variables),
        **by_name("log", history.history),
    }


# -------------------------------------------------------------------------------- added losses


class AutoEncoder(keras.Model):
    """Trained by ``add_loss`` alone, on x alone."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(8)

    def call(self, x):
        out = self.dense(x)
        self.add_loss(0.5 * ops.mean(ops.square(out - x)))
        return out


@CASES.case
def add_loss(env):
    with env.scope():
        model = AutoEncoder()
        model.compile(sgd())
    history = model.fit(X, batch_size=BATCH, shuffle=False, verbose=0)
    return state(model) | by_name("log", history.history)


@CASES.case(topologies=LOCAL)
def add_loss_uneven(env):
    """Batches of 15, the last of 11: a mean over rows is weighted by rows."""
    with env.scope():
        model = AutoEncoder()
        model.compile(sgd())
    history = model.fit(X[:311], batch_size=15, shuffle=False, verbose=0)
    return state(model) | by_name("log", history.history)


def regularized():
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, "tanh", kernel_regularizer="l2", activity_regularizer="l2"),
            layers.Dense(2, bias_regularizer=keras.regularizers.L1(0.02)),
        ]
    )


@CASES.case
def regularizers(env):
    return train(env, regularized)[1]


@CASES.case(topologies=WORKERS)
def regularizers_uneven(env):
    """Weight decay does not depend on how many rows a replica has, not even on none."""
    return train(env, regularized, x=X[:305], y=Y[:305])[1]


@CASES.case(topologies=LOCAL)
def regularizers_with_sum(env):
    return train(env, regularized, loss=lambda: cross_entropy(reduction="sum"))[1]


@CASES.case(topologies=LOCAL)
def constraints(env):
    def build():
        return keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(16, "tanh", kernel_constraint="unit_norm"),
                layers.Dense(2),
            ]
        )

    return train(env, build)[1]


# ----------------------------------------------------------------------- sequences, embeddings


@CASES.case(topologies=LOCAL)
def lstm(env):
    def build():
        return keras.Sequential([keras.Input((4, 2)), layers.LSTM(6), layers.Dense(2)])

    return train(env, build, adam, x=X.reshape(320, 4, 2))[1]


@CASES.case
def embedding(env):
    """Sparse gradients; the same token occurs on several replicas, and several times on one."""

    def build():
        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(20, 4),
                layers.Flatten(),
                layers.Dense(2),
            ]
        )

    return train(env, build, adam, x=TOKENS)[1]


@CASES.case(topologies=WORKERS)
def embedding_clipped_uneven(env):
    def build():
        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(20, 4),
                layers.Flatten(),
                layers.Dense(2),
            ]
        )

    def optimizer():
        return sgd(momentum=0.9, global_clipnorm=0.05)

    return train(env, build, optimizer, x=TOKENS[:313], y=Y[:313])[1]


@CASES.case(topologies=LOCAL)
def embedding_accumulated(env):
    def build():
        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(20, 4),
                layers.Flatten(),
                layers.Dense(2),
            ]
        )

    return train(env, build, lambda: sgd(gradient_accumulation_steps=2), x=TOKENS)[1]


@CASES.case
def masked_sequences(env):
    """Padding of very different length on each replica, through Embedding and LSTM."""

    def build():
        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(20, 4, mask_zero=True),
                layers.LSTM(6),
                layers.Dense(2),
            ]
        )

    return train(env, build, adam, x=PADDED)[1]


def tagger():
    """One label per time step: the padding's steps count neither in the loss nor in metrics."""
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(20, 4, mask_zero=True),
            layers.LSTM(6, return_sequences=True),
            layers.Dense(3),
        ]
    )


TAGS = TOKENS % 3


@CASES.case
def masked_loss_per_time_step(env):
    """The mean runs over the valid steps of the global batch."""
    return train(env, tagger, adam, x=PADDED, y=TAGS)[1]


@CASES.case(topologies=TWO)
def masked_loss_uneven_and_weighted(env):
    weights = np.linspace(0.1, 2, 313).astype("float32")[:, None] * np.ones((1, 6), "float32")
    return train(env, tagger, sgd, x=PADDED[:313], y=TAGS[:313], sample_weight=weights)[1]


@CASES.case(topologies=LOCAL)
def masked_loss_all_padding_on_one_replica(env):
    x = np.where((np.arange(320) % 16 < 8)[:, None], 0, TOKENS)
    return train(env, tagger, sgd, x=x, y=TAGS)[1]


@CASES.case(topologies=LOCAL)
def masked_loss_sum(env):
    def loss():
        return cross_entropy(reduction="sum")

    return train(env, tagger, lambda: keras.optimizers.SGD(0.01), loss=loss, x=PADDED, y=TAGS)[1]


@CASES.case(topologies=LOCAL)
def masked_loss_one_of_two_outputs(env):
    """Two outputs of which one is masked: each has a divisor of its own."""

    def build():
        tokens = keras.Input((6,), dtype="int32")
        embedded = layers.Embedding(20, 4, mask_zero=True)(tokens)
        steps = layers.LSTM(6, return_sequences=True)(embedded)
        whole = layers.Flatten()(layers.Lambda(lambda t: t)(steps))
        return keras.Model(
            tokens,
            {
                "tags": layers.Dense(3, name="tags")(steps),
                "label": layers.Dense(2, name="label")(whole),
            },
        )

    return train(
        env,
        build,
        sgd,
        {"tags": cross_entropy(), "label": cross_entropy()},
        metrics=(),
        x=PADDED[:315],
        y={"tags": TAGS[:315], "label": Y[:315]},
    )[1]


# ---------------------------------------------------------------------------- normalization


def normalized(synchronized):
    return lambda: mlp(layers.BatchNormalization(momentum=0.5, synchronized=synchronized))


@CASES.case(topologies=TWO)
def batch_normalization_synchronized(env):
    model, arrays = train(env, normalized(True))
    return arrays | by_name("eval", model.evaluate(X, Y, BATCH, verbose=0, return_dict=True))


@CASES.case
def batch_normalization_synchronized_uneven(env):
    """Statistics are weighted by rows; a replica without rows adds nothing."""
    return train(env, normalized(True), x=X[:305], y=Y[:305])[1]


def statistics_are_the_replicas_mean(workers):
    arrays = workers[0]
    np.testing.assert_allclose(arrays["local/mean"], arrays["local/expected mean"], atol=1e-5)
    np.testing.assert_allclose(arrays["local/var"], arrays["local/expected var"], atol=1e-5)


@CASES.case(compare=(), check=statistics_are_the_replicas_mean)
def batch_normalization_local(env):
    """Not synchronized: each replica normalises by its share, the moving statistics are averaged.

    One step from known statistics against numpy, then an epoch for the agreement of the workers.
    """
    with env.scope():
        model = keras.Sequential([keras.Input((8,)), layers.BatchNormalization(momentum=0.5)])
        model.add(layers.Dense(2))
        model.compile(sgd(), cross_entropy())
    model.fit(X[:16], Y[:16], batch_size=16, shuffle=False, verbose=0)
    normalization = model.layers[0]
    shares = np.split(X[:16], env.replicas)
    local = {
        "local/mean": np.array(normalization.moving_mean),
        "local/var": np.array(normalization.moving_variance),
        "local/expected mean": 0.5 * np.mean([s.mean(axis=0) for s in shares], axis=0),
        "local/expected var": 0.5 + 0.5 * np.mean([s.var(axis=0) for s in shares], axis=0),
    }
    model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    return local | state(model)


@CASES.case(topologies=TWO, compare=())
def batch_normalization_local_uneven(env):
    """A replica without rows must not spoil the statistics with NaN."""
    _, arrays = train(env, normalized(False), x=X[:305], y=Y[:305])
    assert all(np.isfinite(value).all() for value in arrays.values())
    return arrays


@CASES.case(topologies=LOCAL)
def layer_normalization(env):
    return train(env, lambda: mlp(layers.LayerNormalization()))[1]


# --------------------------------------------------------------------------------- randomness


def masks_are_independent_and_reproducible(workers):
    for arrays in workers:
        np.testing.assert_array_equal(arrays["first/masks"], arrays["second/masks"])
        assert not np.array_equal(arrays["first/masks"], arrays["other/masks"])
        np.testing.assert_array_equal(arrays["first/weights"], arrays["second/weights"])
    masks = workers[0]["first/masks"]  # one row of the global batch: [steps, rows, width]
    steps, rows, _ = masks.shape
    flat = masks.reshape(steps * rows, -1)
    assert 0.4 < flat.mean() < 0.6
    assert len(np.unique(flat, axis=0)) == len(flat), "two rows got the same mask"


class Rows(keras.metrics.Metric):
    """A table of 48 rows; each replica fills those that it has seen."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = self.add_variable((48, 64), "zeros", name="table")

    def update_state(self, index, values):
        self.table.assign(self.table + ops.matmul(ops.one_hot(index, 48, axis=0), values))

    def result(self):
        return ops.convert_to_tensor(self.table)


class ShowsItsMasks(keras.Model):
    """Drops units of a constant, so that the masks can be read off what comes out."""

    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.5)
        self.dense = layers.Dense(1)
        self.masks = Rows(name="masks")

    def drop(self, x, training):
        return self.dropout(ops.ones((ops.shape(x)[0], 64)), training=training)

    def call(self, x, training=False):
        return self.dense(self.drop(x, training))

    def train_step(self, data):
        row, y = data
        dropped = self.drop(row, True)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self.dense(dropped))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.masks.update_state(ops.cast(row[:, 0], "int32"), ops.cast(dropped > 0, "float32"))
        return {"masks": self.masks.result()}


@CASES.case(compare=(), check=masks_are_independent_and_reproducible)
def dropout(env):
    """Masks of 64 units for each of 16 rows in 3 steps: twice with one seed, once with another."""
    rows = np.arange(48, dtype="float32")[:, None]

    def once(seed):
        keras.utils.set_random_seed(seed)
        with env.scope():
            model = ShowsItsMasks()
            model.build((None, 1))
            model.compile(keras.optimizers.SGD(0.01), "mse")
        history = model.fit(rows, rows / 48, batch_size=16, shuffle=False, verbose=0)
        masks = np.array(history.history["masks"][-1]).reshape(3, 16, 64)
        return masks, np.array(model.weights[0])

    (a, w_a), (b, w_b), (c, _) = once(1), once(1), once(2)
    return {
        "first/masks": a,
        "second/masks": b,
        "other/masks": c,
        "first/weights": w_a,
        "second/weights": w_b,
    }


def noise_differs_between_replicas(workers):
    replicas = np.concatenate([w["local/noise"] for w in workers])
    assert len(np.unique(replicas.round(6), axis=0)) == len(replicas)


@CASES.case(topologies=TWO, compare=(), check=noise_differs_between_replicas)
def seed_generator_in_a_layer(env):
    """A user's own SeedGenerator draws other numbers on each replica."""

    class Noise(layers.Layer):
        def __init__(self):
            super().__init__()
            self.generator = keras.random.SeedGenerator(7)
            self.drawn = self.add_weight(shape=(4,), initializer="zeros", trainable=False)

        def call(self, x):
            noise = keras.random.normal((4,), seed=self.generator)
            return x + noise[0], noise

    with env.scope():
        layer = Noise()

    @tf.function
    def draw(x):
        return layer(x)[1]

    if env.strategy is None:
        return {"local/noise": np.array([draw(tf.ones((2, 1)))])}
    noise = env.strategy.run(draw, args=(tf.ones((2, 1)),))
    return {
        "local/noise": np.array([v.numpy() for v in env.strategy.experimental_local_results(noise)])
    }


@CASES.case(topologies=TWO, compare=())
def random_layers(env):
    """Noise and spatial dropout train, and the workers' weights agree."""

    def build():
        return keras.Sequential(
            [
                keras.Input((8,)),
                layers.GaussianNoise(0.1),
                layers.Reshape((4, 2)),
                layers.SpatialDropout1D(0.3),
                layers.Flatten(),
                layers.Dense(2),
            ]
        )

    return train(env, build)[1]


# ------------------------------------------------------------------ preprocessing, applications


@CASES.case(topologies=TWO)
def normalization_adapted(env):
    with env.scope():
        normalization = layers.Normalization()
        normalization.adapt(X * 3 + 1)

    def build():
        return keras.Sequential(
            [keras.Input((8,)), normalization, layers.Dense(16, "tanh"), layers.Dense(2)]
        )

    model, arrays = train(env, build, x=X * 3 + 1)
    return arrays | {"pred/y": model.predict(X[:21] * 3 + 1, verbose=0)}


def words_model():
    lookup = layers.StringLookup(vocabulary=["red", "green", "blue", "black"])
    words = keras.Input((1,), dtype="string")
    hidden = layers.Flatten()(layers.Embedding(6, 4)(lookup(words)))
    return keras.Model(words, layers.Dense(2)(hidden))


@CASES.case
def string_lookup(env):
    """String inputs, one of them out of the vocabulary; the last batch is uneven."""
    words = tf.data.Dataset.from_tensor_slices((WORDS[:313, None], Y[:313])).batch(BATCH)
    model, arrays = train(env, words_model, x=words, y=None, batch_size=None)
    return arrays | {
        **by_name("eval", model.evaluate(words, verbose=0, return_dict=True)),
        "pred/y": model.predict(words, verbose=0),
    }


@CASES.case(topologies=WORKERS)
def text_vectorization_adapted(env):
    texts = np.array([" ".join(WORDS[(7 * i + np.arange(4)) % 320]) for i in range(320)])[:, None]
    with env.scope():
        vectorize = layers.TextVectorization(max_tokens=8, output_sequence_length=5)
        vectorize.adapt(texts)

    def build():
        text = keras.Input((1,), dtype="string")
        hidden = layers.GlobalAveragePooling1D()(layers.Embedding(8, 4)(vectorize(text)))
        return keras.Model(text, layers.Dense(2)(hidden))

    data = tf.data.Dataset.from_tensor_slices((texts, Y)).batch(BATCH)
    return train(env, build, x=data, y=None, batch_size=None)[1]


@CASES.case(topologies=LOCAL)
def hashing_and_category_encoding(env):
    def build():
        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.CategoryEncoding(20, output_mode="count"),
                layers.Dense(2),
            ]
        )

    return train(env, build, x=TOKENS)[1]


@CASES.case(topologies=LOCAL, tolerance=1e-4)
def convolution(env):
    def build():
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(4, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(2),
            ]
        )

    images = np.random.RandomState(4).randn(320, 8, 8, 1).astype("float32")
    return train(env, build, adam, x=images)[1]


@CASES.case(topologies=WORKERS, tolerance=1e-4)
def application_mobilenet(env):
    """3 steps of fine-tuning, with the statistics frozen.

    (In training mode its 27 normalizations of a small batch amplify a rounding error of 1e-6 to
    half of what three steps move the weights: one process would not even match itself.)
    """
    images = np.random.RandomState(5).rand(24, 32, 32, 3).astype("float32")

    def build():
        model = keras.applications.MobileNet(
            (32, 32, 3), alpha=0.25, weights=None, classes=2, dropout=0.0
        )
        for layer in model.layers:
            if isinstance(layer, layers.BatchNormalization):
                layer.trainable = False
        return model

    loss = keras.losses.SparseCategoricalCrossentropy
    return train(env, build, sgd, loss, x=images, y=Y[:24], batch_size=8)[1]
