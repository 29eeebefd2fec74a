"""The functions that ``fit``, ``evaluate`` and ``predict`` call once per execution.

They replace the ones that Keras would make. Everything between the fetch of the data and the
reduced logs is one ``tf.function``: no step goes through Python.
"""

import contextlib

import tensorflow as tf

from tfdist import progress
from tfdist.strategies import _input
from tfdist.strategies._step import Step, finish, tracing


def training_function(
    strategy, step_fn, *, metrics_behind, steps_per_execution, run_eagerly, jit_compile
):
    """Makes the function behind ``fit`` or ``evaluate``.

    Args:
        strategy: the strategy that runs the steps.
        step_fn: ``step_fn(data) -> logs``, run by each replica on its rows.
        metrics_behind: ``metrics_behind(step, logs)``, the
            :class:`~tfdist.strategies._step.MetricState` of the metrics whose results are among
            ``logs``, or None.
        steps_per_execution: scalar int, the steps that one call runs at most.
        run_eagerly: whether to run op by op.
        jit_compile: whether to compile the replica's step (one replica only).

    Returns:
        ``function(iterator) -> logs``, the logs of the last step, the same on every worker. It
        raises ``StopIteration`` or ``tf.errors.OutOfRangeError`` when there is no data left.
    """
    step_fn = _without_absent(step_fn)
    if jit_compile:
        step_fn = tf.function(step_fn, jit_compile=True, reduce_retracing=True)

    @tf.autograph.experimental.do_not_convert
    def replica_step(data, total_rows):
        step = Step(strategy, _input.rows_of(data), total_rows)
        with tracing(step), _after(data, total_rows):
            logs = step_fn(data)
            return finish(step, logs, metrics_behind(step, logs))

    @tf.autograph.experimental.do_not_convert
    def one_step(data, total_rows):
        outputs = strategy.run(replica_step, args=(data, total_rows))
        return _first_replica(strategy, outputs)

    if not run_eagerly:
        one_step = tf.function(one_step, reduce_retracing=True)

    if run_eagerly:

        def executions(iterator):
            logs = None
            for _ in range(int(steps_per_execution)):
                try:
                    logs = one_step(
                        *_input.next_step(strategy, iterator.distributed, iterator.kind)
                    )
                except tf.errors.OutOfRangeError:
                    break
            if logs is None:
                raise StopIteration
            return logs

        return _for_batches_too(strategy, executions, int(steps_per_execution))

    def trace(kind):
        if steps_per_execution == 1:
            return lambda iterator: one_step(*_input.next_step(strategy, iterator, kind))
        return lambda iterator: _many_steps(strategy, one_step, iterator, kind, steps_per_execution)

    by_kind = {}

    def execution(iterator):
        kind = iterator.kind
        if kind not in by_kind:
            by_kind[kind] = tf.function(
                tf.autograph.experimental.do_not_convert(trace(kind)), reduce_retracing=True
            )
        logs = by_kind[kind](iterator.distributed)
        if steps_per_execution == 1:
            return logs
        if not logs.has_value():
            raise StopIteration
        return logs.get_value()

    return _for_batches_too(strategy, execution, int(steps_per_execution))


def predict_function(strategy, step_fn, *, run_eagerly, jit_compile):
    """Makes the function behind ``predict``.

    Returns:
        ``function(tickets) -> outputs``: runs one step for each of the iterators in the list
        ``tickets`` and returns all rows of all replicas in the order of the input, on every
        worker.
    """
    step_fn = _without_absent(step_fn)
    if jit_compile:
        step_fn = tf.function(step_fn, jit_compile=True, reduce_retracing=True)

    @tf.autograph.experimental.do_not_convert
    def replica_step(data, total_rows):
        step = Step(strategy, _input.rows_of(data), total_rows)
        with tracing(step), _after(data, total_rows):
            return step_fn(data)

    @tf.autograph.experimental.do_not_convert
    def on_data(data, total_rows):
        outputs = strategy.run(replica_step, args=(data, total_rows))
        return all_rows(strategy, outputs)

    if not run_eagerly:
        on_data = tf.function(on_data, reduce_retracing=True)

    def one_step(iterator, kind):
        return on_data(*_input.next_step(strategy, iterator, kind))

    by_kind = {}

    def execution(iterator):
        if run_eagerly:
            return one_step(iterator.distributed, iterator.kind)
        if iterator.kind not in by_kind:
            by_kind[iterator.kind] = tf.function(
                lambda distributed, kind=iterator.kind: one_step(distributed, kind),
                autograph=False,
                reduce_retracing=True,
            )
        return by_kind[iterator.kind](iterator.distributed)

    one = _for_batches_too(strategy, execution)

    return lambda tickets: concatenated(one, tickets)


def up_to_the_end(function, arguments):
    """``[function(a) for a in arguments]``, shorter where the data ends.

    Raises:
        StopIteration, tf.errors.OutOfRangeError: there is no data at all.
    """
    results = []
    for argument in arguments:
        try:
            results.append(function(argument))
        except (StopIteration, tf.errors.OutOfRangeError):
            if not results:
                raise
            break
    return results


def concatenated(one, tickets):
    """The rows of ``one(ticket)`` for each ticket, as long as there is data."""
    outputs = up_to_the_end(one, tickets)
    if len(outputs) == 1:
        return outputs[0]
    return tf.nest.map_structure(
        lambda *parts: tf.concat(parts, 0), *outputs, expand_composites=False
    )


def all_rows(strategy, outputs):
    """Concatenates every replica's rows of each output, in the order of the replicas.

    Args:
        strategy: the strategy; called in cross-replica context, on all workers.
        outputs: nest of per-replica dense or ragged tensors; first dimensions may differ.
    """
    local = [
        tf.nest.flatten(
            tf.nest.map_structure(
                lambda v, r=r: strategy.experimental_local_results(v)[r],
                outputs,
                expand_composites=False,
            ),
            expand_composites=False,
        )
        for r in range(len(strategy.extended.worker_devices))
    ]
    gathered = [_gather(strategy, _concat_rows(parts)) for parts in zip(*local, strict=True)]
    return tf.nest.pack_sequence_as(
        tf.nest.map_structure(lambda _: 0, outputs, expand_composites=False), gathered
    )


def _concat_rows(parts):
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, parts) if len(parts) > 1 else parts[0]
    if parts[0].shape.rank == 0:
        return tf.stack(parts)
    return tf.concat(parts, 0)


def _gather(strategy, rows):
    """``rows`` of all workers, in rank order."""
    if not strategy.extended._in_multi_worker_mode():
        return rows
    if isinstance(rows, tf.RaggedTensor):
        values = _gather(strategy, rows.values)
        return tf.RaggedTensor.from_row_lengths(
            values, _gather(strategy, rows.row_lengths()), validate=False
        )
    if isinstance(rows, tf.SparseTensor) or rows.dtype == tf.string:
        raise ValueError(
            "predict: the outputs of a model on several workers must be dense or ragged tensors "
            f"of numbers, since TensorFlow gathers nothing else. Received: {rows}. Convert the "
            "output in the model, or call predict on one worker with a model loaded there."
        )
    if rows.dtype == tf.bool:
        return tf.cast(_gather(strategy, tf.cast(rows, tf.int32)), tf.bool)
    if rows.dtype not in (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64):
        wide = tf.float32 if rows.dtype.is_floating else tf.int64
        return tf.cast(_gather(strategy, tf.cast(rows, wide)), rows.dtype)
    gathered = strategy.gather(rows, axis=0)
    gathered.set_shape([None, *rows.shape[1:]])
    return gathered


def _after(*data):
    """Context manager: nothing in it runs before all of ``data``, nests of tensors, is there.

    So where the data has ended, not even those parts of a step run that do not look at the data
    (the count of iterations, weight decay, moving averages of weights).
    """
    tensors = tf.nest.flatten(data, expand_composites=True)
    return tf.control_dependencies([t for t in tensors if tf.is_tensor(t)])


def _first_replica(strategy, outputs):
    return tf.nest.map_structure(
        lambda v: strategy.experimental_local_results(v)[0], outputs, expand_composites=False
    )


def _many_steps(strategy, one_step, iterator, kind, steps_per_execution):
    """Up to ``steps_per_execution`` steps; returns an Optional of the last one's logs."""
    none = tf.experimental.Optional.empty(None)
    traced = []

    def run(data, total_rows):
        logs = tf.experimental.Optional.from_value(one_step(data, total_rows))
        traced.append(logs.element_spec)
        none._element_spec = logs.element_spec
        return logs

    def skip(logs):
        # The structure of the logs is known only once a step was traced, which tf.cond does first.
        logs._element_spec = traced[0]
        return logs

    def body(step, logs, _):
        has_data, data, total_rows = _input.next_step_as_optional(strategy, iterator, kind)
        logs = tf.cond(has_data, lambda: run(data, total_rows), lambda: skip(logs))
        return step + 1, logs, has_data

    def keep_going(step, _, has_data):
        return tf.logical_and(step < steps_per_execution, has_data)

    loop = tf.constant(0), none, tf.constant(True)
    _, logs, _ = tf.while_loop(keep_going, body, loop)
    logs._element_spec = traced[0]
    return logs


def _without_absent(step_fn):
    """Keras marks absent parts of a batch by empty Optionals; a step function expects None."""

    def call(data):
        return step_fn(
            tf.nest.map_structure(
                lambda v: None if isinstance(v, tf.experimental.Optional) else v,
                data,
                expand_composites=False,
            )
        )

    return call


def _for_batches_too(strategy, execution, num_steps=1):
    """Lets ``execution`` also take a Python iterator over global batches (``train_on_batch``).

    And limits its time, and counts it as ``num_steps`` steps.
    """

    watchdog = getattr(strategy.extended, "watchdog", None)
    watching = contextlib.nullcontext if watchdog is None else watchdog.watching

    def function(iterator):
        if not isinstance(iterator, _input.StepIterator):
            batch = iterator if isinstance(iterator, tuple) else next(iterator)
            iterator = iter(_input.from_batch(strategy, batch))
        with watching(), progress.step(num_steps):
            return execution(iterator)

    return function
