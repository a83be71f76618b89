"""The four loading warps: they keep the rings of keys and values full with bulk copies of pages.

Two warps load keys and two values, each 64 tokens of every step (of pages of 128: half of the head's chunks). A lane
starts one copy a step at most, or two parts of one. Pages that no row of the block sees a token of are neither looked
up nor loaded: the multiplying warps clear or mask what then lies in their place.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...kernels.cute import ptx
from .cute_tile import ASKED_BARRIER, LOAD_THREADS, STEP, Tile
from .cute_work import stages_of


@cute.jit
def produce(tile: cutlass.Constexpr[Tile], warp, lane, shared, data, work):
    """Load a task's keys (warps 0 and 1) or values (2 and 3): one loop for both, to keep the code short."""
    page, places = tile.page, tile.places
    page_bits = page.bit_length() - 1
    pages_of_step = STEP // page
    pages_of_warp = max(1, pages_of_step // 2)
    half = warp & 1
    is_values = warp >> 1
    source = data.keys + Int64(work.kv_head) * data.key_head
    block = data.key_block
    if is_values != 0:
        source = data.values + Int64(work.kv_head) * data.value_head
        block = data.value_block
    target = shared + places.keys + is_values * (places.values - places.keys)
    full = shared + places.full_keys + is_values * (places.full_values - places.full_keys)
    empty = shared + places.empty_keys + is_values * (places.empty_values - places.empty_keys)
    stages = stages_of(tile, work)
    if cutlass.const_expr(tile.value_stages != tile.stages):
        stages = tile.stages + is_values * (tile.value_stages - tile.stages)
    # Which page of the warp's a lane copies from, and which part of it.
    piece = Int32(min(tile.page_bytes, tile.stage_bytes // 2) // tile.copies)
    next_source, next_target = piece, piece
    page_of_lane = lane
    holder_bits = Int32(0)
    in_page = Int32(0)
    if cutlass.const_expr(page == STEP):
        in_page = half * piece
        target = target + in_page
    else:
        target = target + (half * pages_of_warp + lane) * (piece * tile.copies)
    if cutlass.const_expr(tile.by_chunk):
        if is_values == 0:
            holder_bits = Int32(tile.lanes_of_page.bit_length() - 1)
            page_of_lane = lane >> holder_bits
            chunk = lane & (tile.lanes_of_page - 1)
            piece = Int32(page * 16)
            next_source, next_target = piece * tile.lanes_of_page, Int32(tile.key_leading * tile.lanes_of_page)
            in_page = chunk * piece
            target = shared + places.keys + (half * pages_of_warp + page_of_lane) * piece + chunk * tile.key_leading
    is_loading = page_of_lane < pages_of_warp
    my_page = page_of_lane
    if cutlass.const_expr(page < STEP):
        my_page = half * pages_of_warp + page_of_lane
    table = data.tables + Int64(work.sequence) * data.table_row
    # Pages of the sequence that hold a token in question.
    first_page = work.lowest >> page_bits
    end_page = (work.highest + (page - 1)) >> page_bits
    of_warp = work.first_step * pages_of_step
    if cutlass.const_expr(page < STEP):
        of_warp = of_warp + half * pages_of_warp
    number = work.first_step * pages_of_step + my_page
    is_live = is_loading and number >= first_page and number < end_page
    block_id = Int32(0)
    if is_live and work.steps > 0:
        block_id = ptx.load(table + Int64(number) * 4)
    if cutlass.const_expr(tile.by_rows):
        # Or many queries would arrive after all of the first tokens.
        ptx.sync(ASKED_BARRIER, tile.math_threads + LOAD_THREADS)
    stage = Int32(0)
    phase = Int32(1)
    i = Int32(0)
    while i < work.steps:
        if i >= stages:
            ptx.barrier_wait(empty + 8 * stage, phase)
        live_pages = cutlass.min(of_warp + pages_of_warp, end_page) - cutlass.max(of_warp, first_page)
        if lane == 0:
            size = cutlass.max(live_pages, 0) * min(tile.page_bytes, tile.stage_bytes // 2)
            ptx.barrier_expect(full + 8 * stage, size)
        cute.arch.sync_warp()
        if cutlass.const_expr(tile.stages > 1 and not tile.token_scales):
            # The first keys are waited for, and values would arrive beside them. It would hold up a longer task.
            if is_values != 0 and i == 0 and work.steps <= tile.stages:
                ptx.barrier_wait(shared + places.full_keys, Int32(0))
        if is_live:
            at = source + Int64(block_id) * block + in_page
            to = target + stage * tile.stage_bytes
            for k in cutlass.range_constexpr(tile.copies):
                ptx.bulk_load(to + k * next_target, at + k * next_source, piece, full + 8 * stage)
        if cutlass.const_expr(tile.token_scales):
            if is_values == 0:
                first_token = (work.first_step + i) * STEP + half * (STEP // 2)
                load_scales(
                    tile, first_token, stage, half, lane, block_id, page_bits, holder_bits, shared, data, work
                )  # fmt: skip
                ptx.barrier_arrive_after_copies(full + 8 * stage)
        i = i + 1
        of_warp = of_warp + pages_of_step
        number = number + pages_of_step
        is_live = is_loading and number >= first_page and number < end_page
        if is_live and i < work.steps:
            block_id = ptx.load(table + Int64(number) * 4)
        stage = stage + 1
        if stage == stages:
            stage = Int32(0)
            phase = phase ^ 1


@cute.jit
def load_scales(
    tile: cutlass.Constexpr[Tile], first_token, stage, half, lane, block_id, page_bits, holder_bits, shared, data, work
):  # fmt: skip
    """Start copying the scales of 64 tokens, two a lane; zeros for tokens that no row sees."""
    for i in cutlass.range_constexpr(2):
        in_half = i * 32 + lane
        token = first_token + in_half
        # The lane that looked up the token's page.
        holder = (in_half >> page_bits) << holder_bits
        its_block = Int64(ptx.from_lane(block_id, holder))
        in_page = Int64(token & ((Int32(1) << page_bits) - 1))
        valid = Int32(0)
        if token >= work.lowest and token < work.highest:
            valid = Int32(1)
        to = shared + (stage * STEP + half * (STEP // 2) + in_half) * 4
        if data.keys_by_token != 0:
            at = data.key_scale + its_block * data.key_scale_block + Int64(work.kv_head) * data.key_scale_head
            ptx.copy_4(to + tile.places.key_scales, at + in_page * data.key_scale_token, valid)
        if data.values_by_token != 0:
            at = data.value_scale + its_block * data.value_scale_block + Int64(work.kv_head) * data.value_scale_head
            ptx.copy_4(to + tile.places.value_scales, at + in_page * data.value_scale_token, valid)
