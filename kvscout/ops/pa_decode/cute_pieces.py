"""The four loading warps where pages cannot be copied in bulk: they copy pieces of 16 bytes.

Two warps load keys and two values, each 64 tokens of every step. Where an operand has a swizzle, eight lanes of a copy
read 128 bytes of a token, and write them to one row of 128 bytes, in an order that is the token's. Other pieces get the
places that they have in a stage of chunked pages of 128: eight lanes of a copy write side by side, and what all lanes
read is whole sectors. Both take all banks of shared memory once. Zeros take the place of pieces that hold no token that
a row sees, and of the last one's rest. No copy reads more than the sequence's own tokens.

e4m3 values that lie token by token go through registers: a lane has 16 tokens of 8 or 16 elements, turns each four by
four bytes, and stores 16 bytes of tokens of each element, in an order that is its own, so that eight lanes write to all
banks.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...kernels.cute import ptx
from .cute_loads import load_scales
from .cute_tile import CORE, RUN, STEP, Tile

HALF = STEP // 2
"""Tokens of a step that a warp loads."""
LEAST_PAGE = 16
"""The fewest tokens of a page."""


@cute.jit
def produce_pieces(tile: cutlass.Constexpr[Tile], warp, lane, shared, data, work):
    """Load a task's keys (warps 0 and 1) or values (2 and 3)."""
    half = warp & 1
    is_values = warp >> 1
    table = data.tables + Int64(work.sequence) * data.table_row
    # Pages of the sequence that hold a token in question.
    first_page = work.lowest >> data.page_bits
    end_page = (work.highest + ((Int32(1) << data.page_bits) - 1)) >> data.page_bits
    # A lane looks up one page of the warp's tokens, of which there are four at most.
    first_token = work.first_step * STEP + half * HALF
    block_id = _block_of(first_token, lane, first_page, end_page, table, work.steps, data)
    places = tile.places
    full = shared + places.full_keys + is_values * (places.full_values - places.full_keys)
    empty = shared + places.empty_keys + is_values * (places.empty_values - places.empty_keys)
    stages = tile.stages
    if cutlass.const_expr(tile.value_stages != tile.stages):
        stages = tile.stages + is_values * (tile.value_stages - tile.stages)
    stage = Int32(0)
    phase = Int32(1)
    i = Int32(0)
    while i < work.steps:
        waits_later = is_values if cutlass.const_expr(tile.turns_values) else Int32(0)
        if i >= stages and waits_later == 0:
            ptx.barrier_wait(empty + 8 * stage, phase)
        at_stage = shared + stage * tile.stage_bytes
        if is_values == 0:
            source = data.keys + Int64(work.kv_head) * data.key_head
            to = at_stage + places.keys
            if cutlass.const_expr(tile.are_keys_swizzled):
                _copy_runs(
                    tile, first_token, half, lane, block_id, to, source, data.key_block, data.key_token, data, work
                )  # fmt: skip
            else:
                _copy_keys(tile, first_token, half, lane, block_id, to, source, data, work)
            if cutlass.const_expr(tile.token_scales):
                load_scales(
                    tile, first_token, stage, half, lane, block_id, data.page_bits, 0, shared, data, work
                )  # fmt: skip
            ptx.barrier_arrive_after_copies(full + 8 * stage)
        else:
            source = data.values + Int64(work.kv_head) * data.value_head
            to = at_stage + places.values
            if cutlass.const_expr(tile.turns_values):
                must_wait = Int32(0)
                if i >= stages:
                    must_wait = Int32(1)
                _turn_tokens(
                    tile, first_token, half, lane, block_id, to, source, must_wait, empty + 8 * stage, phase, data, work
                )  # fmt: skip
                ptx.fence_async_shared()
                ptx.barrier_arrive(full + 8 * stage)
            elif cutlass.const_expr(tile.are_values_turned):
                _copy_runs(
                    tile, first_token, half, lane, block_id, to, source, data.value_block, data.value_pitch, data, work
                )  # fmt: skip
                ptx.barrier_arrive_after_copies(full + 8 * stage)
            else:
                _copy_elements(tile, first_token, half, lane, block_id, to, source, data, work)
                ptx.barrier_arrive_after_copies(full + 8 * stage)
        i = i + 1
        first_token = first_token + STEP
        block_id = _block_of(first_token, lane, first_page, end_page, table, work.steps - i, data)
        stage = stage + 1
        if stage == stages:
            stage = Int32(0)
            phase = phase ^ 1


@cute.jit
def _block_of(first_token, lane, first_page, end_page, table, steps_left, data):
    """The block of the lane-th page from a token on, if that holds any of the warp's tokens in question."""
    number = (first_token >> data.page_bits) + lane
    block_id = Int32(0)
    is_wanted = (lane << data.page_bits) < HALF and steps_left > 0
    if is_wanted and number >= first_page and number < end_page:
        block_id = ptx.load(table + Int64(number) * 4)
    return block_id


@cute.jit
def _copy_runs(
    tile: cutlass.Constexpr[Tile], first_token, half, lane, block_id, to, source, block, token_step, data, work
):  # fmt: skip
    """Start copying 64 tokens' keys or values, 512 bytes at a time: of one token, or of several, each by its lanes."""
    lanes = min(tile.chunks, 32)
    at_once = 32 // lanes
    chunk, place = lane & (lanes - 1), lane >> (lanes.bit_length() - 1)
    lies_at = to + (chunk >> 3) * (STEP * RUN) + (half * HALF + place) * RUN + ((chunk & 7) ^ place) * 16
    source = source + Int64(place) * token_step + Int64(chunk * 16)
    # Each 16 tokens are of one page.
    for in_half in cutlass.range(0, HALF, LEAST_PAGE, unroll=1):
        token = first_token + in_half
        its_block = Int64(ptx.from_lane(block_id, in_half >> data.page_bits))
        in_page = Int64(token & ((Int32(1) << data.page_bits) - 1))
        at = source + its_block * block + in_page * token_step
        # A bit for each token from the lane's first one on: whether any row sees it.
        low = cutlass.min(cutlass.max(work.lowest - (token + place), 0), LEAST_PAGE)
        high = cutlass.min(cutlass.max(work.highest - (token + place), 0), LEAST_PAGE)
        seen = (Int32(1) << high) - (Int32(1) << low)
        for i in cutlass.range_constexpr(0, LEAST_PAGE, at_once):
            ptx.copy_16_or_zeros((lies_at ^ (i % 8 * 16)) + i * RUN, at + i * token_step, seen, 1 << i)
        lies_at = lies_at + LEAST_PAGE * RUN


@cute.jit
def _copy_keys(tile: cutlass.Constexpr[Tile], first_token, half, lane, block_id, to, source, data, work):
    """Start copying 64 tokens' keys, eight at a time: a lane has one of these, and each fourth chunk of it."""
    chunk = lane >> 3
    for g in cutlass.range(HALF // 8, unroll=1):
        in_half = g * 8 + (lane & 7)
        token = first_token + in_half
        its_block = Int64(ptx.from_lane(block_id, (g * 8) >> data.page_bits))
        in_page = Int64(token & ((Int32(1) << data.page_bits) - 1))
        at = source + its_block * data.key_block + in_page * data.key_token + Int64(chunk) * data.key_chunk
        size = Int32(0)
        if token >= work.lowest and token < work.highest:
            size = Int32(16)
        lies_at = to + chunk * tile.key_leading + (half * HALF + in_half) * 16
        for k in cutlass.range_constexpr(tile.chunks // 4):
            ptx.copy_16(lies_at + 4 * k * tile.key_leading, at + 4 * k * data.key_chunk, size)


@cute.jit
def _copy_elements(tile: cutlass.Constexpr[Tile], first_token, half, lane, block_id, to, source, data, work):
    """Start copying 64 tokens' values, four pieces of tokens of eight elements at a time."""
    tokens = tile.tokens_of_piece
    for k in cutlass.range_constexpr(HALF // (4 * tokens)):
        in_half = (4 * k + (lane >> 3)) * tokens
        token = first_token + in_half
        its_block = Int64(ptx.from_lane(block_id, in_half >> data.page_bits))
        in_page = Int64((token & ((Int32(1) << data.page_bits) - 1)) * tile.element_bytes)
        at = source + its_block * data.value_block + in_page + Int64(lane & 7) * data.value_pitch
        # Tokens before the first that is seen are kept beside it: they are the sequence's own.
        size = cutlass.min(cutlass.max(work.highest - token, 0), tokens) * tile.element_bytes
        if work.lowest - token >= tokens:
            size = Int32(0)
        lies_at = to + ((half * HALF + in_half) // tokens * tile.dim + (lane & 7)) * 16
        for _ in cutlass.range(tile.dim // 64, unroll=1):
            for e in cutlass.range_constexpr(8):
                ptx.copy_16(lies_at + e * CORE, at + e * 8 * data.value_pitch, size)
            lies_at = lies_at + 8 * CORE
            at = at + 64 * data.value_pitch


@cute.jit
def _turn_tokens(
    tile: cutlass.Constexpr[Tile], first_token, half, lane, block_id, to, source, must_wait, empty, phase, data, work
):  # fmt: skip
    """Load 64 tokens' e4m3 values, and store them with tokens side by side once the stage is empty."""
    group, place = lane >> 3, lane & 7
    # Of a token: the four groups' lanes read all elements in one or more passes.
    words = min(4, tile.dim // 32)
    elements = 4 * words
    token = first_token + group * 16
    its_block = Int64(ptx.from_lane(block_id, (group * 16) >> data.page_bits))
    in_page = Int64(token & ((Int32(1) << data.page_bits) - 1))
    at = source + its_block * data.value_block + in_page * data.value_pitch + Int64(place * elements)
    # The k-th element that a lane stores is ``k ^ place``: bits 0 and 1 by its choice of bytes, bit 2 by that of words.
    x = place & 3
    picked = [(x ^ k) * 0x11 + ((x ^ k ^ 1) * 0x11 << 8) + 0x4040 for k in (0, 2)]
    lies_at = to + ((half * (HALF // 16) + group) * tile.dim + place * elements + place) * 16
    for done in cutlass.range(0, tile.dim, 8 * elements, unroll=1):
        found = []
        for i in cutlass.range_constexpr(16):
            is_seen = Int32(0)
            if token + i >= work.lowest and token + i < work.highest:
                is_seen = Int32(1)
            of_token = ptx.load_or_zero(at + (i * data.value_pitch + Int64(done)), is_seen, words, Int32)
            odd = place >> 2
            found.append([ptx.select(odd, of_token[q ^ 1], of_token[q], Int32) for q in range(words)])
        if must_wait != 0 and done == 0:
            ptx.barrier_wait(empty, phase)
        for q in cutlass.range_constexpr(words):
            stored: Any = [[], [], [], []]
            for i in cutlass.range_constexpr(0, 16, 4):
                for pair in cutlass.range_constexpr(2):
                    first = ptx.permute_bytes(found[i][q], found[i + 1][q], picked[pair])
                    second = ptx.permute_bytes(found[i + 2][q], found[i + 3][q], picked[pair])
                    stored[2 * pair].append(ptx.permute_bytes(first, second, 0x5410))
                    stored[2 * pair + 1].append(ptx.permute_bytes(first, second, 0x7632))
            for k in cutlass.range_constexpr(4):
                ptx.shared_store((lies_at ^ ((4 * q + k) * 16)) + done * 16, stored[k])
