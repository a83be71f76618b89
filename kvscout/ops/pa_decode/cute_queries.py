"""Queries on their way to shared memory, as the B operand of the scores."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...kernels.cute import ptx
from .cute_tile import ASKED_BARRIER, ELEMENTS, LOAD_THREADS, Tile
from .cute_work import key_scale, place_of, visible

# A row of zeros needs some scale.
LEAST_MAGNITUDE = 1e-30

# What multiplies scores is not 0, as some are infinite.
LEAST_SCALE = 2.0**-125
SIGN, BOTH_SIGNS = -(1 << 31), 0x8000 - (1 << 31)
"""Sign bits of a float32, and of two 16-bit floats."""


@cute.jit
def load_queries(tile: cutlass.Constexpr[Tile], thread, shared, data, work):
    """Bring the block's query rows to shared memory, with what each row sees and what its scores are multiplied by.

    That is not negative, so that the largest product has the largest score: queries take its sign.
    """
    places, threads = tile.places, tile.query_threads
    row, place = (thread >> (threads.bit_length() - 1)) & (tile.rows - 1), thread & (threads - 1)
    # A row past the last reads one that is there, and what becomes of it is not stored.
    position, in_group = place_of(data, work.first_row + row)
    position = cutlass.min(position, data.query_length - 1)
    words = cute.make_rmem_tensor((4 * tile.query_parts,), Int32)
    _load(tile, place, position, in_group, words, data, work)
    if cutlass.const_expr(tile.by_rows):
        ptx.arrive(ASKED_BARRIER, tile.math_threads + LOAD_THREADS)
    # Not earlier, as it would hold up the queries.
    scale = Float32(1.0)
    if cutlass.const_expr(tile.is_e4m3):
        scale = key_scale(data, work.kv_head)
    # While they are on their way.
    if place == 0:
        low, high = visible(data, work.context, position)
        ptx.shared_store(shared + places.bounds + row * 8, [low, high])
    scale = data.softmax_scale * scale
    is_negative = ptx.bits_of(scale) >> 31
    row_scale = ptx.magnitude(scale)
    if cutlass.const_expr(tile.is_e4m3):
        row_scale = row_scale * _store_split(tile, row, place, words, is_negative & SIGN, shared, data)
    else:
        signs = is_negative & BOTH_SIGNS
        at = shared + places.queries + place * tile.query_pitch + row * 16
        for part in cutlass.range_constexpr(tile.query_parts):
            piece = [words[4 * part + i] ^ signs for i in range(4)]
            ptx.shared_store(at + part * (threads * tile.query_pitch), piece)
    if cutlass.const_expr(not tile.token_scales):
        if row_scale < Float32(LEAST_SCALE):
            row_scale = Float32(LEAST_SCALE)
    if place == 0:
        ptx.shared_store(shared + places.row_scales + row * 4, [row_scale], Float32)


@cute.jit
def span_of(tile: cutlass.Constexpr[Tile], shared):
    """The tokens ``[lowest, highest)`` that any of the block's rows sees, once :func:`load_queries` has ended."""
    at = shared + tile.places.bounds
    return ptx.shared_load(at), ptx.shared_load(at + (8 * tile.rows - 4))


@cute.jit
def _load(tile: cutlass.Constexpr[Tile], place, position, in_group, words, data, work):
    """This thread's elements of a row, each eight in 16 bytes unless they lie on an element's boundary only."""
    at = Int64(work.sequence) * data.query_length + position
    head = Int64(work.kv_head * data.group + in_group)
    from_ = data.query + at * data.query_row + head * data.query_head + Int64(place * (2 * ELEMENTS))
    step = tile.query_threads * (2 * ELEMENTS)
    if ((data.query | data.query_row | data.query_head) & 15) == 0:
        for part in cutlass.range_constexpr(tile.query_parts):
            found = ptx.load(from_ + part * step, Int32, 4)
            for i in cutlass.range_constexpr(4):
                words[4 * part + i] = found[i]
    else:
        for part in cutlass.range_constexpr(tile.query_parts):
            for i in cutlass.range_constexpr(4):
                low = ptx.load_16(from_ + (part * step + 4 * i))
                words[4 * part + i] = low | (ptx.load_16(from_ + (part * step + 4 * i + 2)) << 16)


@cute.jit
def _store_split(tile: cutlass.Constexpr[Tile], row, place, words, sign, shared, data):
    """Store this thread's elements of a row as two e4m3 numbers each; what the row's scores are to be multiplied by.

    A power of two brings the row's largest element into [128, 256); ``sign`` is a sign bit that all elements change by.
    """
    threads, elements = tile.query_threads, ELEMENTS * tile.query_parts
    x = cute.make_rmem_tensor((elements,), Float32)
    # The other of the two would take longer than all else here.
    if data.is_float16 != 0:
        for i in cutlass.range_constexpr(elements // 2):
            x[2 * i], x[2 * i + 1] = ptx.unpack_float16(words[i])
    else:
        for i in cutlass.range_constexpr(elements // 2):
            x[2 * i], x[2 * i + 1] = ptx.unpack_bfloat16(words[i])
    largest = Float32(LEAST_MAGNITUDE)
    for i in cutlass.range_constexpr(elements):
        largest = ptx.maximum(largest, ptx.magnitude(x[i]))
    for distance in cutlass.range_constexpr(threads.bit_length() - 1):
        largest = ptx.maximum(largest, ptx.exchange(largest, 1 << distance))
    exponent = (ptx.bits_of(largest) >> 23) & 255
    up = ptx.float_of(((Int32(261) - exponent) << 23) | sign)
    # Two threads share 16 bytes.
    at = shared + tile.places.queries + (place >> 1) * tile.query_pitch + ((place & 1) * ELEMENTS + row * 16)
    for part in cutlass.range_constexpr(tile.query_parts):
        fours = [[x[ELEMENTS * part + 4 * half + i] * up for i in range(4)] for half in range(2)]
        highs, lows = zip(*[ptx.split(four, (0,), 2) for four in fours], strict=True)
        to = at + part * (threads // 2 * tile.query_pitch)
        ptx.shared_store(to, highs)
        ptx.shared_store(to + tile.rows * 16, lows)
    return ptx.float_of((exponent - 7) << 23)
