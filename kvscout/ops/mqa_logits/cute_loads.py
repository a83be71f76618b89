"""The two producer warps: they walk the thread block's share and keep the rings of queries and keys full.

A *task* is some tiles of one block of query rows. Its queries, weights and windows go to a stage of the query ring, its
keys and their scales to one stage of the key ring a tile. One warp loads queries and keys, the other one all the rest
of a task; both walk the same share. After the last task comes an empty one.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from ...kernels.cute.dsl import copy_async
from .cute_schedule import task_of, window
from .cute_tile import Tile


@cute.jit
def load_matrices(
    tile: cutlass.Constexpr[Tile], share, lane, copy_q, tma_q, copy_k, tma_k, data, shared,
):  # fmt: skip
    """Load the queries, the keys and the keys' scales of every task."""
    boxes = cute.local_tile(tma_q, (tile.dim, 2, tile.quad_rows, tile.heads // 2), (0, 0, None, 0))
    keys = cute.local_tile(tma_k, (tile.stage_keys, tile.dim), (None, 0))
    one = cute.make_layout(1)
    box_to, box_from = cpasync.tma_partition(
        copy_q, 0, one, cute.group_modes(shared.q_boxes, 0, 4), cute.group_modes(boxes, 0, 4)
    )
    keys_to, keys_from = cpasync.tma_partition(
        copy_k, 0, one, cute.group_modes(shared.k_stages, 0, 2), cute.group_modes(keys, 0, 2)
    )
    q_stage = Int32(0)
    q_phase = Int32(1)
    k_stage = Int32(0)
    k_phase = Int32(1)
    block, before, begin, end = share
    while before < end:
        low, high, before = task_of(tile, block, before, begin, end, lane, data)
        if low < high:
            cute.arch.mbarrier_wait(shared.q_empty + q_stage, q_phase)
            # The first keys go before the second query tile, so that one warpgroup can start.
            _load_queries(tile, 0, block, q_stage, copy_q, box_from, box_to, shared)
            k_stage, k_phase = _load_keys(tile, lane, low, k_stage, k_phase, copy_k, keys_from, keys_to, data, shared)
            if cutlass.const_expr(tile.query_tiles == 2):
                _load_queries(tile, 1, block, q_stage, copy_q, box_from, box_to, shared)
            q_stage = q_stage ^ 1
            if q_stage == 0:
                q_phase = q_phase ^ 1
            for i in cutlass.range(low + 1, high, unroll=1):
                k_stage, k_phase = _load_keys(tile, lane, i, k_stage, k_phase, copy_k, keys_from, keys_to, data, shared)
        block += 1


@cute.jit
def _load_queries(
    tile: cutlass.Constexpr[Tile], query_tile: cutlass.Constexpr[int], block, stage, copy, source, target, shared
):  # fmt: skip
    """Start loading one query tile of a block."""
    in_stage = stage * tile.query_tiles + query_tile
    full = shared.q_full + in_stage
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, tile.columns * tile.dim)
    for group in cutlass.range_constexpr(tile.groups):
        box = (block * tile.query_tiles + query_tile) * tile.groups + group
        cute.copy(copy, source[(None, box)], target[(None, in_stage * tile.groups + group)], tma_bar_ptr=full)


@cute.jit
def _load_keys(
    tile: cutlass.Constexpr[Tile], lane, i, stage, phase, copy, source, target, data, shared
):  # fmt: skip
    """Start loading the keys of tile ``i`` and their scales into a stage; the stage after it."""
    cute.arch.mbarrier_wait(shared.k_empty + stage, phase)
    full = shared.k_full + stage
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, tile.stage_bytes)
    cute.copy(copy, source[(None, i)], target[(None, stage)], tma_bar_ptr=full)
    for part in cutlass.range_constexpr(tile.stage_keys // 32):
        key = i * tile.stage_keys + part * 32 + lane
        from_ = data.k_scale.iterator + cutlass.min(key, data.num_keys - 1)
        place = stage * tile.stage_keys + part * 32 + lane
        copy_async(shared.k_scale.iterator + place, from_, 4, key < data.num_keys)
    cute.arch.cp_async_mbarrier_arrive_noinc(full)
    stage += 1
    if stage == tile.kv_stages:
        stage = Int32(0)
        phase = phase ^ 1
    return stage, phase


@cute.jit
def load_tasks(tile: cutlass.Constexpr[Tile], share, lane, data, shared):
    """Write every task: its block and tiles, its rows' windows and weights."""
    stage = Int32(0)
    phase = Int32(1)
    block, before, begin, end = share
    while before < end:
        low, high, before = task_of(tile, block, before, begin, end, lane, data)
        if low < high:
            cute.arch.mbarrier_wait(shared.q_empty + stage, phase)
            _hand_on(lane, block, low, high - low, stage, shared)
            _load_weights(tile, lane, block, stage, data, shared)
            # Arrives when the copies have.
            cute.arch.cp_async_mbarrier_arrive_noinc(shared.rows_full + stage)
            _write_windows(tile, lane, block, low, high, stage, data, shared)
            stage = stage ^ 1
            if stage == 0:
                phase = phase ^ 1
        block += 1
    cute.arch.mbarrier_wait(shared.q_empty + stage, phase)
    _hand_on(lane, block, Int32(0), Int32(0), stage, shared)


@cute.jit
def _load_weights(tile: cutlass.Constexpr[Tile], lane, block, stage, data, shared):
    """Bring the weights of a block's rows to a stage; zeros past the last row."""
    source = data.weights
    if data.has_q_scale != 0:
        # Ordinary stores: every lane arrives for its own in _write_windows.
        for index in cutlass.range(lane, tile.block_rows * tile.heads, 32, unroll=4):
            row, in_block, head = _place(tile, index, 1, block)
            loaded = cutlass.min(row, data.num_rows - 1)
            weight = source[loaded, head] * data.q_scale[loaded, head]
            shared.weights[head, in_block, stage] = cutlass.select_(row < data.num_rows, weight, Float32(0.0))
    elif source.iterator.toint() % 16 == 0 and source.stride[0] % 4 == 0:
        _copy_weights(tile, 4, lane, block, stage, source, data, shared)
    else:
        _copy_weights(tile, 1, lane, block, stage, source, data, shared)


@cute.jit
def _copy_weights(
    tile: cutlass.Constexpr[Tile], width: cutlass.Constexpr[int], lane, block, stage, source, data, shared
):  # fmt: skip
    """Start copying them, ``width`` at a time."""
    for index in cutlass.range(lane, tile.block_rows * tile.heads // width, 32, unroll=width):
        row, in_block, head = _place(tile, index, width, block)
        from_ = source.iterator + source.layout((cutlass.min(row, data.num_rows - 1), head))
        to = shared.weights.iterator + shared.weights.layout((head, in_block, stage))
        copy_async(to, from_, width * 4, row < data.num_rows)


@cute.jit
def _place(tile: cutlass.Constexpr[Tile], index, width: cutlass.Constexpr[int], block):
    """Row, row in the block, and head of a block's ``index``-th run of ``width`` weights."""
    per_row = tile.heads // width
    in_block = index // per_row
    return block * tile.block_rows + in_block, in_block, index % per_row * width


@cute.jit
def _write_windows(tile: cutlass.Constexpr[Tile], lane, block, low, high, stage, data, shared):
    """Write the windows of the block's rows, and which tiles lie inside those of all rows of a query tile; arrive."""
    for query_tile in cutlass.range_constexpr(tile.query_tiles):
        in_block = query_tile * tile.rows + cutlass.min(lane, tile.rows - 1)
        row = block * tile.block_rows + in_block
        start, end = window(data, row)
        # Rows past the last have empty windows.
        end = cutlass.select_(row < data.num_rows, end, 0)
        if lane < tile.rows:
            shared.windows[0, in_block, stage] = start
            shared.windows[1, in_block, stage] = end
        last_start = cute.arch.warp_redux_sync(start, kind="max")
        first_end = cute.arch.warp_redux_sync(end, kind="min")
        # The first tile is never one of them: its wait for the matrix unit is the time to load the weights.
        inner = cutlass.min(cutlass.max((last_start + tile.stage_keys - 1) // tile.stage_keys, low + 1), high)
        inner_end = cutlass.min(cutlass.max(first_end // tile.stage_keys, inner), high)
        if lane == 0:
            shared.tasks[stage, 3 + 2 * query_tile] = inner
            shared.tasks[stage, 4 + 2 * query_tile] = inner_end
    # Every lane, for what it wrote itself.
    cute.arch.mbarrier_arrive(shared.rows_full + stage)


@cute.jit
def _hand_on(lane, block, first, count, stage, shared):
    """Write which tiles the task is, and arrive."""
    if lane == 0:
        shared.tasks[stage, 0] = block
        shared.tasks[stage, 1] = first
        shared.tasks[stage, 2] = count
        cute.arch.mbarrier_arrive(shared.task_full + stage)
