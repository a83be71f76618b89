"""``torch.topk`` over int64 keys that hold a logit and its column, a block of rows at a time.

The keys of a row differ, so the rule for ties is part of their order, and the columns need no second array.

Wins: on the CPU and, until a kernel of its own does better, on every GPU.
Limit: passes over memory: about ten that make the keys, then those of ``torch.topk``.
Measured: 2026-11-30, 1 CPU core, k 2048, blocks of 16 MB (of 256 MB; stable sort): 64 x 8192 7.8 ms (9.6; 40),
16 x 131072 28 ms (34; 208), 1024 x 8192 121 ms (213; 700). With ``sorted=True`` 12, 25 and 180 ms.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ....variants import Variant
from ..api import MAX_COLUMNS, Args, Problem, eligible

# Temporaries of _keys for one logit: float32 twice, int32 three times, masks, int64 twice.
BYTES_PER_LOGIT = 40

INT32 = torch.iinfo(torch.int32)
# The high half of a key that must not be selected: no finite number and neither infinity maps to it.
MASKED = INT32.min


@dataclass(frozen=True)
class Config:
    """``budget_bytes`` of keys and temporaries are held at a time (one row at least)."""

    budget_bytes: int


def _default_config(problem: Problem) -> Config:
    # A GPU wants few large launches, a CPU core wants the block to stay in its cache.
    return Config(16 << 20) if problem.arch == "cpu" else Config(1 << 30)


def _space(problem: Problem) -> Iterable[Config]:
    yield Config(1 << 16)


def _launch(problem: Problem, config: Config, args: Args) -> None:
    block_rows = max(1, config.budget_bytes // (BYTES_PER_LOGIT * max(1, problem.num_keys)))
    for row in range(0, problem.num_rows, block_rows):
        rows = slice(row, row + block_rows)
        ks, ke = (None if bound is None else bound[rows] for bound in (args.ks, args.ke))
        _select(args.logits[rows], ks, ke, args.out[rows], problem.sorted)


def _select(
    logits: torch.Tensor, ks: torch.Tensor | None, ke: torch.Tensor | None, out: torch.Tensor, sorted: bool
) -> None:
    count = min(out.shape[1], logits.shape[1])
    best = torch.topk(_keys(logits, ks, ke), count, dim=1, sorted=sorted).values
    valid = best >= (MASKED + 1) << 32
    columns = torch.where(valid, MAX_COLUMNS - (best & MAX_COLUMNS), -1).int()
    out[:, count:] = -1
    if sorted:
        out[:, :count] = columns
    else:
        # The valid ones keep their order and move to the front.
        place = valid.cumsum(1)
        total, rank = place[:, -1:], torch.arange(count, device=out.device)
        out.scatter_(1, torch.where(valid, place - 1, total + rank - place), columns)


def _keys(logits: torch.Tensor, ks: torch.Tensor | None, ke: torch.Tensor | None) -> torch.Tensor:
    """int64 ``[S, N]``: larger is better; the logit's order in the high half, the column counted down in the low."""
    bits = (logits.float() + 0.0).view(torch.int32)  # -0.0 + 0.0 is +0.0
    # Negative floats order backwards as integers: flipping all but their sign turns them round.
    ordered = bits ^ ((bits >> 31) & INT32.max)
    ordered = torch.where(eligible(logits, ks, ke), ordered, MASKED)
    column = torch.arange(logits.shape[1], device=logits.device)
    return (ordered.long() << 32) | (MAX_COLUMNS - column)


VARIANT = Variant(
    launch=_launch,
    default_config=_default_config,
    space=_space,
    rank=lambda problem: 10,
)
