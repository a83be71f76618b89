"""The definition in plain torch: sort, drop what was there before, sort again; and the CPU default.

Wins: on the CPU.
Limit: about 35 launches, two of them sorts of ``[rows, k]``: on a GPU more time than a small decode itself takes.
Measured: nothing yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....variants import Variant
from ..api import Args, Problem
from ..rows import distinct, look_up, owner_and_end


@dataclass(frozen=True)
class Config:
    """Nothing to choose."""


def _launch(problem: Problem, config: Config, args: Args) -> None:
    size, page, per_block = problem.block_size, problem.page, problem.pages_per_block
    owner, end = owner_and_end(
        args.block_tables, args.context_lengths, page, problem.num_rows, args.sequences, args.ends
    )
    blocks = distinct(args.selected, -(-end // size))
    pages = (blocks[:, :, None] * per_block + torch.arange(per_block, device=end.device)).flatten(1)
    args.out_tables.copy_(look_up(args.block_tables, owner, pages).masked_fill(pages * page >= end[:, None], -1))
    args.out_lengths.copy_((end[:, None] - blocks * size).clamp(0, size).sum(1))


VARIANT = Variant(
    launch=_launch,
    default_config=lambda problem: Config(),
    rank=lambda problem: 10,
)
