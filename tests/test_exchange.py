"""Exchanges among replicas of one process: sums, bytes, state, other numbers of replicas."""

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist import compression as C
from tfdist.collectives import bucket_specs, bucketed_sum
from tfdist.strategies._exchange import GradientExchange

# While the tests are collected, since the first operation of any test fixes the devices.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 8
)

SHAPES = ((40, 30), (30,), (30, 5), (5,), (1,), (3, 3, 4, 20))
SPECS = [tf.TensorSpec(s, tf.float32, name=f"layer_{i}/kernel") for i, s in enumerate(SHAPES)]
BUCKET = 4096  # bytes: several buckets, and a tensor in two of them

LOSSLESS = {
    "none": C.all_reduce,
    "top_k of all": lambda: C.through(C.top_k(1.0), BUCKET),
    "exact top_k of all": lambda: C.through(C.top_k(1.0, exact=True), BUCKET),
    "random_k of all": lambda: C.through(C.random_k(1.0), BUCKET),
    "by_size without loss": lambda: C.by_size(100, None, C.top_k(1.0)),
    "by_variable without loss": lambda: C.by_variable(
        {"layer_[02]": C.top_k(1.0), "5/kernel$": C.random_k(1.0)}
    ),
    "dgc of all": lambda: C.dgc(1.0, momentum=0.0, warmup_steps=1),
}
LOSSY = {
    "fp16": C.fp16,
    "bf16": C.bf16,
    "int8": C.int8,
    "qsgd": lambda: C.qsgd(7),
    "natural": C.natural,
    "one_bit": C.one_bit,
    "tern_grad": C.tern_grad,
    "threshold": lambda: C.threshold(0.5),
    "top_k": lambda: C.top_k(0.1),
    "exact top_k": lambda: C.top_k(0.1, exact=True),
    "random_k": lambda: C.random_k(0.1),
    "dgc": lambda: C.dgc(0.1, momentum=0.0),
    "dgc warming up": lambda: C.dgc(0.01, momentum=0.0, warmup_steps=8),
    "power_sgd": lambda: C.power_sgd(2),
    "fed back int8": lambda: C.error_feedback(C.int8()),
    "by_size": lambda: C.by_size(100, C.fp16(), C.power_sgd(1)),
}
STATELESS = ("int8", "qsgd", "natural", "tern_grad")  # but for a count of steps
FED_BACK = [name for name in LOSSY if name not in STATELESS]


def exchange_named(name):
    made = (LOSSLESS | LOSSY)[name]()
    return made if isinstance(made, C.Exchange) else C.through(made, BUCKET)


class Group:
    """Replicas on ``size`` devices, which exchange gradients through one exchange."""

    def __init__(self, exchange, size, specs=SPECS):
        self.strategy = tfdist.MirroredStrategy([f"CPU:{i}" for i in range(size)])
        self.specs = specs
        self.exchange = GradientExchange(self.strategy.extended, exchange, specs)
        self._step = tf.function(self._run, autograph=False)

    def _run(self, gradients):
        def replica_step():
            replica = tf.distribute.get_replica_context()
            mine = [g[replica._replica_id] for g in gradients]
            numbers = list(range(len(mine)))
            return self.strategy.extended.exchange_gradients(mine, numbers, self.exchange)

        sums = self.strategy.run(replica_step)
        return [self.strategy.experimental_local_results(each) for each in sums]

    def sum(self, gradients):
        """The sums on each replica: ``sums[i][r]`` for ``gradients[i][r]``."""
        return tf.nest.map_structure(np.asarray, self._step([tf.constant(g) for g in gradients]))

    def states(self):
        """The state of each member."""
        rows = [[v.numpy() for v in vs] for _, vs in sorted(self.exchange._variables.items())]
        like = self.exchange._exchange.init(list(reversed(self.specs)), len(rows))
        return [tf.nest.pack_sequence_as(like, row) for row in rows]


def gradients_of(size, seed=0, shapes=SHAPES):
    random = np.random.RandomState(seed)
    return [random.randn(size, *shape).astype("float32") for shape in shapes]


def residuals(states, exchange, specs):
    """The sum of all members' residuals for each bucket or matrix: resized to one member."""
    (one,) = exchange.resize(states, specs, 1)
    return [np.asarray(leaf) for leaf in tf.nest.flatten(one) if leaf.dtype.kind == "f"]


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 3) for name in LOSSLESS), ("none", 8), ("top_k of all", 8)]
)
def test_lossless_exchanges_sum(name, size):
    group = Group(exchange_named(name), size)
    for step in range(2):
        gradients = gradients_of(size, step)
        for sums, expected in zip(group.sum(gradients), gradients, strict=True):
            np.testing.assert_allclose(sums[0], expected.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", [*STATELESS, "by_size"])
def test_all_members_hold_the_same_sums(name, size):
    group = Group(exchange_named(name), size)
    for step in range(3):
        for sums in group.sum(gradients_of(size, step)):
            assert all(np.array_equal(sums[0], other) for other in sums[1:])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", [name for name in FED_BACK if name != "by_size"])
def test_what_is_not_sent_is_kept(name, size):
    """The sum of the sums plus all residuals equals the sum of the gradients."""
    exchange = exchange_named(name)
    group = Group(exchange, size)
    steps = 12
    sent = [np.zeros(shape) for shape in SHAPES]
    total = [np.zeros(shape) for shape in SHAPES]
    for step in range(steps):
        gradients = gradients_of(size, step)
        for i, sums in enumerate(group.sum(gradients)):
            assert all(np.array_equal(sums[0], other) for other in sums[1:])
            sent[i] += sums[0]
            total[i] += gradients[i].sum(0)
    kept = [k.ravel() for k in residuals(group.states(), exchange, list(reversed(SPECS)))]
    missing = [(t - s).ravel() for s, t in zip(sent, total, strict=True)][::-1]
    if name == "power_sgd":  # its state: a start and a residual for each of three matrices
        kept = kept[1::2]
        missing = [m for m in missing if m.size > 100]
    elif name.startswith("dgc"):  # velocity and residual
        kept = kept[1::2]
    # Halves are summed in halves on the way, which no member sees.
    atol = 0.2 if name in ("fp16", "bf16") else 2e-4
    np.testing.assert_allclose(np.concatenate(kept), np.concatenate(missing), atol=atol)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 8), (4, 4), (3, 1)])
@pytest.mark.parametrize("name", FED_BACK)
def test_the_sum_of_residuals_survives_another_number_of_members(name, sizes):
    exchange = exchange_named(name)
    random = np.random.RandomState(0)
    states = [
        tf.nest.map_structure(
            lambda leaf: (
                random.randn(*leaf.shape).astype(leaf.dtype.as_numpy_dtype)
                if leaf.dtype.is_floating
                else np.full(leaf.shape, 7, leaf.dtype.as_numpy_dtype)
            ),
            exchange.init(SPECS, sizes[0]),
        )
        for _ in range(sizes[0])
    ]
    resized = exchange.resize(states, SPECS, sizes[1])
    assert len(resized) == sizes[1]
    template = exchange.init(SPECS, sizes[1])
    for state in resized:
        tf.nest.assert_same_structure(state, template)
        for value, like in zip(tf.nest.flatten(state), tf.nest.flatten(template), strict=True):
            assert value.shape == like.shape and value.dtype == like.dtype.as_numpy_dtype
            assert like.dtype.is_floating or (value == 7).all()
    before, after = residuals(states, exchange, SPECS), residuals(resized, exchange, SPECS)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [(2, 4), (3, 2), (4, 3)])
@pytest.mark.parametrize("name", ["one_bit", "power_sgd"])
def test_a_file_restores_into_another_number_of_members(name, sizes):
    """What the old members kept is what the new ones send or keep, on gradients of zero."""
    exchange, specs = exchange_named(name), list(reversed(SPECS))
    old, new = (Group(exchange, size) for size in sizes)
    for step in range(2):
        old.sum(gradients_of(sizes[0], step))
    new.exchange.from_bytes(old.exchange.to_bytes())
    sums = new.sum([np.zeros((sizes[1], *shape), "float32") for shape in SHAPES])
    sent = [s[0].ravel() for s in sums][::-1]
    before, after = (
        [k.ravel() for k in residuals(group.states(), exchange, specs)] for group in (old, new)
    )
    if name == "power_sgd":
        before, after = before[1::2], after[1::2]
        sent = [s for s in sent if s.size > 100]
    assert np.abs(np.concatenate(before)).max() > 0.1
    np.testing.assert_allclose(
        np.concatenate(after) + np.concatenate(sent), np.concatenate(before), atol=1e-4
    )


class Counting:
    """A collective that counts what one member would send."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.sent_bytes = 0.0

    def sum(self, tensor):
        self.sent_bytes += 2 * (self.world_size - 1) / self.world_size * _bytes(tensor)
        return tensor

    def gather(self, tensor):
        self.sent_bytes += (self.world_size - 1) * _bytes(tensor)
        return tf.stack([tensor] * self.world_size)

    def scatter(self, tensor):
        self.sent_bytes += (self.world_size - 1) / self.world_size * _bytes(tensor)
        return tensor


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", [*(n for n in LOSSY if n != "dgc warming up"), "none"])
def test_sent_bytes_are_those_of_the_payloads(name, size):
    """Against the sizes of what really goes into the collectives."""
    exchange, counting = exchange_named(name), Counting(size)
    gradients = [tf.zeros(spec.shape) for spec in SPECS]
    exchange.apply(gradients, exchange.init(SPECS, size), counting, SPECS)
    assert counting.sent_bytes == pytest.approx(exchange.sent_bytes(SPECS, size), rel=1e-6)


def _bytes(tensor):
    return tensor.shape.num_elements() * tensor.dtype.size


def test_the_cheapest_way_is_taken():
    bucket = tf.TensorSpec([1_000_000])

    def way(compressor, size):
        ways = C.sent_through(compressor, bucket, size)
        return min(ways, key=ways.get)

    assert [way(C.fp16(), n) for n in (2, 3, 64)] == ["sum"] * 3
    assert [way(C.one_bit(), n) for n in (2, 3, 64)] == ["gather", "parts", "parts"]
    assert [way(C.top_k(0.01), n) for n in (2, 64, 1024)] == ["gather", "gather", "dense"]
    assert [way(C.int8(), n) for n in (2, 4)] == ["gather", "parts"]


@pytest.mark.parametrize("name", ["one_bit", "top_k", "fp16", "power_sgd", "dgc", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_that_is_not_finite_shows_and_leaves_no_trace(name, bad):
    """A NaN on one member reaches all, and no residual remembers it."""
    size = 2
    group = Group(exchange_named(name), size)
    group.sum(gradients_of(size, 1))
    before = tf.nest.flatten(group.states())
    gradients = gradients_of(size, 2)
    gradients[0][1, 7, 3] = bad
    sums = group.sum(gradients)
    for replica in range(size):
        assert not np.isfinite(np.concatenate([s[replica].ravel() for s in sums])).all()
    if name != "int8":  # has nothing but a count of steps
        for a, b in zip(before, tf.nest.flatten(group.states()), strict=True):
            np.testing.assert_array_equal(a, b)
    sums = group.sum(gradients_of(size, 3))
    assert np.isfinite(np.concatenate([s[0].ravel() for s in sums])).all()


def test_power_sgd_approaches_what_svd_gives():
    """On a constant gradient, power iteration without feedback ends at the best approximation."""
    shapes = ((40, 30),)
    specs = [tf.TensorSpec(shapes[0])]
    group = Group(C.power_sgd(3, error_feedback=False), 2, specs)
    random = np.random.RandomState(0)
    left, right = random.randn(40, 40), random.randn(30, 30)
    spectrum = np.diag(np.r_[10.0, 8, 6, np.linspace(2, 0.1, 27)])
    matrix = np.linalg.qr(left)[0][:, :30] @ spectrum @ np.linalg.qr(right)[0]
    each = np.stack([matrix * 0.25, matrix * 0.75]).astype("float32")
    for _ in range(25):
        ((first, _),) = group.sum([each])
    u, s, vt = np.linalg.svd(matrix)
    best = (u[:, :3] * s[:3]) @ vt[:3]
    np.testing.assert_allclose(first, best, atol=2e-3)


def test_power_sgd_of_one_step_is_the_papers():
    """Algorithm 1 in numpy, from the same start."""
    specs = [tf.TensorSpec((20, 10))]
    group = Group(C.power_sgd(2), 2, specs)
    start = np.asarray(C.power_sgd(2).init(specs, 2).matrices[0].start)
    residual = np.zeros((2, 20, 10))
    for step in range(4):
        gradients = np.random.RandomState(step).randn(2, 20, 10).astype("float32")
        matrices = gradients + residual
        p, _ = np.linalg.qr((matrices @ start).sum(0))
        q = sum(m.T @ p for m in matrices)
        expected = p @ q.T
        residual = matrices - expected / 2
        start = q
        ((first, _),) = group.sum([gradients])
        np.testing.assert_allclose(first, expected, atol=1e-3)


def test_zero_gradients_do_not_stop_power_sgd():
    specs = [tf.TensorSpec((20, 10))]
    group = Group(C.power_sgd(2), 2, specs)
    for _ in range(3):
        ((first, _),) = group.sum([np.zeros((2, 20, 10), "float32")])
        np.testing.assert_array_equal(first, 0)
    ((first, _),) = group.sum([np.ones((2, 20, 10), "float32")])
    np.testing.assert_allclose(first, 2, atol=1e-3)


def test_a_payload_of_another_size_is_refused():
    wrong = C.one_bit()._replace(payload_bytes=lambda spec: 1)
    with pytest.raises(ValueError, match=r"payload_bytes\(.*must be the size of what encode"):
        C.through(wrong).init([tf.TensorSpec([100])], 2)


def test_dgc_warms_up():
    """The number of elements sent falls by stages to the fraction."""
    specs = [tf.TensorSpec([4096])]
    group = Group(C.dgc(0.001, momentum=0.0, warmup_steps=8), 2, specs)
    sent = []
    for step in range(12):
        random = np.random.RandomState(step).randn(2, 4096).astype("float32")
        random[1] = 0
        ((first, _),) = group.sum([random])
        sent.append(np.count_nonzero(first))
    assert sent == [1024] * 2 + [256] * 2 + [64] * 2 + [16] * 2 + [5] * 4


def test_buckets_follow_the_order_of_the_gradients():
    plan = bucket_specs([tf.TensorSpec([100]), tf.TensorSpec([300]), tf.TensorSpec([])], 800)
    assert [spec.shape.num_elements() for spec in plan] == [134, 134, 133]


def test_a_bucket_leaves_before_the_last_gradient_is_there():
    """In the graph, no bucket's collective waits for a gradient of a later bucket."""
    for name, first in (("none", "CollectiveReduceV2"), ("one_bit", "CollectiveGatherV2")):
        exchange = exchange_named(name) if name != "none" else _small_buckets()
        group = Group(exchange, 2)
        traced = group._step.get_concrete_function([tf.constant(g) for g in gradients_of(2)])
        operations = {op.name: op for op in traced.graph.get_operations()}
        collectives = [op for op in operations.values() if op.type == first]
        inputs = [len(_placeholders_before(op)) for op in collectives]
        assert len(inputs) >= 2 * 3, "two replicas with at least three buckets"
        # The gradients come as one argument for each variable.
        assert min(inputs) < len(SHAPES) - 1


def _small_buckets():
    def apply(gradients, state, collective, specs):
        return bucketed_sum(gradients, lambda vector, _: collective.sum(vector), BUCKET), state

    return C.all_reduce()._replace(apply=apply)


def _placeholders_before(op):
    """The float arguments of the graph on which an operation waits."""
    seen, pending, found = set(), [op], set()
    while pending:
        node = pending.pop()
        if node.name in seen:
            continue
        seen.add(node.name)
        if node.type == "Placeholder" and node.outputs[0].dtype == tf.float32:
            found.add(node.name)
        pending += [tensor.op for tensor in node.inputs] + list(node.control_inputs)
    return found


def test_the_compressor_of_the_documentation():
    """What docs/compression.md shows works as it is, from outside of the package."""
    page = (Path(__file__).parents[1] / "docs" / "compression.md").read_text()
    (code,) = re.findall(r"```python\n(import tensorflow as tf\n.*?)```", page, re.S)
    namespace = {}
    exec(code, namespace)
    exchange = C.through(namespace["scaled_fp16"](), BUCKET)
    group = Group(exchange, 3)
    sent, total = 0, 0
    for step in range(6):
        gradients = [g * 1e-9 for g in gradients_of(3, step)]
        sums = group.sum(gradients)
        assert all(np.array_equal(s[0], other) for s in sums for other in s[1:])
        sent += sum(s[0].sum() for s in sums)
        total += sum(g.sum() for g in gradients)
    np.testing.assert_allclose(sent, total, atol=1e-10)
    gradients[0][1, 7, 3] = np.nan
    sums = group.sum(gradients)
    assert not np.isfinite(np.concatenate([s[0].ravel() for s in sums])).all()
