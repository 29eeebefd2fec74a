"""Every kind of training goes on from the checkpoint of every other, in the middle of an epoch.

One topology of processes can hold several kinds. Its case ``write`` interrupts a fit of each kind;
its cases ``from_…``, one for each topology, let each of its kinds go on from what was written
there. So all clusters run side by side, and each waits for what it needs.
"""

import contextlib
import shutil

import keras
import numpy as np
import tensorflow as tf
from case_table import Table, by_name, cross_entropy, state
from keras import layers
from waiting import until

import tfdist

KINDS = {
    "one_process": ("alone", "mirrored", "stages", "tensor", "copies"),
    "2x1": ("2x1",),
    "2x2": ("2x2",),
    "3x1": ("3x1",),
    "split_workers": ("split_workers",),
    "ps": ("ps", "ps_shards"),
}
EPOCHS, BATCH, STEPS = 3, 16, 6
SAVED = STEPS + 2  # the step of the checkpoint: two steps into the second epoch
WAIT_SECONDS = 240

RANDOM = np.random.RandomState(0)
X = RANDOM.randn(84, 8).astype("float32")  # five batches of 16 and one of 4
Y = (X[:, :3].sum(1) > 0).astype("int32")
STATISTICS = RANDOM.rand(2, 16).astype("float32")

CPUS = [f"CPU:{i}" for i in range(8)]
STRATEGIES = {
    "mirrored": lambda: tfdist.MirroredStrategy(CPUS[:2]),
    "stages": lambda: tfdist.ModelParallelStrategy(CPUS[:2], stages=2, micro_batches=2),
    "tensor": lambda: tfdist.ModelParallelStrategy(CPUS[:2], tensor=2),
    "copies": lambda: tfdist.ModelParallelStrategy(CPUS, stages=2, tensor=2, data=2),
}
CASES = Table()
_models = {}


def model_of(env, kind):
    """The model of this kind in this process: made once, so that it is traced once."""
    if kind not in _models:
        with _scope(env, kind):
            _models[kind] = made()
    return _models[kind]


def _scope(env, kind):
    if env.strategy is None:
        return STRATEGIES[kind]().scope() if kind in STRATEGIES else contextlib.nullcontext()
    if kind.startswith("ps"):
        partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(64, 2)
        env.strategy.extended._variable_partitioner = partitioner if kind == "ps_shards" else None
    return env.strategy.scope()


def made():
    """Slots, averages, statistics that are not trained, and the state of a seed generator."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, "tanh", name="first"),
            layers.BatchNormalization(trainable=False, name="statistics"),
            layers.Dropout(1e-9, seed=3, name="dropout"),  # keeps all, and counts its calls
            layers.Dense(16, "tanh", name="second"),
            layers.Dense(2, name="last"),
        ],
        name="mlp",
    )
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.9)
    model.compile(optimizer, cross_entropy(), metrics=["accuracy"])
    statistics = model.get_layer("statistics")
    statistics.moving_mean.assign(STATISTICS[0])
    statistics.moving_variance.assign(STATISTICS[1])
    return model


def fit(model, directory, *others):
    keras.utils.set_random_seed(2)  # decides on the order of the rows
    save = tfdist.callbacks.every_steps(SAVED)
    checkpoint = tfdist.callbacks.FaultTolerantCheckpoint(directory, save=save)
    return model.fit(
        X, Y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[checkpoint, *others]
    )


class Interrupt(keras.callbacks.Callback):
    """Ends the fit like an error, one step after the checkpoint."""

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == SAVED + 1:
            raise InterruptedError


def arrays_of(model, history):
    arrays = state(model) | by_name("log", history.history)
    # How often a seed is used depends on how a batch is cut.
    return {key: value for key, value in arrays.items() if "seed_generator" not in key}


@CASES.case(topologies=tuple(KINDS), compare=())
def write(env):
    """The checkpoints of this topology; in one process also what nobody disturbs."""
    undisturbed = {}
    if env.strategy is None:
        model = made()
        undisturbed = arrays_of(model, fit(model, env.directory / "undisturbed"))
    for kind in KINDS[env.directory.parent.name]:
        folder = env.directory / kind
        try:
            fit(model_of(env, kind), folder, Interrupt())
        except InterruptedError:
            until(
                lambda f=folder: tfdist.checkpoints.entries(f),
                WAIT_SECONDS,
                f"the writing of {folder}",
            )
        else:
            raise AssertionError("was not interrupted")
        assert [entry.step for entry in tfdist.checkpoints.entries(folder)] == [SAVED]
    return undisturbed


def spoil(model):
    """What a checkpoint must bring."""
    for variable in [*model.variables, *model.optimizer.variables]:
        value = np.array(variable)
        if value.dtype.kind == "f":
            variable.assign(np.full_like(value, 0.37))
    model.optimizer.iterations.assign(1000)
    model.reset_metrics()


def going_on_from(topology):
    def run(env):
        written = env.directory.parents[1] / topology
        until(lambda: [*written.glob("write.0.*")], WAIT_SECONDS, f"the writing of {topology}")
        arrays = {}
        for source in KINDS[topology]:
            for kind in KINDS[env.directory.parent.name]:
                folder = env.directory / f"{source}-{kind}-{env.index}"
                shutil.copytree(written / "write-files" / source, folder)
                model = model_of(env, kind)
                spoil(model)
                found = arrays_of(model, fit(model, folder))
                arrays |= {f"{source}/{kind}/{key}": value for key, value in found.items()}
        return arrays

    return run


for _topology in KINDS:
    CASES.case(name=f"from_{_topology}", topologies=tuple(KINDS))(going_on_from(_topology))
