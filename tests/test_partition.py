"""Cutting models into stages, and the order of work in a pipeline: pure functions."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.partition import Block, cut, cut_after
from tfdist.schedules import most_under_way, schedule


def largest(costs, lengths):
    ends = list(itertools.accumulate(lengths, initial=0))
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))


def all_cuts(n, stages):
    for inner in itertools.combinations(range(1, n), stages - 1):
        ends = [0, *inner, n]
        yield [b - a for a, b in itertools.pairwise(ends)]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=9),
    st.integers(1, 5),
    st.none() | st.integers(5, 60),
)
def test_cut_is_the_best_of_all_cuts(layers, stages, limit):
    blocks = [Block(f"layer{i}", cost, size) for i, (cost, size) in enumerate(layers)]
    costs, sizes = zip(*layers, strict=True)
    possible = [
        lengths
        for lengths in all_cuts(len(blocks), stages)
        if limit is None or largest(sizes, lengths) <= limit
    ]
    if not possible:
        with pytest.raises(ValueError, match="stages|memory limit"):
            cut(blocks, stages, limit)
        return
    found = cut(blocks, stages, limit)
    assert found in possible
    assert largest(costs, found) == min(largest(costs, lengths) for lengths in possible)


def test_refusals_of_cut_name_what_fits():
    blocks = [Block("a", 1, 10), Block("b", 1, 10), Block("c", 1, 30)]
    with pytest.raises(ValueError, match="only 3 layers.*stages=3 or fewer"):
        cut(blocks, 4)
    with pytest.raises(ValueError, match="c alone needs 30 bytes"):
        cut(blocks, 2, 20)
    with pytest.raises(ValueError, match="no 1 stages .* 50 bytes .*; 2 stages do"):
        cut(blocks, 1, 30)


def test_cut_by_hand():
    names = ["a", "b", "c", "d"]
    assert cut_after(names, ["a", "c"]) == [1, 2, 1]
    with pytest.raises(ValueError, match="no layer 'cc'. Did you mean .'c'"):
        cut_after(names, ["cc"])
    with pytest.raises(ValueError, match="does not come after 'c'"):
        cut_after(names, ["c", "a"])
    with pytest.raises(ValueError, match="last stage is empty"):
        cut_after(names, ["d"])


def as_text(tasks):
    return " ".join(("F" if t.is_forward else "B") + str(t.micro_batch) for t in tasks)


def test_schedules():
    assert [as_text(t) for t in schedule("gpipe", 2, 3)] == ["F0 F1 F2 B0 B1 B2"] * 2
    assert [as_text(t) for t in schedule("1f1b", 3, 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert [as_text(t) for t in schedule("1f1b", 3, 1)] == ["F0 B0"] * 3
    with pytest.raises(ValueError, match="schedule: expected one of"):
        schedule("other", 1, 1)


def test_1f1b_holds_no_more_micro_batches_than_stages():
    assert [most_under_way(t) for t in schedule("1f1b", 4, 16)] == [4, 3, 2, 1]
    assert [most_under_way(t) for t in schedule("gpipe", 4, 16)] == [16] * 4
