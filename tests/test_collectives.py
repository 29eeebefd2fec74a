"""Buckets hold every element once, in order, and summing them changes nothing but the sum."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tfdist.collectives import Piece, bucketed_sum, plan_buckets
from tfdist.strategies._input import split_rows


def test_plan_of_small_and_large_tensors():
    assert plan_buckets([3, 10, 2], bucket_size=5) == [
        [Piece(0, 0, 3), Piece(1, 0, 2)],
        [Piece(1, 2, 7)],
        [Piece(1, 7, 10), Piece(2, 0, 2)],
    ]


@pytest.mark.parametrize("sizes", [[], [0], [1], [7, 0, 5], [1000], [1] * 50, [3, 999, 3]])
@pytest.mark.parametrize("bucket_size", [1, 4, 64, 10_000])
def test_every_element_is_in_one_piece(sizes, bucket_size):
    buckets = plan_buckets(sizes, bucket_size)
    pieces = list(itertools.chain(*buckets))
    seen = [(p.index, e) for p in pieces for e in range(p.start, p.stop)]
    assert seen == [(i, e) for i, size in enumerate(sizes) for e in range(size)]
    filled = [sum(p.stop - p.start for p in bucket) for bucket in buckets]
    assert all(0 < size <= bucket_size for size in filled)
    assert not filled or max(filled) - min(filled) <= len(filled)


def test_plan_refuses_empty_buckets():
    with pytest.raises(ValueError, match="bucket_size must be at least 1, got 0"):
        plan_buckets([1], 0)


@pytest.mark.parametrize("bucket_bytes", [1, 40, 1 << 20])
def test_bucketed_sum_keeps_shapes_dtypes_and_order(bucket_bytes):
    values = [
        np.arange(12, dtype="float32").reshape(3, 4),
        np.arange(5, dtype="float16"),
        np.float32(7),
        np.zeros((0, 3), "float32"),
        np.arange(30, dtype="float32").reshape(2, 3, 5),
    ]
    launched = []

    def double(vector, index):
        launched.append(index)
        assert vector.shape.num_elements() * vector.dtype.size <= max(bucket_bytes, 4)
        return vector * 2

    sums = bucketed_sum([tf.constant(v) for v in values], double, bucket_bytes)
    for value, total in zip(values, sums, strict=True):
        assert total.dtype == value.dtype
        np.testing.assert_array_equal(total, value * 2)
    assert launched == list(range(len(launched)))


def test_bucketed_sum_needs_static_shapes():
    @tf.function(input_signature=[tf.TensorSpec([None])])
    def total(x):
        return bucketed_sum([x], lambda v, _: v)

    with pytest.raises(ValueError, match=r"tensors\[0\] of shape \(None,\)"):
        total(tf.zeros([3]))


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 16, 31])
def test_rows_are_split_evenly_and_in_order(rows, num_replicas):
    parts = [split_rows(rows, r, num_replicas) for r in range(num_replicas)]
    covered = [row for start, size in parts for row in range(start, start + size)]
    assert covered == list(range(rows))
    sizes = [size for _, size in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    tensors = [
        split_rows(tf.constant(rows, tf.int64), r, num_replicas) for r in range(num_replicas)
    ]
    assert [(int(start), int(size)) for start, size in tensors] == parts
