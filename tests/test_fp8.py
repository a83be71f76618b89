"""The e4m3 formats: saturation, NaN, rounding, scales."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvscout import fp8

FORMATS = pytest.mark.parametrize("dtype", fp8.E4M3)


@pytest.mark.parametrize(("dtype", "limit"), [(fp8.FN, 448.0), (fp8.FNUZ, 240.0)])
def test_max_value(dtype, limit):
    assert fp8.max_value(dtype) == limit


@FORMATS
def test_saturates_instead_of_giving_nan(dtype):
    limit = fp8.max_value(dtype)
    x = torch.tensor([limit, limit + 1, 1e6, float("inf"), -limit, -1e30, float("-inf")])
    assert fp8.quantize(x, 1.0, dtype).float().tolist() == [limit] * 4 + [-limit] * 3


@FORMATS
def test_nan_stays_nan(dtype):
    x = torch.tensor([float("nan"), 1.0, float("-nan")])
    assert fp8.quantize(x, 0.5, dtype).float().isnan().tolist() == [True, False, True]


@FORMATS
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_values_of_the_format_are_exact(dtype, source):
    every = torch.arange(256).to(torch.uint8).view(dtype)
    finite = every[every.float().isfinite()]
    assert torch.equal(fp8.quantize(finite.to(source), 1.0, dtype).float(), finite.float())


def test_scale_is_divided_by_and_broadcasts():
    x = torch.tensor([[2.0, 4.0], [30.0, 60.0]])
    scale = torch.tensor([[2.0], [30.0]])
    assert fp8.quantize(x, scale).float().tolist() == [[1.0, 2.0], [1.0, 2.0]]


def test_amax_scale():
    x = torch.tensor([[-448.0, 3.0], [0.0, 0.0], [1.0, -2.0]])
    assert fp8.amax_scale(x, 1).tolist() == [1.0, 1.0, pytest.approx(2 / 448)]
    assert fp8.amax_scale(x, (0, 1), fp8.FNUZ).item() == pytest.approx(448 / 240)


def test_amax_scale_looks_at_finite_values_alone():
    x = torch.tensor([[float("inf"), -896.0], [float("nan"), 0.0], [float("-inf"), float("nan")]])
    assert fp8.amax_scale(x, 1).tolist() == [2.0, 1.0, 1.0]


def test_amax_scale_of_the_smallest_numbers_gives_no_nan():
    x = torch.tensor([2.0**-149, 0.0])
    assert fp8.quantize(x, fp8.amax_scale(x, 0)).float().tolist() == [0.0, 0.0]


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=16),
    st.sampled_from(fp8.E4M3),
)
def test_round_trip_error(values, dtype):
    """Half a unit in the last of four significant bits, and half the smallest subnormal number near zero."""
    x = torch.tensor(values)
    x[x.abs() < 2.0**-100] = 0
    scale = fp8.amax_scale(x, 0, dtype)
    back = fp8.quantize(x, scale, dtype).double() * scale.double()
    smallest = float(torch.finfo(dtype).smallest_normal) / 8
    bound = x.double().abs() / 16 + scale.double() * smallest / 2
    assert ((back - x.double()).abs() <= bound * (1 + 1e-6)).all()
