"""The cases of the conformance suite on parameter servers, and some that only these have.

Under ``Sync()`` (all topologies but ``ps_async`` and ``ps_all``) the result is that of one process.
"""

import dataclasses
import os

import input_cases
import keras
import metric_cases
import model_cases
import numpy as np
import tensorflow as tf
import training_cases
from case_table import BATCH, Table, X, Y, adam, by_name, cross_entropy, mlp, sgd, train
from job import Rows
from keras import layers

import tfdist

# Cases that can't hold on parameter servers, or hold otherwise: see docs/parameter_server.md.
_LEFT_OUT = {
    "batch_normalization_synchronized",
    "batch_normalization_synchronized_uneven",
    "dataset_not_sharded",
    "custom_loop",
    "dataset_sharded_by_file",
    "datasets_from_function",
    "datasets_from_function_infinite",
    "eager",
    "gan_with_two_optimizers",
    "models_side_by_side",
    "reduction_weighted_mean",
    "workers_with_different_numbers_of_batches",
}
# What is tried each time; with TFDIST_ALL_CASES set, all others are, too (six minutes more).
_TRIED = """
    functional sequential_deferred subclassed_lazy_layers dict_inputs_and_outputs
    several_models_under_one_strategy custom_train_step custom_train_step_returns_tensors
    add_loss_uneven regularizers_uneven constraints lstm embedding embedding_clipped_uneven
    string_lookup text_vectorization_adapted generator_uneven_first_batch py_dataset ragged
    sample_weights class_weights validation_settings infinite_dataset unknown_cardinality
    uneven_last_batch only_batch_of_one_row metrics_binary metrics_weighted
    evaluate_3_steps_per_execution predict_dict predict_3_steps_per_execution predict_strings
    adam momentum adamw global_clipnorm ema_overwrite accumulation_clipped schedule mixed_float16
    overflow_on_one_replica execution_3_steps on_batch fit_twice_and_recompile warmed_up
""".split()  # noqa: SIM905
# Those that also run in shards, with several devices in a worker, or without servers.
_IN_SHARDS = {
    "adam",
    "clipnorm",
    "embedding",
    "functional",
    "global_clipnorm",
    "regularizers",
    "sgd",
    "subclassed",
}
_ON_DEVICES = {"adam", "embedding", "functional", "sgd", "add_loss_uneven", "clipnorm"}
_COLOCATED = {"adam", "functional"}


def _topologies(name):
    return (
        *(["ps"] if name in _TRIED or os.environ.get("TFDIST_ALL_CASES") else []),
        *(["ps_shards"] if name in _IN_SHARDS else []),
        *(["ps_2x2"] if name in _ON_DEVICES else []),
        *(["ps_colocated"] if name in _COLOCATED else []),
    )


_CONFORMANCE = [
    dataclasses.replace(case, topologies=_topologies(case.name), check=None)
    for table in (model_cases, input_cases, metric_cases, training_cases)
    for case in table.CASES
    if case.compare and case.name not in _LEFT_OUT and not case.name.startswith("masked_")
]

_OWN = Table()
ASYNC = ("ps_async", "ps_all")


def _trains(workers):
    (chief,) = workers
    losses = chief["log/loss"]
    assert losses[-1] < 0.7 * losses[0], losses
    assert np.isfinite(losses).all()


def _counts_each_row_once(workers):
    (chief,) = workers
    _trains(workers)
    assert (chief["log/rows"] == len(X)).all()
    assert (chief["log/val_rows"] == 70).all()
    assert chief["iterations"] == len(chief["log/rows"]) * len(X) // BATCH
    assert len(chief["log/staleness_mean"]) == len(chief["log/rows"])
    assert sum(chief["steps"]) == len(X) // BATCH
    rows = chief["log/examples_per_second"] * chief["log/step_seconds"]
    np.testing.assert_allclose(rows, BATCH)
    seconds = chief["busy"][chief["steps"] > 0]
    assert len(chief["busy"]) == 2
    assert (seconds > 0).all()


@_OWN.case(topologies=ASYNC, compare=(), check=_counts_each_row_once)
def asynchronous_fit(env):
    with env.scope():
        model = mlp()
        model.compile(adam(), cross_entropy(), metrics=["accuracy", Rows("rows")])
    history = model.fit(
        X,
        Y,
        batch_size=BATCH,
        epochs=4,
        validation_data=(X[:70], Y[:70]),
        callbacks=[tfdist.callbacks.WorkerMonitor(env.directory / "tensorboard")],
        verbose=0,
    ).history
    assert list((env.directory / "tensorboard").iterdir())
    assert all(sum(counts) == len(X) // BATCH for counts in history["staleness_histogram"])
    steps = history["steps_by_worker"][-1]
    busy = history["busy_seconds_by_worker"][-1]
    arrays = by_name("log", {k: v for k, v in history.items() if isinstance(v[0], float)})
    counts = {"iterations": int(model.optimizer.iterations), "steps": steps, "busy": busy}
    return arrays | counts


class Interrupt(keras.callbacks.Callback):
    """Ends the fit in its second epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == len(X) // BATCH + 5:
            raise InterruptedError


def _goes_on(workers):
    (chief,) = workers
    assert chief["difference"] < 1e-6
    assert chief["resumed at"] > len(X) // BATCH  # not from the start


def _trains_each_batch_once(workers):
    (chief,) = workers
    assert chief["resumed at"] > len(X) // BATCH
    assert chief["iterations"] == 3 * (len(X) // BATCH)
    assert np.isfinite(chief["difference"])  # another order of updates, other weights


@_OWN.case(topologies=("ps_async",), compare=(), check=_trains_each_batch_once)
def fault_tolerant_checkpoint_asynchronous(env):
    """Under Async() it goes on in the middle of the epoch, too."""
    return _interrupted_and_not(env)


@_OWN.case(topologies=("ps_shards",), compare=(), check=_goes_on)
def fault_tolerant_checkpoint(env):
    """Under Sync() a run that was interrupted has the weights of one that was not."""
    return _interrupted_and_not(env)


def _interrupted_and_not(env):
    def once(folder, *others):
        keras.utils.set_random_seed(1)
        with env.scope():
            model = mlp()
            model.compile(adam(), cross_entropy())
        first = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: first.append(int(model.optimizer.iterations))
        )
        checkpoint = tfdist.callbacks.FaultTolerantCheckpoint(
            env.directory / folder, save=tfdist.callbacks.every_steps(3)
        )
        callbacks = [checkpoint, note, *others]
        model.fit(X, Y, batch_size=BATCH, epochs=3, verbose=0, callbacks=callbacks)
        variables = [*model.variables, *model.optimizer.variables]
        return [np.array(v) for v in variables], first[0], int(model.optimizer.iterations)

    whole, *_ = once("whole")
    try:
        once("broken", Interrupt())
    except InterruptedError:
        found, first, iterations = once("broken")
    else:
        raise AssertionError("was not interrupted")
    pairs = zip(whole, found, strict=True)
    difference = max(np.abs(a.astype("float64") - b).max() for a, b in pairs)
    return {"difference": difference, "resumed at": first, "iterations": iterations}


def _saved_files_agree(workers):
    (chief,) = workers
    assert chief["difference"] == 0
    assert chief["restored"] == 0


@_OWN.case(topologies=("ps_shards",), compare=(), check=_saved_files_agree)
def saving_in_all_formats(env):
    model, _ = train(env, optimizer=adam, batch_logs=False)
    expected = model.predict(X[:50], verbose=0)
    folder = env.directory
    model.save(folder / "m.keras")
    model.save_weights(folder / "m.weights.h5")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(str(folder / "ckpt" / "c"))
    plain = keras.saving.load_model(folder / "m.keras")
    weights = [np.array(v) for v in model.weights]
    slots = [np.array(v) for v in model.optimizer.variables]
    difference = np.abs(plain.predict(X[:50], verbose=0) - expected).max()
    differences = [
        *(np.abs(np.array(a) - b).max() for a, b in zip(plain.weights, weights, strict=True)),
        *(
            np.abs(np.array(a) - b).max()
            for a, b in zip(plain.optimizer.variables, slots, strict=True)
        ),
    ]
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    checkpoint.restore(path).assert_consumed()
    restored = max(
        np.abs(np.array(a) - b).max()
        for a, b in zip([*model.weights, *model.optimizer.variables], weights + slots, strict=True)
    )
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    model.load_weights(folder / "m.weights.h5")
    again = np.abs(model.predict(X[:50], verbose=0) - expected).max()
    # float32 in other batches: rows may differ in the last place
    return {
        "difference": max(float(difference > 1e-6), *map(float, differences)),
        "restored": max(float(restored), float(again > 1e-6)),
    }


def _reads_to_the_end(workers):
    (chief,) = workers
    assert chief["finite"] == 2 * 3 * 2 * 16  # epochs, batches of each of 2 workers, rows
    assert chief["infinite"] == 10 * 16


@_OWN.case(topologies=("ps_async",), compare=(), check=_reads_to_the_end)
def workers_read_their_own_data(env):
    def dataset_fn(context, repeat=False):
        start = 100 * context.input_pipeline_id
        data = tf.data.Dataset.from_tensor_slices((X, Y)).skip(start).take(48).batch(16)
        return data.repeat() if repeat else data

    with env.scope():
        model = mlp()
        model.compile(sgd(), cross_entropy(), metrics=[Rows("rows")])
    finite = env.strategy.distribute_datasets_from_function(dataset_fn)
    seen = sum(model.fit(finite, epochs=2, verbose=0).history["rows"])
    infinite = env.strategy.distribute_datasets_from_function(lambda c: dataset_fn(c, True))
    more = model.fit(infinite, steps_per_epoch=10, verbose=0).history["rows"][0]
    return {"finite": seen, "infinite": more}


def _is_refused(workers):
    (chief,) = workers
    assert all(message == "ok" for message in chief.values()), chief


@_OWN.case(topologies=("ps_async",), compare=(), check=_is_refused)
def what_asynchrony_rules_out_is_refused(env):
    def message_of(words, optimizer=sgd, extra=(), **compile_args):
        with env.scope():
            model = mlp(*[layer() for layer in extra])
            model.compile(optimizer(), cross_entropy(), **compile_args)
        try:
            model.fit(X, Y, batch_size=BATCH, verbose=0)
        except ValueError as error:
            return "ok" if words in str(error) else str(error)
        return "nothing was raised"

    def normalization():
        return layers.BatchNormalization(synchronized=True)

    return {
        "eager": message_of("run_eagerly=True cannot be honoured", run_eagerly=True),
        "compiled": message_of("jit_compile=True cannot be honoured", jit_compile=True),
        "accumulation": message_of(
            "gradient_accumulation_steps", lambda: sgd(gradient_accumulation_steps=2)
        ),
        "synchronized": message_of("can't sum over all workers", extra=[normalization]),
    }


@_OWN.case(topologies=("ps_async",), compare=(), check=_trains)
def mixed_precision_with_loss_scale(env):
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        _, arrays = train(env, optimizer=adam, epochs=5, batch_logs=False)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    return by_name("log", {"loss": arrays["log/loss"]})


def _counts_rows_of_all_steps(workers):
    (chief,) = workers
    _trains(workers)
    assert (chief["log/rows"] == len(X)).all()


@_OWN.case(topologies=("ps_async",), compare=(), check=_counts_rows_of_all_steps)
def several_steps_per_execution(env):
    _, arrays = train(
        env,
        optimizer=adam,
        metrics=lambda: [Rows("rows")],
        epochs=5,
        batch_logs=False,
        compile_args={"steps_per_execution": 3},
    )
    return arrays


def _travels_by_rows(workers):
    (chief,) = workers
    assert chief["gradient"] == "IndexedSlices"
    assert chief["changed"] <= 4
    assert chief["off"] < 1e-6


@_OWN.case(topologies=("ps_shards",), compare=(), check=_travels_by_rows)
def rows_of_a_table_in_shards(env):
    """Rows are looked up and updated on the shards that hold them, whole or one by one."""
    with env.scope():
        table = keras.Variable(np.arange(40, dtype="float32").reshape(20, 2), name="table")
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build([table])
    assert table.value.is_sharded
    indices = np.array([[0, 19, 9], [10, 19, 3]], "int32")
    with tf.GradientTape() as tape:
        rows = tf.gather(table, indices)
        loss = tf.reduce_sum(rows)
    gradient = tape.gradient(loss, table)
    before = np.array(table)
    optimizer.apply([gradient], [table])
    after = np.array(table)
    expected = before.copy()
    np.add.at(expected, indices.reshape(-1), -0.5)
    return {
        "gradient": type(gradient).__name__,
        "changed": int((before != after).any(1).sum()) - 1,
        "off": np.abs(after - expected).max() + np.abs(np.array(rows) - before[indices]).max(),
    }


def _acts_on_the_chief(workers):
    (chief,) = workers
    assert chief["iterations"] == 1  # no other step is under way before the first is finished
    assert chief["stopped"]
    # One worker's batch makes an update, so there is nothing to scale by; 1 of 4 to warm up.
    np.testing.assert_allclose(chief["log/effective_learning_rate"], [0.1 / 4])


@_OWN.case(topologies=("ps_async",), compare=(), check=_acts_on_the_chief)
def callbacks_on_the_chief(env):
    stop = tfdist.callbacks.DeadlineStop(at=0)
    others = [
        tfdist.callbacks.LearningRateWarmup(steps=4),
        tfdist.callbacks.ScaleLearningRate(),
        tfdist.callbacks.MetricAverage(),
    ]
    model, arrays = train(env, callbacks=[*others, stop], epochs=3, batch_logs=False)
    return arrays | {"iterations": int(model.optimizer.iterations), "stopped": stop.stopped}


CASES = [*_CONFORMANCE, *_OWN]
