"""The parity suite notices what it is there to notice."""

from pathlib import Path

import numpy as np
import pytest

TABLE = Path(__file__).with_name("cases.py")
pytestmark = pytest.mark.timeout(600)

# Cases in which TensorFlow's own strategy trains wrongly under Keras, or does not train at all.
WRONG_IN_STOCK = ("clipnorm", "last_batch_of_one_row", "masked_loss_per_time_step", "on_batch")


def arrays_of(paths):
    return [dict(np.load(path)) for path in paths]


def test_stock_strategy_fails(run_cases, cases, differences):
    """Not so the plain case, which shows that the strategy as such was at work."""
    names = ["sgd", *WRONG_IN_STOCK]
    reference = run_cases(TABLE, "single", names)
    stock = run_cases(TABLE, "mirrored2", names, strategies="tf.distribute")
    found = {}
    for name in names:
        (expected,) = arrays_of(reference.get(name))
        try:
            (actual,) = arrays_of(stock.get(name))
        except stock.CaseFailedError as error:
            found[name] = [str(error)]
        else:
            found[name] = differences(expected, actual, cases[name].compare, cases[name].tolerance)
    assert not [line for line in found["sgd"] if line.startswith(("w/", "log/"))]
    for name in WRONG_IN_STOCK:
        assert found[name], f"{name} was expected to differ"


def test_differences_are_found(differences):
    reference = {"w/a": np.array([1.0, 2.0]), "w/b": np.zeros(3), "log/loss": np.array([1.0])}
    assert not differences(reference, reference, ("w/", "log/"), 1e-5)
    for change in (
        {"w/a": np.array([1.0, 2.0001])},
        {"w/a": np.array([1.0, np.nan])},
        {"w/b": np.zeros(2)},
        {"log/loss": np.array([1.1])},
        {"w/c": np.zeros(1)},
    ):
        assert len(differences(reference, reference | change, ("w/", "log/"), 1e-5)) == 1
    missing = {"w/a": reference["w/a"], "log/loss": reference["log/loss"]}
    assert differences(reference, missing, ("w/", "log/"), 1e-5) == ["w/b: missing"]
    with pytest.raises(AssertionError):
        differences(reference, reference, ("pred/",), 1e-5)


def test_disagreements_are_found(disagreements):
    one = {"w/a": np.array([1.0, 2.0]), "replica1/w/a": np.array([1.0, 2.0])}
    assert not disagreements([one, one])
    last_bit = np.array([1.0, np.nextafter(2.0, 3.0)])
    assert disagreements([one, one | {"w/a": last_bit}])
    assert disagreements([one | {"replica1/w/a": last_bit}])
    assert disagreements([one, {"w/a": one["w/a"]}])


BROKEN_TABLE = """
import os, sys, time
import numpy as np
from case_table import Table

CASES = Table()

@CASES.case
def good(env):
    return {"w/a": np.ones(2)}

@CASES.case
def raises(env):
    if env.index == 1:
        raise ValueError("a message to be found")
    time.sleep(60)

@CASES.case
def dies(env):
    print("last words")
    os._exit(3)

@CASES.case
def good_again(env):
    return {"w/a": np.ones(2)}
"""


def test_failing_cases_do_not_stop_the_others(run_cases, tmp_path):
    table = tmp_path / "broken_table.py"
    table.write_text(BROKEN_TABLE)
    cluster = run_cases(table, "2x1", ["good", "raises", "dies", "good_again"], grace_seconds=1)
    for name in ("good", "good_again"):
        assert all(np.array_equal(a["w/a"], [1, 1]) for a in arrays_of(cluster.get(name)))
    with pytest.raises(cluster.CaseFailedError, match=r"(?s)raises.*worker 1.*message to be found"):
        cluster.get("raises")
    with pytest.raises(cluster.CaseFailedError, match="last words"):
        cluster.get("dies")
