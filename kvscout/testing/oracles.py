"""Plans worked out one sequence and one task at a time, in plain Python integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Plan(NamedTuple):
    """What ``work_info`` and ``reduce_info`` of a decode plan hold."""

    work: list[tuple[int, int, int, int]]
    reduce: list[tuple[int, int]]


def pa_capacity(
    num_sequences: int, num_kv_heads: int, max_partitions: int, workgroup_budget: int, batch_invariant: bool = False
) -> int:
    """Slots of a plan: every head of every sequence gets one, then the budget is filled, but no partition too many.

    Of a batch-invariant plan: for each sequence as many as it would have alone.
    """
    if batch_invariant:
        return num_sequences * pa_capacity(1, num_kv_heads, max_partitions, workgroup_budget)
    per_head = 0
    while per_head * num_kv_heads < workgroup_budget:
        per_head += 1
    return min(num_sequences * max_partitions, max(num_sequences, per_head))


def pa_tiles(length: int, sliding_window: int, query_length: int, tile: int) -> range:
    """The tiles of ``tile`` tokens that hold a token which some query of the sequence sees."""
    if length <= 0:
        return range(0)
    first_token = max(length - query_length + 1 - sliding_window, 0) if sliding_window > 0 else 0
    last_token = length - 1
    return range(first_token // tile, last_token // tile + 1)


def pa_plan(
    lengths: Sequence[int],
    capacity: int,
    max_partitions: int,
    sliding_window: int,
    query_length: int,
    tile: int,
    tiles_per_partition: int = 0,
) -> Plan:
    """The plan of ``lengths``: shares of the slots in proportion to tiles, rounded by a running total.

    With ``tiles_per_partition`` a batch-invariant one: every sequence gets the same slots, and fills those it needs.
    """
    tiles = [pa_tiles(length, sliding_window, query_length, tile) for length in lengths]
    total = max(sum(map(len, tiles)), 1)
    remaining = capacity - sum(len(t) > 0 for t in tiles)
    work: list[tuple[int, int, int, int]] = []
    reduce = []
    cumulative = 0
    for sequence, (length, mine) in enumerate(zip(lengths, tiles, strict=True)):
        before, cumulative = cumulative, cumulative + len(mine)
        share = cumulative * remaining // total - before * remaining // total
        count = min((len(mine) > 0) + share, len(mine), max_partitions)
        if tiles_per_partition:
            count = min(len(mine[::tiles_per_partition]), capacity // len(lengths))
        reduce.append((len(work), count))
        for task in range(count):
            begin, end = (mine.start + part * len(mine) // count for part in (task, task + 1))
            work.append((sequence, begin, end, length))
    return Plan(work + [(0, 0, 0, 0)] * (capacity - len(work)), reduce)
