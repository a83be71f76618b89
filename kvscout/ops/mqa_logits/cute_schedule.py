"""Who computes what: equal shares of all tiles, found inside the kernel from the windows on the device.

Query rows are cut into blocks of ``block_rows``. A block needs the tiles between the first and the last key that any
of its rows sees. Its cost is that of its tiles plus a constant for loading its queries; the thread blocks get equal,
contiguous parts of the sum of all costs. Every thread block adds up the costs of all blocks for itself, which takes
about a microsecond and saves a second kernel, a workspace and a read by the host.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .cute_tile import Tile

THREADS = 128
"""Threads that look for a share together."""
BARRIER = 1
"""The named barrier that they meet at."""
SHARE_WORDS = THREADS // 32 + 2
"""Integers of shared memory that they take: a sum per warp, then the first block and the costs before it."""


@cute.jit
def window(data, row):
    """Clamped start and end of a row's window; those of the last row past it. No branch, so that loads overlap."""
    row = cutlass.min(row, data.num_rows - 1)
    return _clamped(data.ks[row], data.ke[row], data.num_keys)


@cute.jit
def _clamped(start, end, num_keys):
    start = cutlass.min(cutlass.max(start, 0), num_keys)
    return start, cutlass.min(cutlass.max(end, start), num_keys)


@cute.jit
def _widened(first_key, last_key, start, end):
    """The range of keys ``[first_key, last_key)`` extended by a window, if it is not empty."""
    is_window = start < end
    first_key = cutlass.select_(is_window, cutlass.min(first_key, start), first_key)
    last_key = cutlass.select_(is_window, cutlass.max(last_key, end), last_key)
    return first_key, last_key


@cute.jit
def _tiles_between(tile: cutlass.Constexpr[Tile], first_key, last_key):
    """First tile, and number of tiles, of the keys ``[first_key, last_key)``; 0 of them where it is empty."""
    first = first_key // tile.stage_keys
    count = (last_key + tile.stage_keys - 1) // tile.stage_keys - first
    return first, cutlass.select_(first_key < last_key, count, 0)


@cute.jit
def _cost_of(tile: cutlass.Constexpr[Tile], block, data):
    """Cost of a block, computed by one lane; 0 past the last block."""
    first_key = data.num_keys
    last_key = Int32(0)
    row = block * tile.block_rows
    aligned = (data.ks.iterator.toint() | data.ke.iterator.toint()) % 16 == 0
    if cutlass.const_expr(tile.block_rows % 4 == 0) and aligned and row + tile.block_rows <= data.num_rows:
        # Four rows a load: a lane reads whole sectors.
        for part in cutlass.range(tile.block_rows // 4, unroll=min(tile.block_rows // 4, 4)):
            four = cute.make_layout(4)
            starts = cute.make_tensor((data.ks.iterator + row + 4 * part).align(16), four).load()
            ends = cute.make_tensor((data.ke.iterator + row + 4 * part).align(16), four).load()
            for i in cutlass.range_constexpr(4):
                start, end = _clamped(starts[i], ends[i], data.num_keys)
                first_key, last_key = _widened(first_key, last_key, start, end)
    else:
        for i in cutlass.range(tile.block_rows, unroll=min(tile.block_rows, 2)):
            start, end = window(data, row + i)
            first_key, last_key = _widened(first_key, last_key, start, end)
    _, count = _tiles_between(tile, first_key, last_key)
    return cutlass.select_(row < data.num_rows, count * tile.tile_cost + tile.block_cost, 0)


@cute.jit
def my_share(tile: cutlass.Constexpr[Tile], warp, lane, data, shared):
    """This thread block's share, found by the warps of one warpgroup.

    Returns:
        The first block, the costs of all blocks before it, and the costs before the share's beginning and its end.
    """
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    num_blocks = (data.num_rows + tile.block_rows - 1) // tile.block_rows
    # Each warp adds up consecutive blocks, 32 a step; each lane remembers the sum before the first step of its slot.
    steps = (num_blocks + THREADS - 1) // THREADS
    slot_steps = (steps + 31) // 32
    warp_block = warp * steps * 32
    cost = Int32(0)
    sum_ = Int32(0)
    before = Int32(0)
    for step in cutlass.range(steps, unroll=2):
        before = cutlass.select_(step == lane * slot_steps, sum_, before)
        cost = _cost_of(tile, warp_block + step * 32 + lane, data)
        sum_ += cute.arch.warp_redux_sync(cost, kind="add")
    if lane == 0:
        shared.share[warp] = sum_
    cute.arch.barrier(barrier_id=BARRIER, number_of_threads=THREADS)
    total = Int32(0)
    warp_before = Int32(0)
    for other in cutlass.range_constexpr(THREADS // 32):
        warp_before = cutlass.select_(other == warp, total, warp_before)
        total += shared.share[other]
    begin = _share_begin(cta, ctas, total)
    end = _share_begin(cta + 1, ctas, total)
    if begin >= warp_before and begin < warp_before + sum_:
        # The last slot that begins at or before the share, then the block within it.
        before += warp_before
        slot = cute.arch.popc(cute.arch.vote_ballot_sync(lane * slot_steps < steps and before <= begin)) - 1
        before = cute.arch.shuffle_sync(before, slot)
        step = slot * slot_steps
        found = Int32(0)
        while found == 0:
            block = warp_block + step * 32 + lane
            if steps > 1:
                cost = _cost_of(tile, block, data)
            upto = cost
            for distance in cutlass.range_constexpr(5):
                lower = cute.arch.shuffle_sync_up(upto, 1 << distance, mask_and_clamp=0)
                upto += cutlass.select_(lane >= (1 << distance), lower, 0)
            mine = before + upto - cost
            if begin >= mine and begin < mine + cost:
                shared.share[THREADS // 32] = block
                shared.share[THREADS // 32 + 1] = mine
            before += cute.arch.shuffle_sync(upto, 31)
            step += 1
            found = cutlass.select_(begin < before, 1, 0)
    cute.arch.barrier(barrier_id=BARRIER, number_of_threads=THREADS)
    # An empty share has no first block.
    first_before = cutlass.select_(begin < end, shared.share[THREADS // 32 + 1], end)
    return shared.share[THREADS // 32], first_before, begin, end


@cute.jit
def _share_begin(cta, ctas, total):
    """Where a share begins: the same in every thread block that asks, from 0 to ``total``; without a slow division."""
    part = Float32(total) * (Float32(cta) * cute.arch.rcp_approx(Float32(ctas)))
    return cutlass.select_(cta < ctas, cutlass.min(Int32(part), total), total)


@cute.jit
def block_tiles(tile: cutlass.Constexpr[Tile], block, lane, data):
    """First tile and number of tiles of a block, computed by one warp."""
    row = block * tile.block_rows + cutlass.min(lane, tile.block_rows - 1)
    start, end = window(data, row)
    first_key, last_key = _widened(data.num_keys, Int32(0), start, end)
    first_key = cute.arch.warp_redux_sync(first_key, kind="min")
    last_key = cute.arch.warp_redux_sync(last_key, kind="max")
    return _tiles_between(tile, first_key, last_key)


@cute.jit
def task_of(tile: cutlass.Constexpr[Tile], block, before, begin, end, lane, data):
    """What a share ``[begin, end)`` of the costs holds of a block, computed by one warp.

    ``before`` is the cost of all blocks before this one; a block's own cost comes first, then its tiles.

    Returns:
        The first tile, the first one past the last (not above the first where the share holds none), and the costs up
        to the next block.
    """
    first, count = block_tiles(tile, block, lane, data)
    unit = tile.tile_cost
    tiles_at = before + tile.block_cost
    low = cutlass.min((cutlass.max(begin - tiles_at, 0) + unit - 1) // unit, count)
    high = cutlass.min((cutlass.max(end - tiles_at, 0) + unit - 1) // unit, count)
    return first + low, first + high, tiles_at + count * unit
