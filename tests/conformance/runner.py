"""One worker of a test cluster: executes cases of a table, one result file for each.

Started by the ``CaseCluster`` of ``tests/conftest.py``. Writes ``<case>.<index>.npz``, or
``<case>.<index>.error`` with the traceback. Under a strategy the process then ends: a failed
collective poisons all later ones, so the harness starts a fresh cluster for the other cases.
"""

import argparse
import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import json
import os
import sys
import time
import traceback
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf


@dataclasses.dataclass
class Env:
    """Where a case runs. All workers of a topology share ``directory``."""

    strategy: tf.distribute.Strategy | None
    index: int  # this worker
    workers: int  # 0: one process without a strategy
    devices: int  # replicas in this worker
    directory: Path

    def scope(self):
        return self.strategy.scope() if self.strategy else contextlib.nullcontext()

    @property
    def replicas(self):
        return max(self.workers, 1) * self.devices

    def barrier(self, name):
        """Waits until every worker has come here (over files: no collective is involved)."""
        (self.directory / f"barrier-{name}.{self.index}").touch()
        limit = time.monotonic() + 60
        for i in range(max(self.workers, 1)):
            while not (self.directory / f"barrier-{name}.{i}").exists():
                if time.monotonic() > limit:
                    raise TimeoutError(f"worker {i} did not come to the barrier {name!r}")
                time.sleep(0.01)


def make_strategy(module, workers, devices, servers=None, split=None):
    """The strategy under test, from ``tfdist`` or, to test the tests, from ``tf.distribute``.

    ``servers``: keyword arguments of a ``ParameterServerStrategy``, whose call returns only on the
    chief. ``split``: those of a ``ModelParallelStrategy``.
    """
    if devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * devices
        )
    if workers == 0:
        return None
    strategies = tf.distribute if module == "tf.distribute" else importlib.import_module(module)
    if servers is not None:
        return strategies.ParameterServerStrategy(**servers)
    if split is not None:
        return strategies.ModelParallelStrategy(**split)
    if workers == 1:
        return strategies.MirroredStrategy([f"CPU:{i}" for i in range(devices)])
    return strategies.MultiWorkerMirroredStrategy()


def server_arguments(args):
    import tfdist

    partitioner = None
    if args.shards:  # also the smallest matrix
        partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(64, 2)
    consistencies = {
        "Sync": tfdist.Sync,
        "Async": tfdist.Async,
        "everything": lambda: tfdist.StalenessScaledRate(
            inner=tfdist.DelayCompensation(0.1, inner=tfdist.Stale(2))
        ),
    }
    more = {}
    if args.compressed:
        more = {"compression": tfdist.compression.one_bit(), "pull_dtype": "bfloat16"}
    consistency = consistencies[args.consistency]()
    return {"variable_partitioner": partitioner, "consistency": consistency, **more}


def load_table(path):
    sys.path[:0] = [str(Path(__file__).parent), str(path.parent)]  # tables share models and data
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return {case.name: case for case in module.CASES}


def write(path, arrays):
    """Writes the file in one piece, so that a reader never sees half of it."""
    part = path.with_suffix(".part")
    with part.open("wb") as f:
        np.savez(f, **{key: np.asarray(value) for key, value in arrays.items()})
    os.replace(part, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--strategies", default="tfdist")
    parser.add_argument("--servers", action="store_true")
    parser.add_argument("--split", type=json.loads, help="how a model is split")
    parser.add_argument("--consistency", default="Sync")
    parser.add_argument("--compressed", action="store_true")
    parser.add_argument("--shards", action="store_true")
    parser.add_argument("--colocate-ps", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", required=True)
    args = parser.parse_args()

    servers = server_arguments(args) if args.servers else None
    if args.split is not None and args.compressed:
        import tfdist

        # All elements are sent, so nothing is lost.
        args.split["compression"] = tfdist.compression.top_k(1.0)
    strategy = make_strategy(args.strategies, args.workers, args.devices, servers, args.split)
    table = load_table(args.table)
    # What was imported stays; without it a collection, of which tracing causes many, is short.
    gc.collect()
    gc.freeze()
    is_mirrored = strategy is not None and servers is None and args.split is None
    if is_mirrored and strategy.num_replicas_in_sync != args.devices * args.workers:
        raise RuntimeError(
            f"expected {args.devices * args.workers} replicas, got {strategy.num_replicas_in_sync}"
        )
    # The chief, or the process that has other processes' devices, runs the cases alone.
    is_led = servers is not None or (args.split is not None and "devices" in args.split)
    for name in args.cases.split(","):
        directory = args.out / f"{name}-files"
        directory.mkdir(exist_ok=True)
        workers = 1 if is_led else args.workers
        env = Env(strategy, args.index, workers, args.devices, directory)
        keras.utils.clear_session()
        gc.collect()
        keras.utils.set_random_seed(1)
        start = time.monotonic()
        try:
            write(args.out / f"{name}.{args.index}.npz", table[name].run(env))
            print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
        except BaseException:
            traceback.print_exc()
            error = args.out / f"{name}.{args.index}.error"
            error.with_suffix(".part").write_text(traceback.format_exc())
            os.replace(error.with_suffix(".part"), error)
            if strategy is not None:
                sys.stdout.flush()
                os._exit(1)
    if args.workers > 1 and not is_led:
        # A worker that leaves early would look like a crash to the others.
        Env(strategy, args.index, args.workers, args.devices, args.out).barrier("end")


if __name__ == "__main__":
    main()
