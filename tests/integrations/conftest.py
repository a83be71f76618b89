"""Inputs that the adapters' tests share."""

import pytest
import torch


def _make(rows=5, keys=70, heads=16, dim=64, seed=0, device="cpu"):
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device)

    start = torch.arange(rows, device=device).int() * 3
    return {
        "q": normal(rows, heads, dim).to(torch.float8_e4m3fn),
        "k": normal(keys, dim).to(torch.float8_e4m3fn),
        "k_scale": normal(keys).abs(),
        "weights": normal(rows, heads),
        "ks": start,
        "ke": (keys - 5 * start).clamp(max=keys),
    }


@pytest.fixture
def make():
    """``make(rows=5, ...)``: the tensors of a score by kvscout's short names; windows of different lengths."""
    return _make


@pytest.fixture
def assert_scores():
    """``assert_scores(found, expected)``: equal up to float32's or, rounded once more, bfloat16's precision."""

    def check(found, expected):
        rounding = 2**-8 if found.dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(found.double(), expected, rtol=1e-5 + rounding, atol=1e-4, equal_nan=True)

    return check
