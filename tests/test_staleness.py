"""The settings of asynchronous updates, and the clock, by themselves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist import Async, DelayCompensation, Stale, StalenessScaledRate, Sync
from tfdist.staleness import Clocks, histogram, settings_of


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stale(-1), "Stale: bound must be a whole number of at least 0, got -1"),
        (lambda: Stale(1.5), "Stale: bound .* got 1.5"),
        (lambda: Stale(True), "Stale: bound .* got True"),
        (lambda: Sync(-1), "Sync: backup_workers"),
        (lambda: DelayCompensation(-0.1), "DelayCompensation: lambda_"),
        (lambda: DelayCompensation("much"), "DelayCompensation: lambda_"),
        (lambda: DelayCompensation(0.1, inner=4), "DelayCompensation: inner .* got 4"),
        (lambda: DelayCompensation(0.1, inner=Sync()), "inner must not be Sync"),
        (lambda: StalenessScaledRate(inner=Sync()), "inner must not be Sync"),
        (lambda: settings_of("async"), "consistency: expected .* got 'async'"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_wrappers_compose():
    settings = settings_of(StalenessScaledRate(inner=DelayCompensation(0.5, inner=Stale(3))))
    assert (settings.bound, settings.lambda_, settings.scales_rate) == (3, 0.5, True)
    assert settings_of(Async()).bound is None
    assert settings_of(Sync(backup_workers=1)).backup_workers == 1


def test_a_worker_waits_for_the_slowest_live_one():
    clocks = Clocks(3, bound=1)
    clocks.finish(0)
    assert clocks.may_start(0)
    clocks.finish(0)
    assert not clocks.may_start(0)
    clocks.finish(1)
    assert not clocks.may_start(0)  # worker 2 has finished none
    clocks.leave(2)
    assert clocks.may_start(0)
    clocks.finish(0)
    clocks.finish(1)
    clocks.join(2)
    assert clocks.finished(2) == 2  # where the slower one of the others is


def test_several_steps_at_once_count_to_their_last():
    clocks = Clocks(2, bound=2)
    assert clocks.may_start(0, steps=3)
    assert not clocks.may_start(0, steps=4)


@given(
    bound=st.integers(0, 5),
    num_workers=st.integers(1, 5),
    events=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["step", "leave", "join"]))),
)
def test_the_bound_is_never_exceeded(bound, num_workers, events):
    clocks = Clocks(num_workers, bound)
    for worker, event in events:
        if worker >= num_workers:
            continue
        if event == "leave":
            clocks.leave(worker)
        elif event == "join":
            clocks.join(worker)
        elif worker in clocks.live and clocks.may_start(worker):
            slowest = min(clocks.finished(w) for w in clocks.live)
            assert clocks.finished(worker) - slowest <= bound
            clocks.finish(worker)
        if clocks.live:  # nobody is stuck for ever: the slowest may always go on
            assert any(clocks.may_start(w) for w in clocks.live)


def test_histogram():
    assert histogram([0, 2, 2, 1, 0]) == [2, 1, 2]
    assert histogram([]) == []
