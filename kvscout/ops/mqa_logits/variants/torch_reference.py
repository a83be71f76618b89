"""The definition, in float64 or float32: all heads' dot products at once.

Wins: never; it is what the others are judged by.
Limit: memory for ``[S, H, N]`` values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....variants import Variant
from ..api import Args, Problem


@dataclass(frozen=True)
class Config:
    """Precision of the arithmetic."""

    dtype: torch.dtype = torch.float64


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    q_scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """``[S, N]`` logits in ``dtype``, -inf outside the windows."""
    if q_scale is not None:
        weights = weights * q_scale
    dots = torch.einsum("shd,nd->shn", q.to(dtype), k.to(dtype))
    logits = torch.einsum("shn,sh->sn", dots.relu(), weights.to(dtype)) * k_scale.to(dtype)
    return logits.masked_fill(~window(ks, ke, k.shape[0]), float("-inf"))


def window(ks: torch.Tensor, ke: torch.Tensor, num_keys: int, columns: slice = slice(None)) -> torch.Tensor:
    """bool ``[S, columns]``: which of the columns, of all N unless told otherwise, a row scores."""
    column = torch.arange(*columns.indices(num_keys), device=ks.device)
    start = ks.clamp(0, num_keys)
    return (column >= start[:, None]) & (column < ke.clamp(max=num_keys)[:, None])


def _launch(problem: Problem, config: Config, args: Args) -> None:
    logits = reference(*args[:-1], dtype=config.dtype)
    if problem.clean_logits:
        args.out.copy_(logits)
    else:
        inside = window(args.ks, args.ke, problem.num_keys)
        args.out.copy_(torch.where(inside, logits.to(args.out.dtype), args.out))


VARIANT = Variant(
    launch=_launch,
    default_config=lambda problem: Config(),
    rank=lambda problem: 0,
)
