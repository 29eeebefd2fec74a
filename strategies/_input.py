"""Feeding ``fit``: from a dataset of global batches to each replica's rows.

A batch given to Keras is the global one. Two ways lead from it to the replicas:

- *split*: every worker reads the same stream of global batches and keeps its own rows, so that
  training equals training in one process. The size of the global batch is known without asking.
- *own*: every worker brings rows of its own (files, ``AutoShardPolicy.OFF``, datasets made with
  ``distribute_datasets_from_function``). The workers then add up their rows, and learn in the
  same collective whether anyone has data left; who has none takes part with zero rows.
"""

import functools
import warnings

import tensorflow as tf
from tensorflow.python.distribute import input_lib
from tensorflow.python.distribute import values as distribute_values

AutoShardPolicy = tf.data.experimental.AutoShardPolicy


class StepInput:
    """An iterable over the steps of an epoch.

    Args:
        strategy: the strategy that will run the steps.
        distributed: a ``DistributedDataset`` (or one made from a function).
        split: True where elements are ``(data, total_rows)`` and ``total_rows`` is the size of
            the global batch; False where elements are ``data``, and the workers must add up.
        element_spec: the nest of ``tf.TypeSpec`` of one replica's ``data``.
        num_steps: steps in an epoch, None where the data itself decides.
        agree_on_end: True where workers may run out of data at different steps.
    """

    def __init__(self, strategy, distributed, *, split, element_spec, num_steps, agree_on_end):
        self.strategy = strategy
        self.before_epoch = None  # called before each iteration starts
        self.distributed = distributed
        self.split = split
        self.element_spec = element_spec
        self.num_steps = num_steps
        self.agree_on_end = agree_on_end

    def __iter__(self):
        if self.before_epoch is not None:
            self.before_epoch()
        return StepIterator(self, iter(self.distributed))


class StepIterator:
    """An iterator that is advanced inside the step function, not by Python.

    ``next()`` only hands out the iterator itself, as a ticket for one step: the step function
    fetches the data, in the graph.
    """

    def __init__(self, source, distributed):
        self.source = source
        self.distributed = distributed
        self._fetch = None

    def skip(self):
        """Reads the data of a step and drops it; called on all workers alike.

        Raises:
            tf.errors.OutOfRangeError: there is none left.
        """
        if self._fetch is None:
            strategy, kind = self.source.strategy, self.kind

            def fetch(iterator):
                next_step(strategy, iterator, kind)

            self._fetch = tf.function(fetch, autograph=False)
        self._fetch(self.distributed)

    @property
    def kind(self):
        """What a traced step function depends on, apart from the element's type."""
        return (self.source.split, self.source.agree_on_end)

    def __iter__(self):
        return self

    def __next__(self):
        return self


def split_rows(total_rows, replica, num_replicas):
    """``(start, size)`` of a replica's rows in a global batch.

    Sizes differ by at most one row, the larger ones first; in the order of replicas they make up
    the batch. Integers in, integers out; tensors likewise.
    """
    size, larger = total_rows // num_replicas, total_rows % num_replicas
    if tf.is_tensor(total_rows):
        replica = tf.cast(replica, total_rows.dtype)
        return (
            size * replica + tf.minimum(replica, larger),
            size + tf.cast(replica < larger, total_rows.dtype),
        )
    return size * replica + min(replica, larger), size + (replica < larger)


def distribute(strategy, dataset, *, board=None, num_batches=None, same_stream=False):
    """Makes the input of ``fit``, ``evaluate`` or ``predict``.

    Args:
        strategy: a strategy of tfdist.
        dataset: a batched ``tf.data.Dataset``, or one that the user has distributed.
        board: the workers' board, None where there is one worker.
        num_batches: the number of batches where the caller knows more than ``dataset``.
        same_stream: True where it is known that all workers have the same elements in the same
            order (Keras' arrays).

    Raises:
        ValueError: ``dataset`` is not batched.
        WorkersDisagree: workers have different numbers of batches of what must be one stream.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return _own(strategy, dataset, board)
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if board is not None and policy in (AutoShardPolicy.FILE, AutoShardPolicy.OFF):
        return _own(strategy, strategy.experimental_distribute_dataset(dataset), board)
    if board is not None and not same_stream:
        _warn_of_different_shuffles(dataset, board)
    if num_batches is not None and dataset.cardinality() < 0:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(num_batches))
    return _split(strategy, dataset, board)


def from_batch(strategy, batch):
    """The input for a single step on ``batch``, the global batch that every worker has."""
    dataset = tf.data.Dataset.from_tensors(batch)
    return _split(strategy, dataset, None, static=False)


def next_step(strategy, iterator, kind):
    """Fetches one step's data (to be called in cross-replica context).

    Args:
        strategy: the strategy that runs the step.
        iterator: the TensorFlow ``DistributedIterator``.
        kind: of the :class:`StepIterator` that holds it.

    Returns:
        ``(data, total_rows)``, nests of per-replica values; ``total_rows`` is an int64 scalar.

    Raises:
        tf.errors.OutOfRangeError: no worker has data left (in graph mode: when it runs).
    """
    split, agree_on_end = kind
    if split and not agree_on_end:
        return iterator._get_next_no_partial_batch_handling()
    optionals = _optionals(iterator)
    data, rows, num_with_data = _values_or_empty(strategy, iterator, optionals, split)

    def at_end():
        # Raises OutOfRangeError, since this worker's iterator has ended like all others.
        return iterator._get_next_no_partial_batch_handling()

    if split:
        return tf.cond(num_with_data > 0, lambda: data, at_end)

    def values():
        total = [tf.identity(rows) for _ in strategy.extended.worker_devices]
        return data, input_lib._create_per_replica(total, strategy)

    def ended():
        return at_end(), values()[1]

    return tf.cond(num_with_data > 0, values, ended)


def next_step_as_optional(strategy, iterator, kind):
    """Like :func:`next_step`, but never raises: ``(has_data, data, total_rows)``.

    ``has_data`` is a scalar bool, the same on all workers.
    """
    split, agree_on_end = kind
    optionals = _optionals(iterator)
    if split and not agree_on_end:
        value = input_lib._create_per_replica(_local_values_or_empty(iterator, optionals), strategy)
        return optionals[0].has_value(), *value
    data, rows, num_with_data = _values_or_empty(strategy, iterator, optionals, split)
    if split:
        return num_with_data > 0, *data
    total = [tf.identity(rows) for _ in strategy.extended.worker_devices]
    return num_with_data > 0, data, input_lib._create_per_replica(total, strategy)


def rows_of(data):
    """The number of rows (scalar int64 tensor) of a batch, a nest of tensors."""
    for component in tf.nest.flatten(data, expand_composites=False):
        if isinstance(component, tf.RaggedTensor):
            return tf.cast(component.nrows(), tf.int64)
        if isinstance(component, tf.SparseTensor):
            return component.dense_shape[0]
        if tf.is_tensor(component):
            return tf.shape(component, out_type=tf.int64)[0]
    raise ValueError(f"A batch must hold at least one tensor. Received: {data}")


# ------------------------------------------------------------------------------------- split


def _split(strategy, dataset, board, *, static=True):
    extended = strategy.extended
    num_replicas = strategy.num_replicas_in_sync
    num_local = len(extended.worker_devices)
    first = extended._get_replica_id_in_sync_group(0)
    _require_batched(dataset.element_spec)
    static_rows = _static_rows(dataset.element_spec) if static else None
    even = static_rows is not None and static_rows % num_replicas == 0

    def keep(replica, batch):
        total = rows_of(batch)
        start, size = split_rows(total, replica, num_replicas)
        part = _map_components(functools.partial(_slice, start, size), batch)
        if even:
            part = _map_components(_with_static_rows(static_rows // num_replicas), part)
        return part, total

    # Dataset.map spreads tuples over the function's arguments.
    is_tuple = type(dataset.element_spec) is tuple
    cardinality = int(dataset.cardinality())
    if num_local == 1:
        kept = dataset.map(
            lambda *batch: keep(first, batch if is_tuple else batch[0]),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
    else:

        def local_parts(*batch):
            return tf.data.Dataset.range(first, first + num_local).map(
                lambda replica: keep(replica, batch if is_tuple else batch[0])
            )

        kept = dataset.flat_map(local_parts)
    kept = kept.prefetch(tf.data.AUTOTUNE)
    distributed = extended._plain_datasets_from_function(lambda _: kept)
    if board is not None:
        # One stream: a worker that sees another number of batches than the others would leave
        # them waiting in a collective, so they compare before anyone starts.
        board.require_same("input", {"number of batches": cardinality})
    agree_on_end = board is not None and cardinality == tf.data.UNKNOWN_CARDINALITY
    if not agree_on_end:
        # All replicas have the same number of elements: no need to ask at every step.
        distributed._enable_get_next_as_optional = False
    return StepInput(
        strategy,
        distributed,
        split=True,
        element_spec=kept.element_spec[0],
        num_steps=cardinality if cardinality >= 0 else None,
        agree_on_end=agree_on_end,
    )


def _slice(start, size, component):
    if isinstance(component, tf.SparseTensor):
        rank = component.shape.rank
        begin = tf.concat([[start], tf.zeros([rank - 1], tf.int64)], 0)
        length = tf.concat([[size], component.dense_shape[1:]], 0)
        return tf.sparse.slice(component, begin, length)
    return component[start : start + size]


def _with_static_rows(rows):
    def set_rows(component):
        if not isinstance(component, tf.SparseTensor | tf.RaggedTensor):
            component.set_shape([rows, *component.shape[1:]])
        return component

    return set_rows


def _map_components(fn, batch):
    """Maps over tensors, leaving what stands for "absent" (None, empty Optionals) as it is."""

    def apply(component):
        is_absent = component is None or isinstance(component, tf.experimental.Optional)
        return component if is_absent else fn(component)

    flat = [apply(c) for c in tf.nest.flatten(batch, expand_composites=False)]
    return tf.nest.pack_sequence_as(batch, flat, expand_composites=False)


def _tensor_specs(element_spec):
    specs = tf.nest.flatten(element_spec, expand_composites=False)
    return [s for s in specs if hasattr(s, "shape") and not _is_absent(s)]


def _is_absent(spec):
    return isinstance(spec, tf.OptionalSpec) or spec is None or not hasattr(spec, "dtype")


def _static_rows(element_spec):
    rows = {spec.shape[0] for spec in _tensor_specs(element_spec)}
    return rows.pop() if len(rows) == 1 else None


def _require_batched(element_spec):
    for spec in _tensor_specs(element_spec):
        if spec.shape.rank == 0:
            raise ValueError(
                "The dataset must be batched: each of its tensors needs a first dimension of "
                f"rows, which are shared out to the replicas. Received: element_spec="
                f"{element_spec}. Call dataset.batch(global_batch_size)."
            )


def _warn_of_different_shuffles(dataset, board):
    seeds = []
    pending = [dataset]
    while pending:
        node = pending.pop()
        pending.extend(node._inputs())
        if type(node).__name__ == "_ShuffleDataset":
            seeds.append([int(node._seed), int(node._seed2)])
    everyone = board.gather("shuffle", seeds)
    if [0, 0] in seeds or any(theirs != seeds for theirs in everyone):
        warnings.warn(
            "The dataset has a shuffle() whose seed is not set, or not the same on all workers. So "
            "every worker draws an order of its own, and some rows are seen twice and others "
            "never. Use dataset.shuffle(n, seed=...) with one seed, or the same "
            "keras.utils.set_random_seed(...) on all workers before the dataset is made.",
            stacklevel=2,
        )


# --------------------------------------------------------------------------------------- own


def _own(strategy, distributed, board):
    num_steps = _own_num_steps(strategy, distributed)
    if board is not None:
        # The epoch lasts until the last worker has run out of data.
        everyone = board.gather("own input", num_steps)
        num_steps = None if None in everyone else max(everyone)
    spec = tf.nest.map_structure(_one_replica, distributed.element_spec, expand_composites=False)
    return StepInput(
        strategy,
        distributed,
        split=False,
        element_spec=spec,
        num_steps=num_steps,
        agree_on_end=board is not None,
    )


def _own_num_steps(strategy, distributed):
    """Steps that this worker has data for; None where that is unknown or without end."""
    worker_datasets = getattr(distributed, "_cloned_datasets", None) or distributed._datasets
    cardinality = int(worker_datasets[0].cardinality())
    return None if cardinality < 0 else -(-cardinality // len(strategy.extended.worker_devices))


def _one_replica(spec):
    is_per_replica = isinstance(spec, distribute_values.PerReplicaSpec)
    return spec._value_specs[0] if is_per_replica else spec


def _optionals(iterator):
    """This worker's ``tf.experimental.Optional``, one for each local replica."""
    worker = iterator._input_workers.worker_devices[0]
    with tf.device(worker):
        return iterator._iterators[0].get_next_as_optional_list()


def _local_values_or_empty(iterator, optionals):
    return input_lib._get_value_or_dummy(iterator._input_workers, [optionals], produce_dummy=True)


def _values_or_empty(strategy, iterator, optionals, split):
    """``(per-replica values, rows, replicas with data)``, the last two over all workers."""
    local = _local_values_or_empty(iterator, optionals)
    has = tf.add_n([tf.cast(optional.has_value(), tf.int64) for optional in optionals])
    rows = tf.add_n([rows_of(value[0] if split else value) for value in local])
    counts = tf.stack([has, rows])
    if strategy.extended._in_multi_worker_mode():
        counts = tf.reshape(strategy.reduce("SUM", counts, axis=None), [2])
    return input_lib._create_per_replica(local, strategy), counts[1], counts[0]
