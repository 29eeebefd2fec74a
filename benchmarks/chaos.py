"""Kills a training job again and again, and says what came of it.

``python benchmarks/chaos.py --kills 500 [--workers 2] [--seed 1] [--out FILE]``

The job is that of ``tests/faults``, under ``tfdist run``: its workers and its launcher get SIGKILL,
SIGTERM and SIGSTOP, before steps, in the forward pass, while they wait in a collective, at single
file operations of a checkpoint, while one is restored; some never begin their step. All is drawn
from the seed. At the end the weights must be those of the same job without kills, bit for bit, and
no checkpoint may be lost that was reported as written. Shown as well: the time from each signal to
the next trained step (where no other fault came before it), and how much of it a bare
``import tensorflow, keras`` takes. About ten seconds a kill.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FAULTS = Path(__file__).resolve().parent.parent / "tests" / "faults"


def load_harness():
    """The module ``harness`` of ``tests/faults``."""
    spec = importlib.util.spec_from_file_location("harness", FAULTS / "harness.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def import_seconds(processes):
    """Seconds that so many processes need to import TensorFlow and Keras side by side."""
    command = [sys.executable, "-c", "import tensorflow, keras"]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    began = time.perf_counter()
    started = [
        subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) for _ in range(processes)
    ]
    for process in started:
        process.wait(timeout=300)
    return time.perf_counter() - began


def by_kind(recoveries):
    """Times from the signal to the next step, by signal and place."""
    kinds = {}
    for word, seconds, attempts in recoveries:
        signal, _, _, place = word.split(":")
        if attempts == 1:
            kinds.setdefault(f"{signal} {place.partition('-')[0]}", []).append(seconds)
    return dict(sorted(kinds.items()))


def main():
    """Runs the job without kills, then with them; exits with 1 if it did not come out the same."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="for the job's files (default: temporary)")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    args = parser.parse_args()
    if args.kills < 1 or args.workers < 2:
        parser.error("--kills must be 1 or more, and --workers 2 or more")
    harness = load_harness()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    words = harness.draw(args.seed, args.kills, args.workers)
    epochs = harness.epochs_for(words)
    limit = 120.0 + 60.0 * args.kills
    options = {"workers": args.workers, "seconds": limit}

    importing = import_seconds(args.workers)
    status, said = harness.run_job(folder / "calm", [], epochs, **options)
    if status != 0:
        sys.exit(f"the job without kills ended with {status}:\n{said}")
    began = time.perf_counter()
    status, said = harness.run_job(folder / "harmed", words, epochs, **options)
    seconds = time.perf_counter() - began
    importing = min(importing, import_seconds(args.workers))  # of a machine that is not ours alone

    calm, harmed = harness.report(folder / "calm"), harness.report(folder / "harmed")
    same = harmed is not None and all(
        harmed[name] == calm[name] for name in ("weights", "iterations")
    )
    kinds = by_kind(harness.recoveries(folder / "harmed"))
    all_times = sorted(t for times in kinds.values() for t in times)
    figures = {
        "command": " ".join(sys.argv),
        "signals": len(harness.strikes(folder / "harmed")),
        "attempts": harmed and harmed["attempt"] + 1,
        "status": status,
        "same_as_undisturbed": same,
        "lost_checkpoints": harmed and harmed["lost_checkpoints"],
        "seconds": seconds,
        "import_seconds": importing,
        "recovery_seconds": {kind: statistics.median(times) for kind, times in kinds.items()},
        "recovery_median": statistics.median(all_times) if all_times else None,
        "recovery_max": max(all_times, default=None),
    }
    print(f"{figures['signals']} signals in {seconds:.0f} s, {args.workers} workers; job: {status}")
    print(f"weights and number of steps as undisturbed: {'yes' if same else 'NO'}")
    print(f"lost checkpoints: {figures['lost_checkpoints']}")
    print(f"import of TensorFlow and Keras, {args.workers} side by side: {importing:.1f} s")
    print("from the signal to the next trained step (seconds: median, largest, number)")
    for kind, times in kinds.items():
        print(f"  {kind:22} {statistics.median(times):5.1f} {max(times):5.1f} {len(times):4}")
    if args.out:
        beside = args.out.with_name(args.out.name + ".new")
        beside.write_text(json.dumps(figures, indent=1) + "\n")
        beside.replace(args.out)
    if status != 0 or not same or figures["lost_checkpoints"]:
        print(f"files of the job: {folder}")
        sys.exit(1)


if __name__ == "__main__":
    main()
