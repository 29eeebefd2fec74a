"""The exchange of many small gradients beside that of one which holds them all."""

import statistics
import time

import compressors
import keras
import link
import tensorflow as tf

from tfdist import MultiWorkerMirroredStrategy

LAYOUTS = {"many": [1_000] * 200, "one": [200_000]}
TURNS = 5

run = link.Run()
strategy = MultiWorkerMirroredStrategy(compression=compressors.make(run.contender))


def make_step(sizes):
    """A compiled step that exchanges constant gradients and applies them."""
    with strategy.scope():
        variables = [keras.Variable(tf.zeros([size])) for size in sizes]
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(variables)
    gradients = [tf.fill([size], 1e-3) for size in sizes]

    @tf.function
    def step():
        strategy.run(lambda: optimizer.apply(gradients, variables))

    return step


def timed(step):
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


steps = {name: make_step(sizes) for name, sizes in LAYOUTS.items()}
times = {name: [] for name in steps}
for turn in range(1 + TURNS):
    for name, step in steps.items():
        measured = [timed(step) for _ in range(2 if turn == 0 else -(-run.steps // TURNS))]
        times[name] += measured if turn else []
link.report(
    {
        name: {"median": statistics.median(values), "min": min(values)}
        for name, values in times.items()
    }
)
link.stay()
