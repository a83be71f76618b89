"""The merge of partial results, by a kernel that starts while the last of them are computed.

A row's partial results are contiguous, so one bulk copy brings them all to shared memory. They are added up in float32
in a fixed order: partitions k, k + 4, ... by warp k, then the four warps.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...kernels.cute import ptx
from .cute_outputs import load_sink, normalise, store_row
from .cute_softmax import LOG2E, NOTHING
from .cute_tile import DIM, REDUCE_CHUNK, REDUCE_HEADER, REDUCE_THREADS
from .cute_work import output_of, partitions_of

ROW_BYTES = DIM * 4
WARPS = REDUCE_THREADS // 32
LANE_PARTS = REDUCE_CHUNK // 32
"""Partial results of a chunk that a lane finds the weights of."""
AT_ONCE = 4
"""Partial results that a warp loads before it adds them up."""


@cute.jit
def reduce_sequences(thread, shared, sequence, sequence_step, first_row, row_step, kv_head, data):
    """Merge rows ``first_row``, ``first_row + row_step``, ... of sequences ``sequence``, ... of a KV head."""
    if thread == 0:
        ptx.barrier_init(shared, 1)
        ptx.barrier_init_fence()
    cute.arch.sync_threads()
    # The plan is older than the partial results: what they waited for has ended.
    first_slot, count = partitions_of(data, sequence)
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    rows = data.query_length * data.group
    phase = Int32(0)
    while sequence < data.num_sequences:
        row = first_row
        while row < rows and count > 1:
            at = Int64(kv_head * rows + row) * data.capacity + first_slot
            phase = _reduce_row(thread, shared, at, count, phase, sequence, row, kv_head, data)
            row = row + row_step
        sequence = sequence + sequence_step
        first_slot, count = partitions_of(data, cutlass.min(sequence, data.num_sequences - 1))


@cute.jit
def _reduce_row(thread, shared, at, count, phase, sequence, row, kv_head, data):
    """Merge one row, whose first partial result is number ``at``; the barrier's phase after it."""
    warp, lane = thread >> 5, thread & 31
    sums, weights, parts = shared + 128, shared + (128 + REDUCE_THREADS * 16), shared + REDUCE_HEADER
    begin = Int32(0)
    if thread == 0:
        _start_copy(shared, parts, at, begin, count, data)
    # Every warp finds the weights for itself, those of the first chunk from registers.
    stats = data.partial_stats + at * 8
    references, totals = _load_stats(stats, begin, count, lane)
    top = references[0]
    for i in cutlass.range_constexpr(1, LANE_PARTS):
        top = ptx.maximum(top, references[i])
    k = lane + REDUCE_CHUNK
    while k < count:
        top = ptx.maximum(top, ptx.load(stats + Int64(k) * 8, Float32))
        k = k + 32
    for distance in cutlass.range_constexpr(5):
        top = ptx.maximum(top, ptx.exchange(top, 1 << distance))
    total = _store_weights(weights, references, totals, top, warp, lane)
    k = lane + REDUCE_CHUNK
    while k < count:
        reference, more = ptx.load(stats + Int64(k) * 8, Float32, 2)
        total = ptx.multiply_add(more, ptx.exp2((reference - top) * Float32(LOG2E)), total)
        k = k + 32
    for distance in cutlass.range_constexpr(5):
        total = total + ptx.exchange(total, 1 << distance)
    # While the copy is under way.
    out_at, lse_at, head = output_of(data, sequence, kv_head, row)
    factor, lse = normalise(top, total, load_sink(data, head))
    acc = cute.make_rmem_tensor((4,), Float32)
    acc.fill(0.0)
    cute.arch.sync_threads()
    _add_chunk(acc, shared, parts, weights, cutlass.min(count, REDUCE_CHUNK), phase, warp, lane)
    phase = phase ^ 1
    begin = begin + REDUCE_CHUNK
    while begin < count:
        cute.arch.sync_threads()
        if thread == 0:
            _start_copy(shared, parts, at, begin, count, data)
        more_references, more_totals = _load_stats(stats, begin, count, lane)
        _store_weights(weights, more_references, more_totals, top, warp, lane)
        cute.arch.sync_threads()
        _add_chunk(acc, shared, parts, weights, cutlass.min(count - begin, REDUCE_CHUNK), phase, warp, lane)
        phase = phase ^ 1
        begin = begin + REDUCE_CHUNK
    ptx.shared_store(sums + thread * 16, [acc[z] for z in range(4)], Float32)
    cute.arch.sync_threads()
    if warp == 0:
        merged = [acc[z] for z in range(4)]
        for i in cutlass.range_constexpr(1, WARPS):
            part = ptx.shared_load(sums + i * 512 + lane * 16, Float32, 4)
            merged = [merged[z] + part[z] for z in range(4)]
        store_row(merged, factor, lse, out_at, lse_at, lane, 1, Int32(1), data)
    cute.arch.sync_threads()
    return phase


@cute.jit
def _load_stats(stats, begin, count, lane):
    """References and sums of this lane's partial results of a chunk, those of nothing past the last."""
    references = []
    totals = []
    for i in cutlass.range_constexpr(LANE_PARTS):
        k = begin + (i * 32 + lane)
        there = Int32(0)
        if k < count:
            there = Int32(1)
        reference, total = ptx.load_pair_or(stats + Int64(k) * 8, there, (NOTHING, 0.0))
        references.append(reference)
        totals.append(total)
    return references, totals


@cute.jit
def _store_weights(weights, references, totals, top, warp, lane):
    """Leave a chunk's weights in shared memory; this lane's part of the sum."""
    found = Float32(0.0)
    for i in cutlass.range_constexpr(LANE_PARTS):
        weight = ptx.exp2((references[i] - top) * Float32(LOG2E))
        found = ptx.multiply_add(totals[i], weight, found)
        if warp == 0:
            ptx.shared_store(weights + (i * 32 + lane) * 4, [weight], Float32)
    return found


@cute.jit
def _add_chunk(acc, barrier, parts, weights, size, phase, warp, lane):
    """Add this warp's partial results of a chunk to ``acc``, several at a time for their latency."""
    ptx.barrier_wait(barrier, phase)
    k = warp
    while k < size:
        loaded = []
        for i in cutlass.range_constexpr(AT_ONCE):
            place = k + i * WARPS
            there = Int32(0)
            if place < size:
                there = Int32(1)
            weight = ptx.shared_load_or_zero(weights + place * 4, there)
            part = ptx.shared_load_or_zero(parts + place * ROW_BYTES + lane * 16, there, 4)
            loaded.append((weight, part))
        for weight, part in loaded:
            for z in cutlass.range_constexpr(4):
                acc[z] = ptx.multiply_add(part[z], weight, acc[z])
        k = k + AT_ONCE * WARPS


@cute.jit
def _start_copy(shared, parts, at, begin, count, data):
    """Start copying up to ``REDUCE_CHUNK`` partial results from ``begin`` on."""
    size = cutlass.min(count - begin, REDUCE_CHUNK) * ROW_BYTES
    ptx.barrier_expect(shared, size)
    # Other threads' reads of what was there are ordered by the barrier before; these are this proxy's.
    ptx.fence_async()
    ptx.bulk_load(parts, data.partial_out + (at + begin) * ROW_BYTES, size, shared)
