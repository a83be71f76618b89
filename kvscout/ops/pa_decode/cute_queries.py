"""Queries on their way to shared memory, as the B operand of the scores."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...kernels.cute import ptx
from .cute_tile import CORE, Tile
from .cute_work import key_scale, place_of, visible

# A row of zeros needs some scale.
LEAST_MAGNITUDE = 1e-30

# What multiplies scores is not 0, as some are infinite; it has one sign for all rows.
LEAST_SCALE = 2.0**-125


def threads_of_row(tile: Tile) -> int:
    """Threads that load a query row, eight elements each."""
    return tile.dim // 8


def rows_at_once(tile: Tile) -> int:
    """Query rows that all threads load at once."""
    return min(tile.rows, tile.math_threads // threads_of_row(tile))


def row_of(tile: Tile, part: int, thread: Any) -> Any:
    """The row of the block that a thread loads; where there are more threads than rows, several load the same."""
    at_once = rows_at_once(tile)
    return part * at_once + (thread // threads_of_row(tile)) % at_once


@cute.jit
def load_queries(tile: cutlass.Constexpr[Tile], thread, shared, data, work):
    """Bring the block's query rows to shared memory, with what each row sees and what its scores are multiplied by."""
    places = tile.places
    chunk = thread % threads_of_row(tile)
    parts = tile.rows // rows_at_once(tile)
    words = cute.make_rmem_tensor((4 * parts,), Int32)
    _load(tile, thread, words, data, work)
    # Not earlier, as it would hold up the queries.
    scale = Float32(1.0)
    if cutlass.const_expr(tile.is_e4m3):
        scale = key_scale(data, work)
    # While they are on their way.
    if thread < tile.rows:
        position, _ = place_of(data, work.first_row + thread)
        low, high = visible(data, work.context, cutlass.min(position, data.query_length - 1))
        ptx.shared_store(shared + places.bounds + thread * 8, [low, high])
    units = [Float32(1.0)] * parts
    if cutlass.const_expr(tile.is_e4m3):
        units = _store_split(tile, words, thread, shared, data)
    else:
        for part in cutlass.range_constexpr(parts):
            at = shared + places.queries + chunk * tile.query_pitch + row_of(tile, part, thread) * 16
            ptx.shared_store(at, [words[4 * part + i] for i in range(4)])
    for part in cutlass.range_constexpr(parts):
        row_scale = data.softmax_scale * scale * units[part]
        if cutlass.const_expr(not tile.token_scales):
            if ptx.magnitude(row_scale) < Float32(LEAST_SCALE):
                row_scale = ptx.sign(row_scale) * Float32(LEAST_SCALE)
        if chunk == 0:
            ptx.shared_store(shared + places.row_scales + row_of(tile, part, thread) * 4, [row_scale], Float32)


@cute.jit
def span_of(tile: cutlass.Constexpr[Tile], shared):
    """The tokens ``[lowest, highest)`` that any of the block's rows sees, once :func:`load_queries` has ended."""
    at = shared + tile.places.bounds
    return ptx.shared_load(at), ptx.shared_load(at + (8 * tile.rows - 4))


@cute.jit
def _load(tile: cutlass.Constexpr[Tile], thread, words, data, work):
    """Eight elements of each of this thread's rows, in 16 bytes unless they lie on an element's boundary only.

    Rows past the last read one that is there, and what becomes of them is not stored.
    """
    addresses = []
    parts = tile.rows // rows_at_once(tile)
    for part in cutlass.range_constexpr(parts):
        position, in_group = place_of(data, work.first_row + row_of(tile, part, thread))
        at = Int64(work.sequence) * data.query_length + cutlass.min(position, data.query_length - 1)
        head = Int64(work.kv_head * data.group + in_group)
        addresses.append(
            data.query + at * data.query_row + head * data.query_head + Int64(thread % threads_of_row(tile) * 16)
        )
    if ((data.query | data.query_row | data.query_head) & 15) == 0:
        for part in cutlass.range_constexpr(parts):
            found = ptx.load(addresses[part], Int32, 4)
            for i in cutlass.range_constexpr(4):
                words[4 * part + i] = found[i]
    else:
        for part in cutlass.range_constexpr(parts):
            for i in cutlass.range_constexpr(4):
                low = ptx.load_16(addresses[part] + 4 * i)
                words[4 * part + i] = low | (ptx.load_16(addresses[part] + (4 * i + 2)) << 16)


@cute.jit
def _store_split(tile: cutlass.Constexpr[Tile], words, thread, shared, data):
    """Store eight elements of each of this thread's rows as two e4m3 numbers each; what scores are to be multiplied by.

    A power of two brings a row's largest element into [128, 256).
    """
    parts = tile.rows // rows_at_once(tile)
    rows, largest = [], []
    for part in cutlass.range_constexpr(parts):
        x = []
        for i in cutlass.range_constexpr(4):
            word = words[4 * part + i]
            pair, as_float16 = ptx.unpack_bfloat16(word), ptx.unpack_float16(word)
            for e in cutlass.range_constexpr(2):
                x.append(ptx.select(data.is_float16, as_float16[e], pair[e]))
        most = Float32(LEAST_MAGNITUDE)
        for i in cutlass.range_constexpr(8):
            most = ptx.maximum(most, ptx.magnitude(x[i]))
        rows.append(x)
        largest.append(most)
    # All rows' exchanges are on their way at once.
    for distance in cutlass.range_constexpr(threads_of_row(tile).bit_length() - 1):
        others = [ptx.exchange(most, 1 << distance) for most in largest]
        largest = [ptx.maximum(most, other) for most, other in zip(largest, others, strict=True)]
    element = thread % threads_of_row(tile) * 8
    at = shared + tile.places.queries + (element >> 4) * tile.query_pitch + (element & 15)
    units = []
    for part in cutlass.range_constexpr(parts):
        exponent = (largest[part].bitcast(Int32) >> 23) & 255
        up = ((Int32(261) - exponent) << 23).bitcast(Float32)
        to = at + row_of(tile, part, thread) * 16
        for half in cutlass.range_constexpr(2):
            high, low = ptx.split_queries([rows[part][4 * half + i] * up for i in range(4)])
            ptx.shared_store(to + 4 * half, [high])
            ptx.shared_store(to + (4 * half + tile.rows // 8 * CORE), [low])
        units.append(((exponent - 7) << 23).bitcast(Float32))
    return units
