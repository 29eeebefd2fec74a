"""Step times for links and numbers of workers that are not here: a model, beside what was measured.

    python benchmarks/scaling.py                        # the check, and tables to 1,024 workers
    python benchmarks/scaling.py --plot docs/scaling.svg
    python benchmarks/scaling.py --measure              # measures anew what messages cost

``alpha_beta.py`` is the model; what goes into it was measured by ``compression.py`` and by
``--measure``, and is in ``results/``. ``README.md`` beside this file says more. Needs tfdist, and
matplotlib for the plot.
"""

import argparse
import datetime
import functools
import json
import os
import statistics
import sys
from pathlib import Path

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import network
import tensorflow as tf
from alpha_beta import (
    Codec,
    Link,
    Traffic,
    fit_handling,
    fit_messages,
    of_bucket,
    step_parts,
    together,
)
from contenders.compressors import COMPRESSORS, make
from step_time import installed_versions, machine
from workers import run_workers

from tfdist import compression as tc
from tfdist.collectives import BUCKET_BYTES, bucket_specs
from tfdist.compression._exchange import COMPRESSED_BUCKET_BYTES, all_reduce_bytes

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE / "contenders"))  # whose modules import one another by name
from harness import CLASSES, FEATURES  # noqa: E402
from link import HIDDEN, shapes  # noqa: E402

RESULTS = HERE / "results"
NAMES = ("none", *COMPRESSORS)
TRAIN_WELL = ("none", "fp16", "int8", "top_k", "power_sgd")  # at usual learning rates
WORKERS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PLOTTED = ("none", "fp16", "int8", "one_bit", "top_k", "power_sgd")
_SHADES = ("#555555", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#d55e00")
COLOURS = dict(zip(PLOTTED, _SHADES, strict=True))
MEASURED_WORKERS = (2, 3, 4, 8)


def main(arguments=None):
    """Prints the check and the tables; returns 0."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    if options.measure:
        report = measure_messages()
        (options.results / "latency.json").write_text(json.dumps(report, indent=2) + "\n")
    model = Model.from_results(options.results)
    lines = model.describe() + check_table(model) + tables(model, options)
    print("\n".join(lines))
    if options.plot:
        plot(model, options.plot)
        print(f"\nWritten to {options.plot}")
    return 0


def _parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of reports")
    parser.add_argument("--measure", action="store_true", help="measure what messages cost")
    parser.add_argument("--gradients", type=float, default=100.0, metavar="MB")
    parser.add_argument("--compute", type=float, default=0.2, metavar="S", help="of a step alone")
    parser.add_argument("--rate", default="1gbit", help="of the links")
    parser.add_argument("--delay", default="50us", help="one way")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="an SVG, PNG or PDF file")
    options = parser.parse_args(arguments)
    try:
        options.link = Link(network.bits_per_second(options.rate), network.seconds(options.delay))
    except ValueError as error:
        parser.error(str(error))
    return options


# What goes into the model.


@functools.cache
def specs_of(megabytes):
    """The gradients of a model, last layer first: those of ``compression.py`` where it has them."""
    if megabytes in HIDDEN:
        made = shapes((FEATURES, *HIDDEN[megabytes], CLASSES))
    else:  # square layers of about 4 MB
        count = max(1, round(megabytes / 4))
        side = max(1, round((megabytes * 1e6 / 4 / count) ** 0.5))
        made = [(side, side)] * count
    return tuple(tf.TensorSpec(shape, tf.float32) for shape in reversed(made))


@functools.cache
def traffic_of(name, megabytes, workers):
    """What a worker does in a step to exchange such gradients.

    Raises:
        RuntimeError: the library sends another number of bytes.
    """
    specs = specs_of(megabytes)
    exchange = tc.as_exchange(make(name))
    size = float(sum(4 * spec.shape.num_elements() for spec in specs))
    sent = exchange.sent_bytes(specs, workers)
    if name == "none":
        buckets = bucket_specs(specs, BUCKET_BYTES)
        traffic = Traffic(size, sent, {"sum": len(buckets)})
    elif exchange.compressor_of is None:  # power_sgd: two all-reduces, which fit into a bucket
        traffic = Traffic(size, sent, {"sum": 2}, encoded_bytes=size)
    else:
        parts = []
        for spec in bucket_specs(specs, COMPRESSED_BUCKET_BYTES):
            ways = tc.sent_through(exchange.compressor_of(spec), spec, workers)
            way = min(ways, key=ways.get)
            parts.append(of_bucket(way, ways[way], 4.0 * spec.shape.num_elements(), workers))
        traffic = together(parts)
    expected = all_reduce_bytes(size, workers) if name == "none" else sent
    if abs(traffic.sent_bytes - expected) > 1e-6 * expected:
        raise RuntimeError(f"{name}: {traffic.sent_bytes} bytes, the library sends {expected}.")
    return traffic


class Model:
    """The model with its figures.

    Args:
        encode: the report of ``compression.py encode``.
        latency: the report of :func:`measure_messages`.
        steps: list of reports of ``compression.py step``. Handling is fitted to the rows with the
            fewest workers, and of these the smallest gradients; all others are predictions.
    """

    def __init__(self, encode, latency, steps):
        self.codecs = {"none": Codec()}
        for row in encode["results"]:
            decode = row.get("decode_mb_per_s")
            self.codecs[row["contender"]] = Codec(
                1e-6 / row["encode_mb_per_s"], 1e-6 / decode if decode else 0.0
            )
        self.messages = fit_messages(
            [(row["primitive"], row["workers"], row["cpu_seconds"]) for row in latency["results"]]
        )
        rows = [row for report in steps for row in report["results"] if _is_usable(row)]
        first = min((row["workers"], row["gradients"]) for row in rows)
        self.rows = [row | {"fitted": (row["workers"], row["gradients"]) == first} for row in rows]
        self.handling = 0.0
        points = []
        for row in self.rows:
            if row["fitted"]:
                size = traffic_of(row["contender"], row["gradients"], row["workers"])[0]
                points.append((row["step_ms"]["median"] / 1e3, self.predict_row(row), size))
        self.handling = fit_handling(points)

    @classmethod
    def from_results(cls, folder):
        """The model with the figures of a folder of reports."""
        reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        by_kind = {}
        for report in reports:
            by_kind.setdefault(report["benchmark"], []).append(report)
        missing = {"compression encode", "compression step", "latency"} - by_kind.keys()
        if missing:
            raise SystemExit(f"{folder} has no report of: {', '.join(sorted(missing))}")
        return cls(
            by_kind["compression encode"][-1], by_kind["latency"][-1], by_kind["compression step"]
        )

    def parts(self, name, megabytes, workers, compute, link):
        """Seconds of a step, by what they go to."""
        traffic = traffic_of(name, megabytes, workers)
        return step_parts(
            compute, traffic, workers, link, self.codecs[name], self.messages, self.handling
        )

    def step(self, *arguments):
        """Seconds of a step."""
        return sum(self.parts(*arguments).values())

    def predict_row(self, row):
        """Seconds of a step that was measured."""
        link = Link(network.bits_per_second(row["rate"]), network.seconds(row["delay"]))
        compute = row["alone_ms"] / 1e3
        return self.step(row["contender"], row["gradients"], row["workers"], compute, link)

    def errors(self, fitted):
        """How far predictions are off, as parts of what was measured, by row."""
        rows = [row for row in self.rows if row["fitted"] == fitted]
        return [(row, self.predict_row(row) * 1e3 / row["step_ms"]["median"] - 1) for row in rows]

    def describe(self):
        """The figures, in words."""
        lines = [f"handling: {self.handling * 1e9:.2f} ms for each MB of gradient"]
        for primitive, fixed in self.messages.fixed.items():
            each = self.messages.each[primitive]
            lines.append(
                f"{primitive}: {1e3 * fixed:.2f} ms and {1e3 * each:.2f} ms for each message"
            )
        return lines


def _is_usable(row):
    return row.get("contender") in NAMES and "step_ms" in row and "alone_ms" in row


def measure_messages():
    """Processor time of collectives of next to nothing, over loopback, as a report."""
    host, rows = machine(), []
    for workers in MEASURED_WORKERS:
        arguments = ["--contender=none", "--steps=40"]
        results = run_workers(
            Path(sys.executable),
            "latency.py",
            arguments,
            network.loopback(workers),
            threads=1,
            timeout=300,
        )
        for primitive in results[0]:
            times = [result[primitive] for result in results]
            rows.append(
                {
                    "primitive": primitive,
                    "workers": workers,
                    "cpu_seconds": statistics.median(t["cpu_seconds"] for t in times),
                    "seconds": max(t["seconds"] for t in times),
                }
            )
            print(f"{workers} workers, {primitive}: {rows[-1]['cpu_seconds'] * 1e3:.2f} ms of CPU")
    return {
        "benchmark": "latency",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": ["python", "benchmarks/scaling.py", "--measure"],
        "machine": host,
        "versions": installed_versions(Path(sys.executable)),
        "threads_per_process": 1,
        "results": rows,
    }


# What is shown.


def check_table(model):
    """Predictions beside what was measured."""
    lines = [
        "",
        "Predicted steps beside measured ones",
        f"{'':11}{'MB':>5}{'workers':>8}{'rate':>9}{'delay':>7}{'measured, ms':>14}"
        f"{'model, ms':>11}{'error':>8}",
    ]
    for fitted in (True, False):
        for row, error in model.errors(fitted):
            lines.append(
                f"{row['contender']:11}{row['gradients']:5}{row['workers']:8}{row['rate']:>9}"
                f"{row['delay']:>7}{row['step_ms']['median']:14.0f}"
                f"{1e3 * model.predict_row(row):11.0f}{100 * error:+7.0f}%"
                + ("  (handling is fitted to it)" if fitted else "")
            )
    errors = [abs(error) for _, error in model.errors(False)]
    if errors:
        lines.append(
            f"Predictions are off by {100 * statistics.median(errors):.0f} % (median), "
            f"{100 * max(errors):.0f} % at most, in {len(errors)} steps that nothing was fitted to."
        )
    return lines


def tables(model, options):
    """Step times by number of workers, and what they go to with the most of them."""
    megabytes, compute, link = options.gradients, options.compute, options.link
    lines = [
        "",
        f"{megabytes:g} MB of gradients, {compute:g} s of computing, {options.rate}, delay "
        f"{options.delay}; seconds of a step by number of workers",
        f"{'':11}" + "".join(f"{workers:>8}" for workers in WORKERS),
    ]
    for name in NAMES:
        steps = [model.step(name, megabytes, workers, compute, link) for workers in WORKERS]
        lines.append(f"{name:11}" + "".join(f"{seconds:8.2f}" for seconds in steps))
    for workers in (WORKERS[2], WORKERS[-1]):
        parts = {name: model.parts(name, megabytes, workers, compute, link) for name in NAMES}
        kinds = list(parts["none"])
        lines += ["", f"{workers} workers, seconds by what they go to"]
        lines.append(f"{'':11}" + "".join(f"{kind:>10}" for kind in kinds))
        for name in NAMES:
            lines.append(f"{name:11}" + "".join(f"{parts[name][kind]:10.3f}" for kind in kinds))
    return lines


def best(model, megabytes, workers, link):
    """The fastest exchange of those that train well at usual learning rates."""
    return min(TRAIN_WELL, key=lambda name: model.step(name, megabytes, workers, 0.0, link))


def plot(model, path):
    """Which one for me: by link and model, by link, and by number of workers.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    choice, by_link, by_workers = figure.subplots(1, 3)
    _plot_choice(model, choice)
    rates = [10 ** (7 + i / 10) for i in range(41)]
    for name in PLOTTED:
        steps = [model.step(name, 100, 2, 0.71, Link(rate)) for rate in rates]
        by_link.loglog(rates, steps, color=COLOURS[name], label=name)
    for row in model.rows:
        shown = row["contender"] in PLOTTED and row["gradients"] == 100 and row["workers"] == 2
        if shown and network.seconds(row["delay"]) == 0:
            x = network.bits_per_second(row["rate"])
            by_link.plot(x, row["step_ms"]["median"] / 1e3, "o", color=COLOURS[row["contender"]])
    by_link.set(
        title="2 workers, 100 MB, computing 0.71 s (dots: measured)",
        xlabel="link, bits per second",
        ylabel="step, s",
    )
    link = Link(1e9, 50e-6)
    for name in PLOTTED:
        steps = [model.step(name, 100, workers, 0.2, link) for workers in WORKERS]
        by_workers.loglog(WORKERS, steps, color=COLOURS[name], label=name, base=2)
    by_workers.set(
        title="1 Gbit/s, 50 µs, 100 MB, computing 0.2 s (model)",
        xlabel="workers",
        ylabel="step, s",
    )
    for axes in (by_link, by_workers):
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _plot_choice(model, axes):
    rates = [10 ** (7 + i / 12) for i in range(49)]
    sizes = [float(2 ** (1 + i / 3)) for i in range(28)]
    numbers = [[TRAIN_WELL.index(best(model, s, 8, Link(r, 50e-6))) for r in rates] for s in sizes]
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colours = ListedColormap([COLOURS[name] for name in TRAIN_WELL])
    axes.pcolormesh(
        rates, sizes, numbers, cmap=colours, vmin=-0.5, vmax=len(TRAIN_WELL) - 0.5, rasterized=True
    )
    axes.set(
        xscale="log",
        yscale="log",
        title="fastest of those that train well, 8 workers",
        xlabel="link, bits per second",
        ylabel="gradients, MB",
    )
    seen = sorted({number for row in numbers for number in row})
    handles = [Patch(color=COLOURS[TRAIN_WELL[n]], label=TRAIN_WELL[n]) for n in seen]
    axes.legend(handles=handles)


if __name__ == "__main__":
    sys.exit(main())
