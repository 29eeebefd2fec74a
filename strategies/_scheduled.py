"""What ``fit``, ``evaluate`` and ``predict`` call on the chief of a parameter-server strategy.

The chief computes nothing: each call hands steps to the workers and returns, unless enough of them
are under way.
"""

import collections
import functools
import threading

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import input_lib
from tensorflow.python.distribute import values as distribute_values

from tfdist.strategies import _input
from tfdist.strategies._functions import (
    _after,
    _without_absent,
    concatenated,
    up_to_the_end,
)
from tfdist.strategies._server_variables import StateVariable, TotalVariable, on_servers
from tfdist.strategies._step import MetricState, tracing
from tfdist.strategies._worker_step import WorkerStep

_IN_FLIGHT_PER_WORKER = 3
CALL_SPEC = tf.TensorSpec([2], tf.int64)  # the numbers of an attempt and of its first step


class ScheduledInput(input_lib.DistributedDatasetsFromFunction):
    """An iterable over the steps of an epoch, whose data the chief or the workers read.

    (Keras takes it for a dataset because of its base, of which nothing is used.)

    Args:
        strategy: the strategy.
        dataset: a batched ``tf.data.Dataset`` that the chief reads, or None.
        per_worker: ``per_worker() -> iterators``, a ``PerWorkerValues``, or None.
        element_spec: the nest of ``tf.TypeSpec`` of a batch.
        num_steps: steps in an epoch, None where the data itself decides.
    """

    def __init__(self, strategy, *, dataset=None, per_worker=None, element_spec, num_steps):
        self.strategy = strategy
        self.before_epoch = None
        self.dataset = dataset
        self.per_worker = per_worker
        self._spec = element_spec
        self.batch_spec = _spec_of(element_spec)
        self.num_steps = num_steps

    @property
    def element_spec(self):
        return self._spec

    @property
    def cardinality(self):
        return tf.data.UNKNOWN_CARDINALITY if self.num_steps is None else self.num_steps

    def __iter__(self):
        if self.before_epoch is not None:
            self.before_epoch()
        return ScheduledIterator(self)


class ScheduledIterator:
    """``next()`` hands out the iterator itself, as a ticket for one step."""

    def __init__(self, source):
        self.source = source
        self._batches = None
        self.iterators = None
        if source.per_worker is not None:
            source.strategy.coordinator.queue.start_reading()
            self.iterators = source.per_worker()

    def __iter__(self):
        return self

    def __next__(self):
        return self

    def skip(self):
        """Reads a batch and drops it; nothing where the workers read their own data."""
        if self.iterators is None:
            self.batch()

    def batch(self):
        """The next batch, on the chief. Raises StopIteration at the end."""
        with tf.device(self.source.strategy.chief_device):
            if self._batches is None:
                self._batches = iter(self.source.dataset)
            batch = next(self._batches)
        return _none_where_absent(batch)


def _none_where_absent(batch):
    return tf.nest.map_structure(
        lambda v: None if isinstance(v, tf.experimental.Optional) else v,
        batch,
        expand_composites=False,
    )


def _spec_of(spec):
    """The spec of a batch as the workers get it: None where there is nothing."""
    return tf.nest.map_structure(
        lambda s: None if isinstance(s, tf.OptionalSpec) else s, spec, expand_composites=False
    )


class _Packing:
    """How the results of steps travel to the chief: each result of its own would cost a message.

    Numbers that a float64 holds exactly go in one vector; others go as they are.
    """

    def __init__(self):
        self._structure, self._shapes, self._dtypes = None, [], []

    def pack(self, results):
        """A list of few tensors, of a nest of tensors."""
        flat = tf.nest.flatten(results)
        self._structure = tf.nest.map_structure(lambda _: None, results)
        self._shapes = [t.shape if _fits_float64(t) else None for t in flat]
        self._dtypes = [t.dtype for t in flat]
        chosen = [t for t, shape in zip(flat, self._shapes, strict=True) if shape is not None]
        others = [t for t, shape in zip(flat, self._shapes, strict=True) if shape is None]
        vector = [tf.reshape(tf.cast(t, tf.float64), [-1]) for t in chosen]
        return [tf.concat([tf.zeros([0], tf.float64), *vector], 0), *others]

    def unpack(self, arrays):
        """The nest that ``pack`` was given, of numpy arrays."""
        vector, others = arrays[0], iter(arrays[1:])
        flat, start = [], 0
        for shape, dtype in zip(self._shapes, self._dtypes, strict=True):
            if shape is None:
                flat.append(next(others))
                continue
            size = shape.num_elements()
            part = vector[start : start + size].reshape(shape.as_list())
            flat.append(part.astype(dtype.as_numpy_dtype))
            start += size
        return tf.nest.pack_sequence_as(self._structure, flat)


def _fits_float64(tensor):
    dtype = tensor.dtype
    is_exact = dtype.is_floating or (dtype.is_integer and dtype.size <= 4)
    return is_exact and tensor.shape.is_fully_defined()


class Traced:
    """A traced function for the workers, and what its results mean.

    Attributes:
        concrete: the concrete function; its results are those of ``packing``.
        packing: the :class:`_Packing` of its results.
        totals: the :class:`TotalVariable` of each of the results' ``totals``.
        results: ``results(values) -> dict``, logs from the values of ``metrics``.
        metrics: the ``TotalVariable`` that the logs depend on.
        deferred: list of (optimizer, variables), to be applied by the servers.
    """

    def __init__(self):
        self.concrete = None
        self.packing = _Packing()
        self.totals, self.metrics, self.deferred = [], [], []
        self.results = lambda values: {}
        self.keys = None


class TrainingFunction:
    """The function behind ``fit`` or ``evaluate``.

    Args:
        strategy: the strategy.
        step_fn: ``step_fn(data) -> logs``.
        metrics_behind: see :func:`tfdist.strategies._functions.training_function`.
        steps_per_execution: steps that one closure runs.
        is_training: whether the steps are those of ``fit``.
        in_rounds: whether the gradients of all workers are applied together.
    """

    def __init__(
        self, strategy, step_fn, *, metrics_behind, steps_per_execution, is_training, in_rounds
    ):
        self._strategy = strategy
        self._step_fn = _without_absent(step_fn)
        self._metrics_behind = metrics_behind
        self._steps = int(steps_per_execution)
        self._is_training = is_training
        self._in_rounds = in_rounds
        self._traced = {}
        self._appliers = {}
        self._last = {}  # the other logs of the step that was finished last
        self._num_finished = 0
        self._lock = threading.Lock()

    def __call__(self, iterator):
        if not isinstance(iterator, ScheduledIterator):
            return self._single(iterator)
        if self._in_rounds:
            return self._several_rounds(iterator)
        finished = self._num_finished
        if iterator.iterators is not None:
            traced = self._schedule_reading(iterator)
        else:
            batches = up_to_the_end(lambda _: iterator.batch(), range(self._steps))
            traced = self._schedule(batches, iterator.source.batch_spec)
        if finished == 0:
            # Logs need at least one finished step.
            self._strategy.coordinator.wait_until(lambda: self._num_finished > 0)
        return self._logs(traced)

    def _single(self, iterator):
        batch = _none_where_absent(iterator if isinstance(iterator, tuple) else next(iterator))
        batch = tf.nest.map_structure(_as_tensor, batch, expand_composites=False)
        spec = tf.nest.map_structure(_flexible_spec, batch, expand_composites=False)
        traced = self._round(batch, spec) if self._in_rounds else self._schedule([batch], spec)
        self._strategy.join()
        return self._final_logs(traced)

    # ------------------------------------------------------------------ steps one by one

    def _schedule(self, batches, spec):
        traced = self._trace(spec, len(batches))
        serial = self._strategy.next_serial(len(batches))
        self._submit(traced, serial, (tuple(batches),), len(batches))
        return traced

    def _schedule_reading(self, iterator):
        strategy = self._strategy
        if strategy.coordinator.queue.is_read_out():
            strategy.join()
            strategy.coordinator.queue.start_reading()  # for the next epoch
            raise StopIteration
        traced = self._trace(iterator.iterators._values[0]._type_spec, self._steps, reads=True)
        serial = strategy.next_serial(self._steps)
        self._submit(traced, serial, (iterator.iterators,), self._steps, reads=True)
        return traced

    def _submit(self, traced, serial, args, num_steps, reads=False):
        coordinator = self._strategy.coordinator

        def deliver(results, worker):
            found = traced.packing.unpack(results)
            self._take_over(traced, found)
            if self._is_training:
                self._strategy.note_steps(worker, num_steps, found["staleness"])

        coordinator.submit(
            traced.concrete,
            serial,
            args,
            deliver,
            num_steps=num_steps,
            reads=reads,
            most=_IN_FLIGHT_PER_WORKER * self._strategy._num_workers,
        )

    def _take_over(self, traced, found):
        for variable, delta in zip(traced.totals, found["totals"], strict=True):
            variable.add(delta)
        with self._lock:
            self._last = found["others"]
            self._num_finished += 1

    # --------------------------------------------------------------------------- tracing

    def _trace(self, spec, num_steps, reads=False):
        key = (str(spec), num_steps, reads)
        if key not in self._traced:
            traced = self._traced[key] = Traced()
            make = self._reading_steps if reads else self._steps_on
            with self._strategy.scheduling():
                function = tf.function(make(traced, num_steps), autograph=False)
                data = spec if reads else (spec,) * num_steps
                traced.concrete = function.get_concrete_function(CALL_SPEC, data)
        return self._traced[key]

    def _steps_on(self, traced, num_steps):
        def steps(call, batches):
            attempt, serial = tf.unstack(call)
            results = [
                self._one_step(traced, batch, _input.rows_of(batch), attempt, serial + i)
                for i, batch in enumerate(batches)
            ]
            return traced.packing.pack(_combined(results))

        return steps

    def _reading_steps(self, traced, num_steps):
        def steps(call, iterator):
            attempt, serial = tf.unstack(call)
            results = []
            for i in range(num_steps):
                batch = iterator.get_next()
                rows = _input.rows_of(batch)
                results.append(self._one_step(traced, batch, rows, attempt, serial + i))
            return traced.packing.pack(_combined(results))

        return steps

    def _one_step(self, traced, data, total_rows, attempt, serial, part=None):
        strategy = self._strategy

        def replica_step(data):
            step = WorkerStep(
                strategy, _input.rows_of(data), total_rows, strategy.transport, attempt, serial
            )
            step.is_deferring = self._in_rounds
            if part is not None:
                number, num_parts = part
                step.is_first_part = number == 0
                step.num_parts = num_parts * strategy.num_replicas_in_sync
            with tracing(step), _after(data):
                strategy.transport.begin(step)
                logs = self._step_fn(data)
                return self._conclude(step, logs, traced)

        outputs = strategy.run(replica_step, args=(_shares(strategy, data),))
        return tf.nest.map_structure(
            lambda v: strategy.experimental_local_results(v)[0], outputs, expand_composites=False
        )

    def _conclude(self, step, logs, traced):
        logged = _flat(logs if isinstance(logs, dict) else {} if logs is None else {"loss": logs})
        metrics = self._metrics_behind(step, logged) or MetricState([], lambda _: {})
        of_metrics = metrics.results(metrics.state)
        others = {k: v for k, v in logged.items() if k not in of_metrics}
        copies = step.copies(TotalVariable)
        totals = step.sum([copy.read() for copy in copies])
        leaves = [tf.cast(leaf, tf.float32) for leaf in tf.nest.flatten(others)]
        weighted = step.sum([step.scale(leaf) for leaf in leaves])
        weighted = tf.nest.pack_sequence_as(others, weighted)
        transport = step.transport
        changes = [
            (copy.of, *_averaged(step, copy))
            for copy in step.copies(StateVariable)
            if copy.is_written
        ]
        if step.is_deferring:  # all parts of a batch count alike; one of them may say so
            changes = [
                (v, a, tf.where(step.is_first_part | v.dtype.is_floating, b, a))
                for v, a, b in changes
            ]
        transport.push_states(step, changes)
        if step.deferred:
            rows = step.all_rows()
            if step.is_first_replica:
                kept = [(gradients, variables) for _, gradients, variables in step.deferred]
                transport.keep(step, kept, rows)
        if step.is_first_replica:
            traced.totals = [copy.of for copy in copies]
            traced.metrics = [v.value for v in getattr(metrics.results, "variables", [])]
            traced.results = metrics.results
            traced.keys = list(logged)
            traced.deferred = [
                (optimizer, [v for g, v in zip(gs, vs, strict=True) if g is not None])
                for optimizer, gs, vs in step.deferred
            ]
        staleness = tf.constant(-1) if step.staleness is None else step.staleness
        return {"totals": totals, "others": weighted, "staleness": staleness}

    # ----------------------------------------------------------------------------- rounds

    def _several_rounds(self, iterator):
        spec = iterator.source.batch_spec
        rounds = up_to_the_end(lambda _: self._round(iterator.batch(), spec), range(self._steps))
        return self._final_logs(rounds[-1])

    def _round(self, batch, spec):
        """One step of all live workers: their gradients are applied together."""
        strategy = self._strategy
        coordinator, queue = strategy.coordinator, strategy.coordinator.queue
        traced = self._trace_part(spec)
        total = int(_input.rows_of(batch))
        serial = strategy.next_serial(strategy._num_workers)
        while True:
            coordinator.wait_until(lambda: bool(queue.usable()))
            workers = queue.usable_workers()
            num_lost = len(coordinator.lost_workers)
            found, closures = {}, []
            for number, worker in enumerate(workers):
                start, size = _input.split_rows(total, number, len(workers))
                if size == 0:
                    continue
                part = _rows_of_batch(batch, start, size)
                closures.append(
                    coordinator.submit(
                        traced.concrete,
                        serial + number,
                        (_place(total, number, len(workers)), part),
                        functools.partial(_note, found),
                        worker=worker,
                    )
                )
            # Workers that are still late with an earlier step, or dead, are left out already.
            num_missing = strategy._num_workers - len(workers)
            late = max(0, strategy.settings.backup_workers - num_missing)
            needed = max(1, len(closures) - late)
            coordinator.wait_until(
                lambda found=found, needed=needed, num_lost=num_lost: (
                    len(found) >= needed or len(coordinator.lost_workers) > num_lost
                )
            )
            in_time = dict(found)
            queue.drop(closures)
            if len(in_time) >= needed:
                break
        parts = [traced.packing.unpack(results) for results in in_time.values()]
        self._take_over(traced, tf.nest.map_structure(lambda *same: sum(same), *parts))
        for worker in in_time:
            strategy.note_steps(worker, 1, [])
        mask = np.zeros(strategy._num_workers, bool)
        mask[list(in_time)] = True
        self._applier(traced)(tf.constant(mask), tf.constant(total, tf.float32))
        return traced

    def _trace_part(self, spec):
        key = (str(spec), "part")
        if key not in self._traced:
            traced = self._traced[key] = Traced()

            def step(call, place, data):
                attempt, serial = tf.unstack(call)
                total_rows, number, num_parts = tf.unstack(place)
                place = number, num_parts
                result = self._one_step(traced, data, total_rows, attempt, serial, place)
                return traced.packing.pack(_combined([result]))

            with self._strategy.scheduling():
                place = tf.TensorSpec([3], tf.int64)
                spec = tf.nest.map_structure(_of_any_rows, spec, expand_composites=False)
                function = tf.function(step, autograph=False)
                traced.concrete = function.get_concrete_function(CALL_SPEC, place, spec)
        return self._traced[key]

    def _applier(self, traced):
        if id(traced) not in self._appliers:
            strategy = self._strategy

            def update(workers_and_rows):
                workers, total_rows = workers_and_rows
                for optimizer, variables in traced.deferred:
                    sums = [
                        strategy.transport.kept(on_servers(v), workers, total_rows)
                        for v in variables
                    ]
                    optimizer.apply(sums, variables)

            def apply(workers, total_rows):
                # As one replica, however many devices the workers have.
                strategy.run_on_first_device(update, (workers, total_rows))

            with strategy.scheduling():
                function = tf.function(apply, autograph=False)
                self._appliers[id(traced)] = function.get_concrete_function(
                    tf.TensorSpec([strategy._num_workers], tf.bool), tf.TensorSpec([], tf.float32)
                )
        return self._strategy.on_servers(self._appliers[id(traced)])

    # ------------------------------------------------------------------------------- logs

    def _logs(self, traced):
        """Logs that are computed when somebody looks at them, over the steps finished by then."""
        cache = _Running(self, traced)
        return {name: _RunningLog(cache, name) for name in traced.keys}

    def _final_logs(self, traced):
        logs = self.current_logs(traced)
        return {name: logs[name] for name in traced.keys}

    def current_logs(self, traced):
        """The logs over all steps that are finished."""
        with self._strategy.not_waiting():
            values = [tf.convert_to_tensor(v) for v in traced.metrics]
            results = traced.results(values)
        with self._lock:
            return {**self._last, **results}


class _Running:
    def __init__(self, function, traced):
        self._function, self._traced = function, traced
        self._at, self._logs = None, None
        self._lock = threading.Lock()

    def value(self, name):
        with self._lock:
            if self._at != self._function._num_finished:
                self._at = self._function._num_finished
                self._logs = self._function.current_logs(self._traced)
            return self._logs[name]


class _RunningLog:
    """A log over the steps finished so far; a number as soon as somebody asks."""

    def __init__(self, cache, name):
        self._cache, self._name = cache, name

    def numpy(self):
        return np.asarray(self._cache.value(self._name))

    def __array__(self, dtype=None, copy=None):
        del copy
        return np.asarray(self.numpy(), dtype)

    def __float__(self):
        return float(self.numpy())

    def __repr__(self):
        return repr(self.numpy())


def _note(found, results, worker):
    found[worker] = results


def _place(total_rows, number, num_parts):
    """Of a part of a batch: the rows of all parts, its number, and how many there are."""
    return tf.constant([total_rows, number, min(num_parts, total_rows)], tf.int64)


def _combined(results):
    """The results of several steps as one: sums of totals, the last one's other logs."""
    return {
        "totals": [
            tf.add_n(list(same)) for same in zip(*(r["totals"] for r in results), strict=True)
        ],
        "others": results[-1]["others"],
        "staleness": tf.stack([r["staleness"] for r in results]),
    }


def _flat(logs):
    """Nested logs in one dict, as Keras' callbacks get them."""
    flat = {}
    for name, value in logs.items():
        flat |= _flat(value) if isinstance(value, dict) else {name: value}
    return flat


def _averaged(step, copy):
    """The first and the last value of a state that the replicas of a step have changed."""
    first, last = copy.first, copy.read()
    if not copy.of.dtype.is_floating:
        return first, last
    change = step.scale(tf.cast(last, tf.float32) - tf.cast(first, tf.float32))
    (total,) = step.sum([change])
    return first, tf.cast(tf.cast(first, tf.float32) + total, copy.of.dtype)


def _shares(strategy, data):
    """The rows of each replica of a worker."""
    num = len(strategy.extended.worker_devices)
    if num == 1:
        return data
    total = _input.rows_of(data)
    parts = []
    for replica in range(num):
        start, size = _input.split_rows(total, tf.constant(replica), num)
        parts.append(_rows_of_batch(data, start, size))
    return tf.nest.map_structure(
        lambda *same: None if same[0] is None else distribute_values.PerReplica(same),
        *parts,
        expand_composites=False,
    )


def _rows_of_batch(batch, start, size):
    return _input._map_components(lambda c: _input._slice(start, size, c), batch)


def _as_tensor(value):
    if value is None or isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        return value
    return tf.convert_to_tensor(value)


def _of_any_rows(spec):
    if spec is None or not hasattr(spec, "shape") or not isinstance(spec, tf.TensorSpec):
        return spec
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def _flexible_spec(value):
    if value is None:
        return None
    return _of_any_rows(tf.type_spec_from_value(value))


# ---------------------------------------------------------------------------------- predict


class PredictFunction:
    """The function behind ``predict``: keeps the workers busy ahead of the result it returns.

    Args:
        strategy: the strategy.
        step_fn: ``step_fn(data) -> outputs``.
    """

    def __init__(self, strategy, step_fn):
        self._strategy = strategy
        self._step_fn = _without_absent(step_fn)
        self._traced = {}
        self._ahead = (None, None)  # the iterator of the results under way, and these

    def __call__(self, tickets):
        return concatenated(self._one, tickets)

    def _one(self, ticket):
        if not isinstance(ticket, ScheduledIterator):
            batch = tf.nest.map_structure(_as_tensor, ticket, expand_composites=False)
            spec = tf.nest.map_structure(_flexible_spec, batch, expand_composites=False)
            return self._submit(batch, spec).get()
        if ticket.iterators is not None:
            raise ValueError(
                "predict: a dataset that each worker makes for itself has no order of rows. "
                "Use a dataset, arrays or a generator."
            )
        if self._ahead[0] is not ticket:
            self._ahead = (ticket, collections.deque())
        waiting = self._ahead[1]
        spec = ticket.source.batch_spec
        while len(waiting) < _IN_FLIGHT_PER_WORKER * self._strategy._num_workers:
            try:
                waiting.append(self._submit(ticket.batch(), spec))
            except (StopIteration, tf.errors.OutOfRangeError):
                break
        if not waiting:
            self._ahead = (None, None)
            raise StopIteration
        return waiting.popleft().get()

    def _submit(self, batch, spec):
        key = str(spec)
        if key not in self._traced:
            self._traced[key] = self._trace(spec)
        concrete = self._traced[key]
        result = _Result(self._strategy.coordinator, concrete)
        serial = self._strategy.next_serial(1)
        self._strategy.coordinator.submit(concrete, serial, (batch,), result.set)
        return result

    def _trace(self, spec):
        strategy = self._strategy

        def step(call, data):
            attempt, serial = tf.unstack(call)

            def replica_step(data):
                step = WorkerStep(
                    strategy,
                    _input.rows_of(data),
                    _input.rows_of(data),
                    strategy.transport,
                    attempt,
                    serial,
                )
                with tracing(step), _after(data):
                    strategy.transport.begin(step)
                    return self._step_fn(data)

            # One replica is enough: the rows of a batch stay in order.
            return strategy.run_on_first_device(replica_step, data)

        with strategy.scheduling():
            spec = tf.nest.map_structure(_of_any_rows, spec, expand_composites=False)
            function = tf.function(step, autograph=False)
            return function.get_concrete_function(CALL_SPEC, spec)


class _Result:
    def __init__(self, coordinator, concrete):
        self._coordinator = coordinator
        self._concrete = concrete
        self._values = None

    def set(self, values, worker):
        self._values = values

    def get(self):
        self._coordinator.wait_until(lambda: self._values is not None)
        structure = self._concrete.structured_outputs
        return tf.nest.pack_sequence_as(
            structure, [tf.constant(v) for v in self._values], expand_composites=True
        )
