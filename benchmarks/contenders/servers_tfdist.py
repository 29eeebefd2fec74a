"""tfdist: ``model.fit`` under ``tfdist.ParameterServerStrategy``."""

import harness
import keras
import naps
import servers

import tfdist

run = servers.Run()
options = run.options
name, _, argument = options.consistency.rstrip(")").partition("(")
compression = None
if options.compression:
    import compressors

    compression = compressors.make(options.compression)
strategy = tfdist.ParameterServerStrategy(
    consistency=getattr(tfdist, name)(*([int(argument)] if argument else [])),
    compression=compression,
    pull_dtype=options.pull_dtype,
)


class Model(keras.Model):
    """The network, with a sleep in each step that takes worker 0 longer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, inputs):
        return self.inner(inputs)

    def train_step(self, data):
        x, y = data
        return super().train_step((naps.after_nap(x, options.nap_ms, options.slow), y))


with strategy.scope():
    inner = harness.mlp(keras, servers.HIDDEN[options.model])
    model = Model(inner) if options.nap_ms else inner
    model.compile(
        optimizer=keras.optimizers.SGD(harness.LEARNING_RATE, momentum=harness.MOMENTUM),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=options.steps_per_execution,
    )
data = run.dataset()
if options.fed_by == "workers":
    data = strategy.distribute_datasets_from_function(lambda context: run.dataset())
history = model.fit(
    data,
    steps_per_epoch=options.steps,
    epochs=options.epochs,
    callbacks=[tfdist.callbacks.WorkerMonitor(), run.clock(keras)],
    verbose=0,
).history
pushed, pulled = strategy.bytes_per_step(inner.trainable_variables)
run.report(
    inner.count_params(),
    formula_bytes=pushed + pulled,
    staleness=history.get("staleness_mean", [None])[-1],
    steps_by_worker=history["steps_by_worker"][-1],
)
