"""Trains a model whose two stages are in two processes; harms the second one on the way.

    harmed.py SIGNAL FOLDER

The first process prints what becomes of ``fit``.
"""

import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import tfdist

what, folder = getattr(signal, sys.argv[1]), Path(sys.argv[2])
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
(folder / f"{index}.pid").write_text(str(os.getpid()))
strategy = tfdist.ModelParallelStrategy(
    devices=["/job:worker/task:0/CPU:0", "/job:worker/task:1/CPU:0"], stages=2
)
with strategy.scope():
    layers = [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))


class Harm(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 5:
            print("harmed", flush=True)
            os.kill(int((folder / "1.pid").read_text()), what)


try:
    model.fit(np.zeros((640, 8)), np.zeros(640), batch_size=16, verbose=0, callbacks=[Harm()])
except Exception as error:
    print(type(error).__name__, error, flush=True)
