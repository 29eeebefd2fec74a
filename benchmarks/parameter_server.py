"""Parameter-server training beside ``tf_keras`` 2, with a straggler, by loss and by bytes.

    python benchmarks/parameter_server.py updates --out parameter_server.json
    python benchmarks/parameter_server.py straggler

Sub-commands: ``updates`` (steps per second beside ``tf_keras``), ``straggler`` (steps per second
when one of four workers is ten times slower), ``loss`` (loss against time), ``bytes`` (bytes of a
step on the wire beside the formula), ``back`` (from the death of a worker to its next step). All
processes run on this machine, over loopback. ``README.md`` beside this file says what is measured
and how.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from step_time import ContenderFailed, installed_versions, machine, prepare_venv, report_head

HERE = Path(__file__).resolve().parent
UPDATES_GOAL = 1.3  # steps per second over those of tf_keras, at least
STRAGGLER_GOAL = 0.77  # steps per second over those without a straggler, at least (3.1 of 4)
BYTES_GOAL = 0.05  # how far the wire may be from the formula
BACK_GOAL = 10.0  # s from the death of a worker until it trains again, at most
CONSISTENCIES = ("Async()", "Stale(4)", "Sync()", "Sync(1)")


def main(arguments=None):
    """Runs a sub-command; returns 0, or 1 if a contender failed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    host = machine()
    python = Path(sys.executable) if options.no_venv else prepare_venv()
    versions = installed_versions(python)
    rows, goals = options.measure(options, python)
    report = {
        **report_head(f"parameter_server {options.command}", arguments, host, versions),
        "threads_per_process": options.threads,
        "results": rows,
        "goals": goals,
    }
    print(f"\n{host['cpu']}, {host['cores']} cores; {options.threads} thread(s) for each process")
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    for row in rows:
        print(row.pop("line"))
    for goal in goals:
        print(f"{goal['goal']:52}{goal['value']:8.2f}  goal {goal['bound']}: {goal['verdict']}")
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")
        print(f"\nWritten to {options.out}")
    return 1 if any("error" in row for row in rows) else 0


def _parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, measure, steps in (
        ("updates", measure_updates, 150),
        ("straggler", measure_straggler, 120),
        ("loss", measure_loss, 0),
        ("bytes", measure_bytes, 20),
        ("back", measure_back, 0),
    ):
        each = commands.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        each.set_defaults(measure=measure)
        each.add_argument("--steps", type=int, default=steps, help="of an epoch")
        each.add_argument("--rounds", type=int, default=3)
        each.add_argument("--threads", type=int, default=1, help="of each process")
        each.add_argument("--timeout", type=float, default=600, help="s for each run")
        each.add_argument("--out", type=Path, metavar="FILE", help="write the figures, as JSON")
        each.add_argument("--no-venv", action="store_true", help="use this interpreter's packages")
    return parser.parse_args(arguments)


def run(options, python, script, *arguments, workers=2, servers=1, launcher=()):
    """Starts a contender with ``tfdist run``; returns what its chief has reported."""
    command = [python, "-m", "tfdist.launch", "run", "--ps", str(servers), "-n", str(workers)]
    command += [
        "--threads",
        str(options.threads),
        *launcher,
        HERE / "contenders" / script,
        *arguments,
    ]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=options.timeout
            )
        except subprocess.TimeoutExpired as error:
            raise ContenderFailed(f"not done after {options.timeout} s") from error
    found = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT" in line]
    if not found:
        raise ContenderFailed((done.stdout + done.stderr)[-3000:])
    return json.loads(found[-1])


def _repeat(options, python, name, script, arguments, **shape):
    """The results of all rounds of one contender, or its failure."""
    results = []
    for number in range(options.rounds):
        try:
            results.append(run(options, python, script, *arguments, **shape))
        except ContenderFailed as error:
            print(f"{name} failed: {error}", flush=True)
            return {"contender": name, "error": str(error), "line": f"{name:44} failed"}
        rate = results[-1].get("steps_per_second")
        done = "done" if rate is None else f"{rate:.1f} steps/s"
        print(f"{name}, round {number + 1}: {done}", flush=True)
    return {"contender": name, "runs": results}


def _rate_row(row):
    if "error" not in row:
        rates = [result["steps_per_second"] for result in row["runs"]]
        row["steps_per_second"] = statistics.median(rates)
        spread = f"{min(rates):.1f} to {max(rates):.1f}"
        stale = row["runs"][-1].get("staleness")
        more = "" if stale is None else f", mean staleness {stale:.2f}"
        row["line"] = (
            f"{row['contender']:44}{row['steps_per_second']:8.1f} steps/s ({spread}{more})"
        )
    return row


def _at_least(label, value, bound):
    return {
        "goal": label,
        "value": value,
        "bound": f">= {bound}",
        "verdict": "met" if value >= bound else "missed",
    }


def measure_updates(options, python):
    """Steps per second of two workers and a server, 1 M parameters."""
    common = [f"--steps={options.steps}"]
    several = "--steps-per-execution=5"
    contenders = {
        "tf_keras": ("servers_tf_keras.py", common),
        "tfdist": ("servers_tfdist.py", common),
        "tfdist, fed by the chief": ("servers_tfdist.py", [*common, "--fed-by=chief"]),
        "tf_keras, 5 steps per execution": ("servers_tf_keras.py", [*common, several]),
        "tfdist, 5 steps per execution": ("servers_tfdist.py", [*common, several]),
    }
    rows = [
        _rate_row(_repeat(options, python, name, script, arguments))
        for name, (script, arguments) in contenders.items()
    ]
    rates = {r["contender"]: r["steps_per_second"] for r in rows if "error" not in r}
    goals = [
        _at_least(f"{ours} / {theirs}", rates[ours] / rates[theirs], UPDATES_GOAL)
        for ours, theirs in (
            ("tfdist", "tf_keras"),
            ("tfdist, 5 steps per execution", "tf_keras, 5 steps per execution"),
        )
        if ours in rates and theirs in rates
    ]
    return rows, goals


def measure_straggler(options, python):
    """Examples per second of four workers, one of them ten times slower, beside none slower.

    The work of a step is small sleeps of the core, so that four workers fit two cores: what is
    measured is who waits for whom.
    """
    rows, goals, rates = [], [], {}
    for consistency in CONSISTENCIES:
        for slow in (1, 10):
            arguments = [
                f"--consistency={consistency}",
                f"--steps={options.steps}",
                f"--slow={slow}",
                "--nap-ms=20",
                "--batch-size=16",
                "--fed-by=chief",
                "--model=tiny",
            ]
            name = f"{consistency}, {'one worker 10 x slower' if slow > 1 else 'none slower'}"
            row = _rate_row(
                _repeat(options, python, name, "servers_tfdist.py", arguments, workers=4)
            )
            rows.append(row)
            if "error" not in row:
                rates[consistency, slow] = row["steps_per_second"]
        if (consistency, 10) in rates and (consistency, 1) in rates:
            ratio = rates[consistency, 10] / rates[consistency, 1]
            goal = _at_least(f"{consistency}: slowed / not slowed", ratio, STRAGGLER_GOAL)
            if consistency != "Async()":
                goal["bound"], goal["verdict"] = "none", "reported"
            goals.append(goal)
    return rows, goals


def measure_loss(options, python):
    """Loss against time, with a straggler: digits, and a factorisation with sparse embeddings."""
    rows, goals = [], []
    for task in ("digits", "recommender"):
        times = {}
        for consistency in CONSISTENCIES:
            arguments = [f"--task={task}", f"--consistency={consistency}", "--nap-ms=20"]
            row = _repeat(
                options,
                python,
                f"{task}, {consistency}",
                "servers_loss.py",
                [*arguments, "--slow=10"],
                workers=4,
            )
            if "error" not in row:
                seconds = [result["seconds_to_target"] for result in row["runs"]]
                times[consistency] = statistics.median(seconds)
                final = statistics.median(result["loss_at_end"] for result in row["runs"])
                row["line"] = (
                    f"{row['contender']:32}{times[consistency]:8.1f} s to the loss of "
                    f"{row['runs'][0]['target']}, {final:.4f} after {row['runs'][0]['seconds']} s"
                )
            rows.append(row)
        if {"Stale(4)", "Sync()"} <= times.keys():
            ratio = times["Stale(4)"] / times["Sync()"]
            goals.append(
                {
                    "goal": f"{task}: time of Stale(4) / Sync() to the same loss",
                    "value": ratio,
                    "bound": "<= 1",
                    "verdict": "met" if ratio <= 1 else "missed",
                }
            )
    return rows, goals


def measure_bytes(options, python):
    """Bytes that leave and reach one server in a step, beside what the formula says."""
    rows, goals = [], []
    for compression, pull in ((None, None), ("top_k", "bfloat16"), ("int8", "int8")):
        arguments = [f"--steps={options.steps}", "--count-bytes"]
        arguments += [f"--compression={compression}"] if compression else []
        arguments += [f"--pull-dtype={pull}"] if pull else []
        name = f"push {compression or 'float32'}, pull {pull or 'float32'}"
        row = _repeat(options, python, name, "servers_tfdist.py", arguments, workers=1)
        if "error" not in row:
            wire = statistics.median(result["wire_bytes"] for result in row["runs"])
            formula = row["runs"][0]["formula_bytes"]
            row["line"] = f"{name:44}{wire / 1e3:10.1f} kB a step, formula {formula / 1e3:.1f}"
            off = abs(wire / formula - 1)
            goals.append(
                {
                    "goal": f"{name}: wire / formula",
                    "value": wire / formula,
                    "bound": f"1 +- {BYTES_GOAL}",
                    "verdict": "met" if off <= BYTES_GOAL else "missed",
                }
            )
        rows.append(row)
    return rows, goals


def measure_back(options, python):
    """Seconds from the SIGKILL of one of two workers until it has trained again."""
    name = "one of two workers killed"
    row = _repeat(options, python, name, "servers_back.py", [], launcher=["--max-restarts", "1"])
    goals = []
    if "error" not in row:
        seconds = statistics.median(result["seconds"] for result in row["runs"])
        imports = statistics.median(result["import_seconds"] for result in row["runs"])
        row["line"] = f"{name:44}{seconds:8.1f} s; the import of TensorFlow takes {imports:.1f} s"
        goals.append(
            {
                "goal": "from the death of a worker to its next step, s",
                "value": seconds,
                "bound": f"<= {BACK_GOAL}",
                "verdict": "met" if seconds <= BACK_GOAL else "missed",
            }
        )
    return [row], goals


if __name__ == "__main__":
    sys.exit(main())
