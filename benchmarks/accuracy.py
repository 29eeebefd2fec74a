"""Test accuracy with each gradient compression beside the uncompressed run: one command.

    python benchmarks/accuracy.py --out accuracy.json

Trains the same models from the same seeds on four replicas of this process (logical CPU devices);
needs tfdist and scikit-learn, whose bundled digits are the data. ``README.md`` beside this file
says what is measured and how.
"""

import argparse
import functools
import gc
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from scipy.ndimage import map_coordinates
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from step_time import machine, report_head

import tfdist
from tfdist import compression as tc

NUM_REPLICAS = 4
DEVICES = [f"CPU:{i}" for i in range(NUM_REPLICAS)]
MOMENTUM = 0.9
WARMUP = 0.1  # the part of all steps in which the learning rate rises
WITHIN_POINTS = 0.5
PACKAGES = ("keras", "numpy", "scikit-learn", "tensorflow", "tfdist")


class Task(NamedTuple):
    """What is learnt: the data, the model, and the settings that all contenders share."""

    what: str
    data: Callable  # () -> x_train, y_train, x_test, y_test
    model: Callable  # () -> keras.Model that returns logits
    epochs: int
    batch_size: int
    learning_rate: float
    threshold: float  # t of tfdist.compression.threshold: depends on the size of the gradients


class Contender(NamedTuple):
    """One way to exchange gradients."""

    make: Callable  # (task) -> the strategy's argument `compression`
    momentum: float = MOMENTUM  # the optimizer's
    worse_than: str | None = None  # a check of the experiment: must lose against this contender


CONTENDERS = {
    "none": Contender(lambda _: None),
    "fp16": Contender(lambda _: tc.fp16()),
    "bf16": Contender(lambda _: tc.bf16()),
    "int8": Contender(lambda _: tc.int8()),
    "qsgd_4": Contender(lambda _: tc.qsgd(4)),
    "natural": Contender(lambda _: tc.natural()),
    "one_bit": Contender(lambda _: tc.one_bit()),
    "tern_grad": Contender(lambda _: tc.tern_grad()),
    "threshold": Contender(lambda task: tc.threshold(task.threshold)),
    "top_k_1%": Contender(lambda _: tc.top_k(0.01)),
    "dgc_1%": Contender(lambda _: tc.dgc(0.01, momentum=MOMENTUM), momentum=0.0),
    "random_k_10%": Contender(lambda _: tc.random_k(0.1)),
    "random_k_1%": Contender(lambda _: tc.random_k(0.01)),
    "power_sgd_4": Contender(lambda _: tc.power_sgd(4)),
    "one_bit_no_feedback": Contender(
        lambda _: tc.one_bit(error_feedback=False), worse_than="one_bit"
    ),
    "top_k_1%_no_feedback": Contender(
        lambda _: tc.top_k(0.01, error_feedback=False), worse_than="top_k_1%"
    ),
}


def main(arguments=None):
    """Runs the benchmark; returns 1 if a contender failed, else 0. Missed goals are no failure."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    host = machine()
    make_devices()
    started = time.monotonic()
    report = {
        **report_head("accuracy", arguments, host, installed_versions()),
        "replicas": NUM_REPLICAS,
        "seeds": options.seeds,
        "tasks": {name: settings(TASKS[name], options) for name in options.tasks},
        "results": list(itertools.chain(*(measure(options, name) for name in options.tasks))),
    }
    judge(report["results"])
    report["seconds"] = round(time.monotonic() - started)
    print("\n" + as_text(report))
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")
        print(f"\nWritten to {options.out}")
    return 1 if any(row["status"] == "failed" for row in report["results"]) else 0


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
    parser.add_argument(
        "--contenders", type=one_of(CONTENDERS), default=list(CONTENDERS), metavar="NAME,..."
    )
    parser.add_argument("--tasks", type=one_of(TASKS), default=list(TASKS), metavar="NAME,...")
    parser.add_argument("--seeds", type=positive, default=3, help="runs of each contender")
    parser.add_argument("--epochs", type=positive, help="default: by task")
    parser.add_argument("--learning-rate", type=float, help="of all contenders; default: by task")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no other run after this time"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures here, as JSON")
    parser.add_argument(
        "--quick", action="store_true", help="one seed, one epoch: shows only that it runs"
    )
    options = parser.parse_args(arguments)
    options.deadline = time.monotonic() + 60 * options.minutes
    if options.quick:
        options.seeds = options.epochs = 1
    return options


def installed_versions():
    """Returns the versions of Python and of the packages that the figures depend on."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **found}


def make_devices():
    """Cuts the CPU into a logical device for each replica; possible once in a process."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * NUM_REPLICAS
    tf.config.set_logical_device_configuration(cpu, parts)


def settings(task, options):
    """Returns what all contenders of a task share, for the report."""
    return {
        "what": task.what,
        "epochs": options.epochs or task.epochs,
        "batch_size": task.batch_size,
        "learning_rate": options.learning_rate or task.learning_rate,
        "threshold": task.threshold,
    }


# The data. Test images are made from other originals than training images.


@functools.cache
def originals():
    """Returns scikit-learn's digits in [0, 1], a third of them for tests."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8)
    x_train, x_test, y_train, y_test = train_test_split(
        images, labels, test_size=1 / 3, random_state=0, stratify=labels
    )
    return x_train, y_train, x_test, y_test


def digits():
    """The digits as they are."""
    x_train, y_train, x_test, y_test = originals()
    return x_train.reshape(-1, 64), y_train, x_test.reshape(-1, 64), y_test


@functools.cache
def cluttered_digits(num_train=4096, num_test=2048):
    """Digits turned, scaled and shifted at random, with neighbours beside them, and noise."""
    x_train, y_train, x_test, y_test = originals()
    rng = np.random.default_rng(0)
    return (
        *cluttered(x_train, y_train, num_train, rng),
        *cluttered(x_test, y_test, num_test, rng),
    )


def cluttered(images, labels, count, rng, size=16):
    """Returns ``count`` images [size, size, 1] of a digit in the middle, and their labels.

    On the left and on the right, parts of two other digits reach into the image.
    """
    middle = rng.integers(len(images), size=count)
    canvas = drawn(images[middle], rng.uniform(-1, 1, (count, 2)), size, rng)
    for side in (-1, 1):
        offset = np.stack([rng.uniform(-3, 3, count), side * rng.uniform(9.5, 11.5, count)], axis=1)
        other = images[rng.integers(len(images), size=count)]
        canvas = np.maximum(canvas, drawn(other, offset, size, rng))
    canvas += rng.normal(0, 0.1, canvas.shape)
    return canvas.astype("float32")[..., None], labels[middle]


def drawn(images, offset, size, rng):
    """Returns images [n, size, size]: each turned, scaled, and ``offset`` from the middle."""
    count = len(images)
    angle = rng.uniform(-0.3, 0.3, count)
    scale = rng.uniform(1.1, 1.6, count)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) / scale
    grid = np.stack(np.meshgrid(np.arange(size), np.arange(size), indexing="ij"), axis=-1)
    place = grid[None] - (size - 1) / 2 - offset[:, None, None, :]
    y, x = np.einsum("ijn,nhwj->inhw", turn, place) + 3.5
    number = np.broadcast_to(np.arange(count)[:, None, None], y.shape)
    return map_coordinates(images, [number, y, x], order=1, mode="constant")


# The models.


def perceptron():
    """A multi-layer perceptron of 85,000 parameters."""
    return keras.Sequential(
        [
            keras.Input([64]),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def resnet():
    """A residual network of 5 convolutions (and 2 on its shortcuts), 73,000 parameters."""
    inputs = keras.Input([16, 16, 1])
    x = norm(convolution(inputs, 16, strides=2))
    x = keras.layers.ReLU()(x)
    for filters in (32, 64):
        shortcut = norm(convolution(x, filters, kernel=1, strides=2))
        x = keras.layers.ReLU()(norm(convolution(x, filters, strides=2)))
        x = keras.layers.ReLU()(keras.layers.add([norm(convolution(x, filters)), shortcut]))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def convolution(x, filters, kernel=3, strides=1):
    layer = keras.layers.Conv2D(filters, kernel, strides, padding="same", use_bias=False)
    return layer(x)


def norm(x):
    """Group normalisation: unlike batch normalisation, the same on any number of replicas."""
    return keras.layers.GroupNormalization(8)(x)


TASKS = {
    "digits": Task(
        what="8x8 digits, multi-layer perceptron",
        data=digits,
        model=perceptron,
        epochs=40,
        batch_size=64,
        learning_rate=0.02,  # what is late by some steps bears less than the 0.05 of no compression
        threshold=5e-3,
    ),
    "hard": Task(
        what="turned, scaled, shifted, noisy 16x16 digits between neighbours, residual network",
        data=cluttered_digits,
        model=resnet,
        epochs=12,
        batch_size=64,
        learning_rate=0.1,
        threshold=1e-2,
    ),
}


# The measurement.


def measure(options, task_name):
    """Trains with every contender in turn, seed after seed; returns a row for each contender."""
    task = TASKS[task_name]
    # Made once: exchanges are pure, and what XLA compiled for one seed serves for the next.
    exchanges = {name: CONTENDERS[name].make(task) for name in options.contenders}
    exchanges = {name: made and tc.as_exchange(made) for name, made in exchanges.items()}
    rows = {
        name: {"task": task_name, "contender": name, "status": "ok", "accuracies": []}
        for name in options.contenders
    }
    for seed, name in itertools.product(range(options.seeds), options.contenders):
        row = rows[name]
        if row["status"] == "failed" or time.monotonic() > options.deadline:
            continue
        started = time.monotonic()
        try:
            result = train(
                task, exchanges[name], CONTENDERS[name].momentum, seed, settings(task, options)
            )
        except Exception as error:  # one contender's failure must not lose the others' figures
            row |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
            print(f"{task_name} seed {seed} {name:21} failed: {row['error']}", flush=True)
            continue
        row["accuracies"].append(result.pop("accuracy"))
        row |= result
        print(
            f"{task_name} seed {seed} {name:21} {row['accuracies'][-1]:6.2f} %, last loss "
            f"{row['loss']:.4f}, {time.monotonic() - started:5.1f} s",
            flush=True,
        )
    return list(rows.values())


def train(task, compression, momentum, seed, shared):
    """Trains once; returns the accuracy on the test images and what was sent for it."""
    keras.utils.clear_session()
    gc.collect()
    keras.utils.set_random_seed(seed)
    x_train, y_train, x_test, y_test = task.data()
    batch_size, epochs = shared["batch_size"], shared["epochs"]
    steps = len(x_train) // batch_size
    with tfdist.MirroredStrategy(DEVICES, compression=compression).scope():
        model = task.model()
        model.compile(
            optimizer=keras.optimizers.SGD(
                schedule(shared["learning_rate"], steps * epochs), momentum=momentum
            ),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=steps,
        )
    rows = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    rows = rows.shuffle(len(x_train), seed=seed).batch(batch_size, drop_remainder=True)
    history = model.fit(rows.repeat(), epochs=epochs, steps_per_epoch=steps, verbose=0)
    loss = history.history["loss"][-1]
    logits = np.asarray(model(x_test, training=False))
    return {
        "accuracy": 100 * float(np.mean(np.argmax(logits, axis=1) == y_test)),
        "loss": loss,
        "name": tc.as_exchange(compression).name,
        "parameters": model.count_params(),
        "ratio": ratio(model, compression),
    }


def schedule(learning_rate, steps):
    """A linear warm-up, then a cosine to zero: the same for all contenders."""
    warmup = max(1, round(WARMUP * steps))
    return keras.optimizers.schedules.CosineDecay(
        0.0, max(1, steps - warmup), warmup_target=learning_rate, warmup_steps=warmup
    )


def ratio(model, compression):
    """Returns the bytes that a replica sends in a step uncompressed, over those it sends."""
    specs = [tf.TensorSpec(v.shape, v.dtype, v.path) for v in model.trainable_variables]
    specs.reverse()  # as the strategy hands them over
    uncompressed = tc.all_reduce().sent_bytes(specs, NUM_REPLICAS)
    return uncompressed / tc.as_exchange(compression).sent_bytes(specs, NUM_REPLICAS)


# The figures.


def judge(rows):
    """Adds means, spreads, differences and whether the goal is met to the rows.

    Differences are taken over the seeds that both have run: ``--minutes`` may end a round early.
    """
    for row in rows:
        if values := row["accuracies"]:
            row |= {"mean": statistics.fmean(values), "min": min(values), "max": max(values)}
        elif row["status"] == "ok":
            row["status"] = "not run"
    found = {(row["task"], row["contender"]): row for row in rows if row["status"] == "ok"}
    for (task, name), row in found.items():
        if base := found.get((task, "none")):
            row["difference"] = difference(row, base)
        other = CONTENDERS[name].worse_than
        if other is None:
            if name != "none" and base:
                row["goal"] = f"within {WITHIN_POINTS} points"
                row["met"] = row["difference"] >= -WITHIN_POINTS
        elif (task, other) in found:
            row["goal"] = f"worse than {other}"
            row["met"] = difference(row, found[task, other]) < 0


def difference(row, other):
    """Returns the mean difference in points over the seeds that both have run."""
    pairs = zip(row["accuracies"], other["accuracies"], strict=False)
    return statistics.fmean(mine - theirs for mine, theirs in pairs)


def as_text(report):
    """Returns the tables that a person reads."""
    lines = [
        f"{report['machine']['cpu']}, {report['machine']['cores']} cores; {NUM_REPLICAS} replicas; "
        f"{report['seeds']} seed(s); {report['seconds']} s in all; load average before: "
        f"{report['machine']['load_average']}",
        ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
    ]
    for task, rows in itertools.groupby(report["results"], key=lambda row: row["task"]):
        shared = report["tasks"][task]
        lines += [
            "",
            f"{task}: {shared['what']}; {shared['epochs']} epochs, batch {shared['batch_size']}, "
            f"learning rate {shared['learning_rate']}, threshold {shared['threshold']}",
            f"{'':22}{'accuracy, %':>11}  {'(min - max)':15}{'difference':>10}"
            f"{'ratio':>7}{'seeds':>6}  goal",
        ]
        lines += map(_line, rows)
    return "\n".join(lines)


def _line(row):
    name = f"{row['contender']:22}"
    if row["status"] == "failed":
        return f"{name}failed: {row['error'].splitlines()[0]}"
    if row["status"] == "not run":
        return f"{name}not run: no time left"
    return (
        f"{name}{row['mean']:11.2f}  {'({min:.2f} - {max:.2f})'.format(**row):15}"
        + (f"{row['difference']:+10.2f}" if "difference" in row else " " * 10)
        + f"{row['ratio']:7.1f}{len(row['accuracies']):6}  "
        + (f"{row['goal']}: {'met' if row['met'] else 'missed'}" if "met" in row else "")
    ).rstrip()


if __name__ == "__main__":
    sys.exit(main())
