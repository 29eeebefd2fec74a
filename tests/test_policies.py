"""When to save and what to keep: the policies alone, without a training."""

import itertools
import math

import pytest

from tfdist.callbacks import policies as P

NOTHING = P.Moment(step=0, epoch=0, is_epoch_end=False, last_step=0, seconds=0.0, preempted=False)


def saves(policy, steps):
    """At which of these steps it saves, when each save is made."""
    last, found = 0, []
    for step in steps:
        if policy.due(NOTHING._replace(step=step, last_step=last)):
            found.append(step)
            last = step
    return found


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("execution", [1, 2, 3, 7])
def test_every_steps_saves_once_for_each_multiple_that_is_passed(n, execution):
    steps = range(execution, 43, execution)
    expected = [
        step for step in steps if any(s % n == 0 for s in range(step - execution + 1, step + 1))
    ]
    assert saves(P.every_steps(n), steps) == expected


def test_every_steps_counts_from_the_multiples_not_from_the_last_save():
    # 7 was saved for another reason, such as a preemption.
    policy = P.every_steps(5)
    due = [policy.due(NOTHING._replace(step=s, last_step=7)) for s in range(7, 12)]
    assert due == [False, False, False, True, True]


def test_every_epochs():
    policy = P.every_epochs(2)
    ends = [NOTHING._replace(epoch=e, is_epoch_end=True) for e in range(1, 7)]
    assert [policy.due(moment) for moment in ends] == [False, True] * 3
    assert not any(policy.due(moment._replace(is_epoch_end=False)) for moment in ends)


def test_every_minutes():
    policy = P.every_minutes(0.5)
    assert [policy.due(NOTHING._replace(seconds=s)) for s in (0, 29.9, 30, 1e9)] == [
        *(False, False, True, True)
    ]


def test_on_preemption():
    policy = P.on_preemption()
    assert [policy.due(NOTHING._replace(preempted=p)) for p in (False, True)] == [False, True]
    assert (policy.grace_seconds, policy.notice_file) == (25.0, None)
    given = P.on_preemption(3, "there")
    assert (given.grace_seconds, given.notice_file) == (3.0, "there")


def test_any_of_is_due_when_one_of_them_is():
    parts = [P.every_steps(3), P.every_epochs(1), P.every_minutes(1), P.on_preemption()]
    nested = P.any_of(parts[0], P.any_of(*parts[1:3]), parts[3])
    choices = itertools.product((2, 3), (False, True), (0.0, 60.0), (False, True))
    for step, is_epoch_end, seconds, preempted in choices:
        moment = NOTHING._replace(
            step=step, is_epoch_end=is_epoch_end, seconds=seconds, preempted=preempted
        )
        assert nested.due(moment) == any(part.due(moment) for part in parts), moment
    assert P.members(nested) == parts
    assert P.members(parts[0]) == [parts[0]]
    assert P.preemption_of(nested) is parts[3]
    assert P.preemption_of(P.any_of(*parts[:3])) is None


def test_who_may_be_asked():
    """What a clock or a signal says is the chief's to say; the rest is the same everywhere."""
    assert not P.every_steps(2).by_chief and not P.every_epochs(2).by_chief
    assert P.every_minutes(1).by_chief and P.on_preemption().by_chief
    assert P.any_of(P.every_steps(2), P.every_minutes(1)).by_chief
    assert not P.any_of(P.every_steps(2), P.every_epochs(1)).by_chief


def saved(*values, monitor="loss"):
    """Checkpoints of the steps 1, 2, ... with these values; None for one without the log."""
    logs = [{} if value is None else {monitor: value} for value in values]
    return [P.Saved(step, log, f"step-{step}") for step, log in enumerate(logs, 1)]


def kept(policy, checkpoints):
    return sorted(int(path.partition("-")[2]) for path in policy.kept(checkpoints))


def test_latest():
    assert kept(P.latest(2), saved(1, 2, 3, 4)) == [3, 4]
    assert kept(P.latest(9), saved(1, 2)) == [1, 2]
    assert kept(P.latest(1), []) == []


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (P.best("loss"), [2]),
        (P.best("loss", 3), [2, 3, 6]),
        (P.best("loss", mode="max"), [5]),
        (P.best("loss", 99), [1, 2, 3, 5, 6]),
        (P.best("other"), []),
    ],
)
def test_best(policy, expected):
    """Of equal ones the older; what is no number, or not there, is not kept."""
    values = [4.0, 1.0, 1.0, math.nan, 9.0, 2.0, math.inf, None]
    assert kept(policy, saved(*values)) == expected


@pytest.mark.parametrize(
    ("monitor", "highest"),
    [
        ("loss", False),
        ("val_loss", False),
        ("val_mean_squared_error", False),
        ("accuracy", True),
        ("val_sparse_categorical_accuracy", True),
        ("val_auc", True),
        ("precision_at_recall", True),
        ("f1_score", True),
    ],
)
def test_best_knows_which_logs_shall_grow(monitor, highest):
    checkpoints = saved(0.5, 0.9, 0.1, monitor=monitor)
    assert kept(P.best(monitor), checkpoints) == [2 if highest else 3]
    assert kept(P.best(monitor, mode="min"), checkpoints) == [3]


def test_union():
    checkpoints = saved(1.0, 4.0, 3.0, None, 9.0)
    policy = P.union(P.latest(1), P.best("loss", 2), P.union(P.latest(2)))
    assert kept(policy, checkpoints) == [1, 3, 4, 5]


class Own:
    """A policy of a user's own."""

    def due(self, moment):
        return moment.step == 3

    def kept(self, saved):
        return {saved[0].path}


def test_policies_of_ones_own_combine():
    assert saves(P.any_of(Own(), P.every_steps(4)), range(1, 9)) == [3, 4, 8]
    assert kept(P.union(Own(), P.latest(1)), saved(1, 2, 3)) == [1, 3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: P.every_steps(0), "every_steps: n must be an integer of at least 1, got 0"),
        (lambda: P.every_steps(2.0), "every_steps: n must be an integer of at least 1, got 2.0"),
        (lambda: P.every_steps(True), "every_steps: n must be .*got True"),
        (lambda: P.every_epochs("1"), "every_epochs: n must be an integer .*got '1'"),
        (lambda: P.every_minutes(0), "every_minutes: m must be a positive number, got 0"),
        (lambda: P.every_minutes(math.inf), "every_minutes: m must be .*got inf"),
        (lambda: P.every_minutes(math.nan), "every_minutes: m must be .*got nan"),
        (lambda: P.every_minutes(None), "every_minutes: m must be .*got None"),
        (lambda: P.on_preemption(-1), "on_preemption: grace_seconds must be .*got -1"),
        (lambda: P.on_preemption(True), "on_preemption: grace_seconds must be .*got True"),
        (lambda: P.on_preemption(notice_file=7), "on_preemption: notice_file must be .*got 7"),
        (lambda: P.any_of(), "any_of: expected policies .*due.*got 'none'"),
        (lambda: P.any_of(P.latest(1)), "any_of: expected policies .*due.*got _Latest"),
        (lambda: P.union(), "union: expected policies .*kept.*got 'none'"),
        (lambda: P.union(P.every_steps(1)), "union: expected policies .*kept.*got _EverySteps"),
        (lambda: P.latest(0), "latest: n must be an integer of at least 1, got 0"),
        (lambda: P.latest(1.5), "latest: n must be an integer of at least 1, got 1.5"),
        (lambda: P.best("loss", n=0), "best: n must be an integer of at least 1, got 0"),
        (lambda: P.best(3), "best: monitor must be the name of a log, got 3"),
        (lambda: P.best("loss", mode="up"), "best: mode must be .*got 'up'"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
