"""Metrics, ``evaluate`` and ``predict``: the values of the whole data, rows in order."""

import keras
import numpy as np
import tensorflow as tf
from case_table import (
    BATCH,
    LOCAL,
    TWO,
    WORKERS,
    Table,
    X,
    Y,
    by_name,
    cross_entropy,
    mlp,
    sgd,
    train,
)
from keras import layers, metrics

CASES = Table()
UNEVEN = {"x": X[:313], "y": Y[:313]}
COLUMN = {"x": X[:313], "y": Y[:313, None].astype("float32")}
WEIGHTS = np.linspace(0.5, 2, 320).astype("float32")


def probability():
    return keras.Sequential(
        [keras.Input((8,)), layers.Dense(16, "tanh"), layers.Dense(1, "sigmoid")]
    )


def binary_metrics():
    return [
        metrics.BinaryAccuracy(),
        metrics.AUC(),
        metrics.AUC(curve="PR", name="auc_pr"),
        metrics.Precision(),
        metrics.Recall(),
        metrics.TruePositives(),
        metrics.FalseNegatives(),
        metrics.SensitivityAtSpecificity(0.5),
        metrics.BinaryCrossentropy(),
        metrics.BinaryIoU([0, 1]),
        metrics.Hinge(),
    ]


@CASES.case
def metrics_binary(env):
    model, arrays = train(
        env, probability, loss="binary_crossentropy", metrics=binary_metrics, **COLUMN
    )
    result = model.evaluate(*COLUMN.values(), BATCH, verbose=0, return_dict=True)
    return arrays | by_name("eval", result)


@CASES.case(topologies=TWO)
def metrics_multiclass(env):
    """One vector among them, F1 by class."""

    def build():
        model = mlp()
        model.add(layers.Softmax())
        return model

    labels = np.eye(2, dtype="float32")[Y]
    model, arrays = train(
        env,
        build,
        loss="categorical_crossentropy",
        metrics=lambda: [
            metrics.CategoricalAccuracy(),
            metrics.F1Score(average=None),
            metrics.F1Score(average="macro", name="f1_macro"),
            metrics.TopKCategoricalAccuracy(1),
            metrics.OneHotMeanIoU(2),
            metrics.CategoricalCrossentropy(),
            metrics.KLDivergence(),
            metrics.CategoricalHinge(),
        ],
        x=X[:313],
        y=labels[:313],
    )
    result = model.evaluate(X[:313], labels[:313], BATCH, verbose=0, return_dict=True)
    return arrays | by_name("eval", result)


@CASES.case(topologies=WORKERS)
def metrics_sparse(env):
    return train(
        env,
        metrics=lambda: [
            "accuracy",
            metrics.SparseTopKCategoricalAccuracy(1),
            metrics.MeanIoU(2, sparse_y_true=True, sparse_y_pred=False),
            metrics.SparseCategoricalCrossentropy(from_logits=True),
        ],
        **UNEVEN,
    )[1]


@CASES.case(topologies=TWO)
def metrics_regression(env):
    target = X[:, :1] * 0.5 + X[:, 1:2] ** 2 + 0.1

    def build():
        return keras.Sequential([keras.Input((8,)), layers.Dense(16, "tanh"), layers.Dense(1)])

    names = [
        "MeanSquaredError",
        "RootMeanSquaredError",
        "MeanAbsoluteError",
        "MeanSquaredLogarithmicError",
        "CosineSimilarity",
        "LogCoshError",
        "R2Score",
        "Poisson",
    ]
    model, arrays = train(
        env,
        build,
        loss="mse",
        metrics=lambda: [getattr(metrics, name)() for name in names],
        x=X[:313],
        y=target[:313],
    )
    result = model.evaluate(X[:313], target[:313], BATCH, verbose=0, return_dict=True)
    return arrays | by_name("eval", result)


@CASES.case
def metrics_weighted(env):
    """The same metric with and without the sample weights, on uneven batches."""
    weights = WEIGHTS[:313]
    model, arrays = train(
        env,
        probability,
        loss="binary_crossentropy",
        compile_args={"weighted_metrics": ["accuracy", "mae"]},
        metrics=lambda: [metrics.BinaryAccuracy(name="plain")],
        sample_weight=weights,
        **COLUMN,
    )
    result = model.evaluate(
        *COLUMN.values(), BATCH, sample_weight=weights, verbose=0, return_dict=True
    )
    return arrays | by_name("eval", result)


@CASES.case(topologies=WORKERS)
def metrics_of_ones_own(env):
    """A function, and a metric made under the scope and added by the model."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)
            self.norm = metrics.Mean(name="norm")

        def call(self, x):
            out = self.dense(x)
            self.norm.update_state(keras.ops.sum(keras.ops.square(out), axis=-1))
            return out

    def largest_margin(y_true, y_pred):
        return keras.ops.abs(y_pred[:, 0] - y_pred[:, 1])

    return train(env, Model, metrics=[largest_margin], **UNEVEN)[1]


# -------------------------------------------------------------------------- evaluate, predict


def fixed(env, build=mlp, **compile_args):
    with env.scope():
        model = build()
        model.compile(sgd(), cross_entropy(), metrics=["accuracy"], **compile_args)
    return model


@CASES.case
def evaluate(env):
    """313 rows, 5 rows, one row; arrays, dataset, steps; a list and a dict."""
    model = fixed(env)
    data = tf.data.Dataset.from_tensor_slices((X[:313], Y[:313])).batch(BATCH)
    return {
        "eval/arrays": model.evaluate(X[:313], Y[:313], BATCH, verbose=0),
        "eval/five rows": model.evaluate(X[:5], Y[:5], verbose=0),
        "eval/one row": model.evaluate(X[:1], Y[:1], verbose=0),
        "eval/dataset": model.evaluate(data, verbose=0),
        "eval/steps": model.evaluate(data.repeat(), steps=7, verbose=0),
        "eval/weighted": model.evaluate(X, Y, BATCH, sample_weight=WEIGHTS, verbose=0),
        **by_name("eval", model.evaluate(data, verbose=0, return_dict=True)),
    }


@CASES.case(topologies=WORKERS)
def evaluate_3_steps_per_execution(env):
    model = fixed(env, steps_per_execution=3)
    return {"eval/arrays": model.evaluate(X[:313], Y[:313], BATCH, verbose=0)}


@CASES.case
def predict(env):
    """Rows in the input's order, whatever the last batch is."""
    model = fixed(env)
    data = tf.data.Dataset.from_tensor_slices(X[:313]).batch(BATCH)
    return {
        "pred/even": model.predict(X, BATCH, verbose=0),
        "pred/uneven": model.predict(X[:313], BATCH, verbose=0),
        "pred/one in the last": model.predict(X[:305], BATCH, verbose=0),
        "pred/odd": model.predict(X[:300], 15, verbose=0),
        "pred/five rows": model.predict(X[:5], verbose=0),
        "pred/one row": model.predict(X[:1], verbose=0),
        "pred/dataset": model.predict(data, verbose=0),
        "pred/steps": model.predict(data.repeat(), steps=7, verbose=0),
    }


@CASES.case(topologies=("2x1", "3x1"))
def predict_on_unequal_input(env):
    """Batches of 1 to 16 rows from a generator; rows are numbered, so that order shows."""
    model = fixed(
        env, lambda: keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False)])
    )
    model.set_weights([np.ones((1, 1), "float32")])
    cuts = np.cumsum([0, 16, 3, 16, 1, 15, 2, 16])
    rows = np.arange(cuts[-1], dtype="float32")[:, None]
    parts = ((rows[a:b],) for a, b in zip(cuts[:-1], cuts[1:], strict=True))
    return {"pred/rows": model.predict(parts, verbose=0)}


@CASES.case(topologies=WORKERS)
def predict_dict(env):
    """A dict of outputs, one of them an integer per row, one a sequence."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, x):
            logits = self.dense(x)
            sequence = keras.ops.stack([logits, 2 * logits], axis=1)
            return {
                "logits": logits,
                "label": keras.ops.argmax(logits, axis=-1),
                "pair": (sequence, logits[:, 0]),
            }

    with env.scope():
        model = Model()
        model.compile()
    out = model.predict(X[:313], BATCH, verbose=0)
    return {
        "pred/logits": out["logits"],
        "pred/label": out["label"],
        "pred/sequence": out["pair"][0],
        "pred/vector": out["pair"][1],
    }


@CASES.case(topologies=TWO)
def predict_3_steps_per_execution(env):
    model = fixed(env, steps_per_execution=3)
    return {
        "pred/even": model.predict(X, BATCH, verbose=0),
        "pred/uneven": model.predict(X[:313], BATCH, verbose=0),
    }


@CASES.case(topologies=LOCAL)
def predict_strings(env):
    """Outputs that no collective carries: strings."""
    names = np.array(["no", "yes"])

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, x):
            return tf.gather(tf.constant(names), tf.argmax(self.dense(x), axis=-1))

    with env.scope():
        model = Model()
        model.compile()
    out = model.predict(X[:37], BATCH, verbose=0)
    return {"pred/found": np.array([name == b"yes" for name in out])}
