"""The cluster is read and checked, and its tasks find one another, without TensorFlow."""

import concurrent.futures
import contextlib
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest

from tfdist import cluster as clusters
from tfdist.cluster import Cluster, ClusterError, PeersUnreachable, resolve
from tfdist.rendezvous import _Meeting, listen, rendezvous

TWO_WORKERS = {"worker": ["a:2222", "b:2222"]}
FIRST = {"type": "worker", "index": 0}


def config(cluster=TWO_WORKERS, task=FIRST, **others):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task, **others})}


def workers(addresses):
    return config({"worker": addresses})


# -- What is refused: the input, and words that the one sentence must hold.

MALFORMED = {
    "empty": ({"TF_CONFIG": ""}, "TF_CONFIG is set but empty.*unset"),
    "blank": ({"TF_CONFIG": " \n"}, "TF_CONFIG is set but empty"),
    "no_json": ({"TF_CONFIG": "{'cluster': {}}"}, "not valid JSON.*'cluster'.*double quotes"),
    "cut_json": ({"TF_CONFIG": '{"cluster": {"worker"'}, "not valid JSON"),
    "list": ({"TF_CONFIG": "[1]"}, r"must be a JSON object.*got \[1\]"),
    "null": ({"TF_CONFIG": "null"}, "must be a JSON object.*got null"),
    "no_cluster": ({"TF_CONFIG": '{"task": {}}'}, r"no `cluster`, only \[\"task\"\]"),
    "nothing": ({"TF_CONFIG": "{}"}, "no `cluster`"),
    "cluster_list": (config([]), r"`cluster` must be an object.*got \[\]"),
    "cluster_text": (config("a:1"), "`cluster` must be an object.*got 'a:1'"),
    "cluster_empty": (config({}), "`cluster` is empty"),
    "job_text": (workers("a:1"), "`cluster.worker` must be a list.*got 'a:1'"),
    "job_null": (workers(None), "`cluster.worker` must be a list.*got null"),
    "job_gap": (workers({"0": "a:1", "2": "b:1"}), r"`cluster.worker`.*indices 0 to 1.*\"2\""),
    "job_unknown": (config({"master": ["a:1"]}), "unknown job 'master'.*chief, worker, ps"),
    "job_case": (config({"Worker": ["a:1"]}), "unknown job 'Worker'"),
    "only_ps": (config({"ps": ["a:1"]}, {"type": "ps", "index": 0}), "no `worker` and no `chief`"),
    "no_worker": (workers([]), "no `worker` and no `chief`"),
    "two_chiefs": (config({"chief": ["a:1", "b:1"]}), "`cluster.chief` has 2.*one chief"),
    "no_task": ({"TF_CONFIG": json.dumps({"cluster": TWO_WORKERS})}, "no `task`"),
    "task_text": (config(task="worker"), "`task` must be an object.*got 'worker'"),
    "no_type": (config(task={"index": 0}), "`task` has no `type`"),
    "no_index": (config(task={"type": "worker"}), "`task` has no `index`"),
    "index_text": (config(task={"type": "worker", "index": "x"}), "`task.index`.*integer.*'x'"),
    "index_float": (config(task={"type": "worker", "index": 1.0}), "`task.index`.*got 1.0"),
    "index_bool": (config(task={"type": "worker", "index": True}), "`task.index`.*got true"),
    "index_null": (config(task={"type": "worker", "index": None}), "`task.index`.*got null"),
    "index_negative": (config(task={"type": "worker", "index": -1}), "0 or more, got -1"),
    "index_large": (config(task={"type": "worker", "index": 2}), "`task.index` is 2.*at most 1"),
    "type_unknown": (config(task={"type": "boss", "index": 0}), "`task.type` 'boss' is unknown"),
    "type_list": (config(task={"type": ["worker"], "index": 0}), "`task.type`.*unknown"),
    "type_absent": (config(task={"type": "ps", "index": 0}), "`task.type` is 'ps'.*only.*worker"),
    "no_port": (workers(["a:1", "b"]), r"`cluster.worker\[1\]`.*got 'b', which has no port"),
    "empty_port": (workers(["a:"]), "port '' is not a number"),
    "word_port": (workers(["a:http"]), "port 'http' is not a number"),
    "path": (workers(["a:1/x"]), "port '1/x' is not a number"),
    "port_0": (workers(["a:0"]), "port '0' must lie between 1 and 65535"),
    "port_65536": (workers(["a:65536"]), "port '65536' must lie between"),
    "port_long": (workers(["a:" + "9" * 5000]), "must lie between"),
    "port_negative": (workers(["a:-1"]), "port '-1' is not a number"),
    "scheme": (workers(["grpc://a:1"]), "leave out the scheme 'grpc'"),
    "no_host": (workers([":1"]), "'' is not a host name"),
    "spaces": (workers(["a b:1"]), "'a b' is not a host name"),
    "bare_ipv6": (workers(["::1:2222"]), "IPv6 address in brackets"),
    "address_empty": (workers([""]), r"`cluster.worker\[0\]`.*empty"),
    "address_number": (workers([2222]), "got 2222, which is not a text"),
    "twice": (workers(["a:1", "b:1", "a:1"]), r"'a:1' is there twice.*\[0\].*\[2\]"),
    "twice_jobs": (config({"worker": ["a:1"], "ps": ["a:1"]}), r"twice.*worker\[0\].*ps\[0\]"),
    "own_list": (config(tfdist=[]), "`tfdist` must be an object"),
    "timeout_text": (config(tfdist={"startup_timeout_seconds": "9"}), "positive number.*'9'"),
    "timeout_zero": (config(tfdist={"startup_timeout_seconds": 0}), "positive number.*got 0"),
    "mpi_size": ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
    "mpi_rank": (
        {
            "OMPI_COMM_WORLD_RANK": "x",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
        "OMPI_COMM_WORLD_RANK must be an integer, got 'x'",
    ),
    "mpi_hosts": (
        {
            "OMPI_COMM_WORLD_RANK": "0",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
        "Open MPI: 2 of the 4 processes run on this host.*tfdist run --hosts",
    ),
    "pmi_rank": (
        {"PMI_RANK": "3", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"},
        "PMI: the rank must lie in 0 to 1, got 3",
    ),
    "pmi_hosts": (
        {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"},
        "PMI: 1 of the 2 processes.*TF_CONFIG",
    ),
    "pmi_unknown_hosts": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALNRANKS is not set"),
    "slurm_size": (
        {
            "SLURM_PROCID": "0",
            "SLURM_STEP_NUM_TASKS": "3",
            "SLURM_STEP_NODELIST": "n[1-2]",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        },
        "Slurm: the variables contradict one another.*SLURM_STEP_NUM_TASKS=3",
    ),
    "slurm_hosts": (
        {
            "SLURM_PROCID": "0",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_NODELIST": "n[1-",
            "SLURM_STEP_TASKS_PER_NODE": "1",
        },
        "SLURM_STEP_NODELIST is not a list of hosts",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_input_is_refused_in_one_sentence(case):
    environ, words = MALFORMED[case]
    with pytest.raises(ClusterError, match=f"(?s){words}") as caught:
        resolve(environ)
    message = str(caught.value)
    assert len(message) < 500
    assert "\n" not in message.replace("\\n", "")
    assert message.endswith((".", "}}."))


# -- What is read


def test_without_variables_it_is_a_single_process():
    cluster = resolve({})
    assert cluster == Cluster({}, "worker", 0, "none")
    assert cluster.is_chief and not cluster.is_distributed
    assert (cluster.rank, cluster.num_workers) == (0, 1)
    assert cluster.address is None and cluster.peers() == []
    with pytest.raises(ClusterError, match="single process"):
        cluster.tf_config()


def test_tf_config_is_read_and_written_back():
    cluster = resolve(
        config(
            task={"type": "worker", "index": "1"},
            tfdist={"startup_timeout_seconds": 30},
            rpc_layer="grpc",
        )
    )
    assert cluster == Cluster({"worker": ("a:2222", "b:2222")}, "worker", 1, "TF_CONFIG", 30.0)
    assert resolve({"TF_CONFIG": cluster.tf_config()}) == cluster
    assert cluster.address == "b:2222"
    assert cluster.peers() == [("worker 0", "a:2222")]
    assert (cluster.rank, cluster.num_workers) == (1, 2)
    assert cluster.is_distributed and not cluster.is_chief


def tf_job(job, index):
    """What Kubernetes' TFJob sets for a job with all kinds of replicas."""
    service = "train-{}-{}.ml.svc:2222".format
    return config(
        {
            "chief": [service("chief", 0)],
            "ps": [service("ps", 0), service("ps", 1)],
            "worker": [service("worker", 0), service("worker", 1)],
        },
        {"type": job, "index": index},
        environment="cloud",
    )


@pytest.mark.parametrize(
    ("job", "index", "rank", "is_chief"),
    [("chief", 0, 0, True), ("worker", 0, 1, False), ("worker", 1, 2, False)],
)
def test_ranks_of_a_tf_job(job, index, rank, is_chief):
    cluster = resolve(tf_job(job, index))
    assert (cluster.rank, cluster.num_workers, cluster.is_chief) == (rank, 3, is_chief)
    assert cluster.address == f"train-{job}-{index}.ml.svc:2222"
    labels = ["chief", "worker 0", "worker 1"]
    assert [label for label, _ in cluster.peers()] == labels[:rank] + labels[rank + 1 :]


@pytest.mark.parametrize(("job", "index"), [("ps", 1), ("evaluator", 0)])
def test_servers_and_evaluators_do_not_train(job, index):
    cluster = resolve(tf_job(job, index))
    assert not cluster.is_chief
    assert cluster.num_workers == 3
    with pytest.raises(ClusterError, match=f"{job} {index} does not train"):
        cluster.rank  # noqa: B018
    rendezvous(cluster)


def test_sparse_jobs_and_ipv6_addresses_are_read():
    cluster = resolve(workers({"1": "[::1]:2223", "0": "localhost:2222"}))
    assert cluster.jobs == {"worker": ("localhost:2222", "[::1]:2223")}
    assert clusters.split_address("[::1]:2223") == ("::1", 2223)


def test_cluster_of_one_behaves_as_a_single_process():
    cluster = resolve(workers(["a:2222"]))
    assert cluster.is_chief and not cluster.is_distributed
    rendezvous(cluster)  # No socket: "a" does not exist.


def test_one_worker_with_servers_is_distributed():
    assert resolve(config({"worker": ["a:1"], "ps": ["b:1"]})).is_distributed


def test_servers_are_refused_by_a_strategy_that_has_none():
    clusters.require_no_ps(resolve(config()), "MultiWorkerMirroredStrategy")
    with pytest.raises(ClusterError, match="MultiWorkerMirroredStrategy has no parameter servers"):
        clusters.require_no_ps(resolve(tf_job("worker", 0)), "MultiWorkerMirroredStrategy")


def open_mpi(rank, namespace="prterun-host-1@1"):
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
        "PMIX_NAMESPACE": namespace,
    }


def test_open_mpi_ranks_work_out_the_same_addresses():
    found = [resolve(open_mpi(rank)) for rank in range(3)]
    assert [(cluster.source, cluster.rank) for cluster in found] == [
        ("Open MPI", rank) for rank in range(3)
    ]
    assert found[0].jobs == found[1].jobs == found[2].jobs
    assert all(address.startswith("127.0.0.1:") for address in found[0].jobs["worker"])
    assert resolve(open_mpi(0, "prterun-host-2@1")).jobs != found[0].jobs


def slurm(rank, **others):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "n[2,10],m01",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2),2",
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        **others,
    }


def test_slurm_ranks_get_their_own_hosts():
    cluster = resolve(slurm(1, SLURM_NODEID="1", SLURM_LOCALID="0"))
    hosts, ports = zip(*map(clusters.split_address, cluster.jobs["worker"]), strict=True)
    assert hosts == ("n2", "n10", "m01", "m01")
    assert ports[0] == ports[1] == ports[2] == ports[3] - 1
    assert (cluster.source, cluster.rank) == ("Slurm", 1)
    assert resolve(slurm(1, PMI_RANK="1", PMI_SIZE="4")) == cluster


def test_slurm_ranks_out_of_order_are_refused():
    with pytest.raises(ClusterError, match="--distribution=block"):
        resolve(slurm(1, SLURM_NODEID="2", SLURM_LOCALID="0"))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("x", ["x"]),
        ("n[1-2],m5,o[3-4,6]", ["n1", "n2", "m5", "o3", "o4", "o6"]),
        ("a[08-11]", ["a08", "a09", "a10", "a11"]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
    ],
)
def test_slurm_host_lists(text, hosts):
    assert clusters._expanded_hosts(text) == hosts


def test_slurm_batch_script_is_a_single_process():
    assert resolve({"SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}).source == "none"


def test_tf_config_goes_before_mpi():
    assert resolve({**open_mpi(2), **config()}).source == "TF_CONFIG"


RANK_SCRIPT = """
from tfdist import cluster
from tfdist.rendezvous import rendezvous
own = cluster.resolve()
rendezvous(own, timeout_seconds=20, payload={"shared": "yes"})
print(own.source, own.rank, "of", own.num_workers, flush=True)
"""


@pytest.mark.parametrize(
    ("command", "version", "source"),
    [
        (["mpirun", "--allow-run-as-root", "--oversubscribe"], "Open MPI", "Open MPI"),
        (["mpiexec.hydra"], "HYDRA", "PMI"),
    ],
)
def test_two_processes_of_mpirun_meet(command, version, source, tmp_path):
    folder = os.path.dirname(sys.executable)
    program = shutil.which(command[0], path=os.pathsep.join([folder, os.environ["PATH"]]))
    if program is None:
        pytest.skip(f"{command[0]} is not installed")
    shown = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20)
    if version not in shown.stdout:
        pytest.skip(f"{program} is not {version}")
    script = tmp_path / "rank.py"
    script.write_text(RANK_SCRIPT)
    result = subprocess.run(
        [program, *command[1:], "-n", "2", sys.executable, script],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split("\n")[:2]) == [f"{source} 0 of 2", f"{source} 1 of 2"]


def test_tensorflow_is_not_imported():
    code = "import sys, tfdist.cluster, tfdist.launch; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- Ports


def test_local_ports_are_different_and_free():
    ports = clusters.local_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        listen(f"127.0.0.1:{port}").close()


def test_taken_port_is_named_with_its_holder():
    address = f"127.0.0.1:{clusters.local_ports(1)[0]}"
    with listen(address), pytest.raises(ClusterError, match="already taken") as caught:
        listen(address)
    assert address in str(caught.value)
    if os.path.exists("/proc/net/tcp"):
        assert f"by process {os.getpid()} (" in str(caught.value)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", socket.gethostname()])
def test_foreign_and_own_names_are_bound_on_all_interfaces(host, monkeypatch):
    here = socket.getaddrinfo("127.0.0.1", 0, type=socket.SOCK_STREAM)
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *args, **_: here if args[0] == host else pytest.fail()
    )
    if host == "192.0.2.1":  # An address of nobody's, which stays what it is.
        monkeypatch.undo()
    with listen(f"{host}:{clusters.local_ports(1)[0]}") as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")


def test_loopback_addresses_are_bound_alone():
    with listen(f"127.0.0.1:{clusters.local_ports(1)[0]}") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


# -- Rendezvous: ranks are threads here; tests/test_launch.py has processes.


def local_jobs(n):
    return {"worker": tuple(f"127.0.0.1:{port}" for port in clusters.local_ports(n))}


def ranks(jobs):
    return [Cluster(jobs, "worker", rank, "TF_CONFIG") for rank in range(len(jobs["worker"]))]


def meet(tasks, *, payloads=None, timeout_seconds=20.0):
    """Runs the rendezvous of all tasks at once. Returns each one's exception, or None."""
    payloads = payloads or [{}] * len(tasks)
    with concurrent.futures.ThreadPoolExecutor(len(tasks)) as pool:
        futures = [
            pool.submit(rendezvous, task, timeout_seconds=timeout_seconds, payload=payload)
            for task, payload in zip(tasks, payloads, strict=True)
        ]
        return [future.exception() for future in futures]


def open_sockets():
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {name for name in found if name.startswith("socket:")}


@pytest.mark.parametrize("n", [2, 3, 8])
def test_all_meet_and_leave_nothing_behind(n):
    tasks = ranks(local_jobs(n))
    before = open_sockets() if os.path.exists("/proc/self/fd") else None
    threads = threading.active_count()
    assert meet(tasks) == [None] * n
    for task in tasks:  # The port is free at once.
        listen(task.address).close()
    assert threading.active_count() == threads
    if before is not None:
        assert open_sockets() <= before


def test_chief_and_workers_meet_without_servers():
    first, second, server = local_jobs(3)["worker"]
    jobs = {"chief": (first,), "worker": (second,), "ps": (server,)}
    tasks = [Cluster(jobs, job, 0, "TF_CONFIG") for job in ("chief", "worker", "ps")]
    assert meet(tasks) == [None] * 3


def test_late_peer_is_waited_for():
    first, second = ranks(local_jobs(2))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        early = pool.submit(rendezvous, first, timeout_seconds=20.0)
        wait_for_listener(first.address)
        rendezvous(second, timeout_seconds=20.0)
        early.result(timeout=5)


def wait_for_listener(address):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(clusters.split_address(address)).close()
    pytest.fail(f"nobody listens at {address}")


def test_absent_peer_is_named():
    *present, absent = ranks(local_jobs(3))
    started = time.monotonic()
    errors = meet(present, timeout_seconds=1.0)
    assert time.monotonic() - started < 5
    for error in errors:
        assert isinstance(error, PeersUnreachable) and isinstance(error, TimeoutError)
        assert error.peers == [f"worker 2 at {absent.address}"]
        assert "waited 1 s" in str(error) and "connection refused" in str(error)


def test_unknown_host_is_named():
    jobs = {"worker": (*local_jobs(1)["worker"], "no-such-host.invalid:2222")}
    with pytest.raises(PeersUnreachable, match="no-such-host.invalid:2222.*unknown host"):
        rendezvous(ranks(jobs)[0], timeout_seconds=0.5)


def test_startup_timeout_of_the_cluster_counts():
    with pytest.raises(PeersUnreachable, match=r"waited 0\.3 s"):
        rendezvous(Cluster(local_jobs(2), "worker", 0, "TF_CONFIG", 0.3))


def test_different_payload_is_named_on_all():
    tasks = ranks(local_jobs(3))
    same = {"keras": "3.15.1", "compression": "None"}
    other = {**same, "compression": "fp16"}
    errors = meet(tasks, payloads=[same, same, other])
    assert all(isinstance(error, ClusterError) for error in errors)
    for error, own in zip(errors, tasks, strict=True):
        assert "`compression`" in str(error)
        assert "'None'" in str(error) and "'fp16'" in str(error)
        assert own.label in str(error) and "keras" not in str(error)
    assert tasks[2].address in str(errors[0])


def test_missing_payload_key_is_named():
    errors = meet(ranks(local_jobs(2)), payloads=[{"seed": "1"}, {}])
    assert all("`seed`" in str(error) and "'not set'" in str(error) for error in errors)


def test_different_clusters_are_refused():
    jobs = local_jobs(3)
    larger = Cluster(jobs, "worker", 0, "TF_CONFIG")
    smaller = Cluster({"worker": jobs["worker"][:2]}, "worker", 1, "TF_CONFIG")
    error, other = meet([larger, smaller], timeout_seconds=10)
    for text in (str(error), str(other)):
        assert "`cluster`" in text and "3 worker" in text and "2 worker" in text


def test_same_index_on_two_hosts_is_refused():
    first, second = local_jobs(2)["worker"]
    tasks = [
        Cluster({"worker": (first, second)}, "worker", 0, "TF_CONFIG"),
        Cluster({"worker": (second, first)}, "worker", 0, "TF_CONFIG"),
    ]
    for error in meet(tasks, timeout_seconds=10):
        assert isinstance(error, ClusterError) and "its rank is 0 and not 1" in str(error)


def test_taken_port_is_refused_before_waiting():
    task = ranks(local_jobs(2))[0]
    with listen(task.address), pytest.raises(ClusterError, match="already taken"):
        rendezvous(task, timeout_seconds=60)


@contextlib.contextmanager
def stranger(address, greeting):
    """Another program at an address: says something to whoever connects."""
    ended = threading.Event()

    def serve(listener):
        with contextlib.ExitStack() as guests:
            while not ended.is_set():
                with contextlib.suppress(TimeoutError, OSError):
                    guest = guests.enter_context(listener.accept()[0])
                    guest.sendall(greeting)

    with listen(address) as listener:
        listener.settimeout(0.05)
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize(
    "greeting",
    [
        pytest.param(b"PRI * HTTP/2.0\r\n\r\n\x00\x00\x12\x04", id="grpc"),
        pytest.param(b"\xff" * (1 << 17), id="endless_line"),
        pytest.param(b'{"magic": "other"}\n', id="other_json"),
        pytest.param(b"[" * 60000 + b"\n", id="deep_json"),
        pytest.param(b'{"magic": "tfdist", "id": 7}\n', id="no_id"),
    ],
)
def test_other_program_at_a_peers_port_is_no_peer(greeting):
    first, second = ranks(local_jobs(2))
    with stranger(second.address, greeting), pytest.raises(PeersUnreachable) as caught:
        rendezvous(first, timeout_seconds=1.0)
    assert "another program answers there" in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
        b'{"magic": "tfdist", "ready": true}\n',
        b'{"magic": "tfdist", "rank": [0], "id": "x", "settings": 3}\n',
        b'{"magic": "tfdist", "rank": 1, "id": "x", "settings": {}}\n',
        b"\x00" * (1 << 17),
    ],
)
def test_strange_guests_do_no_harm(line):
    first, second = ranks(local_jobs(2))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        early = pool.submit(rendezvous, first, timeout_seconds=20.0)
        wait_for_listener(first.address)
        with socket.create_connection(clusters.split_address(first.address)) as guest:
            with contextlib.suppress(ConnectionError):
                guest.sendall(line)
            rendezvous(second, timeout_seconds=20.0)
            early.result(timeout=5)


def test_peer_that_is_restarted_after_it_answered_is_met_again():
    first, second, third = ranks(local_jobs(3))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(rendezvous, task, timeout_seconds=20.0) for task in (first, second)]
        with contextlib.closing(_Meeting(third, {})) as killed:
            killed.listen()
            deadline = time.monotonic() + 10
            while not all(peer.ready for peer in killed._peers.values()):
                assert time.monotonic() < deadline
                killed._open_connections()
                killed._wait(0.05)
        rendezvous(third, timeout_seconds=20.0)
        for future in waiting:
            future.result(timeout=5)


def test_peer_that_left_after_it_answered_is_not_taken_for_present():
    first, second = ranks(local_jobs(2))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rendezvous, first, timeout_seconds=1.0)
        with contextlib.closing(_Meeting(second, {})) as killed:
            killed.listen()
            while not killed._peers[0].ready:
                killed._open_connections()
                killed._wait(0.05)
        with pytest.raises(PeersUnreachable, match="worker 1"):
            waiting.result(timeout=10)


def test_too_large_payload_is_refused():
    with pytest.raises(ClusterError, match="payload"):
        rendezvous(ranks(local_jobs(2))[0], payload={"key": "x" * 70000}, timeout_seconds=1)


def test_privileged_port_is_refused_clearly(monkeypatch):
    def refuse(self, address):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ClusterError, match="127.0.0.1:80 .*above 1023"):
        listen("127.0.0.1:80")
