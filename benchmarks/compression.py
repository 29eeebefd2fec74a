"""Gradient compression beside what one would use instead, over links of a given speed.

    python benchmarks/compression.py step --rates 100mbit --out compression.json
    python benchmarks/compression.py encode

Sub-commands: ``step`` (time and bytes of a training step), ``encode`` (speed of the compressors),
``small`` (many small gradients beside one), ``growth`` (bytes against the number of workers).
``README.md`` beside this file says what is measured and how.
"""

import argparse
import itertools
import json
import signal
import statistics
import sys
from pathlib import Path

import limits
import network
from contenders.compressors import COMPRESSORS
from step_time import (
    ContenderFailed,
    installed_versions,
    machine,
    prepare_venv,
    report_head,
    spread,
)
from tables import as_text, encode_table, growth_table, small_table, step_table
from workers import run_workers

TORCH = ("torch", "torch_fp16", "torch_power_sgd")
OURS = ("none", *COMPRESSORS)
ALL = ("stock", *OURS, *TORCH)
GRADIENTS = (2, 25, 100)  # MB
GROWTH = ("none", "int8", "one_bit", "top_k", "power_sgd")
EXIT_NO_NETWORK = 3


def main(arguments=None):
    """Runs a sub-command; returns 0, 1 if a contender failed, or 3 without permission."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs
    try:
        if options.needs_network:
            network.require()
        host = machine()
        python = Path(sys.executable) if options.no_venv else prepare_venv()
        versions = installed_versions(python)
        figures = options.measure(options, python, versions)
    except network.NetworkUnavailable as error:
        print(error, file=sys.stderr)
        return EXIT_NO_NETWORK
    report = {
        **report_head(f"compression {options.command}", arguments, host, versions),
        "threads_per_process": options.threads,
        **figures,
    }
    print("\n" + as_text(report, options.table))
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")
        print(f"\nWritten to {options.out}")
    return 1 if any("error" in row for row in report["results"]) else 0


def _parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name, help_, measure, table, known, default, timeout):
        each = commands.add_parser(
            name, help=help_, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        each.set_defaults(measure=measure, table=table, needs_network=False)
        each.add_argument(
            "--contenders", type=_some_of(known), default=list(default), metavar="NAME,..."
        )
        each.add_argument("--threads", type=_positive, default=1, help="of each process")
        each.add_argument("--timeout", type=_positive, default=timeout, help="s for each run")
        each.add_argument("--out", type=Path, metavar="FILE", help="write the figures, as JSON")
        each.add_argument("--quick", action="store_true", help="as few steps as there can be")
        each.add_argument("--no-venv", action="store_true", help="use this interpreter's packages")
        return each

    step = command("step", "training steps", measure_step, step_table, ALL, ALL, 600)
    step.set_defaults(needs_network=True)
    step.add_argument("--gradients", type=_megabytes, default=[25], metavar="MB,...")
    step.add_argument("--workers", type=_workers, default=[2], metavar="N,...")
    step.add_argument("--rates", type=_each(network.bits_per_second), default=["100mbit"])
    step.add_argument("--delays", type=_each(network.seconds), default=["0"])
    step.add_argument("--rounds", type=_positive, default=3)
    step.add_argument("--steps", type=_positive, default=10, help="that are measured in a run")
    step.add_argument("--warmup", type=_positive, default=4, help="steps before those")
    step.add_argument("--batch-size", type=_positive, default=32, help="of each worker")
    encode = command(
        "encode", "compressors alone", measure_encode, encode_table, COMPRESSORS, COMPRESSORS, 600
    )
    encode.add_argument("--repeats", type=_positive, default=7)
    small = command(
        "small", "small gradients", measure_small, small_table, OURS, ("none", "one_bit"), 300
    )
    small.add_argument("--rounds", type=_positive, default=3)
    small.add_argument("--steps", type=_positive, default=50)
    growth = command("growth", "bytes by workers", measure_growth, growth_table, OURS, GROWTH, 900)
    growth.add_argument("--gradients", type=_megabytes, default=[2], metavar="MB,...")
    growth.add_argument("--workers", type=_workers, default=[2, 3, 4, 8], metavar="N,...")
    growth.add_argument("--steps", type=_positive, default=4)
    growth.add_argument("--loopback", action="store_true", help="without namespaces, as any user")
    growth.set_defaults(warmup=2, batch_size=4)
    options = parser.parse_args(arguments)
    if options.command == "growth":
        options.needs_network = not options.loopback
    if options.quick:
        quick = {"rounds": 1, "steps": 2, "repeats": 1, "gradients": [2], "workers": [2]}
        vars(options).update({k: v for k, v in quick.items() if k in options})
    return options


def _each(check):
    """A parser of texts that ``check`` accepts, separated by commas."""

    def parse(text):
        try:
            for part in text.split(","):
                check(part)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text.split(",")

    return parse


def _some_of(known):
    def check(name):
        if name not in known:
            raise ValueError(f"expected some of {','.join(known)}, got {name}")

    return _each(check)


def _positive(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return int(text)


def _megabytes(text):
    return [int(part) for part in _some_of([str(size) for size in GRADIENTS])(text)]


def _workers(text):
    counts = [int(part) for part in text.split(",")]
    if not all(2 <= count <= 100 for count in counts):
        raise argparse.ArgumentTypeError(f"expected numbers from 2 to 100, got {text}")
    return counts


# The measurements. Each returns the part of the report that is its own.


def measure_step(options, python, versions):
    """Training steps of all contenders in turn, for each model, cluster and link."""
    contenders, missing = _installed(options.contenders, versions)
    rows, goals, skipped = [], [], {}
    for megabytes, workers in itertools.product(options.gradients, options.workers):
        alone = _alone(options, python, contenders, megabytes, workers)
        encode = _encode_seconds(options, python, contenders, megabytes, workers)
        for rate, delay in itertools.product(options.rates, options.delays):
            place = {"gradients": megabytes, "workers": workers, "rate": rate, "delay": delay}
            try:
                with network.hosts(workers, rate, delay) as hosts:
                    place["network"] = hosts.how
                    runs = _turns(options, python, contenders, hosts, place)
            except network.NetworkUnavailable as error:
                if not network.seconds(delay):
                    raise
                skipped[f"delay {delay}"] = str(error)
                print(error, file=sys.stderr, flush=True)
                continue
            new = [place | _step_row(name, runs[name], alone, encode, rate) for name in runs]
            rows += new
            goals += [place | goal for goal in _step_goals(new, rate)]
    settings = ("rounds", "steps", "warmup", "batch_size")
    return {
        **{name: getattr(options, name) for name in settings},
        "results": rows,
        "goals": goals,
        "missing": missing,
        "skipped": skipped,
    }


def _installed(contenders, versions):
    """The contenders whose packages there are, and what the others lack."""
    missing = {}
    for name in contenders:
        needed = ["torch"] if name in TORCH else ["tensorflow", "keras"]
        needed += ["tfdist"] if name in OURS else []
        if lacking := [package for package in needed if package not in versions]:
            missing[name] = lacking
            print(f"{name} is left out: {', '.join(lacking)} not installed", flush=True)
    return [name for name in contenders if name not in missing], missing


def _train(options, python, name, hosts, megabytes, is_alone=False):
    """Trains once; returns the workers' results as one."""
    script = "link_stock.py" if name == "stock" else "link_tfdist.py"
    script = "link_torch.py" if name in TORCH else script
    arguments = [
        f"--contender={name}",
        f"--gradients={megabytes}",
        f"--batch-size={options.batch_size}",
        f"--warmup={options.warmup}",
        f"--steps={options.steps}",
    ]
    results = run_workers(
        python,
        script,
        arguments + (["--alone"] if is_alone else []),
        hosts,
        threads=options.threads,
        timeout=options.timeout,
        together=not is_alone,
    )
    slowest = max(results, key=lambda result: result["step_seconds"])
    return slowest | {
        "wire_bytes": statistics.mean(result["wire_bytes"] for result in results),
        "cpu_seconds": max(result["cpu_seconds"] for result in results),
    }


def _attempt(title, function, *arguments):
    """What the function returns, or the error of a contender that failed; shows either."""
    try:
        result = function(*arguments)
    except ContenderFailed as error:
        print(f"{title} failed: {error}", flush=True)
        return error
    if "step_seconds" in result:
        print(f"{title} {1e3 * result['step_seconds']:9.1f} ms a step", flush=True)
    return result


def _alone(options, python, contenders, megabytes, workers):
    """Seconds of a step without exchange, by family; so many processes share the cores."""
    families = ["none"] if any(name not in TORCH for name in contenders) else []
    families += ["torch"] if any(name in TORCH for name in contenders) else []
    runs = {family: [] for family in families}
    for round_, family in itertools.product(range(options.rounds), families):
        title = f"{megabytes} MB, {workers} workers alone, round {round_ + 1} {family:16}"
        hosts = network.loopback(workers)
        result = _attempt(title, _train, options, python, family, hosts, megabytes, True)
        runs[family] += [] if isinstance(result, Exception) else [result["step_seconds"]]
    return {family: statistics.median(times) for family, times in runs.items() if times}


def _encode_seconds(options, python, contenders, megabytes, workers):
    """Seconds to encode a step's gradients, by compressor; so many processes share the cores."""
    names = [name for name in contenders if name in COMPRESSORS]
    if not names:
        return {}
    repeats = 1 if options.quick else 5
    arguments = [f"--gradients={megabytes}", f"--repeats={repeats}"]
    hosts = network.loopback(workers)
    results = _attempt("encode", _encode, options, python, names, arguments, hosts)
    if isinstance(results, Exception):
        return {}
    return {name: max(each[name]["encode"]["median"] for each in results) for name in names}


def _encode(options, python, names, arguments, hosts):
    """Each worker's result of ``contenders/encode.py``."""
    return run_workers(
        python,
        "encode.py",
        [f"--contenders={','.join(names)}", *arguments],
        hosts,
        threads=1,
        timeout=options.timeout,
        together=False,
    )


def _turns(options, python, contenders, hosts, place):
    """A result, or a failure, for each round of each contender."""
    runs = {name: [] for name in contenders}
    where = "{gradients} MB, {workers} workers, {rate}, delay {delay}".format(**place)
    for round_, name in itertools.product(range(options.rounds), contenders):
        title = f"{where}, round {round_ + 1} {name:16}"
        megabytes = place["gradients"]
        runs[name].append(_attempt(title, _train, options, python, name, hosts, megabytes))
    return runs


def _step_row(name, runs, alone, encode, rate):
    """A contender's figures over the rounds that it finished."""
    row = {"contender": name}
    if errors := [str(run) for run in runs if isinstance(run, Exception)]:
        row["error"] = errors[-1]
    done = [run for run in runs if not isinstance(run, Exception)]
    if not done:
        return row
    compute = alone.get("torch" if name in TORCH else "none")
    formula, wire = done[0]["formula_bytes"], [run["wire_bytes"] for run in done]
    step = statistics.median(run["step_seconds"] for run in done)
    row |= {
        "parameters": done[0]["parameters"],
        "step_ms": spread([1e3 * run["step_seconds"] for run in done]),
        "fastest_step_ms": min(1e3 * run["min_step_seconds"] for run in done),
        "mean_step_ms": spread([1e3 * run["mean_step_seconds"] for run in done]),
        "cpu_ms": spread([1e3 * run["cpu_seconds"] for run in done]),
        "wire_bytes": spread(wire),
        "formula_bytes": formula,
        "wire_ratio": statistics.median(wire) / formula,
    }
    if compute is None or (name in COMPRESSORS and name not in encode):
        return {"error": "no time of computing alone, or of encoding"} | row
    own = encode.get(name, 0.0)
    limit = limits.limit_seconds(compute, formula, network.bits_per_second(rate), own)
    return row | {
        "alone_ms": 1e3 * compute,
        "encode_ms": 1e3 * own,
        "limit_ms": 1e3 * limit,
        "over_limit": step / limit,
    }


def _step_goals(rows, rate):
    done = {
        row["contender"]: {
            "step": row["step_ms"]["median"],
            "limit": row.get("limit_ms"),
            "wire_ratio": row["wire_ratio"],
            "gradients": row["gradients"],
            "rate": network.bits_per_second(rate),
        }
        for row in rows
        if "step_ms" in row
    }
    return limits.step_goals(done, COMPRESSORS)


def measure_encode(options, python, versions):
    """How fast each compressor is on one core, with and without error feedback."""
    rows, speeds = [], {}
    for name in options.contenders:
        arguments = ["--plain", f"--repeats={options.repeats}"]
        hosts = network.loopback(1)
        results = _attempt(name, _encode, options, python, [name], arguments, hosts)
        if isinstance(results, Exception):
            rows.append({"contender": name, "error": str(results)})
            continue
        num_bytes, times = results[0]["bytes"], results[0][name]
        row = {"contender": name, "bytes": num_bytes, "payload_bytes": times.pop("payload_bytes")}
        for what, seconds in times.items():
            row[f"{what}_mb_per_s"] = num_bytes / seconds["median"] / 1e6
            row[f"{what}_seconds"] = seconds
        rows.append(row)
        speeds[name] = row["encode_mb_per_s"]
        print(f"{name:12} {speeds[name]:9.0f} MB/s", flush=True)
    return {"repeats": options.repeats, "results": rows, "goals": limits.encode_goals(speeds)}


def measure_small(options, python, versions):
    """The exchange of 200 variables of 1,000 elements beside that of one of 200,000."""
    rows = {name: {"contender": name, "many": [], "one": []} for name in options.contenders}
    for _, name in itertools.product(range(options.rounds), options.contenders):
        arguments = [f"--contender={name}", f"--steps={options.steps}"]
        result = _attempt(name, _small, options, python, arguments)
        if isinstance(result, Exception):
            rows[name]["error"] = str(result)
            continue
        for layout, seconds in result.items():
            rows[name][layout].append(1e3 * seconds)
        print(f"{name:12} {1e3 * result['many']:.2f} ms, {1e3 * result['one']:.2f} ms", flush=True)
    goals = []
    for name, row in rows.items():
        many, one = row.pop("many"), row.pop("one")
        if many:
            row |= {"many_ms": spread(many), "one_ms": spread(one)}
            row["ratio"] = row["many_ms"]["median"] / row["one_ms"]["median"]
            goals.append(limits.small_goal(name, row["ratio"]))
    figures = {"rounds": options.rounds, "steps": options.steps}
    return {**figures, "results": list(rows.values()), "goals": goals}


def _small(options, python, arguments):
    """The slower worker's median times, by layout."""
    settings = {"threads": options.threads, "timeout": options.timeout}
    results = run_workers(python, "small.py", arguments, network.loopback(2), **settings)
    return {layout: max(each[layout]["median"] for each in results) for layout in results[0]}


def measure_growth(options, python, versions):
    """What a worker sends in a step, against the number of workers."""
    rows, goals = [], []
    sizes = itertools.product(options.gradients, options.workers, options.contenders)
    for megabytes, workers, name in sizes:
        row = {"contender": name, "gradients": megabytes, "workers": workers}
        rows.append(row)
        result = _attempt(
            f"{megabytes} MB, {workers} workers {name:12}",
            *(_train_on_hosts, options, python, name, megabytes, workers),
        )
        if isinstance(result, Exception):
            row["error"] = str(result)
            continue
        ratio = result["wire_bytes"] / result["formula_bytes"]
        row |= {key: result[key] for key in ("parameters", "wire_bytes", "formula_bytes")}
        row["wire_ratio"] = ratio
        goals.append({"gradients": megabytes} | limits.growth_goal(name, workers, ratio))
    return {"steps": options.steps, "results": rows, "goals": goals}


def _train_on_hosts(options, python, name, megabytes, workers):
    if not options.loopback:
        with network.hosts(workers) as hosts:
            return _train(options, python, name, hosts, megabytes)
    result = _train(options, python, name, network.loopback(workers), megabytes)
    # The one interface counts what all workers send.
    return result | {"wire_bytes": result["wire_bytes"] / workers}


if __name__ == "__main__":
    sys.exit(main())
