"""Ways to feed a model, and batches that do not divide evenly."""

import math
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
    batches_of,
    by_name,
    train,
)
from keras import layers, ops

CASES = Table()

AutoShardPolicy = tf.data.experimental.AutoShardPolicy
WEIGHTS = np.linspace(0.5, 2, 320).astype("float32")


def batches(x=X, y=Y, size=BATCH):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(size)


def with_policy(dataset, policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def feed(env, data, **kwargs):
    """Trains on a dataset, generator or PyDataset, which brings its own batches."""
    return train(env, x=data, y=None, batch_size=None, **kwargs)


# ------------------------------------------------------------------------------ even batches


@CASES.case(topologies=TWO)
def numpy_arrays(env):
    model, arrays = train(env, epochs=2, validation_data=(X[:100], Y[:100]))
    return arrays | {"pred/y": model.predict(X, BATCH, verbose=0)}


@CASES.case(topologies=LOCAL)
def numpy_default_batch_size(env):
    """Without ``batch_size`` it is 32, globally."""
    return train(env, batch_size=None)[1]


@CASES.case(topologies=LOCAL)
def tensors(env):
    return train(env, x=tf.constant(X), y=tf.constant(Y))[1]


@CASES.case
def dataset_sharded_by_data(env):
    data = with_policy(batches(), AutoShardPolicy.DATA)
    return feed(env, data, epochs=2, validation_data=batches(X[:100], Y[:100]))[1]


@CASES.case(topologies=WORKERS)
def dataset_sharded_automatically(env):
    """AUTO falls back to DATA when there are no files; map, cache and prefetch do not matter."""
    data = batches().map(lambda x, y: (x * 2.0, y)).cache().prefetch(2)
    return feed(env, data, epochs=2)[1]


def write_shards(env):
    """Two TFRecord files, with rows 0, 2, 4, … and 1, 3, 5, …"""
    paths = [env.directory / f"rows-{i}.tfrecord" for i in range(2)]
    if env.index == 0:
        for i, path in enumerate(paths):
            with tf.io.TFRecordWriter(str(path)) as writer:
                for x, y in zip(X[i::2], Y[i::2], strict=True):
                    writer.write(np.append(x, y.astype("float32")).tobytes())
    env.barrier("files")
    return [str(path) for path in paths]


def parse(record):
    row = tf.reshape(tf.io.decode_raw(record, tf.float32), (9,))
    return row[:8], tf.cast(row[8], tf.int32)


@CASES.case(topologies=("2x1", "2x2"))
def dataset_sharded_by_file(env):
    """Each worker reads every second file: a global batch is half of one and half of the other."""
    paths = write_shards(env)
    if env.strategy is None:
        data = batches()  # rows in turn from both files
    else:
        data = tf.data.TFRecordDataset(paths).map(parse).batch(BATCH)
        data = with_policy(data, AutoShardPolicy.FILE)
    return feed(env, data, epochs=2, batch_logs=False)[1]


@CASES.case(topologies=WORKERS)
def dataset_not_sharded(env):
    """OFF: every worker reads all rows, in its share of the batch: as one process by 8 rows."""
    if env.strategy is None:
        return feed(env, batches(size=BATCH // 2))[1]
    return feed(env, with_policy(batches(), AutoShardPolicy.OFF))[1]


def rows_of_worker(context, steps):
    """This worker's share of every global batch, for ``distribute_datasets_from_function``."""
    pipeline, pipelines = context.input_pipeline_id, context.num_input_pipelines
    share = BATCH // pipelines
    rows = np.arange(steps * BATCH).reshape(steps, pipelines, share)[:, pipeline].ravel()
    return batches(X[rows], Y[rows], context.get_per_replica_batch_size(BATCH))


@CASES.case
def datasets_from_function(env):
    if env.strategy is None:
        return feed(env, batches())[1]
    data = env.strategy.distribute_datasets_from_function(lambda c: rows_of_worker(c, 20))
    model, arrays = feed(env, data)
    return arrays


@CASES.case(topologies=WORKERS)
def datasets_from_function_infinite(env):
    if env.strategy is None:
        return feed(env, batches().repeat(), epochs=2, steps_per_epoch=20)[1]
    data = env.strategy.distribute_datasets_from_function(lambda c: rows_of_worker(c, 20).repeat())
    return feed(env, data, epochs=2, steps_per_epoch=20)[1]


@CASES.case(topologies=WORKERS)
def workers_with_different_numbers_of_batches(env):
    """The one that has run out goes on without rows until all have: nothing lost, no hang."""
    rows = [np.arange(17 * 16), np.arange(17 * 16, 20 * 16)]  # both have them, one alone
    if env.strategy is None:
        whole = batches(X[rows[0]], Y[rows[0]])
        return feed(env, whole.concatenate(batches(X[rows[1]], Y[rows[1]], BATCH // 2)))[1]

    def make(context):
        shared = rows[0].reshape(17, 2, 8)[:, context.input_pipeline_id].ravel()
        data = batches(X[shared], Y[shared], 8)
        if context.input_pipeline_id == 0:
            data = data.concatenate(batches(X[rows[1]], Y[rows[1]], 8))
        return data

    return feed(env, env.strategy.distribute_datasets_from_function(make))[1]


def without_counter(arrays):
    """Drops the optimizer's counter.

    Where the number of batches is unknown, one process sees the end of the data only in the step
    after the last, and at times counts that step (Keras 3.15) although it trains nothing.
    """
    return {key: value for key, value in arrays.items() if not key.endswith(" iteration")}


def generate(x=X, y=Y, size=BATCH):
    for start in range(0, len(x), size):
        yield x[start : start + size], y[start : start + size]


@CASES.case(topologies=TWO)
def generator(env):
    """Every batch is used once: the one that builds the model is not lost."""
    return without_counter(feed(env, generate(), shuffle=None)[1])


@CASES.case(topologies=WORKERS)
def generator_uneven_first_batch(env):
    def uneven():
        yield X[:5], Y[:5]
        yield from generate(X[5:], Y[5:])

    return without_counter(feed(env, uneven(), shuffle=None)[1])


class Pages(keras.utils.PyDataset):
    def __init__(self, x=X, y=Y, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y = x, y

    def __len__(self):
        return math.ceil(len(self.x) / BATCH)

    def __getitem__(self, i):
        rows = slice(i * BATCH, (i + 1) * BATCH)
        return self.x[rows], self.y[rows]


@CASES.case
def py_dataset(env):
    model, arrays = feed(env, Pages(X[:311], Y[:311]), epochs=2)
    return arrays | by_name("eval", model.evaluate(Pages(), verbose=0, return_dict=True))


@CASES.case(topologies=WORKERS)
def py_dataset_threads(env):
    return feed(env, Pages(workers=2), epochs=2)[1]


@CASES.case(topologies=TWO)
def ragged(env):
    """Rows of different length, cut from one RaggedTensor."""
    lengths = 1 + np.arange(320) % 6
    values = tf.RaggedTensor.from_tensor(TOKENS, lengths=lengths)

    class Bag(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = layers.Embedding(20, 4)
            self.out = layers.Dense(2)

        def call(self, tokens):
            if isinstance(tokens, tf.RaggedTensor):
                tokens = tokens.to_tensor(shape=(None, 6))
            return self.out(ops.mean(self.embedding(tokens), axis=1))

    data = tf.data.Dataset.from_tensor_slices((values, Y)).batch(BATCH)
    return feed(env, data, build=Bag)[1]


@CASES.case(topologies=WORKERS)
def ragged_layers(env):
    """A functional model with a ragged Input, uneven batches."""
    values = tf.RaggedTensor.from_tensor(TOKENS, lengths=1 + np.arange(320) % 6)

    def build():
        tokens = keras.Input((None,), dtype="int32", ragged=True)
        dense = layers.Lambda(lambda t: t.to_tensor(shape=(None, 6)), output_shape=(6,))(tokens)
        return keras.Model(
            tokens, layers.Dense(2)(layers.Flatten()(layers.Embedding(20, 4)(dense)))
        )

    data = tf.data.Dataset.from_tensor_slices((values[:315], Y[:315])).batch(BATCH)
    return feed(env, data, build=build)[1]


# ------------------------------------------------------------------- weights, splits and steps


@CASES.case(topologies=TWO)
def sample_weights(env):
    model, arrays = train(env, sample_weight=WEIGHTS, x=X, y=Y)
    result = model.evaluate(X, Y, BATCH, sample_weight=WEIGHTS, verbose=0, return_dict=True)
    return arrays | by_name("eval", result)


@CASES.case(topologies=WORKERS)
def sample_weights_in_dataset_uneven(env):
    rows = slice(0, 313)
    data = tf.data.Dataset.from_tensor_slices((X[rows], Y[rows], WEIGHTS[rows])).batch(BATCH)
    return feed(env, data)[1]


@CASES.case(topologies=LOCAL)
def class_weights(env):
    return train(env, class_weight={0: 1.0, 1: 3.0})[1]


@CASES.case(topologies=WORKERS)
def validation_split(env):
    return train(env, validation_split=0.25, epochs=2)[1]


@CASES.case(topologies=WORKERS)
def validation_settings(env):
    """Weighted validation data, every second epoch, with a batch size and steps of its own."""
    return train(
        env,
        x=X[:64],
        y=Y[:64],
        epochs=4,
        validation_data=(X[:100], Y[:100], WEIGHTS[:100]),
        validation_freq=2,
        validation_batch_size=12,
        validation_steps=5,
    )[1]


@CASES.case(topologies=WORKERS)
def infinite_dataset(env):
    return feed(env, batches().repeat(), epochs=3, steps_per_epoch=7)[1]


@CASES.case(topologies=WORKERS)
def steps_over_one_pass(env):
    """Epochs of 7 steps over a finite dataset of 20 end when it does, on all workers."""
    return feed(env, batches(), epochs=3, steps_per_epoch=7)[1]


@CASES.case(topologies=WORKERS)
def infinite_generator(env):
    def endless():
        while True:
            yield from generate(X[:112], Y[:112])

    return feed(env, endless(), shuffle=None, epochs=2, steps_per_epoch=10)[1]


@CASES.case(topologies=WORKERS)
def unknown_cardinality(env):
    """A filter hides the number of batches."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: x[0] > -1.0)
    return without_counter(feed(env, data.batch(BATCH), epochs=2)[1])


# ---------------------------------------------------------------------------- uneven batches


def uneven_case(name, rows, batch_size=BATCH, topologies=TWO, **kwargs):
    """Weights and logs are those of one process whatever share each replica gets."""

    def run(env):
        model, arrays = train(
            env, x=X[:rows], y=Y[:rows], batch_size=batch_size, epochs=2, **kwargs
        )
        return arrays | {"pred/y": model.predict(X[:rows], batch_size, verbose=0)}

    CASES.case(name=name, topologies=topologies)(run)


uneven_case("uneven_last_batch", 315, topologies=("mirrored2", "2x1", "2x2", "3x1"))
uneven_case("last_batch_of_one_row", 305, topologies=("mirrored2", "2x1", "2x2", "3x1"))
uneven_case("last_batch_of_two_rows", 306, topologies=("2x2",))
uneven_case("odd_batch_size", 300, 15, ("mirrored2", "2x1", "2x2"))
uneven_case("only_batch_uneven", 5, topologies=("mirrored2", "2x1", "2x2"))
uneven_case("only_batch_of_one_row", 1, topologies=WORKERS)
uneven_case("batch_size_one", 9, 1, LOCAL)
uneven_case("batch_larger_than_data", 40, 64, LOCAL)
uneven_case(
    "uneven_adam_clipped", 313, topologies=WORKERS, optimizer=lambda: adam(global_clipnorm=0.05)
)
uneven_case("uneven_weighted", 313, topologies=LOCAL, sample_weight=WEIGHTS[:313])
uneven_case(
    "uneven_execution_3_steps", 313, topologies=WORKERS, compile_args={"steps_per_execution": 3}
)


@CASES.case(topologies=WORKERS)
def uneven_dataset(env):
    """Uneven batches in the middle of an epoch, too."""
    return feed(env, batches_of(16, 3, 16, 1, 15, 16, 2, 16), epochs=2)[1]


# ------------------------------------------------------------------------------- shuffling


class Visits(keras.metrics.Metric):
    """The step at which each row was seen, plus a thousand for each further time."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.steps = self.add_variable((96,), "zeros", name="steps")
        self.times = self.add_variable((96,), "zeros", name="times")

    def update_state(self, rows, step):
        seen = ops.sum(ops.one_hot(rows, 96), axis=0)
        self.steps.assign(self.steps + seen * step)
        self.times.assign(self.times + seen)

    def result(self):
        return ops.concatenate([self.steps, self.times])


class SeesRows(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)
        self.visits = Visits(name="visits")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        logs = super().train_step(data)
        step = ops.cast(self.optimizer.iterations, "float32")
        self.visits.update_state(ops.cast(data[0][:, 0] * 96.0 + 0.5, "int32"), step)
        return {**logs, "visits": self.visits.result()}


def visits(env, **fit_args):
    rows = np.arange(96, dtype="float32")[:, None] / 96.0
    with env.scope():
        model = SeesRows()
        model.compile(keras.optimizers.SGD(0.01), "mse")
    history = model.fit(rows, rows, epochs=3, batch_size=8, verbose=0, **fit_args)
    return np.reshape(history.history["visits"], (3, 2, 96))  # epoch, step or times, row


def disjoint_complete_and_reordered(workers):
    steps, times = np.moveaxis(workers[0]["rows/visits"], 1, 0)
    np.testing.assert_array_equal(times, 1.0, "rows seen another number of times than once")
    first = steps - steps.min(axis=1, keepdims=True)
    assert not np.array_equal(first[0], np.arange(96) // 8), "not shuffled"
    assert not np.array_equal(first[0], first[1]), "the same order in each epoch"
    assert not np.array_equal(first[1], first[2]), "the same order in each epoch"
    for epoch in first:
        np.testing.assert_array_equal(np.unique(epoch, return_counts=True)[1], 8)


@CASES.case(topologies=WORKERS, compare=(), check=disjoint_complete_and_reordered)
def shuffle_seeded(env):
    return {"rows/visits": visits(env, shuffle=True)}


@CASES.case(topologies=("2x1", "2x2"), compare=(), check=disjoint_complete_and_reordered)
def shuffle_with_seeds_that_differ(env):
    """As when nobody has set a seed."""
    keras.utils.set_random_seed(100 + env.index)
    return {"rows/visits": visits(env, shuffle=True)}


@CASES.case(topologies=WORKERS, compare=(), check=disjoint_complete_and_reordered)
def shuffle_after_a_draw_on_one_worker(env):
    """One worker's random state has moved on (it printed a sample, say)."""
    if env.index == 0:
        np.random.rand(3)
        tf.random.normal((3,))
        keras.random.normal((3,))
    return {"rows/visits": visits(env)}


def fit_shuffled_dataset(env):
    rows = np.arange(96, dtype="float32")[:, None] / 96.0
    data = tf.data.Dataset.from_tensor_slices((rows, rows)).shuffle(96).batch(8)
    with env.scope():
        model = SeesRows()
        model.compile(keras.optimizers.SGD(0.01), "mse")
    history = model.fit(data, epochs=3, shuffle=None, verbose=0)
    return np.reshape(history.history["visits"], (3, 2, 96))


@CASES.case(topologies=WORKERS, compare=(), check=disjoint_complete_and_reordered)
def dataset_shuffled_by_its_user(env):
    """``dataset.shuffle`` without a seed of its own, after ``set_random_seed``."""
    return {"rows/visits": fit_shuffled_dataset(env)}


def complete_or_warned_of(workers):
    for arrays in workers:
        assert arrays["local/warnings"] or np.all(arrays["rows/visits"][:, 1] == 1.0)


@CASES.case(topologies=WORKERS, compare=(), check=complete_or_warned_of)
def dataset_shuffled_differently(env):
    """Shuffles that differ between the workers are set right, or warned of."""
    tf.random.set_seed(100 + env.index)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        visits = fit_shuffled_dataset(env)
    count = sum("shuffle" in str(w.message) for w in caught)
    return {"rows/visits": visits, "local/warnings": count}


# ------------------------------------------------------------------------------- disagreement


def one_clear_error_or_agreement(workers):
    messages = [str(arrays["error/message"]) for arrays in workers]
    assert len(set(messages)) == 1
    assert messages[0] == "" or "worker" in messages[0]


@CASES.case(topologies=WORKERS, compare=(), check=one_clear_error_or_agreement, identical=False)
def numbers_of_rows_differ(env):
    """Array data of different length is one clear error on all workers, or is agreed on."""
    rows = 160 if env.index == 0 else 96
    try:
        train(env, x=X[:rows], y=Y[:rows], batch_logs=False)
    except (ValueError, RuntimeError) as error:
        return {"error/message": str(error)}
    return {"error/message": ""}


@CASES.case(topologies=WORKERS, compare=(), check=one_clear_error_or_agreement, identical=False)
def steps_per_epoch_differ(env):
    try:
        feed(env, batches().repeat(), steps_per_epoch=4 + 2 * env.index, batch_logs=False)
    except (ValueError, RuntimeError) as error:
        return {"error/message": str(error)}
    return {"error/message": ""}
