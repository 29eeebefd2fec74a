"""Step time of tfdist beside what one would use instead: two workers on this machine, one command.

    python benchmarks/step_time.py --out step_time.json

Needs only Python: it makes ``benchmarks/.venv`` with what ``requirements.txt`` lists and with
tfdist from this repository. The contenders take turns, each time in two fresh processes;
``README.md`` beside this file says what is measured and how.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
VENV = HERE / ".venv"
NUM_WORKERS = 2
EPOCHS = 4  # the first is the warm-up
STEPS = {"1M": 40, "25M": 8}  # in an epoch
PARAMETERS = {"1M": 995_978, "25M": 24_990_794}
INPUTS = ("finite", "static")  # finite is the headline
STOCK_GOAL, TORCH_GOAL = 1.02, 1.0  # tfdist's step time over the other's, at most


class Contender(NamedTuple):
    """One way to train: a script in ``contenders/``, and the packages it stands or falls with."""

    label: str
    script: str
    packages: tuple[str, ...]


CONTENDERS = {
    "tfdist": Contender("tfdist: model.fit", "tfdist_fit.py", ("tensorflow", "keras", "tfdist")),
    "tf_keras": Contender(
        "(a) tf_keras 2 model.fit, stock", "tf_keras_fit.py", ("tensorflow", "tf_keras")
    ),
    "loop": Contender("(b) custom loop, stock", "loop.py", ("tensorflow", "keras")),
    "torch": Contender("(c) PyTorch DDP, gloo", "torch_ddp.py", ("torch",)),
}


class ContenderFailed(RuntimeError):
    """A pair of workers failed or took too long; the message has their last lines."""


def main(arguments=None):
    """Runs the benchmark; returns 1 if a contender failed, else 0."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    host = machine()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs
    python = Path(sys.executable) if options.no_venv else prepare_venv()
    versions = installed_versions(python)
    missing = {
        name: lacking
        for name in options.contenders
        if (lacking := [p for p in CONTENDERS[name].packages if p not in versions])
    }
    runs, failures = measure(options, python, [c for c in options.contenders if c not in missing])
    report = {
        **report_head("step_time", arguments, host, versions),
        "threads_per_process": options.threads,
        "workers": NUM_WORKERS,
        "batch_size": options.batch_size,
        "epochs": EPOCHS,
        "steps_per_epoch": {m: options.steps or STEPS[m] for m in options.models},
        "rounds": options.rounds,
        "headline_input": INPUTS[0],
        "results": summarise(options, runs, missing, failures),
        "ratios": ratios(runs),
    }
    print("\n" + as_text(report))
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")
        print(f"\nWritten to {options.out}")
    return 1 if failures else 0


def _parse(arguments):
    def one_of(known):
        def parse(text):
            names = text.split(",")
            if unknown := set(names) - set(known):
                raise argparse.ArgumentTypeError(
                    f"expected some of {','.join(known)}, got {','.join(sorted(unknown))}"
                )
            return names

        return parse

    def positive(text):
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
        return int(text)

    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rounds", type=positive, default=5, help="runs of each contender")
    parser.add_argument(
        "--steps", type=positive, help=f"steps in an epoch (default: {STEPS} by model)"
    )
    parser.add_argument("--models", type=one_of(STEPS), default=list(STEPS), metavar="1M,25M")
    parser.add_argument(
        "--contenders", type=one_of(CONTENDERS), default=list(CONTENDERS), metavar="NAME,..."
    )
    parser.add_argument("--inputs", type=one_of(INPUTS), default=list(INPUTS), metavar="NAME,...")
    parser.add_argument("--batch-size", type=positive, default=128, help="over both workers")
    parser.add_argument(
        "--threads",
        type=positive,
        default=max(1, (os.cpu_count() or 1) // NUM_WORKERS),
        help="compute threads of each process",
    )
    parser.add_argument(
        "--timeout", type=positive, default=300, help="seconds a pair of workers may take"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures here, as JSON")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one round of five-step epochs, small model, finite input",
    )
    parser.add_argument(
        "--no-venv", action="store_true", help="use this interpreter's packages, install nothing"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.steps = 1, 5
        options.models, options.inputs = ["1M"], ["finite"]
    if options.steps == 1:
        parser.error("--steps must be at least 2: the time is taken from the first step's end on")
    if options.batch_size % NUM_WORKERS:
        parser.error(f"--batch-size must be a multiple of {NUM_WORKERS}, the number of workers")
    return options


# The packages.


def prepare_venv():
    """Makes ``benchmarks/.venv`` or brings it up to date; returns its interpreter.

    A requirement that can't be installed is reported and left out.
    """
    if not VENV.exists():
        print(f"Making {VENV} (some gigabytes, once)", flush=True)
        venv.create(VENV, with_pip=True)
    python = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    requirements = HERE / "requirements.txt"
    for line in requirements.read_text().splitlines():
        if (
            line
            and not line.startswith("#")
            and subprocess.run([*pip, line, "-c", requirements]).returncode
        ):
            print(f"Could not install {line}: contenders that need it are left out", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        # From a copy: pip would leave a build/ in the repository, and reuse a stale one.
        source = Path(folder) / "tfdist"
        ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
        shutil.copytree(ROOT, source, ignore=ignored)
        install = [*pip, "--force-reinstall", "--no-deps", "--no-build-isolation", source]
        if subprocess.run(install).returncode:
            print("Could not install tfdist: it is left out", flush=True)
    return python


def installed_versions(python):
    """Returns the versions of Python and of the packages that the interpreter finds."""
    names = sorted({"numpy", *itertools.chain(*(c.packages for c in CONTENDERS.values()))})
    probe = (
        "import importlib.metadata as m, json, platform\n"
        f"found = {{d.name.lower().replace('-', '_'): d.version for d in m.distributions()}}\n"
        f"print(json.dumps({{'python': platform.python_version(),"
        f" **{{n: found[n] for n in {names} if n in found}}}}))"
    )
    with tempfile.TemporaryDirectory() as elsewhere:  # not where ./tfdist would be found first
        answer = subprocess.run(
            [python, "-c", probe], cwd=elsewhere, check=True, capture_output=True, text=True
        )
    return json.loads(answer.stdout)


def report_head(benchmark, arguments, host, versions):
    """What every report begins with.

    Args:
        benchmark: the name of the script, and of its sub-command after a space.
        arguments: list of str, the command line.
        host: of :func:`machine`.
        versions: of :func:`installed_versions`.
    """
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": ["python", f"benchmarks/{benchmark.split()[0]}.py", *arguments],
        "machine": host,
        "versions": versions,
    }


def machine():
    """Describes the machine: processor, cores, system, and how busy it is before the benchmark."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, AttributeError):
        cpu = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()).group(1)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "load_average": load,
    }


# The measurement.


def measure(options, python, contenders):
    """Runs every contender in turn, round after round.

    Returns:
        runs: ``runs[model, input][contender]`` is a list of one result a round, None if it failed.
        failures: ``failures[model, input, contender]`` is the last failure's message.
    """
    runs, failures = {}, {}
    for model, input_ in itertools.product(options.models, options.inputs):
        rows = runs[model, input_] = {name: [] for name in contenders}
        for round_, name in itertools.product(range(options.rounds), contenders):
            title = f"{model} {input_} round {round_ + 1}/{options.rounds} {name:9}"
            try:
                result = run_pair(options, python, name, model, input_)
            except ContenderFailed as error:
                failures[model, input_, name] = str(error)
                result = None
                print(f"{title} failed: {error}", flush=True)
            else:
                print(
                    f"{title} {result['step_seconds'] * 1e3:8.1f} ms a step, "
                    f"{sum(result['phases'].values()):5.1f} s to the first step",
                    flush=True,
                )
            rows[name].append(result)
    return runs, failures


def run_pair(options, python, name, model, input_):
    """Trains once with a contender: two fresh worker processes; returns the slower one's result."""
    command = [
        python,
        HERE / "contenders" / CONTENDERS[name].script,
        f"--model={model}",
        f"--input={input_}",
        f"--batch-size={options.batch_size}",
        f"--steps={options.steps or STEPS[model]}",
        f"--epochs={EPOCHS}",
    ]
    addresses = [f"127.0.0.1:{port}" for port in free_ports(NUM_WORKERS)]
    deadline = time.monotonic() + options.timeout
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        logs = [Path(folder) / f"worker_{index}.log" for index in range(NUM_WORKERS)]
        workers = []
        for index, log in enumerate(logs):
            worker = subprocess.Popen(
                [*command, f"--started={time.monotonic()}"],
                cwd=folder,
                env=environment(addresses, index, options.threads),
                stdin=subprocess.PIPE,
                stdout=stack.enter_context(log.open("wb")),
                stderr=subprocess.STDOUT,
            )
            workers.append(worker)
            stack.callback(end, worker)
        while None in (results := [read_result(log) for log in logs]):
            codes = [worker.poll() for worker in workers]
            if any(code is not None for code in codes):
                raise ContenderFailed(f"a worker ended early, exit codes {codes}{last_lines(logs)}")
            if time.monotonic() > deadline:
                raise ContenderFailed(f"not done after {options.timeout} s{last_lines(logs)}")
            time.sleep(0.1)
    result = max(results, key=lambda result: result["step_seconds"])
    if result["parameters"] != PARAMETERS[model]:
        raise ContenderFailed(
            f"expected {PARAMETERS[model]} parameters, got {result['parameters']}"
        )
    return result


def free_ports(count):
    """Returns different loopback ports that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def environment(addresses, index, threads):
    """Returns a worker's environment: its place in the cluster, and the thread budget."""
    cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    return {
        **os.environ,
        "TF_CONFIG": json.dumps(cluster),
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "TF_NUM_INTEROP_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "KERAS_BACKEND": "tensorflow",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "PYTHONUNBUFFERED": "1",
    }


def read_result(log):
    """Returns the result that a worker has printed, or None so far."""
    found = re.search(r"^RESULT (.*)\n", log.read_text(errors="replace"), re.MULTILINE)
    return json.loads(found.group(1)) if found else None


def last_lines(logs, count=15):
    """Returns the end of each worker's output, to be shown with a failure."""
    text = ""
    for index, log in enumerate(logs):
        lines = log.read_text(errors="replace").splitlines()[-count:]
        text += "".join(f"\n[worker {index}] {line}" for line in lines)
    return text


def end(worker):
    """Ends a worker, which waits for this after its result, or has failed or is stuck."""
    worker.kill()
    worker.wait()
    worker.stdin.close()


# The figures.


def summarise(options, runs, missing, failures):
    """Returns a row for each model, input and contender: medians, minima and maxima over rounds."""
    rows = []
    for model, input_ in runs:
        for name in options.contenders:
            row = {"model": model, "input": input_, "contender": name, "status": "ok"}
            rows.append(row)
            done = [result for result in runs[model, input_].get(name, []) if result]
            if name in missing:
                row |= {"status": "missing", "lacks": missing[name]}
            elif (model, input_, name) in failures:
                row |= {"status": "failed", "error": failures[model, input_, name]}
            if done:
                row |= {
                    "parameters": done[0]["parameters"],
                    "loss": done[-1]["loss"],
                    "step_ms": spread([1e3 * result["step_seconds"] for result in done]),
                    "cpu_ms": spread([1e3 * result["cpu_seconds"] for result in done]),
                    "epoch_boundary_ms": spread([1e3 * r["boundary_seconds"] for r in done]),
                    "start_seconds": {
                        phase: statistics.median(result["phases"][phase] for result in done)
                        for phase in done[0]["phases"]
                    },
                    "to_first_step_seconds": spread([sum(r["phases"].values()) for r in done]),
                }
    return rows


def spread(values):
    """Returns the median, minimum and maximum, and the values themselves."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "rounds": values,
    }


def ratios(runs):
    """Returns tfdist's step time over the others' in the rounds that all of them finished."""
    rows = []
    for (model, input_), by_name in runs.items():
        for label, names, goal in (
            ("min(a, b)", ("tf_keras", "loop"), STOCK_GOAL),
            ("(c)", ("torch",), TORCH_GOAL),
        ):
            others = [by_name[name] for name in names if name in by_name]
            if "tfdist" not in by_name or not others:
                continue
            complete = [r for r in zip(by_name["tfdist"], *others, strict=True) if None not in r]
            if not complete:
                continue
            ours, *theirs = (
                [result["step_seconds"] for result in column]
                for column in zip(*complete, strict=True)
            )
            ratio = statistics.median(ours) / min(map(statistics.median, theirs))
            in_rounds = [o / min(t) for o, *t in zip(ours, *theirs, strict=True)]
            rows.append(
                {
                    "model": model,
                    "input": input_,
                    "against": label,
                    "ratio": ratio,
                    "min": min(in_rounds),
                    "max": max(in_rounds),
                    "goal": goal,
                    "met": ratio <= goal if label != "(c)" else ratio < goal,
                }
            )
    return rows


def as_text(report):
    """Returns the tables that a person reads."""
    lines = [
        f"{report['machine']['cpu']}, {report['machine']['cores']} cores; {NUM_WORKERS} workers of "
        f"{report['threads_per_process']} thread(s); batch {report['batch_size']}; "
        f"{report['rounds']} round(s); load average before: {report['machine']['load_average']}",
        ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
    ]
    groups = itertools.groupby(report["results"], key=lambda row: (row["model"], row["input"]))
    for (model, input_), rows in groups:
        lines += [
            "",
            f"{model} parameters, {input_} input"
            + (" (headline)" if input_ == report["headline_input"] else ""),
            f"{'':34}{'step, ms':>9}  {'(min - max)':17}{'CPU':>9}{'boundary':>9}"
            f"{'import':>9}{'cluster':>9}{'1st step':>9}{'total, s':>9}",
        ]
        for row in rows:
            label = CONTENDERS[row["contender"]].label
            if row["status"] == "missing":
                lines.append(f"{label:34}missing: {', '.join(row['lacks'])} not installed")
                continue
            if "step_ms" in row:
                step, start = row["step_ms"], row["start_seconds"]
                lines.append(
                    f"{label:34}{step['median']:9.1f}  "
                    f"{'({min:.1f} - {max:.1f})'.format(**step):17}"
                    f"{row['cpu_ms']['median']:9.1f}{row['epoch_boundary_ms']['median']:9.1f}"
                    f"{start['import']:9.1f}{start['cluster']:9.1f}{start['first_step']:9.1f}"
                    f"{row['to_first_step_seconds']['median']:9.1f}"
                )
            if row["status"] == "failed":
                lines.append(f"{label:34}failed: {row['error'].splitlines()[0]}")
        for row in report["ratios"]:
            if (row["model"], row["input"]) == (model, input_):
                sign = "<" if row["against"] == "(c)" else "<="
                lines.append(
                    f"tfdist / {row['against']:24} {row['ratio']:9.2f}  "
                    f"{'({min:.2f} - {max:.2f})'.format(**row):17}"
                    f" goal {sign} {row['goal']:.2f}: {'met' if row['met'] else 'missed'}"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
