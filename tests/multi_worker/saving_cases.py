"""Saving on all workers to one path, and restoring on all workers from it."""

import os

import keras
import numpy as np
import tensorflow as tf
from case_table import BATCH, TOPOLOGIES, TWO, Table, X, Y, adam, by_name, cross_entropy, state
from keras import layers
from written_files import checkpoints_of_this_worker, listing, writes_of_this_worker

CASES = Table()


def model_with_state():
    """Moving statistics, a dropout seed, an Adam state: all that a file must hold."""
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, "tanh"),
            layers.BatchNormalization(momentum=0.5, synchronized=True),
            layers.Dropout(0.0),
            layers.Dense(2),
        ],
        name="saved",
    )


def compiled(env):
    with env.scope():
        model = model_with_state()
        model.compile(adam(), cross_entropy(), metrics=["accuracy"])
    return model


def fit(model, rows):
    return model.fit(X[rows], Y[rows], batch_size=BATCH, shuffle=False, verbose=0)


FIRST, SECOND = slice(0, 160), slice(160, 320)


def written_once(workers):
    for arrays in workers[1:]:
        assert list(arrays["local/writes"]) == [], "only the chief writes"


@CASES.case(topologies=TOPOLOGIES, check=written_once)
def saves_in_every_way(env):
    """Trains half, saves in four ways, and goes on: what a restored model has to match.

    ``load_saved.py`` restores these files elsewhere.
    """
    model = compiled(env)
    fit(model, FIRST)
    with writes_of_this_worker(env.directory) as writes:
        model.save(env.directory / "model.keras")
        model.save_weights(env.directory / "model.weights.h5")
        model.export(env.directory / "exported", verbose=False)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        checkpoint.write(str(env.directory / "checkpoint"))
    files = listing(env.directory)  # complete as soon as saving returns, on any worker
    half = {f"w/half {k}": v for k, v in state(model).items() if k.startswith("w/")}
    predictions = model.predict(X[:37], verbose=0)
    history = fit(model, SECOND)
    return {
        **half,
        **state(model),
        **by_name("log", history.history),
        "pred/half": predictions,
        "files": files,
        "local/writes": writes,
        "local/directory": str(env.directory),
    }


@CASES.case(topologies=TWO, compare=("w/", "o/", "log/", "pred/", "eval/", "files"))
def restores_on_all_workers(env):
    """Each way into a fresh model under the scope; training then goes on as without a break."""
    model = compiled(env)
    fit(model, FIRST)
    model.save(env.directory / "model.keras")
    model.save_weights(env.directory / "model.weights.h5")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(
        str(env.directory / "checkpoint")
    )
    fit(model, SECOND)
    undisturbed = state(model)

    with env.scope():
        whole = keras.models.load_model(env.directory / "model.keras")
    fit(whole, SECOND)
    assert_same(state(whole), undisturbed)

    restored = compiled(env)
    with env.scope():
        restored.optimizer.build(restored.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=restored, optimizer=restored.optimizer)
    checkpoint.read(str(env.directory / "checkpoint")).assert_existing_objects_matched()
    fit(restored, SECOND)
    assert_same(state(restored), undisturbed)

    weights = compiled(env)
    weights.load_weights(env.directory / "model.weights.h5")
    fit(weights, SECOND)
    return state(weights) | {"eval/loss": weights.evaluate(X, Y, BATCH, verbose=0)}


def assert_same(actual, expected):
    for value, other in zip(actual.values(), expected.values(), strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-5)


@CASES.case(topologies=TWO, compare=("w/", "files"), check=written_once)
def saves_over_what_is_there(env):
    """The second save of the same path replaces the first on every way, without leftovers."""
    model = compiled(env)
    with writes_of_this_worker(env.directory) as writes:
        for rows in (FIRST, SECOND):
            fit(model, rows)
            model.save(env.directory / "model.keras")
            model.save_weights(env.directory / "model.weights.h5")
            model.export(env.directory / "exported", verbose=False)
    with env.scope():
        loaded = keras.models.load_model(env.directory / "model.keras")
        weights = model_with_state()
    weights.load_weights(env.directory / "model.weights.h5")
    for value, first, second in zip(model.weights, loaded.weights, weights.weights, strict=True):
        np.testing.assert_array_equal(np.array(value), np.array(first))
        np.testing.assert_array_equal(np.array(value), np.array(second))
    exported = tf.saved_model.load(str(env.directory / "exported"))
    np.testing.assert_allclose(
        exported.serve(tf.constant(X[:5])), model.predict(X[:5], verbose=0), rtol=1e-5, atol=1e-6
    )
    return state(model) | {"files": listing(env.directory), "local/writes": writes}


def checkpoints_written_once(workers):
    written_once(workers)
    chief, *others = (list(arrays["local/checkpoints"]) for arrays in workers)
    assert len(chief) == 6
    assert all(written == [] for written in others), "only the chief writes"


@CASES.case(topologies=TWO, compare=("w/", "files"), check=checkpoints_written_once)
def checkpoint_manager(env):
    """Saves of which two are kept; the latest is restored. And Checkpoint.save, numbered too."""
    model = compiled(env)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    manager = tf.train.CheckpointManager(checkpoint, str(env.directory / "managed"), 2)
    with (
        checkpoints_of_this_worker() as checkpoints,
        writes_of_this_worker(env.directory / "managed") as writes,
    ):
        for start in range(0, 256, 64):
            fit(model, slice(start, start + 64))
            assert manager.save() == manager.latest_checkpoint
        kept = state(model)
        numbered = [checkpoint.save(str(env.directory / "saved" / "ckpt")) for _ in range(2)]
    fit(model, FIRST)
    assert [os.path.basename(p) for p in manager.checkpoints] == ["ckpt-3", "ckpt-4"]
    assert tf.train.latest_checkpoint(str(env.directory / "saved")) == numbered[1]
    files = listing(env.directory)
    env.barrier("listed")
    checkpoint.restore(manager.latest_checkpoint)
    assert_same(state(model), kept)
    fit(model, FIRST)
    checkpoint.restore(numbered[1])
    assert_same(state(model), kept)
    return state(model) | {"files": files, "local/writes": writes, "local/checkpoints": checkpoints}


def raised_everywhere(workers):
    for arrays in workers:
        assert arrays["local/error"] != ""


@CASES.case(topologies=("2x1",), compare=("w/",), check=raised_everywhere)
def saving_where_it_is_impossible(env):
    """A path below a file: an error on every worker, none waits, and training can go on."""
    (env.directory / "file").touch()
    model = compiled(env)
    fit(model, FIRST)
    error = ""
    try:
        model.save(env.directory / "file" / "model.keras")
    except OSError as e:
        error = str(e)
    fit(model, SECOND)
    return state(model) | {"local/error": error}


@CASES.case(topologies=("2x1",), compare=("w/",))
def only_the_chief_saves(env):
    """As in scripts that guard saving by the rank: nobody waits for the others."""
    model = compiled(env)
    fit(model, FIRST)
    if env.index == 0:
        model.save(env.directory / "model.keras")
    fit(model, SECOND)
    env.barrier("saved")
    assert list(listing(env.directory)) == ["model.keras"]
    return state(model)
