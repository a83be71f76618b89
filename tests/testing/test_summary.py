"""Speed-ups and their means."""

import math

import pytest

from kvscout.roofline import Cost
from kvscout.testing.measure import Measurement
from kvscout.testing.summary import EVERY_CASE, Over, geomean, means, speedups
from kvscout.testing.sweep import FAILED, PASSED
from kvscout.testing.timing import Timing


def made(case, variant, us, floor=None, op="score", **flags):
    times = Timing(us, us, 0.0, 5) if us else None
    status = PASSED if us else FAILED
    return Measurement(op, case, variant, status, hot=times, cost=Cost(1, 1), floor_us=floor, **flags)


FOUND = [
    made("a", "theirs", 16.0, peer=True, baseline=True),
    made("a", "ours", 2.0, floor=1.0),
    made("a", "older", 32.0, peer=True),
    made("b", "theirs", 16.0, peer=True, baseline=True),
    made("b", "ours", 8.0, floor=1.0),
    made("b", "wrong", None),
    made("c", "ours", 1.0),
    made("a", "ours", 7.0, op="other"),
]


def test_a_speedup_is_over_the_baseline_of_the_same_op_and_case():
    assert speedups(FOUND) == [1.0, 8.0, 0.5, 1.0, 2.0, None, None, None]


def test_a_speedup_may_be_over_any_other_measurement():
    assert speedups(FOUND, "older") == [2.0, 16.0, 1.0, None, None, None, None, None]


def test_means_per_group_and_variant():
    groups = {"score": {"first": frozenset("a"), "not run": frozenset("x"), "in part": frozenset("ax")}}
    found = {(m.op, m.group, m.variant): m for m in means(FOUND, groups)}
    assert {key[:2] for key in found} == {("score", EVERY_CASE), ("score", "first"), ("other", EVERY_CASE)}
    ours = found["score", EVERY_CASE, "ours"]
    assert (ours.cases, ours.speedup, ours.roof) == (3, Over(pytest.approx(4.0), 2.0, 2), pytest.approx(0.25))
    assert ours.over == {"theirs": ours.speedup, "older": Over(pytest.approx(16.0), 16.0, 1)}
    assert found["score", "first", "ours"].speedup == Over(pytest.approx(8.0), 8.0, 1)
    assert found["score", EVERY_CASE, "theirs"].over == {"older": Over(pytest.approx(2.0), 2.0, 1)}
    assert (found["other", EVERY_CASE, "ours"].speedup, found["other", EVERY_CASE, "ours"].over) == (None, {})
    assert not any(variant == "wrong" for *_, variant in found)


def test_a_group_that_is_all_that_was_run_is_named():
    found = means(FOUND[:-1], {"score": {"everything": frozenset("abc"), "first": frozenset("a")}})
    assert {m.group for m in found} == {"everything", "first"}


def test_geometric_mean():
    assert geomean([2.0, 8.0]) == pytest.approx(4.0)
    assert geomean([]) is None
    assert math.isclose(geomean([3.0]), 3.0)
