"""The exception that says which variants there are and why each does not serve a call."""

import pickle

import pytest

import kvscout
from kvscout.ops.mqa_logits.api import Problem

PROBLEM = Problem("cpu", 1, 2, 8, 32, True)


REASONS = {"torch_a": "too few rows", "cute_b": "this is cpu"}


@pytest.fixture
def error():
    return kvscout.UnsupportedProblem("mqa_logits", PROBLEM, "auto", REASONS)


def test_message_lists_every_variant_with_its_sentence(error):
    first, *others = str(error).splitlines()
    assert first == f"no variant of mqa_logits serves {PROBLEM} (variant='auto'):"
    assert others == ["  torch_a: too few rows", "  cute_b: this is cpu"]


def test_is_a_not_implemented_error(error):
    assert isinstance(error, NotImplementedError)


@pytest.mark.parametrize(("requested", "reasons"), [("auto", REASONS), ("cute_b", {"cute_b": "this is cpu"})])
def test_survives_pickling(requested, reasons):
    error = kvscout.UnsupportedProblem("mqa_logits", PROBLEM, requested, reasons)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kvscout.UnsupportedProblem
    assert str(copy) == str(error)
    assert f"(variant={requested!r})" in str(copy)
    assert (copy.op, copy.problem, copy.requested, copy.reasons) == ("mqa_logits", PROBLEM, requested, reasons)


def test_reasons_are_its_own():
    reasons = {"torch_a": "too few rows"}
    error = kvscout.UnsupportedProblem("mqa_logits", PROBLEM, "torch_a", reasons)
    reasons.clear()
    assert error.reasons == {"torch_a": "too few rows"}
