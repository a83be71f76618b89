"""The filling warps: -inf wherever no tile reaches, by bulk stores beside the multiplication."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...kernels.cute.dsl import bulk_store
from .cute_schedule import block_tiles
from .cute_tile import FILL_FLOATS, Tile

WARPS = 2

# Columns of one piece of work: enough pieces for all thread blocks where the rows are few and long.
PIECE = 8192


@cute.jit
def fill(tile: cutlass.Constexpr[Tile], warp, lane, data, shared):
    """Write -inf in every column of every row that no tile of the row's block covers.

    Pieces of the output go to the filling warps of all thread blocks in turn, whatever those multiply.
    """
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    pieces = (data.num_keys + PIECE - 1) // PIECE
    total = pieces * ((data.num_rows + tile.block_rows - 1) // tile.block_rows)
    for index in cutlass.range(cta * WARPS + warp, total, ctas * WARPS, unroll=1):
        block = index // pieces
        begin = (index - block * pieces) * PIECE
        end = cutlass.min(begin + PIECE, data.num_keys)
        first, count = block_tiles(tile, block, lane, data)
        covered = first * tile.stage_keys
        covered_end = covered + count * tile.stage_keys
        if count == 0:
            covered = data.num_keys
            covered_end = data.num_keys
        row = block * tile.block_rows + lane
        if lane < tile.block_rows and row < data.num_rows:
            out = data.out.iterator + cutlass.Int64(row) * data.out.stride[0]
            _fill_run(out, begin, cutlass.min(end, covered), shared)
            _fill_run(out, cutlass.max(begin, covered_end), end, shared)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(1, read=True)
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def _fill_run(row, begin, end, shared):
    """-inf into ``row[begin:end]``: up to three elements on either side of what is 16-byte aligned one by one."""
    if begin < end:
        to = cute.make_tensor(row, cute.make_layout(1 << 30))
        past = Int32((row + begin).toint() // 4 % 4)
        aligned = cutlass.min(begin + (4 - past) % 4, end)
        aligned_end = aligned + (end - aligned) // 4 * 4
        for column in cutlass.range(begin, aligned, unroll=1):
            to[column] = -Float32.inf
        for column in cutlass.range(aligned, aligned_end, FILL_FLOATS, unroll=1):
            count = cutlass.min(aligned_end - column, FILL_FLOATS)
            bulk_store(row + column, shared.neg_inf.iterator, count * 4)
        for column in cutlass.range(aligned_end, end, unroll=1):
            to[column] = -Float32.inf
