"""Restores what ``saves_in_every_way`` wrote, with another number of replicas, and trains on.

With ``--devices 0`` in plain Keras, without tfdist. Writes predictions and final weights.
"""

import argparse
import contextlib
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

import saving_cases
from case_table import BATCH, X, Y, adam, cross_entropy


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    scope = contextlib.nullcontext
    if args.devices:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * args.devices
        )
        import tfdist

        scope = tfdist.MirroredStrategy([f"CPU:{i}" for i in range(args.devices)]).scope

    def blank():
        with scope():
            model = saving_cases.model_with_state()
            model.compile(adam(), cross_entropy())
            model.optimizer.build(model.trainable_variables)
        return model

    with scope():
        models = {"keras": keras.models.load_model(args.directory / "model.keras")}
    models["weights"] = blank()
    models["weights"].load_weights(args.directory / "model.weights.h5")
    models["checkpoint"] = blank()
    tf.train.Checkpoint(model=models["checkpoint"], optimizer=models["checkpoint"].optimizer).read(
        str(args.directory / "checkpoint")
    ).assert_existing_objects_matched()

    arrays = {}
    exported = tf.saved_model.load(str(args.directory / "exported"))
    arrays["exported/pred"] = exported.serve(tf.constant(X[:37])).numpy()
    for name, model in models.items():
        arrays[f"{name}/pred"] = model.predict(X[:37], verbose=0)
        rows = saving_cases.SECOND
        model.fit(X[rows], Y[rows], batch_size=BATCH, shuffle=False, verbose=0)
        for i, value in enumerate(model.get_weights()):
            arrays[f"{name}/w/{i:02d}"] = value
    if not args.devices and any(name.split(".")[0] == "tfdist" for name in sys.modules):
        raise RuntimeError("a plain process must load the files without tfdist")
    np.savez(args.out, **arrays)


if __name__ == "__main__":
    main()
