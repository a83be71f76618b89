"""The arithmetic of ``cute_wgmma`` in integers, run as Python: which rows, tokens and steps are whose."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvscout.ops.pa_decode.cute_tile import LOAD_THREADS, REGISTERS, STEP, WIDEN_THREADS, Tile
from kvscout.ops.pa_decode.variants.cute_wgmma import ROWS, VARIANT
from kvscout.ops.pa_decode.variants.torch_reference import visible
from kvscout.ops.pa_plan.plan import TILES as PLAN_TILES
from tests.ops.mqa_logits.lanes import Int32
from tests.ops.pa_decode.device import code_of

MOST = 2**31 - 1
TILES = [program.spec for program in VARIANT.programs()]


WORK = code_of("cute_work")


def numbers(query_length=1, group=8, window=0, causal=True, task_steps=2):
    reach = window or MOST
    return SimpleNamespace(
        query_length=Int32(query_length),
        group=Int32(group),
        per_group=np.float32(1 / group),
        back=Int32(reach),
        ahead=Int32(1 if causal else reach),
        task_steps=Int32(task_steps),
    )


@pytest.mark.parametrize("group", [1, 3, 7, 16, 41, 63, 64])
def test_a_row_s_query_token_and_head_are_those_of_a_division(group):
    data = numbers(group=group)
    rows = {0, 1, group - 1, group, 2 * group - 1, 1000, *range((1 << 20) - 2 * group, 1 << 20)}
    for row in rows:
        assert WORK.place_of(data, Int32(row)) == divmod(row, group)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 2, 100, 4096, MOST - 1])
def test_a_query_token_sees_what_the_definition_says(window, causal):
    for query_length, context in itertools.product((1, 3, 8), (1, 2, 5, 300, MOST - 1024)):
        data = numbers(query_length, window=window, causal=causal)
        low, high = visible(torch.tensor([context]), query_length, window, causal)
        for position in range(query_length):
            expected = low[0, position].item(), high[0, position].item()
            got = WORK.visible(data, Int32(context), Int32(position))
            # Both are empty where nothing is seen.
            assert got == expected or (max(got[1], 0) <= got[0] and max(expected[1], 0) <= expected[0])


@pytest.mark.parametrize("plan_tile", PLAN_TILES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 130, 4096])
@pytest.mark.parametrize("rows", sorted({rows for of_dim in ROWS.values() for rows in of_dim}))
def test_a_block_s_tasks_cover_what_its_rows_see_and_little_else(rows, window, causal, plan_tile):
    tile = SimpleNamespace(rows=rows)
    for group, query_length, context in itertools.product((1, 5, 64), (1, 4), (1, 3, 256, 700, 1025)):
        data = numbers(query_length, group, window, causal, plan_tile // STEP)
        low, high = visible(torch.tensor([context]), query_length, window, causal)
        for first_row in range(0, group * query_length, rows):
            positions = sorted({row // group for row in range(first_row, min(first_row + rows, group * query_length))})
            lows, highs = low[0, positions].tolist(), high[0, positions].tolist()
            spans = WORK.row_span(data, Int32(context), *WORK.positions_of(tile, data, Int32(first_row)))
            assert spans == (min(lows), max(highs), max(lows), min(highs))
            covered = []
            tiles = -(-context // plan_tile)
            for begin, end in itertools.pairwise(sorted({0, 1, tiles // 2, tiles})):
                first, steps = WORK.steps_of(data, Int32(begin), Int32(end), *spans[:2])
                covered += range(first * STEP, (first + steps) * STEP)
            needed = set(range(max(min(lows), 0), max(highs)))
            assert len(covered) == len(set(covered))
            assert needed <= set(covered)
            assert not covered or (
                min(needed) // STEP == min(covered) // STEP and max(covered) // STEP == max(needed) // STEP
            )


@pytest.mark.parametrize("plan_tile", PLAN_TILES)
def test_the_longest_context_does_not_overflow(plan_tile):
    context = Int32(MOST - 1024)
    for window, causal in itertools.product((0, 1, MOST - 1), (True, False)):
        data = numbers(8, window=window, causal=causal, task_steps=plan_tile // STEP)
        spans = WORK.row_span(data, context, Int32(0), Int32(1))
        tiles = -(-context // plan_tile)
        first, steps = WORK.steps_of(data, Int32(tiles - 1), Int32(tiles), *spans[:2])
        assert first >= (tiles - 1) * plan_tile // STEP
        assert first + steps <= -(-context // STEP)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
def test_shared_memory_holds_everything_apart_and_aligned(tile):
    places = tile.places
    keys, values = tile.stages * tile.stage_bytes, tile.value_stages * tile.stage_bytes
    assert (places.keys, places.values, places.queries) == (0, keys, keys + values)
    assert places.own == places.queries + tile.query_pitch * tile.chunks
    assert tile.query_pitch > tile.probability_pitch == 16 * tile.rows * 2 // tile.element_bytes
    begins = [place for name, place in zip(places._fields, places, strict=True) if name != "size"]
    assert begins == sorted(begins)
    assert all(place % 16 == 0 for place in places)
    assert places.size == places.constants + tile.threads // 8 <= (228 << 10) // tile.blocks - 1024
    assert places.constants >= places.empty_values + 8 * tile.value_stages
    own = tile.warpgroups * tile.own_bytes
    assert places.finer in (places.own, places.own + own)
    assert places.mail == places.finer + own
    # Every element, reference and sum that a row of any block of a cluster comes to, and a barrier.
    rows = 16 * tile.cluster
    assert places.mail_stats == places.mail + rows * tile.dim * 4
    assert places.bounds == places.mail_stats + rows * 8
    assert places.constants == places.mail_barrier + 16 * tile.cluster
    assert tile.own_bytes >= tile.probability_bytes
    # What a warpgroup leaves to another: half of its outputs.
    assert tile.own_bytes >= tile.rows // 2 * tile.dim * 4 or tile.warpgroups == 1
    # Of each warp, and of each warpgroup, a number for each row.
    assert places.sums - places.maxima == places.references - places.sums == tile.math_threads // 32 * tile.rows * 4
    assert places.key_scales - places.references >= tile.warpgroups * tile.rows * 4


def test_what_no_kernel_would_get_right_is_no_kernel():
    for wrong in ({"stages": 3}, {"value_stages": 5}, {"rows": 24}, {"page": 48}, {"layout": "plain_v"}):
        with pytest.raises(ValueError, match="no kernel"):
            Tile(**{"cache": "e4m3", "page": 16, "rows": 16, "stages": 4, **wrong})
    for wrong in ({"rows": 32}, {"blocks": 2, "stages": 2}, {"rows": 64, "by_rows": True, "dim": 128}):
        with pytest.raises(ValueError, match="no kernel"):
            Tile(**{"cache": "e4m3", "page": 16, "rows": 16, "stages": 4, "cluster": True, **wrong})
    with pytest.raises(ValueError, match="more shared memory"):
        Tile("e4m3", 16, 16, 4, 2)
    # A single warpgroup has nobody to share steps with, whatever the stages, and takes none that are cut in halves.
    small = {"cache": "e4m3", "page": 16, "rows": 16, "stages": 1, "blocks": 2, "warpgroups": 1}
    assert Tile(**small | {"stages": 3}).threads == 256
    by_rows, cluster = {"rows": 64, "by_rows": True, "blocks": 1, "stages": 2}, {"cluster": True, "blocks": 1}
    for wrong in ({"cache": "bf16"}, {"token_scales": True}, cluster, by_rows, {"warpgroups": 3}):
        with pytest.raises(ValueError, match="no kernel"):
            Tile(**small | wrong)
    with pytest.raises(ValueError, match="more shared memory"):
        Tile(**small | {"blocks": 4, "value_stages": 2})
    tile = Tile("bf16", 16, 16, 3)
    assert tile.name.isidentifier()
    assert tile.value_stages == 3


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
def test_warps_ask_for_no_more_registers_than_all_begin_with(tile):
    at_first = REGISTERS // (tile.blocks * tile.threads) // 8 * 8
    math, load = tile.registers
    asked = math * tile.math_threads + load * LOAD_THREADS + tile.widens * tile.widening_registers * WIDEN_THREADS
    assert asked <= at_first * tile.threads
    assert load < at_first < math <= 255
    assert math % 8 == load % 8 == 0


def test_blocks_of_a_single_warpgroup_are_found_room_for():
    shapes = {(tile.blocks, tile.registers, tile.threads) for tile in TILES if tile.warpgroups == 1}
    assert shapes == {(4, (104, 24), 256)}


def test_names_tell_a_single_warpgroup_from_two():
    small = Tile("e4m3", 16, 16, 2, 2, warpgroups=1)
    assert small.name == Tile("e4m3", 16, 16, 2, 2).name + "_wg1"
