"""A model split over devices: by layers, by the weights of layers, and copies of all that."""

import contextlib
import functools
import os
import threading
import weakref
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import device_util, distribute_lib, mirrored_strategy, values
from tensorflow.python.framework import ops

from tfdist import cluster
from tfdist.parallel import cut_from
from tfdist.schedules import SCHEDULES
from tfdist.strategies import _keras, _stages
from tfdist.strategies._collective import ReplicaCollective, launcher_for
from tfdist.strategies._measured import measured_costs
from tfdist.strategies._placed import joined
from tfdist.strategies._plan import make_plan
from tfdist.strategies._replicated import Replicated, ReplicatedExtended, exchange_for
from tfdist.strategies._serving import connect, require_fresh_context, serve, wait_for
from tfdist.strategies._split_variables import SplitVariable
from tfdist.strategies._watchdog import CancellingWatchdog
from tfdist.strategies._whole_variable import acting_as_shard
from tfdist.strategies.multi_worker import MultiWorkerExtended, join_workers

_STEP_TIMEOUT_SECONDS = 1800.0
_MASTER_PATIENCE_SECONDS = 3.0


class Settings(NamedTuple):
    """How a model is split, see :class:`ModelParallelStrategy`."""

    stages: int
    tensor: int
    micro_batches: int
    schedule: str
    recompute: bool


class _OnDevices:
    """What TensorFlow reads from the variable beside which another one is to be made."""

    def __init__(self, devices):
        self._devices = devices


class _Deferred(NamedTuple):
    """What is known of a variable that waits on the host for the plan of its model."""

    role: str | None
    beside: object  # the weight whose slot it is


class _Grouped:
    """A replica is a group of devices; a variable is at one position of each group."""

    def _set_groups(self, groups):
        self.groups = [tuple(device_util.canonicalize(d) for d in group) for group in groups]
        self._making = threading.local()
        self._exchanging = threading.local()

    def devices_of_replica(self):
        """The devices of the replica in whose context this thread is."""
        return self.groups[tf.distribute.get_replica_context()._replica_id]

    # ------------------------------------------------------------------------ variables

    def _role_of(self, kwargs):
        if getattr(self._making, "position", None) is not None:
            return self._making.role
        return _keras.variable_role(kwargs)

    def _validate_colocate_with_variable(self, colocate_with_variable):
        del colocate_with_variable

    def _create_variable(self, next_creator, **kwargs):
        position = getattr(self._making, "position", None)
        beside = kwargs.get("colocate_with")
        if position is not None:
            return self._at(position, next_creator, kwargs)
        if isinstance(beside, SplitVariable):
            return self._beside_split(beside, next_creator, kwargs)
        is_summed = kwargs.get("aggregation") == tf.VariableAggregation.SUM
        is_of_model = beside is None and not is_summed and _keras.is_made_by_a_layer()
        is_in_replica = tf.distribute.get_replica_context() is not None
        if (_is_deferred(beside) or is_of_model) and not is_in_replica:
            return self._defer(next_creator, kwargs, beside)
        if beside is not None and not isinstance(beside, values.DistributedVariable):
            kwargs.pop("colocate_with")
        return super()._create_variable(next_creator, **kwargs)

    def _at(self, position, next_creator, kwargs):
        kwargs["colocate_with"] = _OnDevices(tuple(group[position] for group in self.groups))
        variable = super()._create_variable(next_creator, **kwargs)
        variable._tfdist_position = position
        return variable

    def _defer(self, next_creator, kwargs, beside):
        role = "slot" if beside is not None else _keras.variable_role(kwargs)
        kwargs.pop("colocate_with", None)
        with ops.colocate_with(None, ignore_existing=True), ops.device("CPU:0"):
            variable = next_creator(**kwargs)
        variable._tfdist_deferred = _Deferred(role, beside)
        return variable

    def _beside_split(self, weight, next_creator, kwargs):
        kwargs.pop("colocate_with")
        value = kwargs.pop("initial_value")
        value = tf.convert_to_tensor(value() if callable(value) else value, kwargs.get("dtype"))
        kwargs.pop("shape", None)
        if value.shape.as_list() != weight.shape.as_list():
            position = _position_of(weight.shards[0])
            return self._at(position, next_creator, {**kwargs, "initial_value": value})
        shards = []
        for number, shard in enumerate(weight.shards):
            part = weight.slice(value, number)
            position = _position_of(shard)
            shards.append(self._at(position, next_creator, {**kwargs, "initial_value": part}))
        return SplitVariable(
            self._container_strategy(), shards, weight.axis, kwargs.get("name") or "slot"
        )

    @contextlib.contextmanager
    def _making_at(self, position, role):
        self._making.position, self._making.role = position, role
        try:
            yield
        finally:
            self._making.position = None

    def place(self, variable, position, axis=None):
        """The variable that takes a deferred one's place.

        Args:
            variable: the deferred one.
            position: in the groups of devices; that of the first shard.
            axis: along which it is split over consecutive positions; None for whole.
        """
        role = variable._tfdist_deferred.role
        if axis is None:
            return self._placed_copy(variable, variable.read_value(), position, role)
        number = self._container_strategy().settings.tensor
        parts = np.split(variable.numpy(), number, axis)
        shards = [
            self._placed_copy(variable, part, position + i, role) for i, part in enumerate(parts)
        ]
        name = variable.name.split(":")[0]
        return SplitVariable(self._container_strategy(), shards, axis, name)

    def _placed_copy(self, variable, value, position, role):
        with self._container_strategy().scope(), self._making_at(position, role):
            return tf.Variable(
                value,
                trainable=variable.trainable,
                name=variable.name.split(":")[0],
                dtype=variable.dtype,
                aggregation=variable.aggregation,
                synchronization=variable.synchronization,
            )

    # -------------------------------------------------------------------------- updates

    def _replica_ctx_update(self, var, fn, args=(), kwargs=None, group=True):
        kwargs = kwargs or {}
        if not isinstance(var, SplitVariable):
            return super()._replica_ctx_update(var, fn, args, kwargs, group)
        results = []
        for number in range(len(var.shards)):
            parts = [_part(var, number, value) for value in args]
            with ops.device(var.local(number).device), acting_as_shard(number):
                results.append(fn(var, *parts, **kwargs))
        return results

    def _update(self, var, fn, args, kwargs, group):
        if not isinstance(var, SplitVariable):
            args = [value.value if isinstance(value, keras.Variable) else value for value in args]
            return super()._update(var, fn, args, kwargs, group)
        for number, shard in enumerate(var.shards):
            parts = [_part(var, number, value) for value in args]
            super()._update(shard, fn, parts, kwargs, group)
        return None

    # ------------------------------------------------------------------------- gradients

    def exchange_gradients(self, gradients, numbers=None, exchange=None, variables=None):
        """Sums gradients over the replicas, those of each position among its devices.

        See :meth:`ReplicatedExtended.exchange_gradients`.
        """
        _keras.place_sums()
        if self._num_replicas_in_sync == 1:
            return gradients
        if tf.executing_eagerly():
            return super().exchange_gradients(gradients, numbers, exchange)
        flat, by_position = [], {}
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if isinstance(variable, keras.Variable):
                variable = _keras.tf_variable(variable)
            if isinstance(variable, SplitVariable):
                pieces = [_part(variable, n, gradient) for n in range(len(variable.shards))]
                owners = variable.shards
            else:
                pieces, owners = [gradient], [variable]
            for n, (piece, owner) in enumerate(zip(pieces, owners, strict=True)):
                number = None if numbers is None else numbers[i]
                if number is not None and isinstance(variable, SplitVariable):
                    number = exchange.number_of_shard(number, n)
                by_position.setdefault(_position_of(owner), []).append(len(flat))
                flat.append((i, piece, number))
        sums = [None] * len(flat)
        for position, places in sorted(by_position.items()):
            self._exchanging.position = position
            try:
                found = super().exchange_gradients(
                    [flat[p][1] for p in places], [flat[p][2] for p in places], exchange
                )
            finally:
                self._exchanging.position = 0
            for place, total in zip(places, found, strict=True):
                sums[place] = _shaped_like(flat[place][1], total)
        results = [[] for _ in gradients]
        for (i, _, _), total in zip(flat, sums, strict=True):
            results[i].append(total)
        return [
            parts[0] if len(parts) == 1 else joined(parts, _axis_of(variables[i]), parts[0].device)
            for i, parts in enumerate(results)
        ]

    def _groups(self, which):
        position = getattr(self._exchanging, "position", 0)
        if position == 0:
            return super()._groups(which)
        key = which, position
        with self._groups_lock:
            if key not in self._made_groups:
                self._made_groups[key] = [
                    self._group_at(position, which, number, collective._launcher)
                    for number, collective in enumerate(self._make_groups(which))
                ]
            return self._made_groups[key]

    def _group_at(self, position, which, number, like):
        """The collective of a replica's device at a position, like that of its first device."""
        kind = {"all": 0, "hosts": 1, "host": 2 + getattr(self, "_id_in_cluster", 0)}[which]
        # Clear of the groups of position 0, which begin at 1 and at 50,000.
        key = self._collective_key_base + 60_000 + 500 * position + kind
        device = self.groups[number][position]
        return ReplicaCollective(launcher_for(key, like._group_size, device, like._options))


class _LocalExtended(_Grouped, ReplicatedExtended, mirrored_strategy.MirroredExtended):
    def __init__(self, strategy, groups, compression):
        self._set_groups(groups)
        super().__init__(strategy, devices=[group[0] for group in self.groups])
        self._prepare_collectives(compression)


class _MultiWorkerExtended(_Grouped, MultiWorkerExtended):
    def __init__(self, strategy, cluster_resolver, communication_options, compression, size, count):
        self._size, self._count = size, count
        super().__init__(strategy, cluster_resolver, communication_options, compression)

    def _initialize_local_devices(self, cluster_resolver, worker_device):
        devices, kind = super()._initialize_local_devices(cluster_resolver, worker_device)
        groups = _groups_of(devices, self._size, self._count)
        self._set_groups(groups)
        return tuple(group[0] for group in groups), kind


class ModelParallelStrategy(Replicated, tf.distribute.Strategy):
    """Trains a model that is split over several devices.

    By layers (a pipeline of ``stages``), by the weights of single layers (``tensor``), and in
    copies of all that (``data``). ``fit``, ``evaluate``, ``predict``, ``save`` and the files are
    those of the model in one piece; so are the weights that training gives.

    Under several workers each worker splits the model over its own devices, and the copies on all
    workers exchange their gradients.

    Args:
        devices: list of device names, by default all GPUs of this process, or its logical CPUs.
            The first ``stages * tensor`` are the first copy's, and so on. Names with a task, such
            as "/job:worker/task:1/device:GPU:0", spread one copy over several processes of the
            cluster: the task of the first one runs the program; the others serve, and do not
            return from this call.
        stages: into how many stages the layers are cut.
        tensor: over how many devices the weights of a layer are split, in every stage.
        data: how many copies there are, over all workers; by default as many as the devices allow.
        micro_batches: into how many parts the batch of a copy is cut in training, so that the
            stages have work at the same time. BatchNormalization sees one micro-batch at a time,
            and updates its statistics with each.
        schedule: "1f1b" or "gpipe", see :func:`tfdist.schedules.schedule`. With "1f1b" each
            micro-batch has its loss at once, so a ``train_step`` of your own and losses that are
            normalised over the batch need "gpipe".
        layout: dict from patterns (``re.search``) of paths of variables to the axis along which
            they are split, or to None for whole. Layers without a pattern are split by default
            rules: attention by heads, pairs of Dense by columns and rows, Dense by columns,
            Embedding by vocabulary; where the size does not divide, they stay whole.
        cut: where the stages end: None or :func:`tfdist.parallel.automatic` for stages of equal
            work, or a list of names of last layers. See also :func:`tfdist.parallel.stage`.
        recompute: whether the activations of a stage are computed again in its backward pass
            instead of being kept (Chen et al. 2016).
        compression: how gradients travel between the copies, see :mod:`tfdist.compression`.

    Attributes:
        plan: the :class:`~tfdist.strategies._plan.Plan` of the model that was split last; None
            before ``fit``, ``evaluate``, ``predict`` or :meth:`split`.

    Raises:
        ValueError: an argument is wrong, or there are too few devices.
        tfdist.cluster.PeersUnreachable: a process whose devices are named does not answer in time.
        RuntimeError: devices of other processes are named after TensorFlow was used.

    References: Huang et al. 2019, "GPipe"; Shoeybi et al. 2019, "Megatron-LM"; Narayanan et al.
    2021, "Efficient Large-Scale Language Model Training on GPU Clusters".
    """

    _collective_key_base = 0

    def __init__(
        self,
        devices=None,
        *,
        stages=1,
        tensor=1,
        data=None,
        micro_batches=1,
        schedule="1f1b",
        layout=None,
        cut=None,
        recompute=False,
        compression=None,
    ):
        for name, value in (
            ("stages", stages),
            ("tensor", tensor),
            ("micro_batches", micro_batches),
        ):
            _require_positive(name, value)
        if data is not None:
            _require_positive("data", data)
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule: expected one of {SCHEDULES}, got {schedule!r}.")
        if layout is not None and not isinstance(layout, dict):
            raise ValueError(f"layout: expected a dict or None, got {layout!r}.")
        self.settings = Settings(stages, tensor, micro_batches, schedule, bool(recompute))
        self._cut, self._layout = cut_from(cut), layout
        self._optimizers = []
        self.plan = None
        exchange = exchange_for(compression)
        self._set_collective_keys()
        members = cluster.resolve()
        size = stages * tensor
        tasks = _tasks_of(devices, members, data)
        if tasks:
            self._join(members, tasks)
        elif members.num_workers > 1 and members.task_type in ("chief", "worker"):
            if devices is not None:
                raise ValueError(
                    "devices: under several workers each uses all its devices. Give None, and set "
                    "CUDA_VISIBLE_DEVICES or logical devices. (For stages in several processes, "
                    "name the tasks: '/job:worker/task:1/device:GPU:0'.)"
                )
            if data is not None and data % members.num_workers:
                raise ValueError(
                    f"data={data}: {members.num_workers} workers need a multiple of "
                    f"{members.num_workers} copies."
                )
            count = None if data is None else data // members.num_workers
            join_workers(
                self,
                members,
                None,
                exchange,
                lambda **settings: _MultiWorkerExtended(self, size=size, count=count, **settings),
                {"stages": stages, "tensor": tensor, "micro_batches": micro_batches},
            )
            return
        names = [_named(d) for d in devices] if devices is not None else _local_devices()
        groups = _groups_of(names, size, data)
        distribute_lib.Strategy.__init__(self, _LocalExtended(self, groups, exchange))
        self.extended.board = None
        if tasks:
            limit = float(os.environ.get("TFDIST_STEP_TIMEOUT") or _STEP_TIMEOUT_SECONDS)
            self.extended.watchdog = CancellingWatchdog(limit)

    def _join(self, members, tasks):
        """Serves, and ends the process, unless this is the task that runs the program."""
        job, index = tasks[0]
        if (members.task_type, members.task_index) != (job, index):
            serve(members, members.jobs[job][index], _MASTER_PATIENCE_SECONDS)
        require_fresh_context("ModelParallelStrategy")
        wait_for(members, tasks[1:])
        connect(members)

    def split(self, model):
        """Plans and splits a built model; ``fit``, ``evaluate`` and ``predict`` do so themselves.

        To be called before :meth:`run` in a loop of one's own.

        Returns:
            The :class:`~tfdist.strategies._plan.Plan`.

        Raises:
            ValueError: the model is not built, or can't be split as asked.
        """
        if not model.built:
            raise ValueError(
                f"split: {model.name} is not built, so its layers are not known. Call "
                "model.build(input_shape), or fit, which does so itself."
            )
        return self.prepare(model)

    @property
    def _is_split(self):
        """False where a copy is whole, on one device: its calls are Keras' own."""
        settings = self.settings
        numbers = settings.stages, settings.tensor, settings.micro_batches
        return settings.recompute or numbers != (1, 1, 1)

    def prepare(self, model):
        """The plan of a built model, whose variables are then where it says."""
        plan = _plan_of(model)
        if plan is None:
            plan = make_plan(
                model,
                num_stages=self.settings.stages,
                tensor=self.settings.tensor,
                how=self._cut,
                layout=self._layout,
                measure=functools.partial(self._measured_costs, model),
            )
            # (not through Keras, which tracks what models hold)
            object.__setattr__(model, "_tfdist_plan", plan)
        if tf.distribute.get_replica_context() is None or tf.executing_eagerly():
            self._place(model, plan)
        self.plan = plan
        return plan

    def _measured_costs(self, model, graph, nodes, rows):
        """What each node costs, the same on all workers."""
        board, device = self.extended.board, self.extended.groups[0][0]
        if board is None:
            return measured_costs(model, graph, nodes, rows, device)
        costs = error = None
        if board.rank == 0:
            try:
                costs = measured_costs(model, graph, nodes, rows, device)
            except ValueError as raised:
                error = str(raised)
        costs, error = board.from_chief("costs of layers", [costs, error])
        if error is not None:
            raise ValueError(error)
        return costs

    def _place(self, model, plan):
        extended, tensor = self.extended, self.settings.tensor
        stage_of = {}
        for number, units in enumerate(plan.stages):
            for unit in units:
                for variable in getattr(unit.operation, "variables", []):
                    stage_of.setdefault(id(variable), number)
        moved = {}  # the new value of each weight, by the id of the deferred one
        waiting = [v for v in model.variables if _is_deferred(_keras.tf_variable(v))]
        for variable in waiting:
            old = _keras.tf_variable(variable)
            position = stage_of.get(id(variable), 0) * tensor
            new = extended.place(old, position, plan.axes.get(id(variable)))
            moved[id(old)] = new
            _keras.replace_value(variable, new)
        if not moved:
            return
        optimizers = [o for o in (reference() for reference in self._optimizers) if o is not None]
        slots = [v for each in optimizers for v in _keras.variables_of_optimizer(each)]
        for variable in slots:
            old = _keras.tf_variable(variable)
            weight = moved.get(id(old._tfdist_deferred.beside)) if _is_deferred(old) else None
            if weight is None:
                continue  # placed already, or of a model that is not split yet
            axis, first = None, weight
            if isinstance(weight, SplitVariable):
                first = weight.shards[0]
                axis = weight.axis if weight.shape == old.shape else None
            position = _position_of(first)
            _keras.replace_value(variable, extended.place(old, position, axis))
        ids = {id(variable) for variable in waiting}
        for optimizer in optimizers:
            if any(id(v) in ids for v in _keras.updated_variables(optimizer)):
                _keras.refresh_optimizer(optimizer)

    def note_optimizer(self, optimizer):
        """Notes an optimizer whose variables are to be placed with those that it updates."""
        if all(reference() is not optimizer for reference in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def training_function(self, step_fn, *, is_training, trainer=None, **settings):
        """See :func:`tfdist.strategies._functions.training_function`."""
        if settings.get("jit_compile"):
            raise ValueError(
                "compile: jit_compile=True cannot be honoured under ModelParallelStrategy: XLA "
                "compiles for one device, and a step runs on several. Use jit_compile='auto' or "
                "False."
            )
        if trainer is not None:
            self.prepare(trainer)
            is_interleaved = self.settings.micro_batches > 1 and self.settings.schedule == "1f1b"
            if is_training and is_interleaved:
                step_fn = _keras.interleaved_step(self, trainer, _stages.one_by_one)
        return super().training_function(step_fn, is_training=is_training, **settings)

    def predict_function(self, step_fn, *, trainer=None, **settings):
        """See :func:`tfdist.strategies._functions.predict_function`."""
        if trainer is not None:
            self.prepare(trainer)
        settings["jit_compile"] = False
        return super().predict_function(step_fn, **settings)

    # What Keras' calls turn into in a replica, see _stages.py.

    def call_layer(self, stock, layer, args, kwargs):
        """The call of a layer or a model."""
        plan = _plan_of(layer)
        if plan is not None and self._is_split and _stages.current_call() is None:
            return _stages.call_model(self, plan, stock, layer, args, kwargs)
        return _stages.call_layer(stock, layer, args, kwargs)

    def call_operation(self, stock, operation, args, kwargs):
        """The computation of a layer, without what Keras does before and after."""
        return _stages.call_operation(stock, operation, args, kwargs)

    def call_graph(self, graph, inputs, operation_of):
        """The call of a functional model; None where it is not the split model itself."""
        call = _stages.current_call()
        if call is None or call.plan.graph is not graph or call.is_in_stage:
            return None
        return _stages.call_graph(graph, inputs, operation_of)


def _is_deferred(variable):
    return hasattr(variable, "_tfdist_deferred")


def _position_of(variable):
    return getattr(variable, "_tfdist_position", 0)


def _plan_of(model):
    return getattr(model, "_tfdist_plan", None)


def _part(variable, number, value):
    """A shard's part of a gradient or another argument of an update."""
    value = _keras.tf_variable(value) if isinstance(value, keras.Variable) else value
    if isinstance(value, SplitVariable):
        return value.shards[number]
    known = getattr(value, "_tfdist_parts", None)
    if (
        known is not None
        and len(known.parts) == len(variable.shards)
        and (known.axis == variable.axis)
    ):
        return known.parts[number]
    is_whole = isinstance(value, tf.IndexedSlices) or (
        tf.is_tensor(value)
        and value.shape.rank != 0
        and variable.shape.is_compatible_with(value.shape)  # it may be unknown, after clipping
    )
    return variable.slice(value, number) if is_whole else value


def _shaped_like(gradient, total):
    """The sum of sparse gradients, with the shape that each of them has."""
    if isinstance(total, tf.IndexedSlices) and isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(total.values, total.indices, gradient.dense_shape)
    return total


def _axis_of(variable):
    return (variable if isinstance(variable, SplitVariable) else _keras.tf_variable(variable)).axis


def _require_positive(name, value):
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}.")


def _tasks_of(devices, members, data):
    """The tasks that these devices belong to, in their order; none where they name none."""
    specs = [tf.DeviceSpec.from_string(_named(device)) for device in devices or ()]
    if all(spec.job is None for spec in specs):
        return []
    tasks = list(dict.fromkeys((spec.job, spec.task or 0) for spec in specs))
    there = [(job, i) for job, addresses in members.jobs.items() for i in range(len(addresses))]
    for device, spec in zip(devices, specs, strict=True):
        if spec.job is None:
            raise ValueError(
                f"devices: {device} does not say of which task it is, but others do. Write, for "
                f"instance, /job:worker/task:0/{_named(device).lstrip('/')}."
            )
        if (spec.job, spec.task or 0) not in there:
            known = ", ".join(f"/job:{job}/task:{i}" for job, i in there)
            raise ValueError(
                f"devices: {device} is of no task of the cluster ({members.source}), which has "
                f"{known or 'no tasks'}. Start the program with `tfdist run -n {len(tasks)}`."
            )
    if len(tasks) > 1 and data not in (None, 1):
        raise ValueError(
            f"data={data}: a model whose stages are in several processes has one copy. For copies "
            "in several processes, give no `devices`: each worker then splits over its own."
        )
    return tasks


def _named(device):
    return device if device.startswith("/") else f"/device:{device}"


def _local_devices():
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return [device.name for device in tf.config.list_logical_devices(kind)]


def _groups_of(devices, size, count):
    """``count`` groups of ``size`` devices (as many as there are, if None)."""
    available = len(devices) // size
    if available < (count or 1):
        needed = size * (count or 1)
        kinds = "logical CPUs (tf.config.set_logical_device_configuration makes more)"
        raise ValueError(
            f"stages * tensor{' * data' if count else ''} needs {needed} devices, found "
            f"{len(devices)}: {list(devices)}. Use a smaller split, or more GPUs or {kinds}."
        )
    known = [d.name for d in tf.config.list_logical_devices()]
    canonical = {device_util.canonicalize(name) for name in known}
    unknown = [d for d in devices if device_util.canonicalize(d) not in canonical]
    if unknown:
        raise ValueError(f"devices: there is no {unknown[0]}. There are {known}.")
    return [tuple(devices[i * size : (i + 1) * size]) for i in range(count or available)]
