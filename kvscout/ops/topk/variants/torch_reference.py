"""The definition: a stable sort of whole rows.

Wins: never; it is what the others are judged by.
Limit: memory and time for sorting ``[S, N]`` values and their columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....variants import Variant
from ..api import Args, Problem, eligible


@dataclass(frozen=True)
class Config:
    """Nothing to choose."""


def reference(
    logits: torch.Tensor, k: int, ks: torch.Tensor | None = None, ke: torch.Tensor | None = None
) -> torch.Tensor:
    """int32 ``[S, k]``: by descending logit, then ascending column; -1 where there is none."""
    candidates = eligible(logits, ks, ke)
    values = torch.where(candidates, logits.float() + 0.0, float("-inf"))  # -0.0 + 0.0 is +0.0
    order = values.sort(dim=1, descending=True, stable=True).indices[:, :k].int()
    rank = torch.arange(order.shape[1], device=logits.device)
    found = torch.where(rank < candidates.sum(1, keepdim=True), order, -1)
    return torch.nn.functional.pad(found, (0, k - found.shape[1]), value=-1)


def _launch(problem: Problem, config: Config, args: Args) -> None:
    args.out.copy_(reference(args.logits, problem.k, args.ks, args.ke))


VARIANT = Variant(
    launch=_launch,
    default_config=lambda problem: Config(),
    rank=lambda problem: 0,
)
