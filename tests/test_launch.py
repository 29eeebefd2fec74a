"""The launcher, with real processes, sockets and signals. Its scripts don't import TensorFlow."""

import concurrent.futures
import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap

import pytest
from launching import LAUNCH, running
from waiting import until

from tfdist import _doctor, _placement, launch
from tfdist import cluster as clusters
from tfdist._output import split_lines
from tfdist._ssh import ssh_command
from tfdist.rendezvous import listen

# What the scripts begin with.
PRELUDE = """
import json, os, pathlib, signal, subprocess, sys, time
config = json.loads(os.environ["TF_CONFIG"])
task = config["task"]
job, index = task["type"], task["index"]

def leave_pid(folder, process=None):
    pid = process.pid if process else os.getpid()
    path = pathlib.Path(folder, f"{job}-{index}-{'child' if process else 'self'}")
    path.with_suffix(".new").write_text(str(pid))
    path.with_suffix(".new").rename(path)

def child():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
"""


@pytest.fixture
def script(tmp_path):
    """Writes a script; gives its path."""

    def write(body, name="train.py"):
        path = tmp_path / name
        path.write_text(PRELUDE + textwrap.dedent(body))
        return str(path)

    return write


@pytest.fixture
def pids(tmp_path):
    """The folder where scripts leave their pids; what is still alive at the end is killed."""
    folder = tmp_path / "pids"
    folder.mkdir()
    yield folder
    for pid in read_pids(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def read_pids(folder):
    return [int(path.read_text()) for path in folder.iterdir() if path.suffix != ".new"]


def run(*args, **options):
    """Runs the launcher to its end."""
    return subprocess.run(
        [*LAUNCH, "run", *args], capture_output=True, text=True, timeout=50, **options
    )


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
    return not os.path.exists("/proc/self")


def all_there(folder, n):
    return until(lambda: len(found := read_pids(folder)) == n and found)


def all_gone(pids):
    until(lambda: not any(map(is_alive, pids)))


# -- Plans and options


def test_plan_with_hosts_is_the_same_everywhere():
    tasks = launch.plan(
        workers=1, ps=1, chief=True, evaluator=True, hosts={"a": 2, "b": 1}, first_port=5000
    )
    assert [(task.label, task.host, task.address) for task in tasks] == [
        ("chief", "a", "a:5000"),
        ("worker 0", "a", "a:5001"),
        ("worker 1", "a", "a:5002"),
        ("worker 2", "b", "b:5000"),
        ("ps 0", "a", "a:5003"),
        ("evaluator", "a", None),
    ]


def test_plan_without_hosts_is_on_loopback():
    tasks = launch.plan(workers=3)
    assert len({task.address for task in tasks}) == 3
    assert all(task.address.startswith("127.0.0.1:") for task in tasks)


def test_task_config_is_understood_by_the_workers():
    tasks = launch.plan(workers=2, ps=1, evaluator=True, hosts={"a": 2}, first_port=5000)
    found = [clusters.resolve({"TF_CONFIG": launch.task_config(t, tasks, 30.0)}) for t in tasks]
    assert [(cluster.task_type, cluster.task_index) for cluster in found] == [
        ("worker", 0),
        ("worker", 1),
        ("ps", 0),
        ("evaluator", 0),
    ]
    assert found[0].jobs == {"worker": ("a:5000", "a:5001"), "ps": ("a:5002",)}
    assert found[0].startup_timeout_seconds == 30.0


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", {"a": 1}),
        ("a:2, b:3", {"a": 2, "b": 3}),
        ("[::1]:2,[::2]", {"[::1]": 2, "[::2]": 1}),
    ],
)
def test_hosts_are_read(text, hosts):
    assert launch.parse_hosts(text) == hosts


def test_hosts_file_is_read():
    text = "# ours\na\n\nb:2  # two\nc slots=3\n"
    assert launch.parse_hosts_file(text) == {"a": 1, "b": 2, "c": 3}


@pytest.mark.parametrize("text", ["", " , ", ":2", "a:0", "a:x", "a:-1", "a:2,a:3"])
def test_malformed_hosts_are_refused(text):
    with pytest.raises(launch.UsageError, match="--hosts"):
        launch.parse_hosts(text)


def test_own_host_is_found():
    assert launch.own_host(["127.0.0.1", "192.0.2.1"]) == "127.0.0.1"
    assert launch.own_host(["192.0.2.1"]) is None
    assert launch.own_host(["a", "b"], name="b") == "b"
    with pytest.raises(launch.UsageError, match="127.0.0.1 and localhost are all this machine"):
        launch.own_host(["127.0.0.1", "localhost"])
    with pytest.raises(launch.UsageError, match="--host c is not one of"):
        launch.own_host(["a", "b"], name="c")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-restarts", "2", "--hosts", "192.0.2.1,127.0.0.1", "--ssh"], "on the first host"),
        (["--min-workers", "2", "--chief", "--max-restarts", "1"], "--chief .*all are needed"),
        (["--min-workers", "2", "--max-restarts", "1"], "more than the number of workers, 1"),
        (["--min-workers", "1"], "needs --max-restarts"),
        (["--ps", "1", "--colocate-ps"], "--ps and --colocate-ps contradict"),
        (["-n", "0"], "must be 1 or more"),
        (["-n", "x"], "invalid"),
        (["--startup-timeout", "-1"], "positive number of seconds"),
        (["--ssh"], "--ssh needs --hosts"),
        (["--port", "5000"], "--port needs --hosts"),
        (["--hosts", "a:1", "-n", "2"], "-n and --hosts contradict"),
        (["--hosts", "a:1", "--hosts-file", "f"], "contradict each other"),
        (["--hosts-file", "no/such/file"], "no/such/file: No such file"),
        (["--hosts", "192.0.2.1:2"], "is none of --hosts.*--host.*--ssh"),
        (["--hosts", "127.0.0.1:9", "--port", "65530"], "too few ports"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words, script, capsys):
    with pytest.raises(SystemExit) as caught:
        launch.main(["run", *options, script("")])
    assert caught.value.code == 2
    assert re.search(words, capsys.readouterr().err)


def test_missing_script_is_refused(capsys):
    with pytest.raises(SystemExit):
        launch.main(["run", "no_such.py"])
    assert "no script 'no_such.py'" in capsys.readouterr().err


def test_threads_are_shared_unless_they_are_set(monkeypatch):
    monkeypatch.setattr(_placement, "_num_cores", lambda: 8)
    names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    assert launch.thread_variables({}, processes=3) == dict.fromkeys(names, "2")
    assert launch.thread_variables({}, processes=20) == dict.fromkeys(names, "1")
    kept = launch.thread_variables({"OMP_NUM_THREADS": "5"}, processes=2)
    assert kept == dict.fromkeys(names[1:], "4")
    told = launch.thread_variables({"OMP_NUM_THREADS": "5"}, processes=2, threads=3)
    assert told == dict.fromkeys(names, "3")


def test_gpus_are_shared_out():
    workers, (server,) = launch.plan(workers=2, ps=1)[:2], launch.plan(workers=2, ps=1)[2:]
    assert [t.job for t in (*workers, server)] == ["worker", "worker", "ps"]

    def visible(task, num_gpus, environ=None):
        return launch.gpu_variables(environ or {}, task, workers, num_gpus)

    assert visible(workers[0], 4) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert visible(workers[1], 4) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert visible(workers[1], 3) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert visible(server, 4) == {"CUDA_VISIBLE_DEVICES": "-1"}
    assert visible(workers[0], 0) == {}
    assert visible(workers[0], 1, {"CUDA_VISIBLE_DEVICES": "0"}) == {}
    with pytest.raises(launch.UsageError, match="2 workers .* but it has 1"):
        visible(workers[0], 1)


def test_ssh_command_quotes_everything(monkeypatch, tmp_path):
    folder = tmp_path / "it's here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    args = launch._parser().parse_args(
        ["run", "--hosts", "a:2,b", "--ssh", "--chief", "--threads", "2", "--startup-timeout", "9"]
        + ["train.py", "--name", "two words; rm"]
    )
    ssh, *options, host, line = ssh_command("b", args, {"a": 2, "b": 1})
    assert (ssh, options, host) == ("ssh", ["-o", "BatchMode=yes"], "b")
    echoed = subprocess.run(
        ["sh", "-c", line.replace("exec ", "printf '%s\\n' \"$PWD\" ", 1)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert echoed.stdout.splitlines() == [
        *(str(folder), sys.executable, "-m", "tfdist.launch", "run", "--stop-with-stdin"),
        *("--host", "b", "--hosts", "a:2,b:1", "--chief", "--threads", "2"),
        *("--startup-timeout", "9.0", "--grace", "30.0", "train.py", "--name", "two words; rm"),
    ]


@pytest.mark.parametrize(
    ("chunks", "lines", "rest"),
    [
        ([b"a\nb\n"], [b"a", b"b"], b""),
        ([b"a", b"b\nc"], [b"ab"], b"c"),
        ([b"a\r\nb\r", b"\nc\n"], [b"a", b"b", b"c"], b""),
        ([b"\r 1%\r 2%", b"\r 3%\n"], [b" 1%", b" 2%", b" 3%"], b""),
        ([b"a\n\nb\n"], [b"a", b"", b"b"], b""),
        ([b"\b\b\b\rx\n"], [b"x"], b""),
        ([b"\xff\xfe\n"], [b"\xff\xfe"], b""),
        ([b"x" * (1 << 21)], [b"x" * (1 << 21)], b""),
    ],
)
def test_output_is_cut_into_lines(chunks, lines, rest):
    found, pending = [], b""
    for chunk in chunks:
        complete, pending = split_lines(pending, chunk)
        found += complete
    assert (found, pending) == (lines, rest)


# -- Processes that end by themselves


def test_every_worker_runs_with_its_task_and_the_arguments(script):
    path = script("""
        print(job, index, os.environ["OMP_NUM_THREADS"], *sys.argv[1:])
        print("to stderr", file=sys.stderr)
    """)
    result = run("-n", "2", "--threads", "3", path, "--epochs", "3", "-n", "9")
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == [
        f"[worker {n}] worker {n} 3 --epochs 3 -n 9" for n in range(2)
    ]
    assert sorted(result.stderr.splitlines()) == [f"[worker {n}] to stderr" for n in range(2)]


def test_modules_are_started(script):
    path = script("print(job, index, *sys.argv[1:])", name="a_module.py")
    result = run("-m", "a_module", "-x", cwd=os.path.dirname(path))
    assert (result.returncode, result.stdout) == (0, "[worker 0] worker 0 -x\n")


def test_lines_are_never_interleaved(script):
    path = script("""
        for number in range(300):
            os.write(1, b"%d %d " % (index, number) + b"x" * 500)
            os.write(1, b"y" * 500 + b"\\n")
    """)
    result = run("-n", "3", path)
    lines = result.stdout.splitlines()
    assert len(lines) == 900
    pattern = re.compile(r"\[worker (\d)\] \1 (\d+) x{500}y{500}")
    for worker in range(3):
        numbers = [match[2] for match in map(pattern.fullmatch, lines) if int(match[1]) == worker]
        assert numbers == [str(number) for number in range(300)]


def test_last_line_without_end_is_shown(script):
    result = run(script("sys.stdout.write('\\r1/2\\r2/2\\nlast')"))
    assert result.stdout == "[worker 0] 1/2\n[worker 0] 2/2\n[worker 0] last\n"


def test_logs_are_written(script, tmp_path):
    path = script("print('hello', index); print('warning', file=sys.stderr)")
    assert run("-n", "2", "--evaluator", "--log-dir", str(tmp_path / "logs"), path).returncode == 0
    assert sorted((tmp_path / "logs" / "worker-1.log").read_text().split()) == [
        *("1", "hello", "warning")
    ]


def test_first_failure_ends_the_rest(script, pids):
    path = script("""
        leave_pid(sys.argv[1])
        if index == 1:
            while len(list(pathlib.Path(sys.argv[1]).iterdir())) < 3:
                time.sleep(0.01)
            for number in range(30):
                print("line", number)
            print("the reason", file=sys.stderr)
            sys.exit(7)
        time.sleep(600)
    """)
    result = run("-n", "3", path, str(pids))
    assert result.returncode == 7
    report = result.stderr.split("tfdist run: ")[1].splitlines()
    assert report[0] == (
        "worker 1 failed with exit code 7; the other 2 were ended. Its last lines:"
    )
    assert len(report) == 21
    assert "  the reason" in report and "  line 29" in report and "  line 9" not in report
    all_gone(read_pids(pids))


def test_death_by_signal_gives_128_and_its_number(script):
    result = run("-n", "2", script("""
        if index == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    """))  # fmt: skip
    assert result.returncode == 137
    assert "worker 0 was killed by SIGKILL; the other was ended" in result.stderr


def test_evaluator_is_ended_after_the_workers(script, pids):
    path = script("""
        leave_pid(sys.argv[1])
        if job == "evaluator":
            time.sleep(600)
        while len(list(pathlib.Path(sys.argv[1]).iterdir())) < 3:
            time.sleep(0.01)
    """)
    result = run("-n", "2", "--evaluator", path, str(pids))
    assert (result.returncode, result.stderr) == (0, "")
    assert len(read_pids(pids)) == 3
    all_gone(read_pids(pids))


@pytest.mark.parametrize("options", [["--ps", "2", "--evaluator"], ["--colocate-ps"]])
def test_chief_comes_with_servers_and_ends_all(script, pids, options):
    path = script("""
        leave_pid(sys.argv[1])
        everyone = int(sys.argv[2])
        while job != "chief" or len(list(pathlib.Path(sys.argv[1]).iterdir())) < everyone:
            time.sleep(0.01)
    """)
    everyone = 6 if "--ps" in options else 3
    assert run("-n", "2", *options, path, str(pids), str(everyone)).returncode == 0
    assert len(read_pids(pids)) == everyone
    all_gone(read_pids(pids))


def test_chief_goes_on_without_a_worker_that_is_killed(script, tmp_path):
    path = script("""
        done = pathlib.Path(sys.argv[1])
        if (job, index) == ("worker", 1):
            os.kill(os.getpid(), signal.SIGKILL)
        while job != "chief":
            time.sleep(0.01)
        time.sleep(1)
    """)
    result = run("-n", "2", "--ps", "1", path, str(tmp_path / "done"))
    assert result.returncode == 0
    assert "worker 1 was killed by SIGKILL; the others go on without it" in result.stderr


def test_killed_worker_of_a_chief_starts_again_at_its_address(script, tmp_path):
    path = script("""
        seen = pathlib.Path(sys.argv[1])
        own = config["cluster"][job][index]
        if (job, index) == ("worker", 1):
            with seen.open("a") as file:
                file.write(own + "\\n")
            if len(seen.read_text().split()) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        while job != "chief" or not seen.exists() or len(seen.read_text().split()) < 2:
            time.sleep(0.01)
    """)
    result = run("-n", "2", "--ps", "1", "--max-restarts", "1", path, str(tmp_path / "seen"))
    assert result.returncode == 0
    assert "worker 1 was killed by SIGKILL; it starts again" in result.stderr
    assert len(set((tmp_path / "seen").read_text().split())) == 1


def test_failed_job_starts_again_at_other_ports(script, tmp_path):
    path = script("""
        seen = pathlib.Path(sys.argv[1])
        if index == 0:
            with seen.open("a") as file:
                file.write(os.environ["TFDIST_RESTART"] + "\\n")
        if os.environ["TFDIST_RESTART"] != "2":
            time.sleep(600 if index else 0.2)
            sys.exit(7)
    """)
    seen = tmp_path / "seen"
    result = run("-n", "2", "--max-restarts", "3", path, str(seen))
    assert (result.returncode, seen.read_text().split()) == (0, ["0", "1", "2"])
    assert "worker 0 failed with exit code 7" in result.stderr
    assert "starts again in 2 s (restart 2 of 3)" in result.stderr
    result = run("-n", "2", "--max-restarts", "1", path, str(seen))
    assert result.returncode == 7


def test_what_a_worker_leaves_behind_is_ended(script, pids):
    result = run(script("leave_pid(sys.argv[1], child())"), str(pids))
    assert result.returncode == 0
    all_gone(all_there(pids, 1))


def test_job_ends_when_nobody_reads_its_output(script, pids):
    path = script("""
        leave_pid(sys.argv[1])
        while True:
            print("more")
    """)
    with running("-n", "2", path, str(pids), stdout=subprocess.PIPE) as process:
        started = all_there(pids, 2)
        process.stdout.read(100)
        process.stdout.close()
        assert process.wait(timeout=20) == 141
    all_gone(started)


# -- Processes that are ended

WAITS_WITH_A_CHILD = """
    leave_pid(sys.argv[1], child())
    leave_pid(sys.argv[1])
    time.sleep(600)
"""


def test_nothing_is_left_when_the_launcher_is_killed(script, pids):
    with running("-n", "2", script(WAITS_WITH_A_CHILD), str(pids)) as process:
        started = all_there(pids, 4)
        assert all(map(is_alive, started))
        process.kill()
        process.wait(timeout=10)
        all_gone(started)


def test_sigterm_ends_every_child(script, pids):
    with running("-n", "2", script(WAITS_WITH_A_CHILD), str(pids)) as process:
        started = all_there(pids, 4)
        process.terminate()
        assert process.wait(timeout=20) == 128 + signal.SIGTERM
        all_gone(started)


def test_second_signal_kills_what_ignores_the_first(script, pids):
    path = script("""
        signal.signal(signal.SIGTERM, lambda *_: leave_pid(sys.argv[1]))
        leave_pid(sys.argv[1], subprocess.Popen(["sleep", "600"]))
        while True:
            time.sleep(600)
    """)
    with running(path, str(pids)) as process:
        all_there(pids, 1)
        process.terminate()
        started = all_there(pids, 2)  # It has seen the first, and goes on.
        assert process.poll() is None
        process.terminate()
        assert process.wait(timeout=8) == 128 + signal.SIGTERM
        all_gone(started)


def test_child_that_ignores_sigterm_is_killed_after_the_grace(script, pids):
    path = script("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        leave_pid(sys.argv[1])
        time.sleep(600)
    """)
    with running("--grace", "0.2", path, str(pids)) as process:
        started = all_there(pids, 1)
        process.terminate()
        process.wait(timeout=8)
        all_gone(started)


def test_ctrl_c_on_a_terminal(script, pids):
    path = script(WAITS_WITH_A_CHILD.replace("time.sleep(600)", "print('hi'); time.sleep(600)"))
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execv(LAUNCH[0], [*LAUNCH, "run", "-n", "2", path, str(pids)])
    try:
        started = all_there(pids, 4)
        shown = b""
        while shown.count(b"hi") < 2:
            shown += os.read(terminal, 4096)
        assert re.search(rb"\x1b\[\d+m\[worker 0\] \x1b\[0mhi\r\n", shown)
        os.write(terminal, b"\x03")
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGINT
        all_gone(started)
    finally:
        os.close(terminal)


# -- Hosts: two loopback addresses stand for two machines

MEETS = """
    from tfdist import cluster
    from tfdist.rendezvous import rendezvous
    own = cluster.resolve()
    rendezvous(own, timeout_seconds=20)
    print("met as", own.rank, "of", own.num_workers, "at", own.address)
"""


def two_hosts(*options):
    port = str(clusters.local_ports(1)[0])
    return ["--hosts", "127.0.0.1:2,127.0.0.2:1", "--port", port, *options]


def test_launchers_of_two_hosts_meet(script):
    path = script(MEETS)
    hosts = two_hosts()
    with running(*hosts, "--host", "127.0.0.2", path, stdout=subprocess.PIPE, text=True) as other:
        result = run(*hosts, "--host", "127.0.0.1", path)
        output, _ = other.communicate(timeout=20)
    assert (result.returncode, other.returncode) == (0, 0)
    assert len(result.stdout.splitlines()) == 2
    assert re.fullmatch(r"\[worker 2\] met as 2 of 3 at 127\.0\.0\.2:\d+\n", output)


@pytest.fixture
def fake_ssh(tmp_path):
    """An ssh that runs the command on this machine; gives the environment to find it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "ssh"
    program.write_text(f'#!/bin/sh\necho "$3" >> {tmp_path}/hosts\nexec sh -c "$4"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_ssh_starts_the_other_hosts(script, fake_ssh, tmp_path):
    hosts = two_hosts("--host", "127.0.0.1", "--ssh")
    result = run(*hosts, script(MEETS), env=fake_ssh)
    assert result.returncode == 0, result.stderr
    assert [line[:24] for line in sorted(result.stdout.splitlines())] == [
        f"[worker {n}] met as {n} of 3" for n in range(3)
    ]
    assert (tmp_path / "hosts").read_text() == "127.0.0.2\n"


def test_failure_on_another_host_ends_all(script, fake_ssh, pids):
    path = script("""
        leave_pid(sys.argv[1])
        if index == 2:
            while len(list(pathlib.Path(sys.argv[1]).iterdir())) < 3:
                time.sleep(0.01)
            sys.exit("no disk")
        time.sleep(600)
    """)
    hosts = two_hosts("--host", "127.0.0.1", "--ssh")
    result = run(*hosts, path, str(pids), env=fake_ssh)
    assert result.returncode == 1
    assert "worker 2 failed with exit code 1; the other 2 were ended" in result.stderr
    assert "no disk" in result.stderr
    all_gone(read_pids(pids))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_other_hosts_end_with_the_first_launcher(signum, script, fake_ssh, pids):
    hosts = two_hosts("--host", "127.0.0.1", "--ssh")
    path = script(WAITS_WITH_A_CHILD)
    with running(*hosts, path, str(pids), env=fake_ssh) as process:
        started = all_there(pids, 6)
        process.send_signal(signum)
        process.wait(timeout=20)
        all_gone(started)


# -- Doctor


@pytest.fixture
def light(tmp_path):
    """An environment in which `import tensorflow` takes no time, for what does not need it."""
    folder = tmp_path / "light"
    folder.mkdir()
    (folder / "tensorflow.py").write_text(
        "class config:\n    list_physical_devices = staticmethod(lambda: [])\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    environ.pop("TF_CONFIG", None)
    return environ


def doctor(environ, *options):
    return subprocess.run(
        [*LAUNCH, "doctor", *options], env=environ, capture_output=True, text=True, timeout=50
    )


def test_doctor_measures_three_workers(light):
    result = run("-n", "3", "-m", "tfdist.launch", "doctor", env=light)
    assert result.returncode == 0, result.stdout + result.stderr
    measured = re.findall(
        r"\[worker (\d)\]   worker (\d) at 127\.0\.0\.1:\d+: round trip [\d.]+ ms, \d+ MB/s to it",
        result.stdout,
    )
    assert sorted(measured) == sorted(
        (str(one), str(other)) for one in range(3) for other in range(3) if one != other
    )


def test_measurement_begins_again_when_a_listener_of_the_rendezvous_closes():
    first, second = (f"127.0.0.1:{port}" for port in clusters.local_ports(2))
    one, other = (clusters.Cluster({"worker": (first, second)}, "worker", n, "") for n in (0, 1))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with listen(second) as early:
            measured = pool.submit(_doctor.measure_peers, one)
            connection, _ = early.accept()
        connection.close()
        assert [peer[:2] for peer in _doctor.measure_peers(other)] == [("worker 0", first)]
        assert [peer[:2] for peer in measured.result(timeout=20)] == [("worker 1", second)]


def test_doctor_names_peers_that_do_not_answer(light):
    first, second = clusters.local_ports(2)
    jobs = {"worker": [f"127.0.0.1:{first}", f"127.0.0.1:{second}"]}
    light["TF_CONFIG"] = json.dumps({"cluster": jobs, "task": {"type": "worker", "index": 0}})
    result = doctor(light, "--startup-timeout", "0.5")
    assert result.returncode == 1
    assert f"worker 1 at 127.0.0.1:{second} (connection refused)" in result.stdout
    assert result.stdout.endswith("not healthy: see above\n")


def test_doctor_explains_a_malformed_cluster(light):
    result = doctor({**light, "TF_CONFIG": ""})
    assert result.returncode == 1 and "TF_CONFIG is set but empty" in result.stdout


def test_doctor_shows_versions_and_devices():
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    result = doctor(environ)
    assert result.returncode == 0, result.stdout
    for word in ("python 3.", "tfdist ", "tensorflow 2.", "keras 3.", "numpy ", "CPU:0"):
        assert f"  {word}" in result.stdout
    assert "a single process" in result.stdout
