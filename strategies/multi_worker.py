"""Several machines, each with one or more devices."""

import atexit
import contextlib
import ctypes
import functools
import platform
import sys

import keras
import tensorflow as tf
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    distribute_lib,
    multi_worker_util,
)
from tensorflow.python.eager import context

from tfdist import __version__, cluster, progress
from tfdist.rendezvous import rendezvous
from tfdist.strategies._agreement import Board
from tfdist.strategies._replicated import Replicated, ReplicatedExtended, exchange_for
from tfdist.strategies._watchdog import Watchdog

_STEP_TIMEOUT_SECONDS = 1800.0
_AGREEMENT_TIMEOUT_SECONDS = 600.0
_FAREWELL_SECONDS = 30.0
_BROADCAST = (tf.bool, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64, tf.string)


class MultiWorkerExtended(
    ReplicatedExtended, collective_all_reduce_strategy.CollectiveAllReduceExtended
):
    """The devices of this worker, and the collectives between all workers."""

    def __init__(self, strategy, cluster_resolver, communication_options, compression):
        super().__init__(
            strategy,
            cluster_resolver=cluster_resolver,
            communication_options=communication_options,
        )
        self._prepare_collectives(compression)

    def _initialize_local_devices(self, cluster_resolver, worker_device):
        num_gpus = context.num_gpus()
        kind, number = ("GPU", num_gpus) if num_gpus else ("CPU", _num_logical_cpus())
        return tuple(f"{worker_device}/device:{kind}:{i}" for i in range(number)), kind

    def _get_variable_creator_initial_value(self, replica_id, device, primary_var, **kwargs):
        inherited = super()._get_variable_creator_initial_value
        dtype = _dtype_of_variable(kwargs)
        if replica_id != 0 or self._num_workers == 1 or dtype is None or dtype in _BROADCAST:
            return inherited(replica_id, device, primary_var, **kwargs)

        # TensorFlow sends the chief's initial value to all, but not in every dtype.
        def initial_value():
            value = kwargs["initial_value"]
            return tf.cast(value() if callable(value) else value, wide)

        wide = tf.float32 if dtype.is_floating else tf.int64
        kwargs_of_wide = kwargs | {"initial_value": initial_value, "dtype": wide}
        send = inherited(replica_id, device, primary_var, **kwargs_of_wide)
        return lambda: tf.cast(send(), dtype)

    def _distribute_datasets_from_function(self, dataset_fn, options):
        dataset = super()._distribute_datasets_from_function(dataset_fn, options)
        if self._in_multi_worker_mode() and dataset._cardinality != tf.data.INFINITE_CARDINALITY:
            # A worker knows only its own cardinality. With UNKNOWN, TensorFlow asks at each step
            # whether any worker has data left, so that none ends alone.
            dataset._cardinality = tf.data.UNKNOWN_CARDINALITY
        return dataset


def _dtype_of_variable(kwargs):
    """The dtype of a variable that is being made, None where only its initial value tells."""
    dtype = kwargs.get("dtype") or getattr(kwargs["initial_value"], "dtype", None)
    return None if dtype is None else tf.as_dtype(dtype)


def _num_logical_cpus():
    (cpu, *_) = tf.config.list_physical_devices("CPU")
    return max(1, len(tf.config.get_logical_device_configuration(cpu) or ()))


class MultiWorkerMirroredStrategy(Replicated, tf.distribute.MultiWorkerMirroredStrategy):
    """Trains copies of the model on the devices of several workers, synchronously.

    Drop-in for ``tf.distribute.MultiWorkerMirroredStrategy``. Under it ``model.fit`` gives the
    weights that one process gives on the same global batch, and the same weights on all workers
    bit for bit. Make it before any TensorFlow operation runs.

    A worker uses all its GPUs; without any, its logical CPUs (one, unless configured by
    ``tf.config.set_logical_device_configuration``). All workers must have the same number.

    Args:
        cluster_resolver: a ``tf.distribute.cluster_resolver.ClusterResolver``; by default the
            cluster is found by :func:`tfdist.cluster.resolve` (``TF_CONFIG``, MPI, Slurm).
        communication_options: a ``tf.distribute.experimental.CommunicationOptions``. Its
            ``timeout_seconds``, by default 1800, limits the time of a step of ``fit``,
            ``evaluate`` and ``predict``, tracing included.
        compression: how gradients travel between the workers: None, or what a function of
            :mod:`tfdist.compression` returns, the same on all workers.

    Raises:
        ValueError: ``compression`` is something else.
        WorkersDisagree: (a RuntimeError) ``compression`` or the number of devices differs.
        tfdist.cluster.ClusterError: the cluster is described wrongly, or the workers differ in
            their versions of TensorFlow, Keras or tfdist.
        tfdist.cluster.PeersUnreachable: workers did not answer in time; names them.
        RuntimeError: TensorFlow was used before the strategy was made.
    """

    def __init__(self, cluster_resolver=None, communication_options=None, *, compression=None):
        exchange = exchange_for(compression)
        self._set_collective_keys()
        members = (
            cluster.resolve()
            if cluster_resolver is None
            else cluster.from_resolver(cluster_resolver)
        )
        join_workers(
            self,
            members,
            communication_options,
            exchange,
            functools.partial(MultiWorkerExtended, self),
        )


def join_workers(strategy, members, communication_options, exchange, make_extended, settings=()):
    """Makes the workers meet, and gives the strategy the ``extended`` that lets them train.

    Args:
        strategy: the strategy that is being made.
        members: the :class:`tfdist.cluster.Cluster`.
        communication_options: see :class:`MultiWorkerMirroredStrategy`.
        exchange: what ``compression`` stands for, or None.
        make_extended: ``make_extended(cluster_resolver=, communication_options=, compression=)``.
        settings: a dict of more that all workers must have the same.
    """
    name = type(strategy).__name__
    cluster.require_no_ps(members, name)
    progress.attach()
    together = members.num_workers > 1 and members.task_type in ("chief", "worker")
    if together:
        _require_fresh_context(name)
        rendezvous(members, payload=_versions())
        _configure_coordination(members)
        _keep_freed_memory()
    extended = make_extended(
        cluster_resolver=_resolver(members if together else None),
        communication_options=_without_timeout(communication_options),
        compression=exchange,
    )
    distribute_lib.Strategy.__init__(strategy, extended)
    extended.board = None
    if together:
        labels = [cluster.task_label(*task) for task, _ in cluster.training_tasks(members.jobs)]
        board = Board(members.rank, labels, _AGREEMENT_TIMEOUT_SECONDS)
        extended.board = board
        timeout_seconds = getattr(communication_options, "timeout_seconds", None)
        extended.watchdog = Watchdog(timeout_seconds or _STEP_TIMEOUT_SECONDS)
        board.require_same(
            "strategy",
            {
                "number of local devices": len(extended.worker_devices),
                "compression": None if exchange is None else exchange.name,
                **dict(settings),
            },
        )
        _leave_together(board)


def _keep_freed_memory():
    """Lets the C library keep large buffers that are freed, instead of returning them each step.

    A collective over gRPC allocates buffers of the size of what it sends. glibc maps each of them
    anew, so that the kernel's page faults take more time than the arithmetic of a small model. The
    process keeps the memory of its largest step. (M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of
    mallopt(3); other C libraries are left alone.)
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 1 << 30)
        mallopt(-1, (1 << 31) - 1)


def _without_timeout(options):
    """The options less the time limit, which the Watchdog takes over."""
    options = options or tf.distribute.experimental.CommunicationOptions()
    return tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=options.bytes_per_pack, implementation=options.implementation
    )


def _resolver(members):
    if members is None:
        return tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
    jobs = {job: list(members.jobs[job]) for job in ("chief", "worker") if members.jobs.get(job)}
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs),
        task_type=members.task_type,
        task_id=members.task_index,
        rpc_layer="grpc",
    )


def _versions():
    return {"tfdist": __version__, "tensorflow": tf.__version__, "keras": keras.__version__}


def _require_fresh_context(name):
    if context.context()._context_handle is not None:
        raise RuntimeError(
            f"{name} must be made before TensorFlow runs its first operation "
            "(makes a tensor or a variable, lists logical devices, builds a model), because the "
            "connections between workers are set up together with the devices. Move "
            f"`strategy = tfdist.{name}()` to the top of the program, right after the imports."
        )


def _configure_coordination(members):
    """TensorFlow's defaults would wait an hour for a worker that dies while it starts."""
    spec = tf.train.ClusterSpec({job: list(a) for job, a in members.jobs.items()})
    timeout_ms = int(members.startup_timeout_seconds * 1000)
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=multi_worker_util.coordination_leader(
            multi_worker_util.normalize_cluster_spec(spec)
        ),
        cluster_register_timeout_in_ms=timeout_ms,
        coordinated_jobs=[
            context.coordination_config_pb2.CoordinatedJob(name=job, num_tasks=spec.num_tasks(job))
            for job in ("chief", "worker")
            if job in spec.jobs
        ],
    )


def _leave_together(board):
    """A process that ends right after its last collective would abort its peers' last one."""

    def say_farewell():
        if getattr(sys, "last_value", None) is not None or getattr(sys, "last_exc", None):
            return  # ends by an error: the peers shall learn of it soon
        board.wait_seconds = _FAREWELL_SECONDS
        with contextlib.suppress(TimeoutError, tf.errors.OpError):
            board.barrier("end of program")

    atexit.register(say_farewell)
