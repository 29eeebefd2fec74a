"""Pull and push between a worker and its servers, with the servers' part on this process' CPU."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.compression import by_size, compressor_for, one_bit, power_sgd, top_k
from tfdist.staleness import Async, DelayCompensation, StalenessScaledRate, settings_of
from tfdist.strategies import _keras, _transport
from tfdist.strategies._server_variables import ServerVariable
from tfdist.strategies._step import tracing
from tfdist.strategies._worker_step import WorkerStep

HERE = "/device:CPU:0"


@pytest.fixture
def transport():
    """``transport(consistency, compressor, pull_dtype)`` of a cluster with two workers."""

    def make(consistency, compressor=None, pull_dtype=None):
        return _transport.Transport(
            [HERE],
            2,
            settings_of(consistency),
            lambda spec: compressor,
            pull_dtype,
            lambda replica: HERE,
        )

    return make


def server_variable(value, num_shards=1):
    strategy = types.SimpleNamespace(join=lambda: None)
    pieces = np.array_split(np.asarray(value, np.float32), num_shards)
    return ServerVariable(strategy, [tf.Variable(piece) for piece in pieces], "weight")


def a_step(transport):
    return types.SimpleNamespace(
        transport=transport,
        version=tf.constant(0),
        serial=tf.constant(7, tf.int64),
        replica=0,
        worker=tf.constant(1),
    )


def test_delay_compensation_looks_at_how_far_the_weights_have_moved(transport):
    weight = server_variable([1.0, 2.0, 3.0])
    carry = transport(DelayCompensation(0.5))

    @tf.function(autograph=False)
    def step(gradient, moved):
        step = a_step(carry)
        then = carry.pull(weight, step)
        weight.shards[0].assign_add(moved)  # what others push in the meantime
        return then, carry.send(weight, 0, gradient, step)

    gradient, moved = np.array([2.0, -1.0, 0.5], "f"), np.array([0.1, 0.2, -0.3], "f")
    then, corrected = step(gradient, moved)
    np.testing.assert_allclose(then, [1.0, 2.0, 3.0])
    np.testing.assert_allclose(corrected, gradient + 0.5 * gradient**2 * moved, rtol=1e-6)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "num_bytes"),
    [(None, 0, 4 * 3072), ("bfloat16", 2**-8, 2 * 3072), ("float16", 2**-10, 2 * 3072)],
)
def test_pulled_weights_are_close(transport, num_shards, dtype, tolerance, num_bytes):
    value = np.random.default_rng(0).standard_normal((48, 64)).astype("f")
    weight = server_variable(value, num_shards)
    carry = transport(Async(), pull_dtype=dtype)
    pulled = tf.function(lambda: carry.pull(weight, a_step(carry)), autograph=False)()
    np.testing.assert_allclose(pulled, value, rtol=tolerance)
    assert carry.pulled_bytes([weight]) == num_bytes


def test_weights_pulled_as_int8_are_close(transport):
    value = np.random.default_rng(0).standard_normal((48, 64)).astype("f")
    weight = server_variable(value, 2)
    carry = transport(Async(), pull_dtype="int8")
    pulled = tf.function(lambda: carry.pull(weight, a_step(carry)), autograph=False)()
    assert np.abs(pulled - value).max() <= np.abs(value).max() / 127
    assert carry.pulled_bytes([weight]) == 3072 + 2 * 3 * 4  # codes, and a scale for each 512


@pytest.mark.parametrize("compressor", [one_bit(), top_k(0.1)], ids=lambda c: c.name)
def test_what_a_push_leaves_out_is_sent_later(transport, compressor):
    weight = server_variable(np.zeros(640))
    carry = transport(Async(), compressor)
    gradients = np.random.default_rng(0).standard_normal((40, 640)).astype("f")

    @tf.function(autograph=False)
    def push(gradient):
        return carry.send(weight, 0, gradient, a_step(carry))

    sent = sum(push(tf.constant(g)).numpy() for g in gradients)
    left = np.abs(sent - gradients.sum(0))
    assert left.max() < 40 and left.mean() < 5  # bounded, however many steps
    with_nan = gradients[0].copy()
    with_nan[3] = np.nan
    assert not np.isfinite(push(tf.constant(with_nan))).all()
    assert np.isfinite(push(tf.constant(gradients[1]))).all()  # the residual has forgotten it
    assert carry.pushed_bytes([weight]) == compressor.payload_bytes(tf.TensorSpec([640]))


def test_exchanges_that_need_all_workers_are_refused():
    spec = tf.TensorSpec([8, 8])
    with pytest.raises(ValueError, match=r"power_sgd\(2\) can't be used on the way to a parameter"):
        compressor_for(power_sgd(2), spec)
    mixed = by_size(100, None, top_k(0.1))
    assert compressor_for(mixed, spec) is None
    assert compressor_for(mixed, tf.TensorSpec([200])).name == top_k(0.1).name
    assert compressor_for(None, spec) is None


@pytest.mark.parametrize(("staleness", "factor"), [(0, 1), (1, 1), (2, 1 / 2), (5, 1 / 5)])
def test_rate_falls_with_staleness(transport, staleness, factor):
    _keras.install()
    optimizer = keras.optimizers.SGD(0.1)
    step = object.__new__(WorkerStep)
    step.transport = transport(StalenessScaledRate())
    step.staleness_now = tf.constant(staleness)
    with tracing(step):
        rate = optimizer._get_current_learning_rate()
    assert float(rate) == pytest.approx(0.1 * factor)
    assert float(optimizer._get_current_learning_rate()) == pytest.approx(0.1)
