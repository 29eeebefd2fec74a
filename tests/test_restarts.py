"""When a job is started again, with real processes; its scripts don't import TensorFlow."""

import contextlib
import json
import re
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest
from launching import LAUNCH, running
from waiting import until

from tfdist import cluster as clusters
from tfdist._hang import StepWatch
from tfdist._restarts import Budget, Slots, got_somewhere
from tfdist.progress import Progress

# What the scripts begin with: `step(n)` ends n steps, `note(word)` tells the test.
PRELUDE = """
import json, os, pathlib, signal, sys, time
from tfdist import cluster, progress
own = cluster.resolve()
rank = own.rank if own.task_type in cluster.TRAINING_JOBS else -1
size, attempt = own.num_workers, int(os.environ["TFDIST_RESTART"])
folder = pathlib.Path(__file__).parent

def step(n):
    for _ in range(n):
        with progress.training(), progress.step():
            pass

def note(*words):
    with open(folder / "notes", "a") as file:
        file.write(" ".join(map(str, (attempt, size, rank, *words))) + "\\n")

def notes():
    path = folder / "notes"
    return path.read_text().splitlines() if path.exists() else []

def until(condition):
    while not condition():
        time.sleep(0.01)
"""


@pytest.fixture
def script(tmp_path):
    """Writes a script; gives its path."""

    def write(body):
        path = tmp_path / "train.py"
        path.write_text(PRELUDE + textwrap.dedent(body))
        return str(path)

    return write


def run(*args, **options):
    """Runs the launcher to its end."""
    command = [*LAUNCH, "run", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def heard(*args):
    """A running launcher whose output is read."""
    return running(*args, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def notes(tmp_path):
    """What the scripts noted: (attempt, workers, rank, words...)."""
    path = tmp_path / "notes"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(*map(int, line.split()[:3]), *line.split()[3:]) for line in lines]


def record(folder):
    return json.loads((Path(folder) / "run.json").read_text())


def test_programs_in_the_documentation_run(capsys):
    page = (Path(__file__).parents[1] / "docs" / "launcher.md").read_text()
    programs = re.findall(r"^( *)```python\n(.*?)^\1```", page, re.M | re.S)
    names = {}
    for _, program in programs:
        exec(textwrap.dedent(program), names)
    assert capsys.readouterr().out == "1.0\n2.0\n"
    assert (names["rows"], names["batch"], names["learning_rate"]) == (256, 256, 0.1)


# -- Decisions, with a clock of the test's


class Clock:
    """Tells the time that the test sets."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_budget_is_per_job_and_per_hour():
    clock = Clock()
    budget = Budget(4, 2, clock)
    assert budget.spend() is None
    clock.now += 1800
    assert budget.spend() is None
    assert "3 times within an hour" in budget.spend()
    clock.now += 1800  # the first one is an hour old
    assert budget.spend() is None
    clock.now += 3600
    assert budget.spend() is None
    clock.now += 3600
    assert "4 times (--max-restarts 4)" in budget.spend()


def test_pause_grows_while_nothing_is_reached():
    budget = Budget(99, 99)
    assert [budget.pause(got_somewhere=False) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert budget.pause(got_somewhere=True) == 1
    assert [budget.pause(got_somewhere=False) for _ in range(2)] == [1, 2]


def test_attempt_without_counted_steps_is_judged_by_its_time():
    assert got_somewhere(None, 61.0) and not got_somewhere(None, 59.0)
    assert not got_somewhere(False, 61.0) and got_somewhere(True, 0.1)


def test_worker_that_fails_again_at_once_is_left_out_and_tried_again():
    clock = Clock()
    slots = Slots("aabb", 2, 60, clock)
    hosts = {"a", "b"}
    full = slots.active(hosts)
    assert full == [0, 1, 2, 3]
    assert not slots.failed(2, full, got_somewhere=True)
    assert not slots.failed(1, full, got_somewhere=False)  # another one
    assert slots.failed(1, full, got_somewhere=False)
    assert slots.active(hosts) == [0, 2, 3]
    assert not slots.may_grow([0, 2, 3], hosts)
    clock.now += 61
    assert slots.may_grow([0, 2, 3], hosts)
    assert slots.active(hosts) == full
    assert slots.failed(1, full, got_somewhere=False)  # it came back, and fails at once
    clock.now += 61
    assert slots.active(hosts) == [0, 2, 3]
    clock.now += 60  # twice as long
    assert slots.active(hosts) == full


def test_no_worker_is_left_out_when_too_few_would_be_left():
    slots = Slots("aab", 2, 60)
    assert slots.active({"a"}) == [0, 1]
    for _ in range(3):
        assert not slots.failed(1, [0, 1], got_somewhere=False)
    assert slots.active({"a"}) == [0, 1]
    assert slots.may_grow([0, 1], {"a", "b"})  # its host is there


def test_hang_is_seen_and_the_one_behind_named():
    class Process:
        is_stopped = False

        def __init__(self, begun, ended, active=True):
            self.progress = Progress(active, begun, ended, True, False)

    class Member:
        def __init__(self, label, process):
            self.label, self.process = label, process

    clock = Clock()
    watch = StepWatch(5, clock)
    members = [Member("worker 0", Process(3, 2)), Member("worker 1", Process(2, 2))]
    assert not watch.is_stuck(members)
    clock.now += 4
    assert not watch.is_stuck(members)
    members[0].process.progress = Progress(True, 4, 3, True, False)
    clock.now += 4
    assert not watch.is_stuck(members)  # it has moved
    clock.now += 6
    assert watch.is_stuck(members)
    text, behind = watch.describe(members)
    assert "worker 1 is behind" in text and behind is members[1]
    members[1].process.progress = Progress(True, 4, 3, True, False)
    assert watch.describe(members)[1] is None
    for member in members:
        member.process.progress = Progress(False, 4, 3, True, False)
    clock.now += 60
    assert not watch.is_stuck(members)  # before and after fit nobody hangs


# -- Restarts of one launcher


def test_restarts_are_recorded(script, tmp_path):
    path = script("""
        step(attempt + 2)
        if attempt == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == 1 and rank == 0:
            sys.exit(9)
        if attempt < 2:
            time.sleep(600)
    """)
    logs = tmp_path / "logs"
    result = run("-n", "2", "--max-restarts", "3", "--log-dir", str(logs), path, "--lr", "0.1")
    assert result.returncode == 0, result.stderr
    found = record(logs)
    assert (found["state"], found["status"], found["nominal_workers"]) == ("ended", 0, 2)
    assert found["arguments"] == ["--lr", "0.1"]
    first, second, third = found["attempts"]
    assert (first["outcome"], first["reason"]) == ("failed", "worker 1 was killed by SIGKILL")
    assert (second["status"], second["reason"]) == (9, "worker 0 failed with exit code 9")
    assert first["steps"]["worker 1"] == 2
    assert (third["outcome"], third["steps"]) == ("ended", {"worker 0": 4, "worker 1": 4})
    assert not list(logs.glob("*.new"))


def test_runs_of_an_earlier_launcher_stay_in_the_record(script, tmp_path):
    path = script("""
        note()
        if attempt == 0 and len(notes()) < 3:
            sys.exit(5)
        if len(notes()) == 2:
            time.sleep(600)
    """)
    options = ["--max-restarts", "3", "--log-dir", str(tmp_path)]
    with heard(*options, path) as launcher:
        until(lambda: len(notes(tmp_path)) == 2)
        launcher.kill()
    assert [run(*options, path).returncode for _ in range(2)] == [0, 0]
    found = record(tmp_path)
    lost, second = found["earlier"]
    assert (lost["state"], second["state"], found["state"]) == ("lost", "ended", "ended")
    assert lost["attempts"][0]["reason"] == "worker 0 failed with exit code 5"
    assert [len(one["attempts"]) for one in (lost, second, found)] == [2, 1, 1]
    assert "outcome" not in lost["attempts"][1] and "earlier" not in lost

    (tmp_path / "run.json").write_text("[]")
    result = run(*options, path)
    assert result.returncode == 0
    assert "run.json cannot be read" in result.stderr
    assert (tmp_path / "run.json.unreadable").read_text() == "[]"
    assert record(tmp_path)["earlier"] == []


def test_budget_of_an_hour_ends_the_job(script, tmp_path):
    path = script("step(1); sys.exit(4)")
    options = ["--max-restarts", "9", "--max-restarts-per-hour", "1", "--log-dir", str(tmp_path)]
    result = run(*options, path)
    assert result.returncode == 4
    assert "the job is not started again: it has failed 2 times within an hour" in result.stderr
    assert len(record(tmp_path)["attempts"]) == 2
    assert "within an hour" in record(tmp_path)["why"]


def test_preempted_job_starts_again_without_spending_the_budget(script, tmp_path):
    path = script("""
        step(1)
        note()
        # The other one still writes when the first has ended.
        time.sleep(0.5 * rank)
        note("saved")
        sys.exit(75 if attempt < 3 else 0)
    """)
    result = run("-n", "2", "--max-restarts", "1", path)
    assert result.returncode == 0, result.stderr
    assert len([line for line in notes(tmp_path) if line[3:] == ("saved",)]) == 8
    assert result.stderr.count("was preempted after a checkpoint (exit code 75)") == 3
    assert "starts again at once" in result.stderr


def test_preempted_job_without_restarts_gives_its_exit_code(script):
    assert run("-n", "2", script("sys.exit(75)")).returncode == 75


def test_sigterm_to_the_launcher_lets_the_job_save(script, tmp_path):
    path = script("""
        def save(*_):
            time.sleep(0.3)
            note("saved")
            sys.exit(75)
        signal.signal(signal.SIGTERM, save)
        note("ready")
        time.sleep(600)
    """)
    with heard("-n", "2", "--max-restarts", "5", path) as process:
        until(lambda: len(notes(tmp_path)) == 2)
        process.terminate()
        assert process.wait(timeout=20) == 75
    assert sorted(line[3] for line in notes(tmp_path)) == ["ready", "ready", "saved", "saved"]


def test_signal_ends_the_pause_before_a_restart(script):
    path = script("sys.exit(1)")
    with heard("--max-restarts", "9", path) as process:
        for line in process.stdout:
            if "starts again in 2 s" in line:
                break
        process.terminate()
        assert process.wait(timeout=5) == 128 + signal.SIGTERM


HANGS = """
    def wait_for_the_others():
        time.sleep(600)

    progress.attach()
    with progress.training():
        for number in range(3 if attempt == 0 else 1):
            if rank == 1 and number == 2:
                wait_for_the_others()
            with progress.step():
                if number == 2:
                    time.sleep(600)
"""


def test_hang_ends_in_a_restart_with_all_stacks(script, tmp_path):
    options = ["-n", "2", "--max-restarts", "1", "--step-timeout", "1", "--log-dir", str(tmp_path)]
    result = run(*options, script(HANGS))
    assert result.returncode == 0, result.stderr
    assert "no step for 1 s; worker 1 is behind" in result.stderr
    assert "worker 0 has begun 3 and ended 2, worker 1 has begun 2 and ended 2" in result.stderr
    log = (tmp_path / "worker-1.log").read_text()
    assert re.search(r"line \d+ in wait_for_the_others", log)
    assert re.search(r"line \d+ in <module>", (tmp_path / "worker-0.log").read_text())
    assert record(tmp_path)["attempts"][0]["outcome"] == "hung"


def test_hang_without_restarts_is_an_error(script):
    assert run("-n", "2", "--step-timeout", "0.5", script(HANGS)).returncode == 124


def test_stopped_worker_is_named(script):
    path = script("""
        with progress.training(), progress.step():
            if attempt == 0:
                os.kill(os.getpid(), signal.SIGSTOP) if rank == 0 else time.sleep(600)
    """)
    result = run("-n", "2", "--max-restarts", "1", "--step-timeout", "1", path)
    assert result.returncode == 0, result.stderr
    assert "worker 0 is stopped by a signal" in result.stderr


def test_pauses_outside_of_training_are_no_hang(script):
    path = script("step(1); time.sleep(1.5); step(1)")
    assert run("--step-timeout", "0.5", path).returncode == 0


# -- Fewer workers


def test_job_goes_on_with_fewer_workers_and_takes_one_back(script, tmp_path):
    path = script("""
        from tfdist.cluster import elastic_batch, per_worker_batch
        lost = pathlib.Path(folder, "lost")
        note(per_worker_batch(12), own.nominal_workers, *elastic_batch(12, "keep_worker_batch"))
        if rank == 2 and attempt < 2:  # before the first step, twice
            until(lambda: len([n for n in notes() if n.startswith(str(attempt))]) == 3)
            sys.exit(5)

        def save(*_):
            sys.exit(75)
        signal.signal(signal.SIGTERM, save)
        for _ in range(1 if size == 3 and attempt > 1 else 6000):
            step(1)
            time.sleep(0.01)
    """)
    options = ["-n", "3", "--min-workers", "2", "--max-restarts", "5", "--retry-workers", "3"]
    result = run(*options, "--log-dir", str(tmp_path), path)
    assert result.returncode == 0, result.stderr
    assert "worker 2 can't come back; the job does without" in result.stderr
    assert "2 of 3 workers take part" in result.stderr
    assert "the job is asked to save, and to start again" in result.stderr
    attempts = record(tmp_path)["attempts"]
    assert [attempt["slots"] for attempt in attempts] == [[0, 1, 2], [0, 1, 2], [0, 1], [0, 1, 2]]
    assert [attempt["outcome"] for attempt in attempts] == [
        *("failed", "failed", "preempted", "ended")
    ]
    seen = {(line[1], line[3:]) for line in notes(tmp_path)}
    assert seen == {(3, ("4", "3", "12", "1.0")), (2, ("6", "3", "8", str(8 / 12)))}


def test_job_that_does_not_save_is_not_asked_to(script, tmp_path):
    path = script("""
        if rank == 1 and size == 2:
            sys.exit(5)
        for _ in range(100 if size == 1 else 6000):
            step(1)
            time.sleep(0.02)
        note("done")
    """)
    options = ["-n", "2", "--min-workers", "1", "--max-restarts", "5", "--retry-workers", "1.5"]
    result = run(*options, path)
    assert result.returncode == 0, result.stderr
    assert "asked to save" not in result.stderr
    assert [line[1:] for line in notes(tmp_path)] == [(1, 0, "done")]


def test_job_that_has_ended_its_training_is_not_asked_to_save(script, tmp_path):
    path = script("""
        if rank == 1 and size == 2:
            sys.exit(5)
        with progress.training():
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
            step(1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3 if size == 1 else 60)
        note("done")
    """)
    options = ["-n", "2", "--min-workers", "1", "--max-restarts", "5", "--retry-workers", "1"]
    result = run(*options, path)
    assert result.returncode == 0, result.stderr
    assert "asked to save" not in result.stderr
    assert [line[1:] for line in notes(tmp_path)] == [(1, 0, "done")]


# -- Several hosts: loopback addresses stand for them


@pytest.fixture
def hosts(script, tmp_path):
    """``hosts(body, *options)``: starts a launcher for each of three hosts, with one worker each.

    Gives the function that starts (or starts again) the launcher of one of them.
    """
    with contextlib.ExitStack() as stack:

        def prepare(body, *options):
            path = script(body)
            names = [f"127.0.0.{n}" for n in (1, 2, 3)]
            port = str(clusters.local_ports(1)[0])

            def start(number, *more):
                return stack.enter_context(
                    heard(
                        *("--hosts", ",".join(names), "--port", port, "--host", names[number]),
                        *("--startup-timeout", "20", *options, *more, path),
                    )
                )

            return start

        yield prepare


def test_first_launcher_restarts_the_job_on_all_hosts(hosts, tmp_path):
    start = hosts(
        """
        note()
        step(1)
        if attempt == 0 and rank == 2:
            until(lambda: len(notes()) == 3)
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == 1 and rank == 1:
            until(lambda: len(notes()) == 6)
            sys.exit(75)
        if attempt == 1:
            sys.exit(75)
        if attempt == 0:
            time.sleep(600)
        """,
        *("--max-restarts", "2", "--log-dir", str(tmp_path)),
    )
    launchers = [start(number) for number in (2, 1, 0)]  # in any order
    outputs = [launcher.communicate(timeout=60)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0, 0], outputs
    assert sorted(notes(tmp_path)) == [(a, 3, rank) for a in range(3) for rank in range(3)]
    first, second, third = record(tmp_path)["attempts"]
    assert first["reason"] == "worker 2 was killed by SIGKILL"
    assert (second["outcome"], third["outcome"]) == ("preempted", "ended")
    assert third["steps"] == {"worker 0": 1, "worker 1": 1, "worker 2": 1}


def test_job_goes_on_without_a_host_and_takes_it_back(hosts, tmp_path):
    start = hosts(
        """
        note()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        for _ in range(1 if size == 3 and attempt > 0 else 6000):
            step(1)
            time.sleep(0.01)
        """,
        *("--max-restarts", "3", "--min-workers", "2", "--log-dir", str(tmp_path)),
        *("--startup-timeout", "5"),  # that long it waits for the lost one, too
    )
    launchers = [start(number) for number in range(3)]
    until(lambda: len(notes(tmp_path)) == 3)
    launchers[1].kill()
    until(lambda: (1, 2, 1) in notes(tmp_path), 30)
    launchers[1] = start(1)
    outputs = [launcher.communicate(timeout=60)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0, 0], outputs
    attempts = record(tmp_path)["attempts"]
    assert [attempt["slots"] for attempt in attempts] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert "worker 1 is gone: the launcher of host 127.0.0.2" in attempts[0]["reason"]
    assert attempts[1]["outcome"] == "preempted"


def test_other_hosts_end_when_the_first_launcher_is_killed(hosts, tmp_path):
    start = hosts("note(os.getpid()); time.sleep(600)", "--max-restarts", "9")
    launchers = [start(number) for number in range(3)]
    until(lambda: len(notes(tmp_path)) == 3)
    launchers[0].kill()
    assert [launcher.wait(timeout=20) for launcher in launchers] == [-9, 1, 1]
    for *_, pid in notes(tmp_path):
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists() or is_zombie(pid))


def is_zombie(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def test_hang_on_another_host_is_seen(hosts, tmp_path):
    start = hosts(
        """
        note()
        with progress.training():
            with progress.step():
                until(lambda: len(notes()) >= 3)
            if rank == 2 and attempt == 0:
                time.sleep(600)
            with progress.step():
                time.sleep(600 if attempt == 0 else 0)
        """,
        *("--max-restarts", "1", "--step-timeout", "2"),
    )
    launchers = [start(number) for number in range(3)]
    outputs = [launcher.communicate(timeout=60)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0, 0], outputs
    assert "worker 2 is behind" in outputs[0]
    assert re.search(r"\[worker 2\].*line \d+ in <module>", outputs[2])


def test_launcher_with_another_job_is_refused(hosts):
    start = hosts("time.sleep(600)")
    start(0)
    launcher = start(1, "--evaluator")
    assert "it was started with other options" in launcher.communicate(timeout=30)[0]
    assert launcher.returncode == 1


def test_missing_host_is_named(hosts, tmp_path):
    start = hosts("note()", "--startup-timeout", "1")
    launchers = [start(0), start(2)]
    output = launchers[0].communicate(timeout=30)[0]
    assert launchers[0].returncode == 1
    assert "the launchers of these hosts are not there: 127.0.0.2." in output
    assert launchers[1].wait(timeout=30) == 1
    assert not notes(tmp_path)


def test_first_host_that_does_not_answer_is_named(hosts):
    launcher = hosts("pass", "--startup-timeout", "0.5")(1)
    output = launcher.communicate(timeout=30)[0]
    assert launcher.returncode == 1
    assert "the launcher of the first host does not answer at 127.0.0.1:" in output


# -- Workers that the others can do without


def test_worker_of_a_chief_comes_back_after_a_failure_of_any_kind(script, tmp_path):
    path = script("""
        job = own.task_type
        if (job, own.task_index) == ("worker", 1):
            note()
            count = len(notes())
            if count == 1:
                sys.exit(6)
            if count == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        until(lambda: job == "chief" and len(notes()) == 3)
    """)
    result = run("-n", "2", "--ps", "1", "--max-restarts", "2", path)
    assert result.returncode == 0, result.stderr
    assert "worker 1 failed with exit code 6; it starts again." in result.stderr
    assert "worker 1 was killed by SIGKILL; it starts again in 1 s." in result.stderr
