"""Shows in a trace that gradients travel while back-propagation still makes others.

Two workers train a multi-layer perceptron with ``model.fit``; worker 0 records a few steps with
TensorFlow's profiler. Printed is the timeline of one step: the matrix products of back-propagation,
and the collectives of the gradients.

    python benchmarks/overlap.py --compression "one_bit()"
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tfdist.cluster import local_ports

LAYERS, WIDTH, BATCH, STEPS = 6, 1024, 1024, 4
COLUMNS = 60


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compression", default="None", help='such as "power_sgd(4)"')
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        train(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        run_workers(options.compression, folder)
        show(steps_of(events_in(folder)))


def run_workers(compression, folder):
    addresses = [f"127.0.0.1:{port}" for port in local_ports(2)]
    command = [sys.executable, __file__, "--compression", compression, "--folder", folder]
    workers = []
    for rank in range(2):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        env = os.environ | {"TF_CONFIG": json.dumps(task), "TF_CPP_MIN_LOG_LEVEL": "2"}
        workers.append(subprocess.Popen([*command, "--rank", str(rank)], env=env))
    for worker in workers:
        if worker.wait(timeout=300):
            sys.exit("A worker failed; see above.")


def train(options):
    """One worker: trains a step or two to trace, then those that worker 0 records."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    compression = eval(options.compression, vars(tfdist.compression) | {"None": None})
    strategy = tfdist.MultiWorkerMirroredStrategy(compression=compression)
    with strategy.scope():
        hidden = [keras.layers.Dense(WIDTH, "relu") for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *hidden, keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.default_rng(0)
    x = random.standard_normal((BATCH * STEPS, WIDTH), dtype="float32")
    y = random.integers(0, 10, BATCH * STEPS)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    if options.rank == 0:
        tf.profiler.experimental.start(options.folder)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    if options.rank == 0:
        tf.profiler.experimental.stop()


def events_in(folder):
    """The recorded operations: (start, end, name), in milliseconds, by start."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    (path,) = Path(folder).rglob("*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    events = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                start = line.timestamp_ns / 1e6 + event.offset_ps / 1e9
                name = plane.event_metadata[event.metadata_id].name
                events.append((start, start + event.duration_ps / 1e9, name))
    return sorted(events)


def steps_of(events):
    """The events of back-propagation and of the exchange, for each step."""
    backward = re.compile(r"gradient_tape/.*/(dense\w*)/MatMul/MatMul_?1?:MatMul$")
    collective = re.compile(r"/\w*(?:sgd|Optimizer)\w*/(Collective\w+):Collective")
    steps, layers_seen = [], set()
    for start, end, name in events:
        if match := backward.search(name):
            if "Relu" in name or not steps or name in layers_seen:
                steps.append([])
                layers_seen = set()
            layers_seen.add(name)
            steps[-1].append((start, end, f"back-propagation {match[1]}"))
        elif steps and (match := collective.search(name)):
            steps[-1].append((start, end, match[1]))
    return steps


def show(steps):
    """Prints the last step as bars over time."""
    if not steps:
        sys.exit("The trace holds no step.")
    step = steps[-1]
    begin, over = step[0][0], max(end for _, end, _ in step)
    backward_ends = max(end for _, end, name in step if name.startswith("back"))
    for start, end, name in step:
        left = int((start - begin) / (over - begin) * COLUMNS)
        right = max(left + 1, int((end - begin) / (over - begin) * COLUMNS))
        bar = " " * left + "#" * (right - left)
        print(f"{name:32}{start - begin:8.1f} - {end - begin:7.1f} ms  |{bar:{COLUMNS}}|")
    early = [s for s, _, name in step if name.startswith("Collective") and s < backward_ends]
    print(
        f"\n{len(early)} collectives began before the last product of back-propagation ended, "
        f"the first {backward_ends - min(early):.0f} ms before."
        if early
        else "\nNo collective began before back-propagation ended."
    )


if __name__ == "__main__":
    main()
