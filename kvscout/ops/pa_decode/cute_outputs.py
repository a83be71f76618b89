"""What becomes of a task's sums: the warpgroups' are merged, then stored as a result or as a partial one."""

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...kernels.cute import ptx
from .cute_cluster import send_row
from .cute_softmax import GROUP_BARRIER, LOG2E, columns_at, fold, folded_column
from .cute_tile import LOAD_THREADS, Tile
from .cute_work import output_of

LN2 = 1 / LOG2E
MERGE_BARRIER = 6
"""The named barrier of all multiplying warps."""


def element_of(k: int) -> int:
    """Where a thread's k-th element of a row stands, counted from its first one; see :class:`.cute_tile.Tile`."""
    return 64 * (k >> 1) + 8 * (k & 1)


@cute.jit
def merge_warpgroups(
    tile: cutlass.Constexpr[Tile], references, sums, outputs, factor, partitions, group, warp, lane, thread, shared,
    data, work,
):  # fmt: skip
    """Add up what the warps have of each row, and store it; ``factor`` multiplies outputs."""
    places, own, per_warp = tile.places, tile.own_columns, 4 * tile.rows
    if cutlass.const_expr(tile.warpgroups > 1):
        # Where outputs are left, all warps are done with probabilities.
        ptx.sync(GROUP_BARRIER + group, 128)
    for quad in cutlass.range_constexpr(own // 4):
        four = slice(4 * quad, 4 * quad + 4)
        total = fold([sums[c] for c in range(own)][four], lambda x, y: x + y, lane)
        offset = columns_at(quad, lane)
        if lane < 16:
            at = shared + places.sums + (group * 4 + warp) * per_warp + offset
            ptx.shared_store(at + folded_column(lane) * 4, [total], Float32)
        if cutlass.const_expr(tile.warpgroups > 1):
            if lane < 4 and warp == 0:
                mine = [references[c] for c in range(own)][four]
                ptx.shared_store(shared + places.references + group * per_warp + offset, mine, Float32)
    if cutlass.const_expr(tile.warpgroups > 1):
        rows = _exchange_halves(tile, outputs, factor, group, lane, thread, shared, work)
    else:
        rows = _all_columns(tile, references, outputs, factor, lane, shared, work)
    _store_rows(tile, rows, warp * 8 + (lane >> 2), partitions, shared, data, work)


@cute.jit
def _all_columns(tile: cutlass.Constexpr[Tile], references, outputs, factor, lane, shared, work):
    """A single warpgroup's rows, as :func:`_store_rows` takes them: all of a thread's columns."""
    own = tile.own_columns
    ptx.sync(MERGE_BARRIER, tile.math_threads)
    rows = []
    for quad in cutlass.range_constexpr(own // 4):
        at = shared + tile.places.sums + columns_at(quad, lane)
        parts = [ptx.shared_load(at + w * (4 * tile.rows), Float32, 4) for w in range(4)]
        for c in cutlass.range_constexpr(4):
            column = 4 * quad + c
            merged = [outputs[k * own + column] * factor for k in range(tile.own_elements)]
            total = _of_warps([part[c] for part in parts])
            rows.append((merged, references[column], total, _row_of(column, lane, work)))
    return rows


@cute.jit
def _exchange_halves(tile: cutlass.Constexpr[Tile], outputs, factor, group, lane, thread, shared, work):
    """Two warpgroups' rows, as :func:`_store_rows` takes them: each takes half of a thread's columns."""
    places, own, per_warp = tile.places, tile.own_columns, 4 * tile.rows
    held, vector, share = tile.own_elements, tile.vector, own // 2
    # Each thread's vectors of a column lie one after the other.
    plane, of_column = 128 * 4 * vector, 128 * 4 * held
    exchange = shared + places.own + (thread & 127) * (4 * vector)
    kept = []
    for i in cutlass.range_constexpr(share):
        pairs = [(outputs[k * own + i], outputs[k * own + share + i]) for k in range(held)]
        kept.append([ptx.select(group, high, low) for low, high in pairs])
        sent = [ptx.select(group, low, high) for low, high in pairs]
        for k in cutlass.range_constexpr(0, held, vector):
            at = exchange + group * tile.own_bytes + (i * of_column + k // vector * plane)
            ptx.shared_store(at, sent[k : k + vector], Float32)
    ptx.sync(MERGE_BARRIER, tile.math_threads)
    rows = []
    for i in cutlass.range_constexpr(share):
        column = group * share + i
        offset = (column >> 2) * 64 + (lane & 3) * 16 + (column & 3) * 4
        at = shared + places.references + offset
        tops = [ptx.shared_load(at + g * per_warp, Float32) for g in range(2)]
        at = shared + places.sums + offset
        parts = [ptx.shared_load(at + w * per_warp, Float32) for w in range(8)]
        others = []
        for k in cutlass.range_constexpr(0, held, vector):
            from_ = exchange + (1 - group) * tile.own_bytes + (i * of_column + k // vector * plane)
            others += ptx.shared_load(from_, Float32, vector)
        top = ptx.maximum(tops[0], tops[1])
        total = Float32(0.0)
        weights = []
        for g in cutlass.range_constexpr(2):
            weights.append(ptx.exp2((tops[g] - top) * Float32(LOG2E)))
            total = ptx.multiply_add(_of_warps(parts[4 * g : 4 * g + 4]), weights[g], total)
        mine, other = ptx.select(group, weights[1], weights[0]), ptx.select(group, weights[0], weights[1])
        merged = [ptx.multiply_add(others[k], other, kept[i][k] * mine) * factor for k in range(held)]
        rows.append((merged, top, total, _row_of(column, lane, work)))
    return rows


def _of_warps(parts: Sequence[Any]) -> Any:
    """A warpgroup's sum."""
    return (parts[0] + parts[1]) + (parts[2] + parts[3])


def _row_of(column: Any, lane: Any, work: Any) -> Any:
    """The row of a lane's column."""
    return work.first_row + ((column >> 1) * 8 + (lane & 3) * 2 + (column & 1))


@cute.jit
def _store_rows(tile: cutlass.Constexpr[Tile], rows, slot, partitions, shared, data, work):
    """Store what a task makes of rows, as results or as partial ones; see :func:`store_row`."""
    count = data.query_length * data.group
    is_partial = partitions > 1
    if cutlass.const_expr(not tile.cluster):
        is_partial = partitions > 1 and data.partial_out != 0
    if is_partial:
        for merged, top, total, row in rows:
            if row < count:
                if cutlass.const_expr(tile.cluster):
                    send_row(tile, merged, top, total, row, slot, shared, data, work)
                else:
                    to, stats = partial_of(tile, data, work, row)
                    for k in cutlass.range_constexpr(0, tile.own_elements, tile.vector):
                        at = to + (slot * (4 * tile.vector) + 32 * 4 * k)
                        ptx.store(at, merged[k : k + tile.vector], Float32, ".cg")
                    if slot == 0:
                        ptx.store(stats, [top, total])
    elif cutlass.const_expr(tile.warpgroups == 1):
        _store_results(rows, slot, partitions, data, work)
    else:
        for merged, top, total, row in rows:
            # All lanes exchange halves, also those whose row is past the last: it takes the sink of one that is there.
            is_row = Int32(0)
            if row < count:
                is_row = Int32(1)
            at, lse_at, factor, lse = result_of(top, total, cutlass.min(row, count - 1), partitions, data, work)
            store_row(merged, factor, lse, at, lse_at, slot, 4, is_row, data)


@cute.jit
def _store_results(rows, slot, partitions, data, work):
    """Store rows as results: of the eight lanes that share them each finds what one becomes, and tells the others."""
    count = data.query_length * data.group
    lane = ptx.thread_index() & 31
    mine = [rows[i][1:] for i in range(len(rows))]
    for bit in cutlass.range_constexpr(len(rows).bit_length() - 1):
        odd = (slot >> bit) & 1
        mine = [
            (
                ptx.select(odd, mine[i + 1][0], mine[i][0]),
                ptx.select(odd, mine[i + 1][1], mine[i][1]),
                ptx.select(odd, mine[i + 1][2], mine[i][2], Int32),
            )
            for i in range(0, len(mine), 2)
        ]
    top, total, row = mine[0]
    at, lse_at, factor, lse = result_of(top, total, cutlass.min(row, count - 1), partitions, data, work)
    if data.lse != 0 and row < count and slot < len(rows):
        ptx.store(lse_at, [lse])
    for i in cutlass.range_constexpr(len(rows)):
        merged, row = rows[i][0], rows[i][3]
        teller = (lane & 3) + 4 * i
        is_row = Int32(0)
        if row < count:
            is_row = Int32(1)
        its_at, its_factor = ptx.from_lane(at, teller, Int64), ptx.from_lane(factor, teller, Float32)
        _store_elements(merged, its_factor, its_at, slot, 4, is_row, data)


@cute.jit
def partial_of(tile: cutlass.Constexpr[Tile], data, work, row):
    """Addresses of a row's partial output, and of its reference and sum."""
    at = Int64(work.kv_head * (data.query_length * data.group) + row) * data.capacity + work.slot
    return data.partial_out + at * (tile.dim * tile.partial_bytes), data.partial_stats + at * 8


@cute.jit
def result_of(top, total, row, partitions, data, work):
    """Addresses of a row's output and lse, and what they become: a factor, and the lse itself."""
    at, lse_at, head = output_of(data, work.sequence, work.kv_head, row)
    factor, lse = normalise(top, total, load_sink(data, head))
    if partitions > 1:
        # The caller has promised shorter contexts.
        factor, lse = Float32(float("nan")), Float32(float("nan"))
    return at, lse_at, factor, lse


@cute.jit
def store_row(merged, factor, lse, at, lse_at, slot, distance: cutlass.Constexpr[int], is_row, data):
    """One row by 32 threads in the order of slots, neighbours being ``distance`` lanes apart; ``is_row`` 0: none."""
    _store_elements(merged, factor, at, slot, distance, is_row, data)
    if data.lse != 0 and is_row != 0 and slot == 0:
        ptx.store(lse_at, [lse])


@cute.jit
def _store_elements(merged, factor, at, slot, distance: cutlass.Constexpr[int], is_row, data):
    """A row's elements: neighbours exchange halves, so that each stores pairs of elements."""
    odd, half = slot & 1, len(merged) // 2
    at = at + Int64(odd * element_of(half) + (slot >> 3) * 16 + (slot & 6)) * 2
    for k in cutlass.range_constexpr(half):
        sent = ptx.select(odd, merged[k], merged[half + k])
        kept = ptx.select(odd, merged[half + k], merged[k])
        got = ptx.exchange(sent, distance)
        low, high = ptx.select(odd, got, kept) * factor, ptx.select(odd, kept, got) * factor
        if is_row != 0:
            store_two(at + 2 * element_of(k), [low, high], data)


@cute.jit
def load_sink(data, head):
    """A head's sink, -inf where there is none."""
    sink = -Float32.inf
    if data.sinks != 0:
        if data.sinks_are_16_bit == 0:
            sink = ptx.load(data.sinks + head * 4, Float32)
        else:
            word = ptx.load_16(data.sinks + head * 2)
            as_float16, _ = ptx.unpack_float16(word)
            as_bfloat16, _ = ptx.unpack_bfloat16(word)
            sink = ptx.select(data.is_float16, as_float16, as_bfloat16)
    return sink


@cute.jit
def store_two(address, two, data):
    """Two elements of an output, rounded."""
    word = ptx.select(data.is_float16, ptx.pack_float16(*two), ptx.pack_bfloat16(*two), Int32)
    store_pair(address, word)


@cute.jit
def store_pair(address, word):
    """Two 16-bit elements that may lie on no more than an element's boundary."""
    if (address & 3) == 0:
        ptx.store(address, [word], Int32)
    else:
        ptx.store_16(address, word)
        ptx.store_16(address + 2, word >> 16)


@cute.jit
def normalise(top, total, sink):
    """What to multiply an output relative to ``top`` with, and the row's lse; ``sink`` is -inf where there is none."""
    most = ptx.maximum(top, sink)
    # Under a sink of inf the factor is 0 and the lse inf, by themselves or replaced.
    if most == Float32.inf:
        most = Float32(0.0)
    weight = ptx.exp2((top - most) * Float32(LOG2E))
    denominator = total * weight + ptx.exp2((sink - most) * Float32(LOG2E))
    factor = weight * ptx.reciprocal(denominator)
    lse = most + ptx.log2(denominator) * Float32(LN2)
    if sink == Float32.inf:
        factor = Float32(0.0)
    if total == 0.0:
        factor = Float32(0.0)
        lse = -Float32.inf
    return factor, lse


@cute.jit
def clear_rows(tile: cutlass.Constexpr[Tile], thread, sequence, kv_head, first_row, data):
    """Zeros, and an lse of -inf, in the block's rows of a sequence."""
    lane = thread & 31
    for i in cutlass.range(thread >> 5, tile.rows, LOAD_THREADS // 32, unroll=1):
        row = first_row + i
        if row < data.query_length * data.group:
            at, lse_at, _ = output_of(data, sequence, kv_head, row)
            for k in cutlass.range_constexpr(tile.dim // 64):
                store_pair(at + Int64(lane * (tile.dim // 16) + k * 4), Int32(0))
            if data.lse != 0 and lane == 0:
                ptx.store(lse_at, [-Float32.inf])
