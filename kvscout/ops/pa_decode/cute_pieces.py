"""The four loading warps where pages cannot be copied in bulk: they copy pieces of 16 bytes.

Each piece gets the place that it has in a stage of chunked pages of 128. Two warps load keys and two values, each 64
tokens of every step. Eight lanes of a copy write side by side, which takes all banks of shared memory once; what the
32 lanes of it read is whole sectors. Zeros take the place of pieces that hold no token that a row sees, and of the last
one's rest. No copy reads more than the sequence's own tokens.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...kernels.cute import ptx
from .cute_loads import load_scales
from .cute_tile import CORE, STEP, Tile

HALF = STEP // 2
"""Tokens of a step that a warp loads."""


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
    full = shared + tile.places.barriers + is_values * (8 * tile.stages)
    empty = full + 16 * tile.stages
    stage = Int32(0)
    phase = Int32(1)
    i = Int32(0)
    while i < work.steps:
        if i >= tile.stages:
            ptx.barrier_wait(empty + 8 * stage, phase)
        at_stage = shared + stage * tile.stage_bytes
        if is_values == 0:
            _copy_tokens(
                tile, first_token, half, lane, block_id, at_stage + tile.places.keys,
                data.keys + Int64(work.kv_head) * data.key_head, data.key_block, data.key_token, data.key_chunk, data,
                work,
            )  # fmt: skip
            if cutlass.const_expr(tile.token_scales):
                load_scales(
                    tile, first_token, stage, half, lane, block_id, data.page_bits, 0, shared, data, work
                )  # fmt: skip
        else:
            source = data.values + Int64(work.kv_head) * data.value_head
            to = at_stage + tile.places.values
            if cutlass.const_expr(tile.are_values_turned):
                _copy_tokens(
                    tile, first_token, half, lane, block_id, to, source, data.value_block, data.value_pitch, Int64(16),
                    data, work,
                )  # fmt: skip
            else:
                _copy_elements(tile, first_token, half, lane, block_id, to, source, data, work)
        ptx.barrier_arrive_after_copies(full + 8 * stage)
        i = i + 1
        first_token = first_token + STEP
        block_id = _block_of(first_token, lane, first_page, end_page, table, work.steps - i, data)
        stage = stage + 1
        if stage == tile.stages:
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
def _copy_tokens(
    tile: cutlass.Constexpr[Tile], first_token, half, lane, block_id, to, source, block, token_step, chunk_step, data,
    work,
):  # fmt: skip
    """Start copying 64 tokens, eight at a time: a lane has one of these, and each fourth chunk of it."""
    chunk = lane >> 3
    for g in cutlass.range(HALF // 8, unroll=1):
        in_half = g * 8 + (lane & 7)
        token = first_token + in_half
        its_block = Int64(ptx.from_lane(block_id, (g * 8) >> data.page_bits))
        in_page = Int64(token & ((Int32(1) << data.page_bits) - 1))
        at = source + its_block * block + in_page * token_step + Int64(chunk) * chunk_step
        size = Int32(0)
        if token >= work.lowest and token < work.highest:
            size = Int32(16)
        lies_at = to + chunk * tile.key_leading + (half * HALF + in_half) * 16
        for k in cutlass.range_constexpr(tile.chunks // 4):
            ptx.copy_16(lies_at + 4 * k * tile.key_leading, at + 4 * k * chunk_step, size)


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
