"""Quantise in float32, then ``index_put_`` the bit patterns.

Skipped tokens repeat one that is written, so that shapes do not depend on the slots; where every token is skipped, they
all write back what the first slot of the cache holds.

Wins: on the CPU, where it is the default.
Limit: copies of all tokens in float32 and in the cache's type. A call whose tokens are all skipped rewrites the first
slot with its own contents: another stream must not write there at that time.
Measured: 2026-11-30, 1 CPU core, 4096 tokens x 8 heads x 128, bfloat16 to chunked e4m3fn: 38 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .... import fp8
from ....variants import Variant
from ..api import CAST, PER_TOKEN, Args, Problem

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Config:
    """Nothing to choose."""


class _Scatter:
    """Where the tokens of a call go."""

    def __init__(self, slots: torch.Tensor, blocks: int, page: int) -> None:
        slots = slots.long()
        written = (slots >= 0) & (slots < blocks * page)
        token = torch.arange(len(slots), device=slots.device)
        self.any_written = written.any()
        self.source = torch.where(written, token, written.int().argmax())
        slots = torch.where(self.any_written, slots[self.source], 0)
        self.block, self.position = slots // page, slots % page

    def put(self, destination: torch.Tensor, tokens: torch.Tensor, *inner: torch.Tensor) -> None:
        """Store ``[T, Hkv, ...]`` at ``destination[block, :, *inner]``."""
        # As integers: torch indexes every integer type, and their copies keep the bits of a NaN.
        integer = INTEGERS[destination.element_size()]
        destination, tokens = destination.view(integer), tokens.view(integer)
        index: tuple[Any, ...] = (self.block, slice(None), *inner)
        first: tuple[Any, ...] = (0, slice(None), *(0 for _ in inner))
        destination[index] = torch.where(self.any_written, tokens[self.source], destination[first])


def _launch(problem: Problem, config: Config, args: Args) -> None:
    keys, values = args.pages.keys, args.pages.values
    scatter = _Scatter(args.slots, keys.shape[0], problem.page)
    position = scatter.position
    k = _to_cache(args.k, problem.k_scaling, args.k_scale, args.k_factor, problem.cache_dtype, scatter)
    scatter.put(keys, k.unflatten(2, keys.shape[3:]), position)
    v = _to_cache(args.v, problem.v_scaling, args.v_scale, args.v_factor, problem.cache_dtype, scatter)
    chunk = values.shape[3]
    scatter.put(values, v, position // chunk, position % chunk)


def _to_cache(
    x: torch.Tensor,
    scaling: str,
    scale: torch.Tensor | None,
    factor: float,
    dtype: torch.dtype,
    scatter: _Scatter,
) -> torch.Tensor:
    """The tokens in the cache's type; writes the scales that are computed on the way."""
    if scaling == CAST:
        return x.to(dtype)
    if scale is None:
        return fp8.quantize(x, factor, dtype)
    if scaling == PER_TOKEN:
        computed = fp8.amax_scale(x, 2, dtype)
        scatter.put(scale, computed, scatter.position)
        return fp8.quantize(x, computed[..., None], dtype)
    return fp8.quantize(x, scale[:, None], dtype)


VARIANT = Variant(
    launch=_launch,
    default_config=lambda problem: Config(),
    rank=lambda problem: 10,
)
