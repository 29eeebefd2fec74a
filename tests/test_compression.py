"""What every compressor promises, one row of a table each; more rows for one's own are welcome."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist import compression as C
from tfdist.compression._bits import dither, pack, unpack
from tfdist.compression._sparsifiers import dgc_compressor
from tfdist.compression._wire import from_words, specs_of, to_words

BLOCK = 16  # small, so that small tensors have several


class Row(NamedTuple):
    """A compressor without error feedback, and what is known of it."""

    make: object
    bound: object  # bound(x) -> [n], how far an element may be off
    name: str = ""


def block_max(x, block=BLOCK):
    """The largest magnitude of each element's block."""
    width = min(block, x.size)
    padded = np.pad(np.abs(x), [0, -x.size % width]).reshape(-1, width)
    return np.repeat(padded.max(1), width)[: x.size]


def block_norm(x, block=BLOCK):
    width = min(block, x.size)
    padded = np.pad(np.abs(x).astype("f8"), [0, -x.size % width]).reshape(-1, width)
    return np.repeat(np.sqrt((padded**2).sum(1)), width)[: x.size]


ROWS = {
    "fp16": Row(
        lambda: C.fp16(error_feedback=False),
        lambda x: np.where(np.abs(x) > 65000, np.inf, np.abs(x) * 2.0**-11 + 3e-8),
    ),
    "bf16": Row(lambda: C.bf16(error_feedback=False), lambda x: np.abs(x) * 2.0**-8),
    "int8": Row(lambda: C.int8(block=BLOCK), lambda x: block_max(x) / 127),
    "qsgd1": Row(lambda: C.qsgd(1, block=BLOCK), block_norm),
    "qsgd7": Row(lambda: C.qsgd(7, block=BLOCK), lambda x: block_norm(x) / 7),
    "qsgd127": Row(lambda: C.qsgd(127, block=BLOCK), lambda x: block_norm(x) / 127),
    "natural": Row(lambda: C.natural(block=BLOCK), lambda x: np.abs(x) + block_max(x) * 2.0**-124),
    "tern_grad": Row(lambda: C.tern_grad(block=BLOCK), block_max),
    "one_bit": Row(lambda: C.one_bit(block=BLOCK, error_feedback=False), block_max),
    "threshold": Row(
        lambda: C.threshold(0.5, error_feedback=False), lambda x: np.maximum(np.abs(x) - 0.5, 0.5)
    ),
    "top_k_half": Row(lambda: C.top_k(0.5, error_feedback=False), np.abs),
    "top_k": Row(lambda: C.top_k(0.1, error_feedback=False), np.abs),
    "top_k_wide": Row(lambda: C.top_k(0.001, error_feedback=False), np.abs),
    "top_k_exact": Row(lambda: C.top_k(0.1, exact=True, error_feedback=False), np.abs),
    "random_k": Row(lambda: C.random_k(0.25, seed=3), np.abs),
    "random_k_unbiased": Row(
        lambda: C.random_k(0.25, seed=3, error_feedback=False),
        lambda x: np.where(np.abs(x) > 8e37, np.inf, 3 * np.abs(x)),
    ),
}
FED_BACK = {
    "fp16": C.fp16,
    "bf16": C.bf16,
    "one_bit": lambda: C.one_bit(block=BLOCK),
    "threshold": lambda: C.threshold(0.5),
    "top_k": lambda: C.top_k(0.1),
    "top_k_exact": lambda: C.top_k(0.1, exact=True),
    "random_k": lambda: C.random_k(0.25),
    "dgc": lambda: dgc_compressor(0.1, 0.0),
    "of int8": lambda: C.error_feedback(C.int8(block=BLOCK)),
}
UNBIASED = [name for name, row in ROWS.items() if not row.make().biased]
KEPT = {"max_examples": 25, "deadline": None, "derandomize": True}
DTYPES = ("float16", "bfloat16", "float32", "float64")

rows = pytest.mark.parametrize("name", ROWS)
fed_back = pytest.mark.parametrize("name", FED_BACK)


def spec_of(x):
    return tf.TensorSpec(x.shape, x.dtype)


def round_trip(compressor, x, state=None):
    """Encodes and decodes as the exchange does: compiled, over the wire's form."""
    x = tf.convert_to_tensor(x)
    state = compressor.init(spec_of(x)) if state is None else state
    key = compressor.name, compressor.encode
    if key not in _compiled:
        _compiled[key] = tf.function(_round_trip(compressor), jit_compile=True, autograph=False)
    return _compiled[key](x, state)


_compiled = {}


def _round_trip(compressor):
    def run(x, state):
        payload, state = compressor.encode(x, state)
        if compressor.summable:
            return compressor.decode(payload, spec_of(x)), state
        payload = from_words(to_words(payload), specs_of(payload))
        return compressor.decode(payload, spec_of(x)), state

    return run


@pytest.fixture(scope="module", autouse=True)
def made_once():
    """Each row's compressor is made once, so that it is compiled once for each shape."""
    made = {name: row.make() for name, row in ROWS.items()}
    made_fed_back = {name: make() for name, make in FED_BACK.items()}
    made_fed_back = {f"fed back {name}": c for name, c in made_fed_back.items()}
    _made.update(made | made_fed_back)


_made = {}

LENGTHS = (1, 2, 7, 16, 33, 250)
VALUES = {
    "random": lambda n, seed: np.random.RandomState(seed).randn(n),
    "zero": lambda n, seed: np.zeros(n),
    "constant": lambda n, seed: np.full(n, 0.7 + seed % 3),
    "denormal": lambda n, seed: np.random.RandomState(seed).randn(n) * 1e-40,
    "huge": lambda n, seed: np.random.RandomState(seed).uniform(-3e38, 3e38, n),
    "mixed": lambda n, seed: 10 ** np.random.RandomState(seed).uniform(-30, 30, n),
}
tensors = st.builds(
    lambda kind, n, seed: VALUES[kind](n, seed).astype("float32"),
    st.sampled_from(sorted(VALUES)),
    st.sampled_from(LENGTHS),
    st.integers(0, 10**6),
)


@rows
@settings(**KEPT)
@given(x=tensors)
def test_round_trip_stays_within_its_bound(name, x):
    decoded, _ = round_trip(_made[name], x)
    assert decoded.shape == x.shape and decoded.dtype == x.dtype
    off = np.abs(decoded.numpy().astype("f8") - x)
    bound = ROWS[name].bound(x.astype("f8"))
    # Denormal numbers count as zero: processors are told to flush them.
    bound = bound * (1 + 1e-5) + 2.0**-125
    assert (off <= bound).all() or np.isinf(bound[~(off <= bound)]).all()


@rows
def test_zero_stays_zero(name):
    decoded, _ = round_trip(_made[name], np.zeros(40, "float32"))
    np.testing.assert_array_equal(decoded, np.zeros(40))


@rows
@pytest.mark.parametrize("dtype", DTYPES)
def test_keeps_shape_and_dtype(name, dtype):
    x = tf.cast(np.random.RandomState(0).randn(37), dtype)
    decoded, _ = round_trip(_made[name], x)
    assert decoded.dtype == x.dtype and decoded.shape == x.shape
    precision = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(dtype, 1e-6)
    values = x.numpy().astype("f8")
    off = np.abs(decoded.numpy().astype("f8") - values)
    bound = ROWS[name].bound(values)
    assert (off <= bound + 4 * precision * np.maximum(np.abs(values), bound)).all()


@rows
@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_numbers_stay_finite(name, dtype):
    largest = tf.as_dtype(dtype).max
    x = tf.cast(np.array([1.0, -1.0, 0.5, 0.25] * 8), dtype) * tf.cast(largest, dtype)
    decoded, _ = round_trip(_made[name], x)
    if name in ("fp16", "bf16", "random_k_unbiased"):
        return  # their range is smaller; infinity shows
    assert np.isfinite(decoded.numpy().astype("f8")).all()


@rows
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 21, 36])
def test_what_is_not_finite_shows(name, dtype, bad, where):
    values = np.random.RandomState(0).randn(37)
    values[where] = bad
    decoded, _ = round_trip(_made[name], tf.cast(values, dtype))
    assert not np.isfinite(decoded.numpy().astype("f8")).all()


@rows
@pytest.mark.parametrize("n", [1, 2, 3, 31, 32, 33, 100, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_payload_has_the_size_that_the_formula_says(name, n, dtype):
    compressor = _made[name]
    x = tf.zeros([n], dtype)
    payload, _ = compressor.encode(x, compressor.init(spec_of(x)))
    if compressor.summable:
        first = payload[0]
        found = first.shape.num_elements() * first.dtype.size
    else:
        found = 4 * to_words(payload).shape[0]
    assert found == compressor.payload_bytes(spec_of(x))


@pytest.mark.parametrize("name", UNBIASED)
def test_unbiased_ones_are_right_on_average(name):
    """The mean of 4,000 draws is within 5 standard errors, for each of 24 elements.

    If the errors were normal, one of the 24 would exceed that in 1 of 70,000 runs; the seed is
    fixed, so the test does not change its mind.
    """
    draws, n = 4000, 24
    x = np.random.RandomState(1).randn(n).astype("float32")
    compressor = _made[name]

    @tf.function(jit_compile=True)
    def sums(state):
        def body(_, carry):
            total, squares, state = carry
            payload, state = compressor.encode(tf.constant(x), state)
            off = tf.cast(compressor.decode(payload, tf.TensorSpec([n])), tf.float64) - x
            return total + off, squares + off * off, state

        zeros = tf.zeros([n], tf.float64)
        carry = (zeros, zeros, state)
        for _ in range(1):
            carry = tf.while_loop(
                lambda i, *_: i < draws, lambda i, *c: (i + 1, *body(i, c)), (0, *carry)
            )[1:]
        return carry

    total, squares, _ = sums(compressor.init(tf.TensorSpec([n])))
    mean = total.numpy() / draws
    spread = np.sqrt(squares.numpy() / draws - mean**2)
    assert spread.max() > 0, "nothing is random"
    assert (np.abs(mean) <= 5 * spread / math.sqrt(draws) + 1e-7).all()


@fed_back
@settings(**KEPT)
@given(seed=st.integers(0, 10**6), n=st.sampled_from(LENGTHS), steps=st.integers(1, 12))
def test_error_feedback_loses_nothing(name, seed, n, steps):
    """The sum of what was sent plus the residual equals the sum of the gradients."""
    compressor = _made[f"fed back {name}"]
    random = np.random.RandomState(seed)
    state = compressor.init(tf.TensorSpec([n]))
    gradients, sent = np.zeros(n), np.zeros(n)
    for _ in range(steps):
        x = (random.randn(n) * 10.0 ** random.randint(-3, 3)).astype("float32")
        decoded, state = round_trip(compressor, x, state)
        gradients += x
        sent += decoded.numpy()
    # Each step rounds sums of magnitudes up to what has gathered.
    scale = 1000.0 * steps
    np.testing.assert_allclose(sent + state.residual, gradients, rtol=0, atol=scale * 2.0**-22)


@pytest.mark.parametrize("name", ["top_k", "top_k_half", "top_k_wide", "top_k_exact", "random_k"])
@settings(**KEPT)
@given(seed=st.integers(0, 10**6), n=st.sampled_from((10, 40, 1000)))
def test_sparsifiers_are_contractions(name, seed, n):
    """|x - C(x)|^2 <= (1 - k/n) |x|^2, for random-k on average."""
    x = np.random.RandomState(seed).standard_cauchy(n).astype("float32")
    compressor = _made[name]
    fraction = {"top_k_half": 0.5, "top_k_wide": 0.001, "random_k": 0.25}.get(name, 0.1)
    draws = 60 if name == "random_k" else 1
    state, lost = compressor.init(tf.TensorSpec([n])), []
    for _ in range(draws):
        if name == "random_k":
            state = state._replace(residual=tf.zeros([n]))
        decoded, state = round_trip(compressor, x, state)
        lost.append(((x - decoded.numpy().astype("f8")) ** 2).sum())
    slack = 1.0 if name == "random_k" else 1e-6
    assert np.mean(lost) <= (1 - fraction) * (x.astype("f8") ** 2).sum() * (1 + slack)


def test_top_k_of_everything_is_the_identity():
    x = np.random.RandomState(0).randn(33).astype("float32")
    for compressor in (C.top_k(1.0), C.top_k(1.0, exact=True), C.random_k(1.0)):
        np.testing.assert_array_equal(round_trip(compressor, x)[0], x)


def test_top_k_takes_the_largest():
    x = np.array([0.1, -5, 3, 0.2, 4, -0.3, 0.1, 0, 0, 0], "float32")
    exact, _ = round_trip(C.top_k(0.3, exact=True), x)
    np.testing.assert_array_equal(exact, [0, -5, 3, 0, 4, 0, 0, 0, 0, 0])
    blocks, _ = round_trip(C.top_k(0.2), x)
    np.testing.assert_array_equal(blocks, np.float32([0, -5, 0, 0, 0, -0.3, 0, 0, 0, 0]))


def test_random_k_takes_the_same_on_all_replicas_and_others_in_each_step():
    compressor = C.random_k(0.1, seed=5)
    state, seen = compressor.init(tf.TensorSpec([100])), []
    other = state
    for _ in range(40):
        sent, state = round_trip(compressor, np.ones(100, "float32"), state)
        sent_by_other, other = round_trip(compressor, np.full(100, 2, "float32"), other)
        np.testing.assert_array_equal(sent != 0, sent_by_other != 0)
        assert np.count_nonzero(sent) == 10
        seen.append(sent.numpy() != 0)
    assert np.any(seen, axis=0).mean() > 0.9


def test_dgc_corrects_momentum():
    """Against the paper's Algorithm 4 in numpy."""
    compressor = dgc_compressor(0.25, 0.9)
    random = np.random.RandomState(0)
    state = compressor.init(tf.TensorSpec([8]))
    velocity, residual = np.zeros(8), np.zeros(8)
    for _ in range(20):
        g = random.randn(8).astype("float32")
        velocity = 0.9 * velocity + g
        residual = residual + velocity
        picked = np.abs(residual).reshape(2, 4).argmax(1) + [0, 4]
        expected = np.zeros(8)
        expected[picked] = residual[picked]
        velocity[picked] = residual[picked] = 0
        sent, state = round_trip(compressor, g, state)
        np.testing.assert_allclose(sent, expected, rtol=1e-5, atol=1e-6)


def test_values_of_every_code_survive_packing():
    for bits in (1, 2, 4, 8, 16):
        codes = np.random.RandomState(0).randint(0, 2**bits, 77)
        words = pack(tf.constant(codes, tf.int32), bits)
        assert words.shape == [-(-77 // (32 // bits))]
        np.testing.assert_array_equal(unpack(words, bits, 77), codes)


def test_dither_is_uniform_and_differs_between_steps_and_replicas():
    x = tf.random.stateless_normal([20000], [1, 2])
    noise = dither(x, tf.constant(0)).numpy()
    assert noise.min() >= 0 and noise.max() < 1
    counts, _ = np.histogram(noise, 50, (0, 1))
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert chi_square < 94  # 49 degrees of freedom: 1 in 10,000
    for other in (dither(x, tf.constant(1)), dither(x * (1 + 1e-6), tf.constant(0))):
        assert abs(np.corrcoef(noise, other)[0, 1]) < 0.03


BAD = {
    "top_k: fraction must be a number in (0, 1], got 5": lambda: C.top_k(5),
    "top_k: fraction must be a number in (0, 1], got 0": lambda: C.top_k(0),
    "top_k: fraction must be a number in (0, 1], got '1%'": lambda: C.top_k("1%"),
    "top_k: fraction must be at least 1/65536": lambda: C.top_k(1e-6),
    "random_k: fraction must be": lambda: C.random_k(-0.1),
    "random_k: seed must be a whole number": lambda: C.random_k(0.1, seed=0.5),
    "dgc: fraction must be": lambda: C.dgc(2),
    "dgc: momentum must be a number in [0, 1), got 1": lambda: C.dgc(0.1, momentum=1),
    "dgc: warmup_steps must be": lambda: C.dgc(0.1, warmup_steps=-1),
    "qsgd: levels must be a whole number": lambda: C.qsgd(0.5),
    "qsgd: levels must be at most 127, got 200": lambda: C.qsgd(200),
    "int8: block must be a whole number of at least 1, got 0": lambda: C.int8(block=0),
    "one_bit: block must be": lambda: C.one_bit(block=True),
    "threshold: t must be a number above 0, got -1": lambda: C.threshold(-1),
    "power_sgd: rank must be": lambda: C.power_sgd(0),
    "by_size: min_size must be": lambda: C.by_size("1k", None, C.fp16()),
    "by_variable: expected a dict": lambda: C.by_variable([]),
    "by_variable: '(' is no regular expression": lambda: C.by_variable({"(": C.fp16()}),
    "compression: expected None or what a function of tfdist.compression returns": (
        lambda: C.by_size(10, None, "fp16")
    ),
    "mark_non_finite: expected a compressor whose payloads are not summable": (
        lambda: C.mark_non_finite(C.fp16())
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_refused(message):
    with pytest.raises(ValueError) as caught:
        BAD[message]()
    assert str(caught.value).startswith(message)
