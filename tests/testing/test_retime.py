"""Whether an entry of a tuned table still holds, by times that the tests make up."""

from dataclasses import replace

import pytest
import torch

from kvscout.testing.retime import retime
from kvscout.testing.tune import CaseTimes, Key, Winner

BUCKET = frozenset({("size", 8)})
WINNER = Winner(
    BUCKET, Key("torch_a", "a"), Key("torch_a", "default"), 0.5, 0.5, False, {"eight": CaseTimes(10, 15, 15)}
)


@pytest.fixture
def again(doubling, made_times):
    """``again(us, winner, eight=case)``: what is said of the entry's only case."""

    def again(us, winner=WINNER, **changed):
        cases = {"eight": doubling.case()} | changed
        (row,) = retime("doubling", winner, cases, torch.device("cpu"), made_times(us).clock)
        assert (row.op, row.case, row.then_us) == ("doubling", "eight", 10)
        return row

    return again


@pytest.fixture
def both(doubling):
    """The winner and the runner-up are there."""
    doubling(torch_a=doubling.variant(space=lambda problem: ["a"]))


@pytest.mark.parametrize(
    ("a", "default", "flag"),
    [
        (10.9, 15, ""),
        (9.1, 15, ""),
        (11.2, 15, "takes 12% more than it did"),
        (8.0, 15, "takes 20% less than it did"),
        (10.0, 9.9, ""),
        (10.0, 8.0, "torch_a with default is faster now: the winner takes 25% more"),
        (20.0, 10, "takes 100% more than it did; torch_a with default is faster now: the winner takes 100% more"),
    ],
)
def test_flags(both, again, a, default, flag):
    row = again({"a": a, "default": default})
    assert (row.now_us, row.runner_up_us, row.flag) == (a, default, flag)


def test_a_runner_up_that_is_gone_is_no_flag(both, again):
    row = again({"a": 10}, replace(WINNER, runner_up=Key("torch_gone", "x")))
    assert (row.now_us, row.runner_up_us, row.flag) == (10, None, "")


def test_a_winner_that_is_gone_is(doubling, again):
    doubling(torch_a=doubling.variant())
    row = again({"default": 10})
    assert (row.now_us, row.flag) == (None, "torch_a with a is nothing that a call could get")


def test_a_winner_that_is_wrong_is(doubling, again):
    doubling(torch_a=doubling.variant(lambda problem, config, args: None, space=lambda problem: ["a"]))
    assert again({}).flag.startswith("failed: out: ")


def test_a_case_that_is_gone_or_of_another_bucket_is(doubling, both, again):
    assert again({}, eight=None).flag == "the case cannot be made any more"
    moved = replace(WINNER, bucket=frozenset({("size", 16)}))
    assert again({}, moved).flag == "the case is of another bucket now"
    assert again({}, eight=doubling.case(prepare_raises=ValueError("no"))).flag == "ValueError: no"
