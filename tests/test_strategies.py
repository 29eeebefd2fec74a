"""What the strategies promise beside parity: refusals, traces, and other strategies untouched."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist import compression
from tfdist.cluster import local_ports
from tfdist.strategies import _keras

RANDOM = np.random.RandomState(0)
X = RANDOM.randn(75, 8).astype("float32")
Y = (X[:, :3].sum(1) > 0).astype("int32")


# While the tests are collected, since the first operation of any test fixes the devices.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 8
)


@pytest.fixture(scope="module")
def mirrored():
    return tfdist.MirroredStrategy(["CPU:0", "CPU:1"])


def compiled_model(scope, **options):
    keras.utils.set_random_seed(1)
    with scope:
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], **options)
    return model


def trained_weights(scope, **options):
    model = compiled_model(scope, **options)
    model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def assert_same(actual, expected, tolerance=1e-6):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


class Counting(keras.Sequential):
    """Counts how often each step is traced."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.traces = {"train": 0, "test": 0, "predict": 0}

    def train_step(self, data):
        self.traces["train"] += 1
        return super().train_step(data)

    def test_step(self, data):
        self.traces["test"] += 1
        return super().test_step(data)

    def predict_step(self, data):
        self.traces["predict"] += 1
        return super().predict_step(data)


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_each_step_is_traced_once(mirrored, steps_per_execution):
    with mirrored.scope():
        model = Counting([keras.Input((8,)), keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, steps_per_execution=steps_per_execution)
    for _ in range(2):  # with a smaller last batch, over several epochs, in two calls
        model.fit(X, Y, batch_size=16, epochs=2, validation_data=(X[:40], Y[:40]), verbose=0)
        model.predict(X, batch_size=16, verbose=0)
    # Once for each of the two replicas.
    assert model.traces == {"train": 2, "test": 2, "predict": 2}


def test_stock_strategies_are_untouched(tmp_path):
    """Programs under other strategies, or none, get what they got before tfdist was used."""
    script = """
        import sys, numpy as np, tensorflow as tf, keras
        cpu = tf.config.list_physical_devices("CPU")[0]
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)
        if sys.argv[1] == "with":
            import tfdist
            with tfdist.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
                pass
        x = np.random.RandomState(0).randn(75, 8).astype("float32")
        y = (x[:, :3].sum(1) > 0).astype("int32")
        import contextlib
        stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        for scope in (contextlib.nullcontext(), stock.scope()):
            keras.utils.set_random_seed(1)
            with scope:
                drop = keras.layers.Dropout(0.5)
                m = keras.Sequential([keras.Input((8,)), drop, keras.layers.Dense(2)])
                m.compile(keras.optimizers.SGD(0.1, clipnorm=0.1),
                          keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            m.fit(x, y, batch_size=16, shuffle=False, verbose=0)
            print("weights", [w.tobytes().hex() for w in m.get_weights()])
    """
    outputs = []
    for how in ("with", "without"):
        command = [sys.executable, "-c", textwrap.dedent(script), how]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        outputs.append([line for line in done.stdout.splitlines() if line.startswith("weights")])
    assert len(outputs[0]) == 2
    assert outputs[0] == outputs[1]


def test_seam_check_fails_loudly_when_keras_changes(monkeypatch):
    _keras.check_seam()
    owner, name, _, make = _keras._replacements[0]
    changed = (owner, name, ["self", "renamed"], make)
    monkeypatch.setattr(_keras, "_replacements", [changed])
    with pytest.raises(RuntimeError, match=f"{owner.__name__}.{name} has the parameters"):
        _keras.check_seam()
    missing = (owner, "no_such_function", [], make)
    monkeypatch.setattr(_keras, "_replacements", [missing])
    with pytest.raises(RuntimeError, match="no_such_function is missing"):
        _keras.check_seam()


def test_one_replica_compiles_with_xla():
    """What a TPU needs of the step: static shapes, only operations that XLA can compile."""
    x, y = X[:64], Y[:64]
    weights = []
    for options in ({"jit_compile": True}, {"jit_compile": False}):
        model = compiled_model(tfdist.MirroredStrategy(["CPU:0"]).scope(), **options)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16, drop_remainder=True)
        model.fit(data, epochs=2, verbose=0)
        weights.append(model.get_weights())
    assert_same(*weights, tolerance=1e-5)


def test_xla_is_refused_with_several_replicas(mirrored):
    model = compiled_model(mirrored.scope(), jit_compile=True)
    with pytest.raises(ValueError, match="jit_compile=True cannot be honoured .* 2 replicas"):
        model.fit(X, Y, verbose=0)


def test_tpu_strategy_without_a_tpu_says_so():
    with pytest.raises(RuntimeError, match="TensorFlow sees no TPU"):
        tfdist.TPUStrategy()


@pytest.mark.parametrize("name", ["MirroredStrategy", "MultiWorkerMirroredStrategy"])
def test_unknown_compression_is_refused(name):
    with pytest.raises(ValueError, match="compression: expected .* compression='topk'"):
        getattr(tfdist, name)(compression="topk")


def test_compression_on_a_tpu_is_refused():
    with pytest.raises(ValueError, match="TPUStrategy: compression must be None"):
        tfdist.TPUStrategy(compression=tfdist.compression.fp16())


def test_unbatched_dataset_is_refused(mirrored):
    model = compiled_model(mirrored.scope())
    labels = tf.data.Dataset.from_tensor_slices((X, Y))
    with pytest.raises(ValueError, match=r"must be batched.*dataset\.batch"):
        model.fit(labels, verbose=0)


def test_optimizer_counters_convert_to_numbers(mirrored):
    model = compiled_model(mirrored.scope())
    model.fit(X, Y, batch_size=25, verbose=0)
    assert int(model.optimizer.iterations) == 3
    assert float(model.optimizer.learning_rate) == pytest.approx(0.01)


def test_two_strategies_in_one_process(mirrored):
    expected = trained_weights(contextlib.nullcontext())
    assert_same(trained_weights(mirrored.scope()), expected)
    assert_same(trained_weights(tfdist.MirroredStrategy(["CPU:0", "CPU:1"]).scope()), expected)
    assert_same(trained_weights(tfdist.MultiWorkerMirroredStrategy().scope()), expected)


def test_use_of_tensorflow_before_the_strategy_is_refused(tmp_path):
    ports = local_ports(2)
    config = {
        "cluster": {"worker": [f"127.0.0.1:{port}" for port in ports]},
        "task": {"type": "worker", "index": 0},
    }
    script = "import tensorflow as tf, tfdist; tf.zeros([1]); tfdist.MultiWorkerMirroredStrategy()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"TF_CONFIG": json.dumps(config)},
        cwd=tmp_path,  # at the root of the repository, ./tfdist would hide the installed package
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "must be made before TensorFlow runs its first operation" in done.stderr
    assert "top of the program" in done.stderr


@pytest.mark.parametrize("how", ["none", "one_bit", "power_sgd"])
def test_communication_monitor_adds_to_the_logs(how):
    made = {"none": None, "one_bit": compression.one_bit(), "power_sgd": compression.power_sgd(1)}
    strategy = tfdist.MirroredStrategy(["CPU:0", "CPU:1"], compression=made[how])
    model = compiled_model(strategy.scope())
    model.fit(X[:64], Y[:64], batch_size=16, verbose=0)  # traced without the monitor
    monitor = tfdist.callbacks.CommunicationMonitor()
    history = model.fit(
        X[:64], Y[:64], batch_size=16, epochs=2, verbose=0, callbacks=[monitor]
    ).history
    parameters = 8 * 4 + 4 + 4 * 2 + 2
    floats = {"none": parameters, "power_sgd": 12 + 6 + 4 + 2}.get(how, (2 * 4 + 4) / 4)
    np.testing.assert_allclose(history["sent_megabytes_per_step"], [4 * floats / 1e6] * 2)
    np.testing.assert_allclose(history["compression_ratio"], [parameters / floats] * 2)
    assert all(0 < share < 1 for share in history["exchange_share"])
    assert all((value > 0) == (how != "none") for value in history["residual_to_gradient"])


def test_communication_monitor_is_silent_elsewhere():
    monitor = tfdist.callbacks.CommunicationMonitor()
    model = compiled_model(contextlib.nullcontext())
    history = model.fit(X, Y, verbose=0, callbacks=[monitor]).history
    assert set(history) == {"loss", "accuracy"}


def test_plain_keras_reads_files_with_residuals(tmp_path):
    one_bit = compression.one_bit(block=8)
    model = compiled_model(tfdist.MirroredStrategy(["CPU:0", "CPU:1"], compression=one_bit).scope())
    model.fit(X, Y, batch_size=25, verbose=0)
    model.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    assert_same(plain.get_weights(), model.get_weights(), tolerance=0)
    assert int(plain.optimizer.iterations) == int(model.optimizer.iterations)
    assert_same(
        [v.numpy() for v in plain.optimizer.variables],
        [v.numpy() for v in model.optimizer.variables],
        tolerance=0,
    )


def test_unknown_state_in_a_file_is_said(tmp_path):
    model = compiled_model(
        tfdist.MirroredStrategy(["CPU:0", "CPU:1"], compression=compression.one_bit()).scope()
    )
    model.fit(X, Y, batch_size=25, verbose=0)
    model.save(tmp_path / "model.keras")
    other = tfdist.MirroredStrategy(["CPU:0", "CPU:1"], compression=compression.top_k(0.1))
    with other.scope(), pytest.warns(UserWarning, match=r"compression=error_feedback\(one_bit"):
        keras.models.load_model(tmp_path / "model.keras")
