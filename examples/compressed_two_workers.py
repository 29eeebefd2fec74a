"""Compressed gradients on two workers: run with `tfdist run -n 2 compressed_two_workers.py`.

PowerSGD for the kernels, halves for the rest. The history tells what was sent.
"""

import argparse

import keras
from sklearn.datasets import load_digits

import tfdist
from tfdist import compression


def main():
    """Trains on scikit-learn's digits, and prints what was sent."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, help="steps in an epoch (default: all)")
    options = parser.parse_args()

    strategy = tfdist.MultiWorkerMirroredStrategy(
        compression=compression.by_size(
            1000, small=compression.fp16(), large=compression.power_sgd(rank=2)
        )
    )
    keras.utils.set_random_seed(1)
    digits = load_digits()
    x, y = digits.data.astype("float32") / 16, digits.target
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(256, "relu"),
                keras.layers.Dense(256, "relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(
        x[:1500],
        y[:1500],
        batch_size=64,
        epochs=options.epochs,
        steps_per_epoch=options.steps,
        validation_data=(x[1500:], y[1500:]),
        callbacks=[tfdist.callbacks.CommunicationMonitor()],
    ).history
    print(f"{strategy.num_replicas_in_sync} replicas")
    for name in ("sent_megabytes_per_step", "compression_ratio", "residual_to_gradient"):
        print(f"{name}: {history[name][-1]:.3g}")
    print(f"validation accuracy: {history['val_accuracy'][-1]:.3f}")


if __name__ == "__main__":
    main()
