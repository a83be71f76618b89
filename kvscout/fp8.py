"""The e4m3 number formats: their limits, and quantisation with a scale."""

from __future__ import annotations

import torch

FN = torch.float8_e4m3fn
"""OCP e4m3: largest value 448, no infinities, one NaN pattern per sign."""
FNUZ = torch.float8_e4m3fnuz
"""e4m3 as AMD's gfx942 computes it: largest value 240, no negative zero (0x80 is NaN)."""
E4M3 = (FN, FNUZ)


def max_value(dtype: torch.dtype) -> float:
    """Largest finite value of an e4m3 format."""
    return float(torch.finfo(dtype).max)


def quantize(x: torch.Tensor, scale: torch.Tensor | float, dtype: torch.dtype = FN) -> torch.Tensor:
    """``x / scale``, saturated to the format's range and rounded to it.

    Saturation comes first because a bare cast of a value past the range gives NaN on some devices.
    NaN stays NaN.
    """
    limit = max_value(dtype)
    return _divide(x.float(), scale).clamp(-limit, limit).to(dtype)


def amax_scale(x: torch.Tensor, dim: int | tuple[int, ...], dtype: torch.dtype = FN) -> torch.Tensor:
    """Scale that maps the largest finite magnitude along ``dim`` to the format's largest value.

    1 where nothing but zeros, infinities and NaN is left, or where the scale would be too small for float32.
    """
    amax = torch.where(x.isfinite(), x, 0).float().abs().amax(dim)
    scale = _divide(amax, max_value(dtype))
    return torch.where(scale > 0, scale, 1.0)


def _divide(x: torch.Tensor, divisor: torch.Tensor | float) -> torch.Tensor:
    """The quotient rounded once; on a GPU torch would multiply by the reciprocal of a number that is not a tensor."""
    if not isinstance(divisor, torch.Tensor):
        divisor = torch.full((), divisor, dtype=torch.float32, device=x.device)
    return x / divisor
