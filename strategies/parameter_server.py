"""A chief, workers that compute gradients, and servers that hold the parameters."""

import contextlib
import functools
import os
import threading

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import (
    distribute_lib,
    parameter_server_strategy_v2,
)
from tensorflow.python.eager import context
from tensorflow.python.framework import ops

from tfdist import cluster, progress
from tfdist.compression import as_exchange, compressor_for
from tfdist.staleness import Async, settings_of
from tfdist.strategies import _input, _keras, _saving, _scheduled
from tfdist.strategies._coordinator import Coordinator
from tfdist.strategies._server_variables import (
    ServerVariable,
    StateVariable,
    TotalVariable,
    on_servers,
)
from tfdist.strategies._serving import cluster_spec, connect, require_fresh_context, serve, wait_for
from tfdist.strategies._step import current_step
from tfdist.strategies._transport import PULL_DTYPES, Transport
from tfdist.strategies._whole_variable import acting_as_shard
from tfdist.strategies._worker_step import WorkerStep

_STEP_TIMEOUT_SECONDS = 300.0
_CHIEF_TIMEOUT_SECONDS = 120.0
_CHIEF_DEVICE = "/job:chief/replica:0/task:0/device:CPU:0"


class _Extended(parameter_server_strategy_v2.ParameterServerStrategyV2Extended):
    """Where variables live, and how they are updated."""

    def __init__(self, strategy, resolver, partitioner, is_colocated):
        super().__init__(strategy, resolver, partitioner)
        self.is_colocated = is_colocated
        job, count = ("worker", self._num_workers) if is_colocated else ("ps", self._num_ps)
        self.servers = [f"/job:{job}/replica:0/task:{i}/device:CPU:0" for i in range(count)]
        self._bytes_on = [0] * count
        self._allow_run_without_coordinator = True
        self._local_devices = _devices_of_a_worker()

    @property
    def worker_devices(self):
        return self._local_devices

    @property
    def _num_replicas_in_sync(self):
        return len(self._local_devices)

    def _use_merge_call(self):
        return False

    # ------------------------------------------------------------------------ variables

    def _create_variable(self, next_creator, **kwargs):
        strategy = self._container_strategy()
        aggregation = kwargs.pop("aggregation", None) or tf.VariableAggregation.NONE
        synchronization = kwargs.pop("synchronization", None)
        role = _keras.variable_role(
            {**kwargs, "aggregation": aggregation, "synchronization": synchronization}
        )
        is_metric = role == "metric state" or (
            synchronization == tf.VariableSynchronization.ON_READ
        )
        beside = kwargs.pop("colocate_with", None)
        if is_metric:
            with ops.colocate_with(None, ignore_existing=True), ops.device(_CHIEF_DEVICE):
                return TotalVariable(strategy, next_creator(**kwargs))
        if isinstance(beside, ServerVariable):
            return self._beside(beside, next_creator, kwargs)
        is_counter = aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
        if kwargs.get("trainable") is False and not is_counter and _keras.is_step_state():
            return StateVariable(strategy, self._place(next_creator, kwargs))
        shape, value = _shape_and_value(kwargs)
        num_shards = self._num_shards(shape, kwargs)
        name = kwargs.get("name") or "Variable"
        if num_shards == 1:
            return ServerVariable(strategy, [self._place(next_creator, kwargs)], name)
        whole = value() if callable(value) else value
        whole = tf.convert_to_tensor(whole, kwargs.get("dtype"))
        rows = [_input.split_rows(shape[0], i, num_shards) for i in range(num_shards)]
        pieces = [whole[start : start + size] for start, size in rows]
        shards = [
            self._place(next_creator, _of_piece(kwargs, piece, f"{name}/part_{i}"))
            for i, piece in enumerate(pieces)
        ]
        return ServerVariable(strategy, shards, name)

    def _place(self, next_creator, kwargs):
        """Makes a variable on the server that holds the fewest bytes."""
        number = int(np.argmin(self._bytes_on))
        with ops.colocate_with(None, ignore_existing=True), ops.device(self.servers[number]):
            variable = next_creator(**kwargs)
        self._bytes_on[number] += variable.shape.num_elements() * variable.dtype.size
        return variable

    def _beside(self, other, next_creator, kwargs):
        """Makes an optimizer's slot on the server of its variable; in shards like it."""
        strategy = self._container_strategy()
        shape, value = _shape_and_value(kwargs)
        name = kwargs.get("name") or "slot"
        is_like = other.is_sharded and tf.TensorShape(shape).as_list() == other.shape.as_list()
        with ops.colocate_with(None, ignore_existing=True):
            if not is_like:
                with ops.device(other.shards[0].device):
                    return ServerVariable(strategy, [next_creator(**kwargs)], name)
            whole = tf.convert_to_tensor(value() if callable(value) else value, other.dtype)
            shards = []
            for i, shard in enumerate(other.shards):
                piece = whole[other.starts[i] : other.starts[i + 1]]
                with ops.device(shard.device):
                    shards.append(next_creator(**_of_piece(kwargs, piece, f"{name}/part_{i}")))
            return ServerVariable(strategy, shards, name)

    def _num_shards(self, shape, kwargs):
        if self._variable_partitioner is None or not shape or kwargs.get("trainable") is False:
            return 1
        dtype = kwargs.get("dtype") or tf.float32
        parts = self._variable_partitioner(shape=tf.TensorShape(shape), dtype=tf.as_dtype(dtype))
        if not parts or parts[0] < 1 or any(part != 1 for part in parts[1:]):
            raise ValueError(
                "variable_partitioner must return numbers of which all but the first are 1, since "
                f"variables are cut by rows. It returned {list(parts)} for shape {list(shape)}."
            )
        return min(parts[0], shape[0])

    # ---------------------------------------------------------------------- in a step

    def _replica_ctx_update(self, var, fn, args=(), kwargs=None, group=True):
        return self._update(var, fn, args, kwargs or {}, group)

    def _update(self, var, fn, args, kwargs, group):
        return self._container_strategy().update_on_servers(var, fn, args, kwargs)

    def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
        if self._num_workers == 1 and self._num_replicas_in_sync == 1:
            return value
        raise ValueError(
            "ParameterServerStrategy: a step can't sum over all workers, since each is at a step "
            "of its own. BatchNormalization(synchronized=True), for instance, does so: use "
            "synchronized=False, or MultiWorkerMirroredStrategy."
        )

    def sum_replicas(self, value):
        """Sums a nest of tensors over the replicas of a worker (in replica context)."""
        flat = tf.nest.flatten(value)

        def reduce(distribution, *per_replica):
            sums = []
            for each in per_replica:
                with ops.device(self._local_devices[0]):
                    sums.append(_sum(distribution.experimental_local_results(each)))
            return sums

        replica = distribute_lib.get_replica_context()
        return tf.nest.pack_sequence_as(value, replica.merge_call(reduce, args=tuple(flat)))

    def exchange_gradients(self, gradients, numbers=None, exchange=None, variables=None):
        """Sums gradients over the replicas of a worker, on its first device."""
        del numbers, exchange, variables
        if self._num_replicas_in_sync == 1:
            return list(gradients)
        return self.sum_replicas(list(gradients))

    # --------------------------------------------------------------------------- input

    def _experimental_distribute_dataset(self, dataset, options):
        del options
        return self._container_strategy().distribute_input(dataset)

    def _distribute_datasets_from_function(self, dataset_fn, options):
        del options
        return self._container_strategy()._distribute_from_function(dataset_fn)


class ParameterServerStrategy(tf.distribute.experimental.ParameterServerStrategy):
    """Workers compute gradients, each at its own pace; servers hold and update the parameters.

    Drop-in for ``tf.distribute.ParameterServerStrategy``, under which Keras 3's ``model.fit``
    works. The program runs in every process of the cluster. On a worker or a server the call of
    this class serves, and ends the process when the chief is gone; only the chief goes on.

    Where the cluster has no ``ps`` tasks, the workers hold the parameters, too (``tfdist run
    --colocate-ps``).

    Args:
        cluster_resolver: a ``tf.distribute.cluster_resolver.ClusterResolver``; by default the
            cluster is found by :func:`tfdist.cluster.resolve`.
        variable_partitioner: one of ``tf.distribute.experimental.partitioners``, which says in how
            many shards a trainable variable is cut by rows; None cuts none.
        consistency: how far workers may be apart: :class:`tfdist.Async`, :class:`tfdist.Stale`,
            :class:`tfdist.Sync`, or one of them in :class:`tfdist.DelayCompensation` or
            :class:`tfdist.StalenessScaledRate`.
        compression: how gradients travel to the servers: None or what a function of
            :mod:`tfdist.compression` returns. Residuals stay on the workers; they are not saved.
        pull_dtype: how weights travel to the workers: None (as they are), "float16", "bfloat16" or
            "int8" (blocks of 512 with one scale each).

    Attributes:
        staleness: list of int, of each gradient applied since :meth:`read_staleness` was called:
            how many others were applied between reading the weights and applying it.

    Raises:
        ValueError: an argument is something else.
        tfdist.cluster.ClusterError: the cluster is described wrongly, or has no chief.
        tfdist.cluster.PeersUnreachable: a worker or server does not answer in time; names it.
        RuntimeError: TensorFlow was used before the strategy was made.

    Reference: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server".
    """

    def __init__(
        self,
        cluster_resolver=None,
        variable_partitioner=None,
        *,
        consistency=None,
        compression=None,
        pull_dtype=None,
    ):
        self.settings = settings_of(Async() if consistency is None else consistency)
        self.consistency = consistency
        pull_dtype = tf.as_dtype(pull_dtype).name if pull_dtype is not None else None
        if pull_dtype not in PULL_DTYPES:
            raise ValueError(
                f"pull_dtype: expected None, 'float16', 'bfloat16' or 'int8', got {pull_dtype!r}."
            )
        exchange = None if compression is None else as_exchange(compression)
        self._members = members = _members(cluster_resolver)
        servers = len(members.jobs.get("ps", ())) or len(members.jobs.get("worker", ()))
        self.board = None
        _check(members, self.settings)
        if members.task_type != "chief":
            limit = float(os.environ.get("TFDIST_CHIEF_TIMEOUT") or _CHIEF_TIMEOUT_SECONDS)
            serve(members, members.jobs["chief"][0], limit)  # does not return
        require_fresh_context("ParameterServerStrategy")
        tasks = [(j, i) for j in ("worker", "ps") for i in range(len(members.jobs.get(j, ())))]
        wait_for(members, tasks)
        self._num_workers = len(members.jobs["worker"])
        self._num_ps = servers
        self._cluster_resolver = _resolver(members)
        self._cluster_coordinator = None
        is_colocated = "ps" not in members.jobs
        # One request to a worker at a time, and no asynchronous executors: TensorFlow's own
        # strategy sets the same, since its handling of failures depends on it.
        os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"] = "False"
        os.environ["TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY"] = "True"
        connect(members, None if is_colocated else _filters(members))
        context.set_server_def_retries(5)
        self._should_use_with_coordinator = True
        self._canonicalize_devices = False
        self._is_parameter_server_strategy_v2 = True
        extended = _Extended(self, self._cluster_resolver, variable_partitioner, is_colocated)
        distribute_lib.Strategy.__init__(self, extended)
        self.transport = Transport(
            extended.servers,
            self._num_workers,
            self.settings,
            functools.partial(compressor_for, exchange),
            pull_dtype,
            lambda replica: extended.worker_devices[replica],
        )
        self._joins = threading.local()
        self._serial = 0
        self.staleness = []
        self.steps_by_worker = [0] * self._num_workers
        timeout = float(os.environ.get("TFDIST_STEP_TIMEOUT") or _STEP_TIMEOUT_SECONDS)
        self._cluster_coordinator = self.coordinator = Coordinator(
            self,
            bound=self.settings.bound,
            revoke=self.transport.revoke,
            step_timeout=timeout,
            patience=members.startup_timeout_seconds,
            address_of=lambda job, index: members.jobs[job][index],
        )

    chief_device = _CHIEF_DEVICE

    @property
    def compression(self):
        """None: there is no exchange between replicas."""
        return None

    def scope(self):
        """Context manager in which models, optimizers and metrics are made."""
        _keras.install()
        _saving.install()
        return super().scope()

    # ------------------------------------------------------------------- for Keras' loops

    def training_function(
        self,
        step_fn,
        *,
        metrics_behind,
        steps_per_execution,
        run_eagerly,
        jit_compile,
        is_training,
        trainer=None,
    ):
        """See :func:`tfdist.strategies._functions.training_function`."""
        del trainer
        self._refuse(run_eagerly, jit_compile)
        return _scheduled.TrainingFunction(
            self,
            step_fn,
            metrics_behind=metrics_behind,
            steps_per_execution=self._steps_at_once(int(steps_per_execution)),
            is_training=is_training,
            in_rounds=is_training and self.settings.is_synchronous,
        )

    def predict_function(self, step_fn, *, run_eagerly, jit_compile, trainer=None):
        """See :func:`tfdist.strategies._functions.predict_function`."""
        del trainer
        self._refuse(run_eagerly, jit_compile)
        return _scheduled.PredictFunction(self, step_fn)

    def _refuse(self, run_eagerly, jit_compile):
        if run_eagerly:
            raise ValueError(
                "compile: run_eagerly=True cannot be honoured under ParameterServerStrategy: the "
                "workers run graphs that the chief sends them. Use run_eagerly=False; debug the "
                "model without a strategy."
            )
        if jit_compile:
            raise ValueError(
                "compile: jit_compile=True cannot be honoured under ParameterServerStrategy: a "
                "step reads and updates variables on other machines, which XLA cannot compile. "
                "Use jit_compile='auto' or False."
            )

    def _steps_at_once(self, steps):
        bound = self.settings.bound
        if bound is not None and steps > bound + 1:
            raise ValueError(
                f"compile: steps_per_execution={steps} does not fit consistency={self.consistency}:"
                f" a worker runs that many steps at once, so it would be up to {steps - 1} steps "
                f"ahead. Use steps_per_execution of at most {bound + 1}, or a larger bound."
            )
        return steps

    def distribute_input(self, dataset, *, num_batches=None, **_):
        """The input of ``fit``, ``evaluate`` or ``predict``: read on the chief, batch by batch."""
        if isinstance(dataset, _scheduled.ScheduledInput):
            return dataset
        if not isinstance(dataset, tf.data.Dataset):
            raise ValueError(
                "ParameterServerStrategy: expected arrays, a generator, a tf.data.Dataset or what "
                "strategy.distribute_datasets_from_function(dataset_fn) returns, got "
                f"{type(dataset).__name__}."
            )
        _input._require_batched(dataset.element_spec)
        cardinality = int(dataset.cardinality())
        if num_batches is not None and cardinality < 0:
            cardinality = num_batches
        return _scheduled.ScheduledInput(
            self,
            dataset=dataset,
            element_spec=dataset.element_spec,
            num_steps=cardinality if cardinality >= 0 else None,
        )

    def _distribute_from_function(self, dataset_fn):
        if self.settings.is_synchronous:
            raise ValueError(
                "ParameterServerStrategy: with consistency=Sync() every batch is shared out to the "
                "workers, so the chief must read it. Pass the dataset itself to fit, or use "
                "Async() or Stale(bound)."
            )
        num_workers = self._num_workers
        first = dataset_fn(tf.distribute.InputContext(num_workers, 0, num_workers))

        def make():
            index = tf.distribute.coordinator.experimental_get_current_worker_index()
            return dataset_fn(_LateInputContext(num_workers, index))

        def per_worker():
            return iter(self.coordinator.create_per_worker_dataset(make))

        return _scheduled.ScheduledInput(
            self, per_worker=per_worker, element_spec=first.element_spec, num_steps=None
        )

    # ---------------------------------------------------------------------- coordination

    def join(self):
        """Waits until all steps that were scheduled are finished.

        Raises:
            tfdist.cluster.ServerLost: a server is gone.
        """
        if getattr(self._joins, "off", False) or getattr(self, "coordinator", None) is None:
            return
        if self.coordinator.queue.num_outstanding:
            self.coordinator.join()
        self.coordinator.queue.reset_clocks()

    @contextlib.contextmanager
    def not_waiting(self):
        """In this context this thread reads variables without waiting for steps."""
        was, self._joins.off = getattr(self._joins, "off", False), True
        try:
            yield
        finally:
            self._joins.off = was

    @contextlib.contextmanager
    def scheduling(self):
        """Context in which functions for the workers are traced."""
        with self.scope(), self.not_waiting():
            self.extended._being_scheduled = True
            try:
                yield
            finally:
                self.extended._being_scheduled = False

    def on_servers(self, concrete):
        """Calls a concrete function from the chief; its operations know where they belong."""

        def call(*args):
            with self.not_waiting(), self.coordinator.translating():
                return concrete(*args)

        return call

    def run_on_first_device(self, fn, data):
        """``fn(data)`` as one replica."""
        with ops.device(self.extended.worker_devices[0]):
            context_ = distribute_lib.ReplicaContext(self, 0)
            with self.scope(), context_:
                return fn(data)

    def next_serial(self, num_steps):
        """The number of the next step; ``num_steps`` numbers are taken."""
        serial = self._serial
        self._serial += num_steps
        return serial

    def note_steps(self, worker, num_steps, staleness):
        """Notes finished steps, and the staleness of those that pushed a gradient."""
        self.steps_by_worker[worker] += num_steps
        progress.count_ended(num_steps)
        self.staleness.extend(int(s) for s in staleness if s >= 0)

    def read_staleness(self):
        """The staleness of each gradient applied since the last call: a list of int."""
        self.join()
        found, self.staleness = self.staleness, []
        return found

    def bytes_per_step(self, variables):
        """What a step of one worker sends for these variables, where it reads each in full.

        Args:
            variables: Keras variables or ``tf.Variable`` made under the strategy.

        Returns:
            ``(pushed, pulled)``, in bytes, without what gRPC adds.
        """
        variables = [on_servers(variable) for variable in variables]
        return self.transport.pushed_bytes(variables), self.transport.pulled_bytes(variables)

    def update_on_servers(self, variable, fn, args, kwargs):
        """``fn(variable, *args)`` on the server of each shard of a variable."""
        step = current_step()
        step = step if isinstance(step, WorkerStep) else None
        if step is not None and not step.is_first_replica:
            return
        if not isinstance(variable, ServerVariable):
            fn(variable, *args, **kwargs)
            return
        _update_shards(variable, fn, args, kwargs, step, self.transport)


def _update_shards(variable, fn, args, kwargs, step, transport):
    def is_whole(value):
        if isinstance(value, tf.IndexedSlices):
            return True
        return tf.is_tensor(value) and value.shape.rank and value.shape == variable.shape

    is_push = step is not None and step.is_pushing and args and variable.trainable
    for number, shard in enumerate(variable.shards):
        parts = list(args)
        if variable.is_sharded:
            parts = [variable.slice(a, number) if is_whole(a) else a for a in parts]
        if is_push and (tf.is_tensor(parts[0]) or isinstance(parts[0], tf.IndexedSlices)):
            parts[0] = transport.send(variable, number, parts[0], step)

        def update(*parts, number=number, shard=shard):
            with (
                ops.device(shard.device),
                acting_as_shard(number),
                distribute_lib.UpdateContext(shard.device),
            ):
                fn(variable, *parts, **kwargs)

        if step is not None:
            step.forget(variable)
        if step is not None and step.is_pushing:
            transport.guarded(step, shard.device, parts, update)
        else:
            update(*parts)


class _LateInputContext:
    """A ``tf.distribute.InputContext`` whose pipeline number is known when the worker runs it."""

    def __init__(self, num_input_pipelines, input_pipeline_id):
        self.num_input_pipelines = num_input_pipelines
        self.input_pipeline_id = input_pipeline_id
        self.num_replicas_in_sync = num_input_pipelines

    def get_per_replica_batch_size(self, global_batch_size):
        """The batch of a step: on a parameter server each worker's is a step of its own."""
        return global_batch_size


# ---------------------------------------------------------------------------------- variables


def _shape_and_value(kwargs):
    value = kwargs.get("initial_value")
    shape = kwargs.get("shape")
    if shape is None and value is not None and not callable(value):
        shape = np.shape(value) if not tf.is_tensor(value) else value.shape
    elif shape is None and callable(value):
        made = value()
        kwargs["initial_value"] = value = made
        shape = made.shape
    shape = None if shape is None else tf.TensorShape(shape).as_list()
    return shape, value


def _of_piece(kwargs, piece, name):
    return {**kwargs, "initial_value": piece, "shape": piece.shape, "name": name}


def _sum(parts):
    if isinstance(parts[0], tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([p.values for p in parts], 0),
            tf.concat([p.indices for p in parts], 0),
            parts[0].dense_shape,
        )
    return tf.add_n(list(parts))


def _devices_of_a_worker():
    """Where a worker computes, without its job and task: its GPUs, else its logical CPUs."""
    counts = {}
    for device in tf.config.list_logical_devices():
        spec = tf.DeviceSpec.from_string(device.name)
        if spec.job == "worker" and spec.device_type in ("CPU", "GPU"):
            kinds = counts.setdefault(spec.task, {"CPU": 0, "GPU": 0})
            kinds[spec.device_type] += 1
    if len({tuple(kinds.values()) for kinds in counts.values()}) > 1:
        raise ValueError(
            f"ParameterServerStrategy: all workers must have the same number of devices, found "
            f"{counts}."
        )
    kinds = next(iter(counts.values()))
    kind = "GPU" if kinds["GPU"] else "CPU"
    return tuple(f"/device:{kind}:{i}" for i in range(kinds[kind]))


# ------------------------------------------------------------------------------------ cluster


def _members(resolver):
    if resolver is None:
        return cluster.resolve()
    return cluster.from_resolver(resolver)


def _check(members, settings):
    if not members.jobs.get("chief"):
        raise cluster.ClusterError(
            "ParameterServerStrategy needs a chief, which schedules the steps, but the cluster "
            f"({members.source}) has {', '.join(members.jobs) or 'no tasks'}. Start the program "
            "with `tfdist run --ps 1 -n 2 train.py`, or add `chief` to TF_CONFIG."
        )
    if len(members.jobs["chief"]) > 1:
        raise cluster.ClusterError(
            "ParameterServerStrategy has one chief, but the cluster has "
            f"{len(members.jobs['chief'])}."
        )
    num_workers = len(members.jobs.get("worker", ()))
    if not num_workers:
        raise cluster.ClusterError("ParameterServerStrategy needs at least one worker.")
    if settings.backup_workers >= num_workers:
        raise ValueError(
            f"consistency: Sync(backup_workers={settings.backup_workers}) needs more than "
            f"{settings.backup_workers} workers, the cluster has {num_workers}."
        )
    if members.task_type == "evaluator":
        raise cluster.ClusterError(
            "ParameterServerStrategy: an evaluator takes no part in the training. Load the saved "
            "model there without a strategy."
        )


def _resolver(members):
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster_spec(members),
        task_type=members.task_type,
        task_id=members.task_index,
        rpc_layer="grpc",
    )


def _filters(members):
    """Lets workers see servers and the chief, but not one another."""
    filters = tf.config.experimental.ClusterDeviceFilters()
    for i in range(len(members.jobs["worker"])):
        filters.set_device_filters("worker", i, ["/job:ps", "/job:chief"])
    for i in range(len(members.jobs["ps"])):
        filters.set_device_filters("ps", i, ["/job:worker", "/job:chief"])
    return filters
