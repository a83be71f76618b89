"""Verdicts: what must be told apart is, and what is right passes."""

import math

import pytest
import torch

from kvscout.testing.compare import Budget, bits, close, equal, errors

ANYTHING = Budget(max_rel=math.inf, cosine=math.inf)
SOME = Budget(max_rel=0.01, cosine=1e-4)


def values(*numbers):
    return torch.tensor(numbers, dtype=torch.float32)


@pytest.mark.parametrize(
    ("got", "kind"),
    [
        (values(1, -math.inf, 3), "-inf"),
        (values(1, math.inf, 3), "inf"),
        (values(1, math.nan, 3), "NaN"),
    ],
)
def test_a_value_that_is_not_finite_must_be_so_in_the_reference(got, kind):
    finite = values(1, 2, 3)
    for a, b in ((got, finite), (finite, got)):
        found = close("x", a, b.double(), ANYTHING)
        assert not found.ok
        assert found.message.startswith(f"{kind} positions differ in 1 of 3 places, first at (1,)")


def test_the_sign_of_infinity_matters():
    assert not close("x", values(math.inf, 1), values(-math.inf, 1).double(), ANYTHING).ok


def test_the_same_infinities_and_nans_are_right():
    mixed = values(1, math.inf, -math.inf, math.nan)
    assert close("x", mixed, mixed.double(), Budget(0, 0)).ok


def test_shapes_must_match():
    assert "shape [3], expected [1, 3]" in close("x", values(1, 2, 3), values(1, 2, 3)[None].double(), ANYTHING).message


def test_one_element_over_the_budget_fails():
    reference = torch.linspace(1, 100, 1000, dtype=torch.float64)
    off = reference.clone()
    off[7] += 2
    found = close("x", off.float(), reference, SOME)
    assert found.message == "largest relative difference 2.00e-02 exceeds 1.00e-02"
    assert found.max_rel == pytest.approx(0.02, rel=1e-4)
    off[7] -= 1.5
    assert close("x", off.float(), reference, SOME).ok


def test_many_elements_within_the_budget_fail_by_their_cosine():
    reference = torch.ones(1000, dtype=torch.float64)
    reference[0] = 100
    off = reference.clone()
    off[1:] = -0.5
    found = close("x", off.float(), reference, Budget(max_rel=0.02, cosine=1e-3))
    assert found.message.startswith("cosine gap")


def test_the_same_errors_under_another_budget():
    found = close("x", values(1, 2.1), values(1, 2).double(), SOME)
    assert not found.ok
    wide = Budget(0.1, 1e-2)
    assert found.under(wide) == close("x", values(1, 2.1), values(1, 2).double(), wide)
    assert found.under(wide).ok
    assert found.under(wide).under(SOME) == found


@pytest.mark.parametrize(
    "found", [close("x", values(math.nan), values(1).double(), SOME), equal("x", values(1), values(2))]
)
def test_what_no_budget_decided_no_other_excuses(found):
    assert not found.ok
    assert found.under(Budget(9, 9)) == found


def test_what_should_be_zero_must_be_zero():
    assert close("x", values(0, 0), values(0, 0).double(), Budget(0, 0)).ok
    assert not close("x", values(0, 1e-30), values(0, 0).double(), SOME).ok


def test_zeros_are_not_close_to_anything_else():
    found = close("x", torch.zeros(8), torch.ones(8, dtype=torch.float64), Budget(max_rel=2, cosine=0.5))
    assert found.message.startswith("cosine gap 1.0")


def test_a_budget_is_twice_the_error_of_plain_torch_and_the_extra():
    reference = torch.tensor([1.0, 2.0], dtype=torch.float64)
    budget = Budget.from_same_precision(values(1, 2.02), reference, extra=0.001)
    assert budget.max_rel == pytest.approx(0.021, rel=1e-4)
    assert budget.cosine == pytest.approx(0.021**2, rel=1e-3)


def test_errors_of_nothing_are_zero():
    assert errors(torch.empty(0), torch.empty(0)) == (0.0, 0.0)
    assert errors(values(math.nan), values(math.nan)) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8])
@pytest.mark.parametrize("bit", [0, 7])
def test_equality_sees_one_bit(dtype, bit):
    one = torch.arange(1, 25).view(4, 6).to(dtype)
    other = one.clone()
    assert equal("x", one, other).ok
    other.view(torch.uint8).flatten()[other.element_size() * 9] ^= 1 << bit
    found = equal("x", one, other)
    assert found.message.startswith("1 of 24 differ, first at (1, 3)")


def test_equality_tells_zeros_and_nans_apart_and_knows_its_own_nan():
    assert not equal("x", values(0.0), values(-0.0)).ok
    assert equal("x", values(math.nan), values(math.nan)).ok
    other_nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert not equal("x", values(math.nan), other_nan).ok


def test_equality_wants_the_same_shape_and_dtype():
    assert not equal("x", values(1), values(1, 2)).ok
    assert not equal("x", values(1), values(1).double()).ok


def test_bits_of_a_strided_tensor():
    assert bits(torch.ones(2, 6)[:, ::2]).shape == (2, 3)
