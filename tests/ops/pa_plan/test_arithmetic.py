"""The plan's integers, against the oracle and against what a plan is for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvscout import plan_pa_decode
from kvscout.ops.pa_plan.plan import TILES
from kvscout.testing import oracles
from kvscout.testing.cases.pa_plan import INT32_MAX, INT32_MIN, SMALL_EDGES, SPLITS, WINDOWS

EXTREMES = (*SMALL_EDGES, *(INT32_MAX - less for less in (0, 127, 128, 255, 256)))

lengths_of = st.lists(st.one_of(st.sampled_from(EXTREMES), st.integers(-5, 5000)), max_size=40)
windows = st.one_of(st.sampled_from(WINDOWS), st.integers(-1, 9000))
tiles_of = st.sampled_from(TILES)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def rows(tensor):
    return [tuple(row) for row in tensor.tolist()]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("window", WINDOWS)
def test_every_split_and_query_length_as_the_oracle(variant, window, tile, device):
    lengths = int32(EXTREMES).to(device)
    for query_length in range(1, 9):
        for max_partitions, budget in SPLITS:
            kv_heads = (1, 2, 8)[query_length % 3]
            split = {"max_partitions": max_partitions, "workgroup_budget": budget}
            plan = plan_pa_decode(
                lengths, kv_heads, **split, sliding_window=window, query_length=query_length, tile=tile, variant=variant
            )
            capacity = oracles.pa_capacity(len(EXTREMES), kv_heads, max_partitions, budget)
            expected = oracles.pa_plan(EXTREMES, capacity, max_partitions, window, query_length, tile)
            assert rows(plan.reduce_info) == expected.reduce, (query_length, split)
            assert rows(plan.work_info) == expected.work, (query_length, split)


def tasks_of(plan):
    """Every sequence's (first tile, end tile, length), task by task."""
    work = rows(plan.work_info)
    return [[task[1:] for task in work[start : start + count]] for start, count in rows(plan.reduce_info)]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("tiles_per_partition", [1, 3, 2**31 - 1])
@pytest.mark.parametrize("window", [0, 300])
def test_batch_invariant_plans_as_the_oracle(variant, window, tiles_per_partition, tile, device):
    lengths = int32(EXTREMES).to(device)
    for query_length, (max_partitions, budget) in enumerate(SPLITS, start=1):
        kv_heads = (1, 2, 8)[query_length % 3]
        split = {"max_partitions": max_partitions, "workgroup_budget": budget}
        plan = plan_pa_decode(
            lengths, kv_heads, **split, sliding_window=window, query_length=query_length, tile=tile, variant=variant,
            batch_invariant=True, tiles_per_partition=tiles_per_partition,
        )  # fmt: skip
        capacity = oracles.pa_capacity(len(EXTREMES), kv_heads, max_partitions, budget, True)
        expected = oracles.pa_plan(EXTREMES, capacity, max_partitions, window, query_length, tile, tiles_per_partition)
        assert rows(plan.reduce_info) == expected.reduce, split
        assert rows(plan.work_info) == expected.work, split


split_of = st.fixed_dictionaries({"max_partitions": st.integers(1, 256), "workgroup_budget": st.integers(1, 512)})


@given(
    lengths_of,
    lengths_of,
    st.sampled_from((1, 2, 8)),
    split_of,
    st.integers(1, 9),
    windows,
    st.integers(1, 8),
    tiles_of,
)
def test_the_rest_of_the_batch_does_not_split_a_sequence(
    left, right, kv_heads, split, tiles, window, query_length, tile
):
    options = {"sliding_window": window, "query_length": query_length, "tile": tile} | split
    invariant = {"batch_invariant": True, "tiles_per_partition": tiles} | options
    for length in (300, 5000, INT32_MAX):
        alone = plan_pa_decode(int32([length]), kv_heads, **invariant)
        among = plan_pa_decode(int32([*left, length, *right]), kv_heads, **invariant)
        assert tasks_of(among)[len(left)] == tasks_of(alone)[0]
        if tiles == 1:
            assert tasks_of(plan_pa_decode(int32([length]), kv_heads, **options)) == tasks_of(alone)


@given(lengths_of, st.sampled_from((1, 2, 8)), split_of, st.integers(1, 9), windows, st.integers(1, 8), tiles_of)
def test_only_a_sequence_that_fills_its_slots_has_longer_tasks(
    lengths, kv_heads, split, tiles_per_partition, window, query_length, tile
):
    plan = plan_pa_decode(
        int32(lengths), kv_heads, **split, sliding_window=window, query_length=query_length, tile=tile,
        batch_invariant=True, tiles_per_partition=tiles_per_partition,
    )  # fmt: skip
    slots = min(split["max_partitions"], -(-split["workgroup_budget"] // kv_heads))
    assert plan.capacity == len(lengths) * slots
    for length, tasks in zip(lengths, tasks_of(plan), strict=True):
        bounds = [tasks[0][0], *(end for _, end, _ in tasks)] if tasks else []
        tiles = oracles.pa_tiles(length, window, query_length, tile)
        assert ([*bounds[:1], *bounds[-1:]]) == ([tiles.start, tiles.stop] if tiles else [])
        assert [begin for begin, _, _ in tasks] == bounds[:-1]
        sizes = [end - begin for begin, end, _ in tasks]
        assert len(sizes) == slots or max(sizes, default=0) <= tiles_per_partition
        assert not sizes or (min(sizes) > 0 and max(sizes) - min(sizes) <= 1)
    used = sum(count for _, count in rows(plan.reduce_info))
    assert set(rows(plan.work_info)[used:]) <= {(0, 0, 0, 0)}


@given(
    lengths_of,
    st.sampled_from((1, 2, 8)),
    st.integers(1, 256),
    st.integers(5, 512),
    windows,
    st.integers(1, 8),
    tiles_of,
)
def test_partitions_cover_each_sequence_once(lengths, kv_heads, max_partitions, budget, window, query_length, tile):
    split = {"max_partitions": max_partitions, "workgroup_budget": budget, "tile": tile}
    plan = plan_pa_decode(int32(lengths), kv_heads, **split, sliding_window=window, query_length=query_length)
    work = rows(plan.work_info)
    assert plan.capacity == len(work) == oracles.pa_capacity(len(lengths), kv_heads, max_partitions, budget)
    used = 0
    for sequence, (length, (start, count)) in enumerate(zip(lengths, rows(plan.reduce_info), strict=True)):
        tiles = oracles.pa_tiles(length, window, query_length, tile)
        assert start == used
        assert min(len(tiles), 1) <= count <= min(len(tiles), max_partitions)
        tasks = work[start : start + count]
        assert all(task[0] == sequence and task[3] == length for task in tasks)
        assert all(begin < end for _, begin, end, _ in tasks)
        bounds = [task[1] for task in tasks] + [tasks[-1][2]] if tasks else []
        assert all(task[2] == bound for task, bound in zip(tasks, bounds[1:], strict=True))
        assert bounds == [] or (bounds[0], bounds[-1]) == (tiles.start, tiles.stop)
        sizes = [end - begin for _, begin, end, _ in tasks]
        assert not sizes or max(sizes) - min(sizes) <= 1
        used += count
    assert used <= plan.capacity
    assert set(work[used:]) <= {(0, 0, 0, 0)}


@given(st.integers(1, 3000), st.integers(0, 1500), st.integers(1, 8), tiles_of)
def test_tiles_hold_every_token_that_a_query_sees(length, window, query_length, tile):
    plan = plan_pa_decode(int32([length]), 1, sliding_window=window, query_length=query_length, tile=tile)
    begin, end = int(plan.work_info[0, 1]), max(row[2] for row in rows(plan.work_info))
    token = torch.arange(length)
    for query in range(query_length):
        position = length - query_length + query
        causal = token <= position
        both_sides = torch.ones_like(causal)
        if window:
            causal &= token >= position + 1 - window
            both_sides = (token - position).abs() < window
        for seen in (token[causal], token[both_sides]):
            assert not len(seen) or (begin * tile <= seen[0] and seen[-1] < end * tile)
        if query == 0 and causal.any():
            # No tile in front of the first token that anyone sees.
            assert token[causal][0] < (begin + 1) * tile


def test_no_sequences(variant, device):
    plan = plan_pa_decode(int32([]).to(device), 2, variant=variant)
    shapes = [tuple(t.shape) for t in (plan.work_info, plan.reduce_info, plan.arrival_counters)]
    assert shapes == [(0, 4), (0, 2), (0, 2, 32)]


def test_empty_sequences_get_no_slot(variant, device):
    plan = plan_pa_decode(int32([0, -1, INT32_MIN]).to(device), 1, variant=variant)
    assert rows(plan.reduce_info) == [(0, 0)] * 3
    assert not plan.work_info.any()


def test_minus_one_and_zero_are_no_window():
    lengths = int32([5000, 300])
    plans = [plan_pa_decode(lengths, 1, sliding_window=window) for window in (0, -1)]
    assert plans[0].sliding_window == plans[1].sliding_window == 0
    assert torch.equal(plans[0].work_info, plans[1].work_info)


def test_the_widest_window_with_many_queries_sees_everything(variant, device):
    lengths = int32([INT32_MAX, 300, 0]).to(device)
    split = {"max_partitions": 4, "workgroup_budget": 8}
    widest = plan_pa_decode(lengths, 1, **split, sliding_window=2**63 - 1, query_length=8, variant=variant)
    unlimited = plan_pa_decode(lengths, 1, **split, query_length=8, variant=variant)
    assert rows(widest.work_info) == rows(unlimited.work_info)
    assert rows(widest.reduce_info) == rows(unlimited.reduce_info)
