"""What a collective of next to nothing costs: processor time of one worker, and time."""

import time

import link
import tensorflow as tf

from tfdist import MultiWorkerMirroredStrategy

TURNS = 3
ELEMENTS = 960  # a multiple of all numbers of workers that are tried

run = link.Run()
strategy = MultiWorkerMirroredStrategy()
collective = strategy.extended.exchange_groups(0, everywhere=True)[0]
vector = tf.zeros([ELEMENTS])
PRIMITIVES = {
    "sum": lambda: collective.sum(vector),
    "gather": lambda: collective.gather(vector),
    "scatter": lambda: collective.scatter(tf.reshape(vector, [run.world_size, -1])),
}


result = {}
for name, primitive in PRIMITIVES.items():
    repeat = tf.function(lambda primitive=primitive: [primitive() for _ in range(run.steps)])
    repeat()
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(TURNS):
        repeat()
    count = TURNS * run.steps
    result[name] = {
        "seconds": (time.perf_counter() - began) / count,
        "cpu_seconds": (time.process_time() - cpu) / count,
    }
link.report(result)
link.stay()
