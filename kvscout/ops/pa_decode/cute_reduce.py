"""The merge of partial results, by a kernel that starts while the last of them are computed.

Partial results are added up in float32 in one order, whoever adds them: four chains of partitions k, k + 4, ..., then
the chains. It is warps that merge: a row of few partitions, or a quarter of a row of many, of which eight lanes take
each chain. Blocks of a cluster merge what they sent to each other as the former do, and the last block of a sequence to
store its partial results as either.
"""

from collections.abc import Callable, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...kernels.cute import ptx
from .cute_cluster import mail_of
from .cute_outputs import MERGE_BARRIER, load_sink, normalise, store_row, store_two
from .cute_softmax import LOG2E, NOTHING
from .cute_tile import COUNTERS, MEANS, REDUCE_FEW, REDUCE_PARTS, Tile
from .cute_work import output_of, partitions_of, value_scale

CHAINS = REDUCE_PARTS
"""As many as parts of a row, so that a warp has all chains of a part."""
PART_BITS = REDUCE_PARTS.bit_length() - 1
PART_LANES = 32 // CHAINS
"""Lanes that share a chain of a part."""
PAST_L1 = ".cg"


def lane_parts(tile: Tile) -> int:
    """Partial results of a chunk that a lane finds the weights of: as many as registers hold the elements of."""
    return min(2, 256 // tile.dim)


@cute.jit
def reduce_sequences(
    tile: cutlass.Constexpr[Tile], lane, sequence, sequence_step, first, step, kv_head, data,
    is_late: cutlass.Constexpr[bool],
):  # fmt: skip
    """Merge by one warp pieces ``first``, ``first + step``, ... of each sequence ``sequence``, ... of a KV head.

    A piece is what :func:`_merge_pieces` says. The next kernel may begin before, or if ``is_late`` after, if there is
    anything to merge.
    """
    # Launching takes longer than merging: the next kernel's blocks, which wait for this one's end, are on their way.
    if cutlass.const_expr(not is_late):
        cute.arch.griddepcontrol_launch_dependents()
    # The plan is older than the partial results: what they waited for has ended.
    first_slot, count = partitions_of(data, sequence)
    if cutlass.const_expr(is_late):
        if _is_any_split(lane, sequence, sequence_step, data) == 0:
            sequence = data.num_sequences
            cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    rows = data.query_length * data.group
    while sequence < data.num_sequences:
        _merge_pieces(
            tile, lane, first_slot, count, sequence, kv_head, first, step, 0, rows, data, "", lane_parts(tile)
        )  # fmt: skip
        sequence = sequence + sequence_step
        if sequence < data.num_sequences:
            first_slot, count = partitions_of(data, sequence)
    if cutlass.const_expr(is_late):
        cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def _merge_pieces(
    tile: cutlass.Constexpr[Tile], lane, first_slot, count, sequence, kv_head, first, step, first_row, end_row, data,
    hint: cutlass.Constexpr[str], parts_of_lane: cutlass.Constexpr[int],
):  # fmt: skip
    """Merge by one warp, of rows ``first_row`` to ``end_row``, pieces ``first``, ``first + step``, ...

    Those are rows of few partial results, or parts of rows of many.
    """
    mine = first
    if count <= REDUCE_FEW:
        while count > 1 and first_row + mine < end_row:
            _reduce_few(tile, lane, first_slot, count, sequence, first_row + mine, kv_head, data, hint)
            mine = mine + step
    else:
        while mine < (end_row - first_row) * REDUCE_PARTS:
            row, part = first_row + (mine >> PART_BITS), mine & (REDUCE_PARTS - 1)
            _reduce_many(tile, lane, first_slot, count, sequence, row, part, kv_head, data, hint, parts_of_lane)
            mine = mine + step


@cute.jit
def _is_any_split(lane, sequence, sequence_step, data):
    """Whether any of the sequences ``sequence``, ``sequence + sequence_step``, ... has partial results; else 0."""
    is_split = Int32(0)
    mine = sequence + lane * sequence_step
    while mine < data.num_sequences:
        _, count = partitions_of(data, mine)
        if count > 1:
            is_split = Int32(1)
        mine = mine + 32 * sequence_step
    return ptx.ballot(is_split)


@cute.jit
def merge_as_last(tile: cutlass.Constexpr[Tile], shared, num_kv_heads, data, work):
    """Merge the block's rows of its sequence by the multiplying warps, if all other partial results are there.

    They are read past L1, which may hold what was in the slots before.
    """
    thread = ptx.thread_index()
    warp, lane = cute.arch.make_warp_uniform(thread >> 5), thread & 31
    first_slot, count = partitions_of(data, work.sequence)
    if count > 1:
        # All of the block's stores come before its arrival.
        ptx.sync(MERGE_BARRIER, tile.math_threads)
        flag = shared + tile.places.constants
        if thread == 0:
            line = Int64(work.sequence) * num_kv_heads + work.kv_head
            at = data.arrivals + line * (4 * COUNTERS) + Int64(work.first_row // tile.rows) * 4
            ptx.shared_store(flag, [ptx.count_up(at, count - 1)])
        ptx.sync(MERGE_BARRIER, tile.math_threads)
        if ptx.shared_load(flag) == count - 1:
            end = cutlass.min(work.first_row + tile.rows, data.query_length * data.group)
            # A block that multiplied has fewer registers left.
            _merge_pieces(
                tile, lane, first_slot, count, work.sequence, work.kv_head, warp, tile.math_threads // 32,
                work.first_row, end, data, PAST_L1, 1,
            )  # fmt: skip


@cute.jit
def _reduce_few(
    tile: cutlass.Constexpr[Tile], lane, first_slot, count, sequence, row, kv_head, data, hint: cutlass.Constexpr[str]
):  # fmt: skip
    """Merge a row's partial results, ``REDUCE_FEW`` at most, by one warp; ``hint`` is on how to load them."""
    at = _place_of(data, kv_head, row, first_slot)
    reference, total = _load_stats(data.partial_stats + at * 8, lane, count, hint)
    parts = [_load_part(tile, data, at, Int32(0), k, count, lane, hint) for k in range(REDUCE_FEW)]
    # While they are on their way.
    place = _destination(tile, sequence, row, kv_head, data)
    _merge_few(tile, lane, reference, total, parts, place, data)


@cute.jit
def merge_mail(tile: cutlass.Constexpr[Tile], warp, lane, rank, count, shared, sequence, kv_head, data):
    """Merge the rows of a cluster that are this block's, each by one of the multiplying warps."""
    row = (warp << data.cluster_bits) + rank
    if count > 1 and row < data.query_length * data.group:
        # While they are on their way.
        place = _destination(tile, sequence, row, kv_head, data)
        ptx.barrier_wait_for_cluster(shared + tile.places.mail_barrier, Int32(0))
        reference, total, parts = mail_of(tile, warp, lane, count, shared, data)
        _merge_few(tile, lane, reference, total, parts, place, data)


@cute.jit
def _merge_few(tile: cutlass.Constexpr[Tile], lane, reference, total, parts, place, data):
    """Merge a row's partial results by one warp: a lane has one's reference and sum, and its elements of all."""
    out_at, lse_at, sink, factor = place
    top = _over_lanes(reference, ptx.maximum)
    weight = ptx.exp2((reference - top) * Float32(LOG2E))
    held = tile.own_elements
    weighted = ptx.multiply_add(total, weight, Float32(0.0))
    total = _over_lanes(weighted, lambda x, y: x + y)
    normaliser, lse = normalise(top, total, sink)
    if cutlass.const_expr(tile.widens):
        weight, normaliser = weighted, normaliser * factor
    chains = [[Float32(0.0)] * held for _ in range(CHAINS)]
    for k in cutlass.range_constexpr(REDUCE_FEW):
        of_part = ptx.from_lane(weight, Int32(k), Float32)
        chains[k % CHAINS] = [ptx.multiply_add(parts[k][z], of_part, chains[k % CHAINS][z]) for z in range(held)]
    merged = chains[0]
    for chain in chains[1:]:
        merged = [merged[z] + chain[z] for z in range(held)]
    _store(tile, merged, normaliser, lse, out_at, lse_at, lane, Int32(1), data)


@cute.jit
def _reduce_many(
    tile: cutlass.Constexpr[Tile], lane, first_slot, count, sequence, row, part, kv_head, data,
    hint: cutlass.Constexpr[str], parts_of_lane: cutlass.Constexpr[int],
):  # fmt: skip
    """Merge a part of a row's partial results by one warp, in which eight lanes take a chain."""
    held = tile.own_elements
    slot, chain = part * PART_LANES + (lane & (PART_LANES - 1)), lane >> (5 - PART_BITS)
    chunk = 32 * parts_of_lane
    at = _place_of(data, kv_head, row, first_slot)
    stats = data.partial_stats + at * 8
    found = [_load_stats(stats, i * 32 + lane, count, hint) for i in range(parts_of_lane)]
    acc = cute.make_rmem_tensor((held,), Float32)
    acc.fill(0.0)
    parts = [_load_part(tile, data, at, chain, i * CHAINS, count, slot, hint) for i in range(chunk // CHAINS)]
    # While they are on their way.
    out_at, lse_at, sink, factor = _destination(tile, sequence, row, kv_head, data)
    top = found[0][0]
    for i in cutlass.range_constexpr(1, parts_of_lane):
        top = ptx.maximum(top, found[i][0])
    k = lane + chunk
    while k < count:
        top = ptx.maximum(top, ptx.load(stats + Int64(k) * 8, Float32, 1, hint))
        k = k + 32
    top = _over_lanes(top, ptx.maximum)
    weights = _weights(found, top)
    total = Float32(0.0)
    for i in cutlass.range_constexpr(parts_of_lane):
        total = ptx.multiply_add(found[i][1], weights[i], total)
    k = lane + chunk
    while k < count:
        reference, more = ptx.load(stats + Int64(k) * 8, Float32, 2, hint)
        total = ptx.multiply_add(more, ptx.exp2((reference - top) * Float32(LOG2E)), total)
        k = k + 32
    total = _over_lanes(total, lambda x, y: x + y)
    normaliser, lse = normalise(top, total, sink)
    if cutlass.const_expr(tile.widens):
        normaliser = normaliser * factor
    _add_chunk(tile, acc, parts, found, weights, chain)
    begin = Int32(chunk)
    while begin < count:
        more_stats = [_load_stats(stats, begin + (i * 32 + lane), count, hint) for i in range(parts_of_lane)]
        others = [
            _load_part(tile, data, at, begin + chain, i * CHAINS, count, slot, hint) for i in range(chunk // CHAINS)
        ]  # fmt: skip
        _add_chunk(tile, acc, others, more_stats, _weights(more_stats, top), chain)
        begin = begin + chunk
    # What lanes of other chains make of theirs is not stored.
    merged = [acc[z] for z in range(held)]
    for i in cutlass.range_constexpr(1, CHAINS):
        of_chain = (lane & (PART_LANES - 1)) + i * PART_LANES
        merged = [merged[z] + ptx.from_lane(acc[z], of_chain, Float32) for z in range(held)]
    is_first = Int32(0)
    if chain == 0:
        is_first = Int32(1)
    _store(tile, merged, normaliser, lse, out_at, lse_at, slot, is_first, data)


def _weights(stats: Sequence[Any], top: Any) -> list[Any]:
    """What this lane's partial results are to be multiplied by."""
    return [ptx.exp2((reference - top) * Float32(LOG2E)) for reference, _ in stats]


@cute.jit
def _add_chunk(tile: cutlass.Constexpr[Tile], acc, parts, stats, weights, chain):
    """Add a chain's partial results of a chunk to ``acc``."""
    if cutlass.const_expr(tile.widens):
        weights = [weight * total for weight, (_, total) in zip(weights, stats, strict=True)]
    for i in cutlass.range_constexpr(len(parts)):
        factor = ptx.from_lane(weights[i // PART_LANES], chain + (i % PART_LANES) * CHAINS, Float32)
        for z in cutlass.range_constexpr(len(parts[0])):
            acc[z] = ptx.multiply_add(parts[i][z], factor, acc[z])


@cute.jit
def _place_of(data, kv_head, row, first_slot):
    """The number of a row's first partial result."""
    return Int64(kv_head * (data.query_length * data.group) + row) * data.capacity + first_slot


@cute.jit
def _load_stats(stats, k, count, hint: cutlass.Constexpr[str]):
    """Reference and sum of a partial result, those of nothing past the last."""
    there = Int32(0)
    if k < count:
        there = Int32(1)
    return ptx.load_or(stats + Int64(k) * 8, there, (NOTHING, 0.0), hint)


@cute.jit
def _load_part(
    tile: cutlass.Constexpr[Tile], data, at, first, k: cutlass.Constexpr[int], count, slot,
    hint: cutlass.Constexpr[str],
):  # fmt: skip
    """A slot's elements of partial result ``first + k``, zeros past the last."""
    there = Int32(0)
    if first + k < count:
        there = Int32(1)
    size, vector = tile.dim * tile.partial_bytes, tile.vector
    from_ = data.partial_out + (at + first) * size + k * size
    part = []
    if cutlass.const_expr(tile.widens):
        # A thread has stored those of slots s and s + 4 at once.
        in_row = (slot >> 3) * 64 + (slot & 3) * 16 + ((slot >> 2) & 1) * 8
        for word in ptx.load_or_zero(from_ + in_row, there, 2, Int32, hint):
            part += ptx.unpack_float16(word)
    else:
        for z in cutlass.range_constexpr(0, tile.own_elements, vector):
            part += ptx.load_or_zero(from_ + slot * (4 * vector) + 32 * 4 * z, there, vector, Float32, hint)
    return part


def _over_lanes(x: Any, together: Callable[[Any, Any], Any]) -> Any:
    """What all lanes' values make ``together``."""
    for distance in range(5):
        x = together(x, ptx.exchange(x, 1 << distance))
    return x


@cute.jit
def _store(tile: cutlass.Constexpr[Tile], merged, factor, lse, out_at, lse_at, slot, is_row, data):
    """Store a slot's elements of a merged row, if ``is_row``; which elements of a row these are, the tile decides."""
    if cutlass.const_expr(tile.by_rows):
        if is_row != 0:
            for j in cutlass.range_constexpr(2):
                at = out_at + Int64((slot >> 2) * 32 + (slot & 3) * 4) + 16 * j
                store_two(at, [x * factor for x in merged[2 * j : 2 * j + 2]], data)
            if data.lse != 0 and slot == 0:
                ptx.store(lse_at, [lse])
    else:
        store_row(merged, factor, lse, out_at, lse_at, slot, 1, is_row, data)


@cute.jit
def _destination(tile: cutlass.Constexpr[Tile], sequence, row, kv_head, data):
    """Where a row's output and lse belong, its sink, and what multiplies means."""
    out_at, lse_at, head = output_of(data, sequence, kv_head, row)
    factor = Float32(1.0)
    if cutlass.const_expr(tile.widens):
        factor = data.value_factor * value_scale(data, kv_head) * Float32(1 / MEANS)
    return out_at, lse_at, load_sink(data, head), factor
