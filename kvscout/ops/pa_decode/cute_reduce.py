"""The merge of partial results, by a kernel that starts while the last of them are computed.

Partial results are added up in float32 in one order, whoever adds them: four chains of partitions k, k + 4, ..., then
the chains. A warp merges a row of few partitions by itself; of many, each of a block's four warps takes a chain. Blocks
of a cluster merge what they sent to each other as such a warp does; the last block of a sequence to store its partial
results does so too, and of many partitions as two such blocks.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...kernels.cute import ptx
from .cute_cluster import mail_of
from .cute_outputs import MERGE_BARRIER, load_sink, normalise, store_row, store_two
from .cute_softmax import GROUP_BARRIER, LOG2E, NOTHING
from .cute_tile import COUNTERS, MATH_BARRIER, REDUCE_FEW, REDUCE_THREADS, Tile
from .cute_work import output_of, partitions_of

CHAINS = REDUCE_THREADS // 32
PAST_L1 = ".cg"


def lane_parts(tile: Tile) -> int:
    """Partial results of a chunk that a lane finds the weights of: as many as registers hold the elements of."""
    return min(2, 256 // tile.dim)


@cute.jit
def reduce_sequences(
    tile: cutlass.Constexpr[Tile], thread, shared, sequence, sequence_step, first_row, row_step, kv_head, data,
    is_late: cutlass.Constexpr[bool],
):  # fmt: skip
    """Merge rows ``first_row``, ``first_row + row_step``, ... of sequences ``sequence``, ... of a KV head.

    Each of them stands for ``data.rows_of_merge`` rows. The next kernel may begin before, or if ``is_late`` after, if
    there is anything to merge.
    """
    # Launching takes longer than merging: the next kernel's blocks, which wait for this one's end, are on their way.
    if cutlass.const_expr(not is_late):
        cute.arch.griddepcontrol_launch_dependents()
    # The plan is older than the partial results: what they waited for has ended.
    first_slot, count = partitions_of(data, sequence)
    if cutlass.const_expr(is_late):
        if _is_any_split(thread, sequence, sequence_step, data) == 0:
            sequence = data.num_sequences
            cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    rows = data.query_length * data.group
    warp, lane = thread >> 5, thread & 31
    while sequence < data.num_sequences:
        row = first_row * data.rows_of_merge
        while row < rows and count > 1:
            end = cutlass.min(row + data.rows_of_merge, rows)
            if count <= REDUCE_FEW:
                mine = row + warp
                while mine < end:
                    _reduce_few(tile, lane, first_slot, count, sequence, mine, kv_head, data, "")
                    mine = mine + CHAINS
            else:
                mine = row
                while mine < end:
                    _reduce_many(
                        tile, thread, shared, first_slot, count, sequence, mine, kv_head, data, False, Int32(0)
                    )  # fmt: skip
                    mine = mine + 1
            row = row + row_step * data.rows_of_merge
        sequence = sequence + sequence_step
        first_slot, count = partitions_of(data, cutlass.min(sequence, data.num_sequences - 1))
    if cutlass.const_expr(is_late):
        cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def _is_any_split(thread, sequence, sequence_step, data):
    """Whether any of the sequences ``sequence``, ``sequence + sequence_step``, ... has partial results; else 0."""
    is_split = Int32(0)
    mine = sequence + thread * sequence_step
    while mine < data.num_sequences:
        _, count = partitions_of(data, mine)
        if count > 1:
            is_split = Int32(1)
        mine = mine + REDUCE_THREADS * sequence_step
    return ptx.sync_any(MATH_BARRIER, REDUCE_THREADS, is_split)


@cute.jit
def merge_as_last(tile: cutlass.Constexpr[Tile], shared, num_kv_heads, data, work):
    """Merge the block's rows of its sequence by the multiplying warps, if all other partial results are there.

    They are read past L1, which may hold what was in the slots before.
    """
    thread = ptx.thread_index()
    warp, lane = thread >> 5, thread & 31
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
            if count <= REDUCE_FEW:
                row = work.first_row + warp
                while row < end:
                    _reduce_few(tile, lane, first_slot, count, work.sequence, row, work.kv_head, data, PAST_L1)
                    row = row + tile.math_threads // 32
            else:
                group = warp >> 2
                own = shared + tile.places.own + group * tile.own_bytes
                row = work.first_row + group
                while row < end:
                    _reduce_many(
                        tile, thread & 127, own, first_slot, count, work.sequence, row, work.kv_head, data, True,
                        GROUP_BARRIER + group,
                    )  # fmt: skip
                    row = row + tile.warpgroups


@cute.jit
def _reduce_few(
    tile: cutlass.Constexpr[Tile], lane, first_slot, count, sequence, row, kv_head, data, hint: cutlass.Constexpr[str]
):  # fmt: skip
    """Merge a row's partial results, ``REDUCE_FEW`` at most, by one warp; ``hint`` is on how to load them."""
    at = _place_of(data, kv_head, row, first_slot)
    reference, total = _load_stats(data.partial_stats + at * 8, lane, count, hint)
    parts = [_load_part(tile, data, at, Int32(k), count, lane, hint) for k in range(REDUCE_FEW)]
    # While they are on their way.
    place = _destination(sequence, row, kv_head, data)
    _merge_few(tile, lane, reference, total, parts, place, data)


@cute.jit
def merge_mail(tile: cutlass.Constexpr[Tile], warp, lane, rank, count, shared, sequence, kv_head, data):
    """Merge the rows of a cluster that are this block's, each by one of the multiplying warps."""
    row = (warp << data.cluster_bits) + rank
    if count > 1 and row < data.query_length * data.group:
        # While they are on their way.
        place = _destination(sequence, row, kv_head, data)
        ptx.barrier_wait_for_cluster(shared + tile.places.mail_barrier, Int32(0))
        reference, total, parts = mail_of(tile, warp, lane, count, shared, data)
        _merge_few(tile, lane, reference, total, parts, place, data)


@cute.jit
def _merge_few(tile: cutlass.Constexpr[Tile], lane, reference, total, parts, place, data):
    """Merge a row's partial results by one warp: a lane has one's reference and sum, and its elements of all."""
    out_at, lse_at, sink = place
    top = _over_lanes(reference, ptx.maximum)
    weight = ptx.exp2((reference - top) * Float32(LOG2E))
    held = tile.own_elements
    total = _over_lanes(ptx.multiply_add(total, weight, Float32(0.0)), lambda x, y: x + y)
    normaliser, lse = normalise(top, total, sink)
    chains = [[Float32(0.0)] * held for _ in range(CHAINS)]
    for k in cutlass.range_constexpr(REDUCE_FEW):
        factor = ptx.from_lane(weight, Int32(k), Float32)
        chains[k % CHAINS] = [ptx.multiply_add(parts[k][z], factor, chains[k % CHAINS][z]) for z in range(held)]
    merged = chains[0]
    for chain in chains[1:]:
        merged = [merged[z] + chain[z] for z in range(held)]
    _store(tile, merged, normaliser, lse, out_at, lse_at, lane, data)


@cute.jit
def _reduce_many(
    tile: cutlass.Constexpr[Tile], thread, shared, first_slot, count, sequence, row, kv_head, data,
    in_tile: cutlass.Constexpr[bool], barrier,
):  # fmt: skip
    """Merge a row's partial results by all of a block's warps, or ``in_tile`` by a warpgroup that has a ``barrier``."""
    warp, lane = thread >> 5, thread & 31
    held, hint = tile.own_elements, PAST_L1 if in_tile else ""
    # A block that multiplied has fewer registers left.
    parts_of_lane = 1 if in_tile else lane_parts(tile)
    chunk = 32 * parts_of_lane
    at = _place_of(data, kv_head, row, first_slot)
    stats = data.partial_stats + at * 8
    found = [_load_stats(stats, i * 32 + lane, count, hint) for i in range(parts_of_lane)]
    acc = cute.make_rmem_tensor((held,), Float32)
    acc.fill(0.0)
    parts = [_load_part(tile, data, at, warp + i * CHAINS, count, lane, hint) for i in range(chunk // CHAINS)]
    # While they are on their way.
    out_at, lse_at, sink = _destination(sequence, row, kv_head, data)
    top = found[0][0]
    for i in cutlass.range_constexpr(1, parts_of_lane):
        top = ptx.maximum(top, found[i][0])
    k = lane + chunk
    while k < count:
        top = ptx.maximum(top, ptx.load(stats + Int64(k) * 8, Float32, 1, hint))
        k = k + 32
    top = _over_lanes(top, ptx.maximum)
    total = _add_chunk(acc, parts, found, top, warp, Float32(0.0))
    begin = Int32(chunk)
    while begin < count:
        more = [_load_stats(stats, begin + (i * 32 + lane), count, hint) for i in range(parts_of_lane)]
        others = [
            _load_part(tile, data, at, begin + warp + i * CHAINS, count, lane, hint) for i in range(chunk // CHAINS)
        ]  # fmt: skip
        total = _add_chunk(acc, others, more, top, warp, total)
        begin = begin + chunk
    vector = tile.vector
    for z in cutlass.range_constexpr(0, held, vector):
        to = shared + (z * REDUCE_THREADS + thread * vector) * 4
        ptx.shared_store(to, [acc[z + e] for e in range(vector)], Float32)
    total = _over_lanes(total, lambda x, y: x + y)
    normaliser, lse = normalise(top, total, sink)
    _meet(in_tile, barrier)
    if warp == 0:
        merged = [acc[z] for z in range(held)]
        for i in cutlass.range_constexpr(1, CHAINS):
            chain = []
            for z in cutlass.range_constexpr(0, held, vector):
                from_ = shared + (z * REDUCE_THREADS + (i * 32 + lane) * vector) * 4
                chain += ptx.shared_load(from_, Float32, vector)
            merged = [merged[z] + chain[z] for z in range(held)]
        _store(tile, merged, normaliser, lse, out_at, lse_at, lane, data)
    _meet(in_tile, barrier)


@cute.jit
def _meet(in_tile: cutlass.Constexpr[bool], barrier):
    """Let those who merge a row together meet."""
    if cutlass.const_expr(in_tile):
        ptx.sync(barrier, REDUCE_THREADS)
    else:
        cute.arch.sync_threads()


@cute.jit
def _add_chunk(acc, parts, stats, top, warp, total):
    """Add a chain's partial results of a chunk to ``acc``; ``total`` with this lane's sums added."""
    weights = []
    for reference, more in stats:
        weight = ptx.exp2((reference - top) * Float32(LOG2E))
        total = ptx.multiply_add(more, weight, total)
        weights.append(weight)
    per_lane = 32 // CHAINS
    for i in cutlass.range_constexpr(len(parts)):
        factor = ptx.from_lane(weights[i // per_lane], warp + (i % per_lane) * CHAINS, Float32)
        for z in cutlass.range_constexpr(len(parts[0])):
            acc[z] = ptx.multiply_add(parts[i][z], factor, acc[z])
    return total


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
def _load_part(tile: cutlass.Constexpr[Tile], data, at, k, count, lane, hint: cutlass.Constexpr[str]):
    """This lane's elements of a partial result, zeros past the last."""
    there = Int32(0)
    if k < count:
        there = Int32(1)
    vector = tile.vector
    from_ = data.partial_out + (at + k) * (tile.dim * 4) + lane * (4 * vector)
    part = []
    for z in cutlass.range_constexpr(0, tile.own_elements, vector):
        part += ptx.load_or_zero(from_ + 32 * 4 * z, there, vector, Float32, hint)
    return part


def _over_lanes(x: Any, together: Callable[[Any, Any], Any]) -> Any:
    """What all lanes' values make ``together``."""
    for distance in range(5):
        x = together(x, ptx.exchange(x, 1 << distance))
    return x


@cute.jit
def _store(tile: cutlass.Constexpr[Tile], merged, factor, lse, out_at, lse_at, lane, data):
    """Store a merged row by the lanes of a warp; which elements of a partial row a lane has, the tile decides."""
    if cutlass.const_expr(tile.by_rows):
        for j in cutlass.range_constexpr(2):
            at = out_at + Int64((lane >> 2) * 32 + (lane & 3) * 4) + 16 * j
            store_two(at, [x * factor for x in merged[2 * j : 2 * j + 2]], data)
        if data.lse != 0 and lane == 0:
            ptx.store(lse_at, [lse])
    else:
        store_row(merged, factor, lse, out_at, lse_at, lane, 1, Int32(1), data)


@cute.jit
def _destination(sequence, row, kv_head, data):
    """Where a row's output and lse belong, and its sink."""
    out_at, lse_at, head = output_of(data, sequence, kv_head, row)
    return out_at, lse_at, load_sink(data, head)
