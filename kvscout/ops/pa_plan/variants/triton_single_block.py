"""One program, one launch: prefix sums over blocks of sequences, each of which then writes its own tasks.

Wins: on every GPU; the plan is one short kernel without a barrier between its steps.
Limit: one SM works; past 1024 sequences the blocks follow one another, and a sequence much longer than the rest of its
    block keeps few lanes busy.
Measured: 2026-11-30, H200, hot, us: 1 to 8 sequences 3.0 to 3.1, 32 to 256 3.7 to 4.6, 4096 27; one of 32 much longer
    than the rest 11.5.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import triton
import triton.language as tl

from ....variants import Variant
from ..api import Args, Problem

BLOCKS = (16, 64, 256, 1024)
"""Sequences per block that "auto" uses: few sizes, so that a growing batch seldom compiles anew."""

ELEMENTS = 1024
"""Tasks computed at once: sequences per block times tasks per sequence."""


@dataclass(frozen=True)
class Config:
    """Sequences taken at once, tasks of each that are written at once, and warps."""

    block_sequences: int
    block_tasks: int
    num_warps: int


def _default_config(problem: Problem) -> Config:
    block = next((size for size in BLOCKS if size >= problem.num_sequences), BLOCKS[-1])
    return Config(block, ELEMENTS // block, num_warps=8)


def _space(problem: Problem) -> Iterable[Config]:
    default = _default_config(problem)
    for num_warps in (4, 16):
        yield Config(default.block_sequences, default.block_tasks, num_warps)
    # Many blocks of sequences and many rounds of tasks, which the sizes above have in large problems only.
    yield Config(16, 2, 1)


@triton.jit
def _tiles(lengths_ptr, i, num_sequences, reach, TILE: tl.constexpr):
    """Lengths, first tiles and numbers of tiles of sequences ``i``; zeros past the last sequence."""
    length = tl.maximum(tl.load(lengths_ptr + i, mask=i < num_sequences, other=0), 0)
    first = tl.maximum(length - reach, 0) // TILE
    # Rounds up without leaving 32 bits.
    return length, first, length // TILE + (length % TILE > 0).to(tl.int32) - first


@triton.jit(do_not_specialize=["num_sequences", "capacity", "most_tasks", "reach", "tiles_per_partition"])
def _plan(
    lengths_ptr,  # [num_sequences]
    work_ptr,  # [capacity, 4]
    reduce_ptr,  # [num_sequences, 2]
    num_sequences,
    capacity,
    most_tasks,
    reach,
    tiles_per_partition,
    BATCH_INVARIANT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    TASKS: tl.constexpr,
):
    total = tl.full((), 0, tl.int64)
    nonempty = tl.full((), 0, tl.int64)
    if not BATCH_INVARIANT:
        for base in range(0, num_sequences, BLOCK):
            _, _, tiles = _tiles(lengths_ptr, base + tl.arange(0, BLOCK), num_sequences, reach, TILE)
            total += tl.sum(tiles.to(tl.int64))
            nonempty += tl.sum((tiles > 0).to(tl.int64))
    total = tl.maximum(total, 1)
    remaining = capacity - nonempty

    tiles_before = tl.full((), 0, tl.int64)
    slots_before = tl.full((), 0, tl.int64)
    for base in range(0, num_sequences, BLOCK):
        i = base + tl.arange(0, BLOCK)
        length, first, tiles = _tiles(lengths_ptr, i, num_sequences, reach, TILE)
        tiles = tiles.to(tl.int64)
        if BATCH_INVARIANT:
            share = (tiles + (tiles_per_partition - 1)) // tiles_per_partition
        else:
            cumulative = tiles_before + tl.cumsum(tiles)
            share = cumulative * remaining // total - (cumulative - tiles) * remaining // total
            share += (tiles > 0).to(tl.int64)
            tiles_before += tl.sum(tiles)
        count = tl.minimum(tl.minimum(share, tiles), most_tasks)
        start = slots_before + tl.cumsum(count) - count
        slots_before += tl.sum(count)

        record = reduce_ptr + i.to(tl.int64) * 2
        tl.store(record, start.to(tl.int32), mask=i < num_sequences)
        tl.store(record + 1, count.to(tl.int32), mask=i < num_sequences)

        divisor = tl.maximum(count, 1)[:, None]
        for base_task in range(0, tl.max(count), TASKS):
            task = base_task + tl.arange(0, TASKS)[None, :]  # [1, TASKS]
            inside = task < count[:, None]
            begin = first[:, None] + task * tiles[:, None] // divisor  # [BLOCK, TASKS]
            end = first[:, None] + (task + 1) * tiles[:, None] // divisor
            slot = work_ptr + (start[:, None] + task) * 4
            tl.store(slot, tl.broadcast_to(i[:, None], BLOCK, TASKS), mask=inside)
            tl.store(slot + 1, begin.to(tl.int32), mask=inside)
            tl.store(slot + 2, end.to(tl.int32), mask=inside)
            tl.store(slot + 3, tl.broadcast_to(length[:, None], BLOCK, TASKS), mask=inside)

    words = tl.full((), 4, tl.int64) * capacity
    for base in range(slots_before * 4, words, BLOCK * TASKS):
        word = base + tl.arange(0, BLOCK * TASKS)
        tl.store(work_ptr + word, 0, mask=word < words)


def _launch(problem: Problem, config: Config, args: Args) -> None:
    _plan[(1,)](
        *args,
        problem.num_sequences,
        problem.capacity,
        problem.most_tasks,
        problem.reach,
        problem.tiles_per_partition,
        BATCH_INVARIANT=problem.tiles_per_partition > 0,
        TILE=problem.tile,
        BLOCK=config.block_sequences,
        TASKS=config.block_tasks,
        num_warps=config.num_warps,
    )


VARIANT = Variant(
    launch=_launch,
    default_config=_default_config,
    space=_space,
    rank=lambda problem: 60,
)
