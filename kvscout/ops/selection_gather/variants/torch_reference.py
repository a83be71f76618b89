"""The definition in plain torch: the tokens in order, then a copy of each; and the CPU default.

Wins: on the CPU.
Limit: about 40 launches, two of them sorts of ``[rows, k]``, and a copy of all that is selected, freed again.
Measured: nothing yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .... import fp8
from ....variants import Variant
from ...selection_tables.rows import NOTHING, distinct, look_up, owner_and_end
from ..api import Args, Problem


@dataclass(frozen=True)
class Config:
    """Nothing to choose."""


def _launch(problem: Problem, config: Config, args: Args) -> None:
    page, per_row = problem.page, problem.pages_per_row
    owner, end = owner_and_end(
        args.block_tables, args.context_lengths, page, problem.num_rows, args.sequences, args.ends
    )
    tokens = distinct(args.selected, end)
    args.out_lengths.copy_((tokens < NOTHING).sum(1))
    args.out_tables.copy_(torch.arange(problem.num_rows * per_row, device=end.device).view(-1, per_row))
    tokens = torch.nn.functional.pad(tokens, (0, per_row * page - problem.k), value=NOTHING)
    block = look_up(args.block_tables, owner, tokens // page)
    # What no table should hold is not followed out of the cache.
    nothing = (tokens == NOTHING) | (block < 0) | (block >= problem.num_blocks)
    block = block.masked_fill(nothing, 0)
    nothing, block, place = (x.view(-1, page) for x in (nothing, block, tokens % page))  # [pages, page]
    source, to = args.pages(problem.layout)
    _bits(to.keys).copy_(_gathered(_bits(source.keys), nothing, block, place))
    chunk = source.values.shape[3]
    values = _gathered(_bits(source.values), nothing, block, place // chunk, place % chunk)
    _bits(to.values).copy_(values.unflatten(2, (-1, chunk)))
    for pair in args.scales():
        if pair is not None:
            scale, out = pair
            out.copy_(_gathered(scale, nothing, block, place))


def _gathered(source: Tensor, nothing: Tensor, block: Tensor, *place: Tensor) -> Tensor:
    """``source[block, :, *place]`` as ``[pages, heads, page, ...]``, and zeros where there is nothing."""
    if not source.shape[0]:
        return source.new_zeros(len(block), source.shape[1], block.shape[1], *source.shape[2 + len(place) :])
    index: tuple[Any, ...] = (block, slice(None), *place)
    found = source[index]  # [pages, page, heads, ...]
    return found.masked_fill(nothing[(..., *(None,) * (found.dim() - 2))], 0).transpose(1, 2)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype in fp8.E4M3 else x


VARIANT = Variant(
    launch=_launch,
    default_config=lambda problem: Config(),
    rank=lambda problem: 10,
)
