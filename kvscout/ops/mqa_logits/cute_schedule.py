"""Who computes what: equal shares of all tiles, found inside the kernel from the windows on the device.

Query rows are cut into blocks of ``block_rows``. A block needs the tiles between the first and the last key that any
of its rows sees. Its cost is that of its tiles plus a constant for loading its queries; the thread blocks get equal,
contiguous parts of the sum of all costs. Each thread block adds up the costs of all blocks for itself, which takes a
microsecond or two and saves a second kernel, a workspace and a read by the host.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .cute_tile import THREADS, Tile

WARPS = THREADS // 32


@cute.jit
def window(data, row, num_rows, num_keys):
    """Clamped start and end of a row's window; those of the last row past it. No branch, so that loads overlap."""
    row = cutlass.min(row, num_rows - 1)
    start = cutlass.min(cutlass.max(data.ks[row], 0), num_keys)
    end = cutlass.min(cutlass.max(data.ke[row], start), num_keys)
    return start, end


@cute.jit
def widened(first_key, last_key, start, end):
    """The range of keys ``[first_key, last_key)`` extended by a window, if it is not empty."""
    is_window = start < end
    first_key = cutlass.select_(is_window, cutlass.min(first_key, start), first_key)
    last_key = cutlass.select_(is_window, cutlass.max(last_key, end), last_key)
    return first_key, last_key


@cute.jit
def tiles_between(tile: cutlass.Constexpr[Tile], first_key, last_key):
    """First tile, and number of tiles, of the keys ``[first_key, last_key)``; (0, 0) where there are none."""
    first = Int32(0)
    count = Int32(0)
    if first_key < last_key:
        first = first_key // tile.stage_keys
        count = (last_key + tile.stage_keys - 1) // tile.stage_keys - first
    return first, count


@cute.jit
def _cost_of(tile: cutlass.Constexpr[Tile], block, data, num_rows, num_keys):
    """Cost of a block, computed by one thread; 0 past the last block."""
    first_key = num_keys
    last_key = Int32(0)
    for i in cutlass.range(tile.block_rows, unroll=min(tile.block_rows, 16)):
        start, end = window(data, block * tile.block_rows + i, num_rows, num_keys)
        first_key, last_key = widened(first_key, last_key, start, end)
    _, count = tiles_between(tile, first_key, last_key)
    cost = cost_of_tiles(tile, count) + tile.block_cost
    return cutlass.select_(block * tile.block_rows < num_rows, cost, 0)


@cute.jit
def cost_of_tiles(tile: cutlass.Constexpr[Tile], count):
    """Cost of ``count`` tiles of one block."""
    return count * (tile.stage_keys // 64)


@cute.jit
def my_share(tile: cutlass.Constexpr[Tile], warp, lane, data, shared, num_rows, num_keys):
    """Every thread calls it: writes where this thread block's share begins.

    Args:
        tile: what the kernel is compiled for.
        warp: this thread's warp.
        lane: this thread's lane.
        data: the kernel's arguments.
        shared: int32 in shared memory: one cost per warp, then the first block of the share, the costs before that
            block, and the costs before the share's beginning and its end.
        num_rows: S.
        num_keys: N.
    """
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    num_blocks = (num_rows + tile.block_rows - 1) // tile.block_rows
    # A warp adds up consecutive blocks, 32 at a time.
    steps = (num_blocks + THREADS - 1) // THREADS
    mine = warp * steps * 32 + lane
    cost = Int32(0)
    last = Int32(0)
    for step in cutlass.range(steps, unroll=1):
        last = _cost_of(tile, mine + step * 32, data, num_rows, num_keys)
        cost += last
    cost = cute.arch.warp_redux_sync(cost, kind="add")
    if lane == 0:
        shared[warp] = cost
    cute.arch.sync_threads()
    total = Int32(0)
    before = Int32(0)
    for other in cutlass.range_constexpr(WARPS):
        if other == warp:
            before = total
        total += shared[other]
    each = total // ctas
    more = total - each * ctas
    begin = cta * each + cutlass.min(cta, more)
    end = begin + each
    if cta < more:
        end += 1
    if warp == 0 and lane == 0:
        shared[WARPS + 2] = begin
        shared[WARPS + 3] = end
    # Only the warp whose blocks hold the beginning looks for it.
    if begin >= before and begin < before + cost:
        for step in cutlass.range(steps, unroll=1):
            block = mine + step * 32
            one = last
            if steps > 1:
                one = _cost_of(tile, block, data, num_rows, num_keys)
            upto = one
            for distance in cutlass.range_constexpr(5):
                lower = cute.arch.shuffle_sync_up(upto, 1 << distance, mask_and_clamp=0)
                if lane >= (1 << distance):
                    upto += lower
            first = before + upto - one
            if begin >= first and begin < first + one:
                shared[WARPS] = block
                shared[WARPS + 1] = first
            before += cute.arch.shuffle_sync(upto, 31)
    cute.arch.sync_threads()


@cute.jit
def block_tiles(tile: cutlass.Constexpr[Tile], block, lane, data, num_rows, num_keys):
    """First tile and number of tiles of a block, computed by one warp."""
    first_key = num_keys
    last_key = Int32(0)
    for i in cutlass.range_constexpr((tile.block_rows + 31) // 32):
        row = block * tile.block_rows + cutlass.min(lane + 32 * i, tile.block_rows - 1)
        start, end = window(data, row, num_rows, num_keys)
        first_key, last_key = widened(first_key, last_key, start, end)
    first_key = cute.arch.warp_redux_sync(first_key, kind="min")
    last_key = cute.arch.warp_redux_sync(last_key, kind="max")
    return tiles_between(tile, first_key, last_key)


@cute.jit
def share_of(shared):
    """What :func:`my_share` found: first block, the costs before it, and the costs at the share's ends."""
    block, before, begin, end = (shared[WARPS + i] for i in range(4))
    # An empty share has no first block.
    before = cutlass.select_(begin < end, before, end)
    return block, before, begin, end


@cute.jit
def task_of(tile: cutlass.Constexpr[Tile], block, before, begin, end, lane, data, num_rows, num_keys):
    """What a share ``[begin, end)`` of the costs holds of a block, computed by one warp.

    ``before`` is the cost of all blocks before this one; a block's own cost comes first, then its tiles.

    Returns:
        The first tile, the first one past the last (not above the first where the share holds none), and the costs up
        to the next block.
    """
    first, count = block_tiles(tile, block, lane, data, num_rows, num_keys)
    unit = cost_of_tiles(tile, 1)
    tiles_at = before + tile.block_cost
    low = cutlass.min((cutlass.max(begin - tiles_at, 0) + unit - 1) // unit, count)
    high = cutlass.min((cutlass.max(end - tiles_at, 0) + unit - 1) // unit, count)
    return first + low, first + high, tiles_at + cost_of_tiles(tile, count)
