"""What the case tables share: the ``Case`` record, data, small models, and what is written down.

A case is a function of an ``Env`` (see runner.py) that builds a model under ``env.scope()``, trains
it and returns arrays by key. It knows nothing of replicas: the same function in one process without
a strategy gives the reference. Keys by what they hold:

``w/…``      weights                            ``log/…``    values by epoch, from ``History``
``o/…``      optimizer variables                ``batch/…``  values by batch, from a callback
``eval/…``   evaluate                           ``pred/…``   predict
``local/…``  may differ between workers         ``replica<r>/…``  the copy of replica r > 0
"""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers

TOPOLOGIES = ("mirrored2", "2x1", "2x2")
TWO = ("mirrored2", "2x1")  # where four replicas would show nothing new
LOCAL = ("mirrored2",)  # where processes would show nothing new either: arithmetic of a share
WORKERS = ("2x1",)  # where it takes processes


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: what to run, where, and what must hold.

    ``compare``: prefixes of the keys that must equal the one process' to ``tolerance``.
    ``check(workers)``: a promise beyond that, on the list of each worker's arrays; the local
    replicas' copies are among them. ``identical``: whether all workers must agree bit for bit.
    ``needs``: packages without which the case is skipped.
    """

    name: str
    run: Callable
    topologies: tuple = TOPOLOGIES
    compare: tuple = ("w/", "o/", "log/", "batch/", "eval/", "pred/")
    tolerance: float = 1e-5
    check: Callable | None = None
    identical: bool = True
    needs: tuple = ()

    def __str__(self):
        return self.name


class AfterStep(keras.callbacks.Callback):
    """Calls ``do(self)`` after this step of its fit."""

    def __init__(self, step, do):
        super().__init__()
        self.steps, self.step, self.do = 0, step, do

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == self.step:
            self.do(self)


class Table(list):
    """A list of cases with a decorator that adds one."""

    def case(self, *args, name=None, **flags):
        def add(function):
            self.append(Case(name or function.__name__, function, **flags))
            return function

        return add(args[0]) if args else add


# 20 global batches of 16 rows, two classes.
_random = np.random.RandomState(0)
BATCH = 16
X = _random.randn(320, 8).astype("float32")
Y = (X[:, :3].sum(axis=1) + 0.3 * _random.randn(320) > 0).astype("int32")
WORDS = np.array(["red", "green", "blue", "black", "white"])[_random.randint(0, 5, 320)]
TOKENS = _random.randint(1, 20, (320, 6)).astype("int32")
LENGTHS = np.where(np.arange(320) % 4 < 2, 6, 1 + np.arange(320) % 5)  # uneven over any halves
PADDED = np.where(np.arange(6)[None, :] < LENGTHS[:, None], TOKENS, 0).astype("int32")


def batches_of(*sizes):
    """A dataset of batches of just these sizes."""
    cuts = np.cumsum([0, *sizes])
    return tf.data.Dataset.from_generator(
        lambda: ((X[a:b], Y[a:b]) for a, b in zip(cuts[:-1], cuts[1:], strict=True)),
        output_signature=(tf.TensorSpec((None, 8)), tf.TensorSpec((None,), tf.int32)),
    ).apply(tf.data.experimental.assert_cardinality(len(sizes)))


def cross_entropy(**kwargs):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)


def mlp(*extra):
    return keras.Sequential(
        [keras.Input((8,)), layers.Dense(16, "tanh"), *extra, layers.Dense(2)], name="mlp"
    )


def sgd(**kwargs):
    return keras.optimizers.SGD(0.1, **kwargs)


def adam(**kwargs):
    return keras.optimizers.Adam(0.01, **kwargs)


class BatchLogs(keras.callbacks.Callback):
    """Keeps the logs of each training batch."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append(dict(logs))

    def arrays(self):
        return by_name("batch", {key: [logs[key] for logs in self.logs] for key in self.logs[0]})


def by_name(prefix, values):
    """``{"a": …}`` as ``{"prefix/a": array}``; lists of arrays are stacked."""
    return {f"{prefix}/{name}": np.array(value) for name, value in values.items()}


def copies(variable):
    """The value of a Keras variable on every replica of this worker."""
    value = getattr(variable, "_value", variable)
    if hasattr(value, "shards") and hasattr(value, "axis"):  # split over several devices
        pieces = zip(*(shard.values for shard in value.shards), strict=True)
        return [np.concatenate([np.array(p) for p in each], value.axis) for each in pieces]
    return [np.array(v) for v in getattr(value, "values", [variable])]


def variables(prefix, keras_variables):
    """All variables, and each replica's copy under a key of its own."""
    out = {}
    for i, variable in enumerate(keras_variables):
        for replica, value in enumerate(copies(variable)):
            where = f"replica{replica}/" if replica else ""
            # (the last part of the path: the others depend on the scope of a strategy)
            out[f"{where}{prefix}/{i:02d} {variable.path.split('/')[-1]}"] = value
    return out


def state(model):
    """Weights and optimizer variables of a model."""
    return variables("w", model.weights) | variables("o", model.optimizer.variables)


def train(
    env,
    build=mlp,
    optimizer=sgd,
    loss=cross_entropy,
    *,
    x=X,
    y=Y,
    metrics=("accuracy",),
    compile_args=None,
    batch_size=BATCH,
    epochs=1,
    shuffle=False,
    batch_logs=True,
    **fit_args,
):
    """Compiles under the strategy and fits; returns the model and the arrays of the training."""
    with env.scope():
        model = build()
        model.compile(
            optimizer() if callable(optimizer) else optimizer,
            loss() if callable(loss) else loss,
            metrics=metrics() if callable(metrics) else list(metrics) or None,
            **(compile_args or {}),
        )
    recorder = BatchLogs()
    callbacks = [*fit_args.pop("callbacks", ()), *([recorder] if batch_logs else ())]
    history = model.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=shuffle,
        callbacks=callbacks,
        verbose=0,
        **fit_args,
    )
    arrays = state(model) | by_name("log", history.history)
    return model, arrays | (recorder.arrays() if batch_logs else {})
