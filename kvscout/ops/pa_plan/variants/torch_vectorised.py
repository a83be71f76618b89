"""The formulas of the plan on whole tensors, in int64, with shapes that depend on no length.

Wins: on the CPU, where it is the default.
Limit: some thirty small kernels on a GPU, where it is correct and never waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....variants import Variant
from ..api import Args, Problem


@dataclass(frozen=True)
class Config:
    """Nothing to choose."""


def _launch(problem: Problem, config: Config, args: Args) -> None:
    lengths = args.context_lengths.long().clamp(min=0)
    first = (lengths - problem.reach).clamp(min=0) // problem.tile
    tiles = (lengths + problem.tile - 1) // problem.tile - first

    if problem.tiles_per_partition:
        share = (tiles + problem.tiles_per_partition - 1) // problem.tiles_per_partition
    else:
        seen = (tiles > 0).long()
        remaining = problem.capacity - seen.sum()
        cumulative = tiles.cumsum(0)
        total = cumulative[-1].clamp(min=1)
        share = seen + cumulative * remaining // total - (cumulative - tiles) * remaining // total
    count = torch.minimum(share, tiles).clamp(max=problem.most_tasks)
    end = count.cumsum(0)
    start = end - count
    args.reduce_info.copy_(torch.stack((start, count), dim=1))

    slot = torch.arange(problem.capacity, device=lengths.device)
    sequence = torch.searchsorted(end, slot, right=True)
    used = sequence < problem.num_sequences
    sequence = sequence.clamp(max=problem.num_sequences - 1)
    first, tiles, count, part = first[sequence], tiles[sequence], count[sequence].clamp(min=1), slot - start[sequence]
    begin, stop = first + part * tiles // count, first + (part + 1) * tiles // count
    work = torch.stack((sequence, begin, stop, lengths[sequence]), dim=1)
    args.work_info.copy_(work.where(used[:, None], 0))


VARIANT = Variant(
    launch=_launch,
    default_config=lambda problem: Config(),
    rank=lambda problem: 10,
)
