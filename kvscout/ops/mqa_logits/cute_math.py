"""The two multiplying warpgroups: keys times queries, relu, weights, the sum over heads, and the stores."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from ...kernels.cute.dsl import add_weighted_relu
from .cute_tile import KEYS, Tile


@cute.jit
def consume(tile: cutlass.Constexpr[Tile], thread, mmas, data, shared):
    """Compute every task that the producer hands on, until the empty one."""
    lane = thread % 32
    group = cute.arch.make_warp_uniform(thread // 128)
    query_tile = group if cutlass.const_expr(tile.split == "rows") else Int32(0)
    rows_at = query_tile * tile.rows
    mma, mma_first = mmas
    mma.set(warpgroup.Field.ACCUMULATE, True)
    mma_first.set(warpgroup.Field.ACCUMULATE, False)
    slice_ = mma.get_slice(thread % 128)
    keys = mma.make_fragment_A(slice_.partition_A(shared.k_halves))
    queries = mma.make_fragment_B(slice_.partition_B(shared.q_tiles))
    dots = cute.make_rmem_tensor(slice_.partition_shape_C((KEYS, tile.columns)), Float32)
    weights = cute.make_rmem_tensor((tile.groups * tile.pairs * 2,), Float32)
    # This thread's accumulators belong to two keys, eight apart, and to one row of each group of rows.
    my_key = (thread % 128) // 32 * 16 + lane // 4
    my_row = lane % tile.quad_rows
    my_share = lane % 4 // tile.quad_rows
    half_at = group * tile.halves if cutlass.const_expr(tile.split == "keys") else Int32(0)
    q_stage = Int32(0)
    q_phase = Int32(0)
    k_stage = Int32(0)
    k_phase = Int32(0)
    cute.arch.mbarrier_wait(shared.task_full, 0)
    left = shared.tasks[0, 2]
    while left > 0:
        block = shared.tasks[q_stage, 0]
        first_tile = shared.tasks[q_stage, 1]
        # Tiles that every row sees wholly; none before the first tile is done.
        inner_begin = Int32(-1)
        inner_end = Int32(-1)
        row = block * tile.block_rows + rows_at + my_row
        out = data.out.iterator + cutlass.Int64(row) * data.out.stride[0]
        q_tile = q_stage * tile.query_tiles + query_tile
        cute.arch.mbarrier_wait(shared.q_full + q_tile, q_phase)
        tile_index = first_tile
        while tile_index < first_tile + left:
            if tile_index >= inner_begin and tile_index < inner_end:
                for i in cutlass.range(tile_index, inner_end, unroll=1):
                    cute.arch.mbarrier_wait(shared.k_full + k_stage, k_phase)
                    for half in cutlass.range_constexpr(tile.halves):
                        at = half_at + half
                        scales = _multiply(tile, mmas, dots, keys, queries, k_stage, at, q_tile, my_key, shared)
                        _wait(tile, half, k_stage, lane, shared)
                        key = i * tile.stage_keys + at * KEYS + my_key
                        _finish(tile, True, dots, weights, scales, key, my_share, row, out, rows_at + my_row, q_stage,
                                data, shared)  # fmt: skip
                    k_stage += 1
                    if k_stage == tile.kv_stages:
                        k_stage = Int32(0)
                        k_phase = k_phase ^ 1
                tile_index = inner_end
            else:
                cute.arch.mbarrier_wait(shared.k_full + k_stage, k_phase)
                for half in cutlass.range_constexpr(tile.halves):
                    at = half_at + half
                    scales = _multiply(tile, mmas, dots, keys, queries, k_stage, at, q_tile, my_key, shared)
                    if cutlass.const_expr(half == 0) and tile_index == first_tile:
                        # While the matrix unit works: they take half a microsecond.
                        cute.arch.mbarrier_wait(shared.rows_full + q_stage, q_phase)
                        inner_begin = shared.tasks[q_stage, 3 + 2 * query_tile]
                        inner_end = shared.tasks[q_stage, 4 + 2 * query_tile]
                        _load_weights(tile, weights, shared, rows_at + my_row, my_share, q_stage)
                    _wait(tile, half, k_stage, lane, shared)
                    key = tile_index * tile.stage_keys + at * KEYS + my_key
                    _finish(tile, False, dots, weights, scales, key, my_share, row, out, rows_at + my_row, q_stage,
                            data, shared)  # fmt: skip
                tile_index += 1
                k_stage += 1
                if k_stage == tile.kv_stages:
                    k_stage = Int32(0)
                    k_phase = k_phase ^ 1
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(shared.q_empty + q_stage)
        q_stage = q_stage ^ 1
        if q_stage == 0:
            q_phase = q_phase ^ 1
        cute.arch.mbarrier_wait(shared.task_full + q_stage, q_phase)
        left = shared.tasks[q_stage, 2]


@cute.jit
def _load_weights(tile: cutlass.Constexpr[Tile], weights, shared, row, my_share, q_stage):
    """This thread's weights into registers."""
    count = 2 * tile.pairs
    for i in cutlass.range_constexpr(tile.groups * count):
        weights[i] = shared.weights[_head(tile, i % count, my_share), row + 4 * (i // count), q_stage]


def _head(tile: Tile, i: int, my_share: Any) -> Any:
    """Head of the ``i``-th of a lane's columns of one row: pairs go round among the lanes that share the row."""
    return 2 * (i // 2 * tile.row_lanes + my_share) + i % 2


@cute.jit
def _multiply(tile: cutlass.Constexpr[Tile], mmas, dots, keys, queries, k_stage, at, q_tile, my_key, shared):
    """Start ``dots = keys . queries`` for the keys ``[64 * at, 64 * at + 64)`` of a stage.

    Returns this thread's two scales, the first one halved, because ``add_weighted_relu`` doubles it.
    """
    mma, mma_first = mmas
    place = k_stage * tile.stage_keys + at * KEYS + my_key
    scales = shared.k_scale[place] * Float32(0.5), shared.k_scale[place + 8]
    warpgroup.fence()
    for step in cutlass.range_constexpr(tile.dim // 32):
        cute.gemm(
            mma if step else mma_first,
            dots,
            keys[(None, None, step, k_stage * (tile.stage_keys // KEYS) + at)],
            queries[(None, None, step, q_tile)],
            dots,
        )
    warpgroup.commit_group()
    return scales


@cute.jit
def _wait(tile: cutlass.Constexpr[Tile], half: cutlass.Constexpr[int], k_stage, lane, shared):
    """Wait for the product; after a warpgroup's last one of a stage give the stage back.

    All lanes have read their scales by then: the wait is one for the whole warp.
    """
    warpgroup.wait_group(0)
    if cutlass.const_expr(half == tile.halves - 1):
        if lane == 0:
            cute.arch.mbarrier_arrive(shared.k_empty + k_stage)


@cute.jit
def _finish(
    tile: cutlass.Constexpr[Tile], inner: cutlass.Constexpr[bool], dots, weights, scales, key, my_share, row, out,
    row_in_block, q_stage, data, shared,
):  # fmt: skip
    """Turn dots into logits and store them; ``inner`` ones are all inside their windows."""
    stride = data.out.stride[0]
    for group in cutlass.range_constexpr(tile.groups):
        sums = [Float32(0.0)] * 4
        for pair in cutlass.range_constexpr(tile.pairs):
            at = group * tile.pairs + pair
            sums = add_weighted_relu([dots[4 * at + i] for i in range(4)], [weights[2 * at], weights[2 * at + 1]], sums)
        logit_0 = (sums[0] + sums[1]) * scales[0]
        logit_1 = (sums[2] + sums[3]) * scales[1]
        for distance in cutlass.range_constexpr(tile.row_lanes.bit_length() - 1):
            lanes = tile.quad_rows << distance
            logit_0 += cute.arch.shuffle_sync_bfly(logit_0, lanes)
            logit_1 += cute.arch.shuffle_sync_bfly(logit_1, lanes)
        to = cute.make_tensor(out + 4 * group * stride, cute.make_layout(1 << 30))
        if cutlass.const_expr(tile.row_lanes == 1):
            _store(inner, to, key, logit_0, row + 4 * group, row_in_block + 4 * group, q_stage, data, shared)
            _store(inner, to, key + 8, logit_1, row + 4 * group, row_in_block + 4 * group, q_stage, data, shared)
        else:
            # The first two lanes that share a row store one key each.
            logit = logit_0
            if my_share == 1:
                logit = logit_1
            if my_share < 2:
                _store(inner, to, key + 8 * my_share, logit, row, row_in_block, q_stage, data, shared)


@cute.jit
def _store(
    inner: cutlass.Constexpr[bool], to, key, logit, row, row_in_block, q_stage, data, shared,
):  # fmt: skip
    if cutlass.const_expr(inner):
        to[key] = logit
    else:
        inside = key >= shared.windows[0, row_in_block, q_stage] and key < shared.windows[1, row_in_block, q_stage]
        if inside or (data.clean != 0 and row < data.num_rows and key < data.num_keys):
            to[key] = cutlass.select_(inside, logit, -Float32.inf)
