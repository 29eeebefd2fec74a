"""One process runs the program, others lend it their devices by TensorFlow's servers."""

import contextlib
import os
import socket
import sys
import time

import tensorflow as tf
from tensorflow.python.eager import context

from tfdist import cluster

_POLL_SECONDS = 2.0


def require_fresh_context(name):
    """Raises RuntimeError if TensorFlow has run an operation already."""
    if context.context()._context_handle is not None:
        raise RuntimeError(
            f"{name} must be made before TensorFlow runs its first operation, because connecting "
            f"to the cluster makes all devices anew. Move `strategy = tfdist.{name}(...)` to the "
            "top of the program, right after the imports."
        )


def cluster_spec(members):
    """The ``tf.train.ClusterSpec`` of all tasks but evaluators."""
    jobs = ("chief", "worker", "ps")
    return tf.train.ClusterSpec({j: list(members.jobs[j]) for j in jobs if members.jobs.get(j)})


def wait_for(members, tasks):
    """Returns when all tasks listen.

    Args:
        members: the :class:`tfdist.cluster.Cluster`.
        tasks: pairs of a job's name and an index.

    Raises:
        tfdist.cluster.PeersUnreachable: some did not in time.
    """
    limit = members.startup_timeout_seconds
    deadline = time.monotonic() + limit
    missing = [(cluster.task_label(job, i), members.jobs[job][i]) for job, i in tasks]
    while missing:
        missing = [peer for peer in missing if not _answers(peer[1])]
        if missing and time.monotonic() > deadline:
            names = [f"{label} ({address})" for label, address in missing]
            raise cluster.PeersUnreachable(
                f"No answer within {limit:.0f} s from {', '.join(names)}. Start the same program "
                "there, with the same cluster.",
                [label for label, _ in missing],
            )
        if missing:
            time.sleep(0.2)


def connect(members, filters=None):
    """Makes the devices of all tasks known to this one, which runs the program.

    Args:
        members: the :class:`tfdist.cluster.Cluster`.
        filters: a ``tf.config.experimental.ClusterDeviceFilters``: which tasks see one another.
    """
    tf.config.experimental_connect_to_cluster(
        cluster_spec(members),
        job_name=members.task_type,
        task_index=members.task_index,
        protocol="grpc",
        cluster_device_filters=filters,
        make_master_device_default=True,
    )
    context.ensure_initialized()


def serve(members, master, patience_seconds):
    """Runs TensorFlow's server until the task that runs the program is gone; ends the process.

    Args:
        members: the :class:`tfdist.cluster.Cluster`.
        master: the address of the task that runs the program.
        patience_seconds: how long that may not answer, once it has been seen.
    """
    config = tf.compat.v1.ConfigProto()
    # Fewer threads than steps and servers that wait for one another would block the process.
    num_tasks = sum(len(addresses) for addresses in members.jobs.values())
    config.inter_op_parallelism_threads = max(os.cpu_count() or 1, num_tasks + 2)
    if threads := os.environ.get("TF_NUM_INTRAOP_THREADS"):
        config.intra_op_parallelism_threads = int(threads)
    (cpu, *_) = tf.config.list_physical_devices("CPU")
    logical = len(tf.config.get_logical_device_configuration(cpu) or ())
    if members.task_type != "ps" and logical > 1:
        config.device_count["CPU"] = logical
    if members.task_type == "ps":
        config.device_count["GPU"] = 0
    server = tf.distribute.Server(
        cluster_spec(members),
        job_name=members.task_type,
        task_index=members.task_index,
        protocol="grpc",
        config=config,
    )
    _return_without(members, master, patience_seconds)
    del server
    sys.exit(0)


def _return_without(members, master, patience_seconds):
    """Returns when ``master``, once seen, has not answered for some time."""
    began = last_seen = time.monotonic()
    was_seen = False
    while True:
        time.sleep(_POLL_SECONDS)
        now = time.monotonic()
        if _answers(master):
            was_seen, last_seen = True, now
            continue
        limit = patience_seconds
        if not was_seen:
            limit = max(limit, members.startup_timeout_seconds)
        if now - last_seen > limit:
            what = f"for {now - last_seen:.0f} s" if was_seen else f"since {now - began:.0f} s"
            print(
                f"tfdist: {master}, which runs the program, has not answered {what}; "
                f"{members.label} ends."
            )
            return


def _answers(address):
    with contextlib.suppress(OSError):
        socket.create_connection(cluster.split_address(address), timeout=2.0).close()
        return True
    return False
