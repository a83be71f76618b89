"""Partial results that the blocks of a cluster send to each other, so that no second kernel has to merge them.

The blocks of a sequence and KV head are a cluster, and the block of rank r has the sequence's r-th task, if there are
so many. Each row is one block's to merge: that of the rank ``row % size``. What the others make of it is sent to that
block's shared memory, its *mail*, where a barrier counts the bytes. Nothing is sent before all blocks of the cluster
have made their barriers, and no block to which something is sent ends before all of it has arrived.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...kernels.cute import ptx
from .cute_softmax import NOTHING
from .cute_tile import REDUCE_FEW, Tile
from .cute_work import partitions_of, read_task


@cute.jit
def read_task_of_rank(data, sequence, rank):
    """A block's slot, and first tile, end tile and context length of its task; number of the sequence's tasks.

    The slot of a plan that splits all sequences alike is read at once with which slots are the sequence's; only if that
    is another one, it is read after it. A block without a task gets one of no tiles.
    """
    guess = cutlass.min(sequence * data.max_partitions + rank, data.capacity - 1)
    _, first_tile, end_tile, context = read_task(data, guess)
    first_slot, count = partitions_of(data, sequence)
    slot = first_slot + rank
    if rank >= count:
        end_tile = first_tile
    elif slot != guess:
        _, first_tile, end_tile, context = read_task(data, slot)
    return slot, first_tile, end_tile, context, count


@cute.jit
def expect_mail(tile: cutlass.Constexpr[Tile], rank, count, shared, data):
    """Let this block's barrier wait for its rows of ``count`` blocks; some may have arrived."""
    rows = (data.query_length * data.group - rank + (1 << data.cluster_bits) - 1) >> data.cluster_bits
    ptx.barrier_expect(shared + tile.places.mail_barrier, count * rows * (tile.dim * 4 + 8))


@cute.jit
def send_row(tile: cutlass.Constexpr[Tile], merged, top, total, row, slot, shared, data, work):
    """Send this thread's elements of a row to the block that merges it; the first thread, reference and sum too."""
    places, bits = tile.places, data.cluster_bits
    to = ptx.address_in_block(shared, row & ((Int32(1) << bits) - 1))
    place = work.rank * (Int32(tile.rows) >> bits) + (row >> bits)
    for k in cutlass.range_constexpr(0, tile.own_elements, tile.vector):
        at = to + places.mail + (place * (tile.dim * 4) + slot * (4 * tile.vector) + 32 * 4 * k)
        ptx.send(at, merged[k : k + tile.vector], to + places.mail_barrier)
    if slot == 0:
        ptx.send(to + places.mail_stats + place * 8, [top, total], to + places.mail_barrier)


@cute.jit
def mail_of(tile: cutlass.Constexpr[Tile], number, lane, count, shared, data):
    """Reference and sum of the lane-th partial result of this block's ``number``-th row; this lane's elements of all.

    Those of nothing past the last.
    """
    places, vector = tile.places, tile.vector
    pitch = Int32(tile.rows) >> data.cluster_bits
    there = Int32(0)
    if lane < count:
        there = Int32(1)
    at = shared + places.mail_stats + (lane * pitch + number) * 8
    reference, total = ptx.shared_load_or(at, there, (NOTHING, 0.0))
    parts = []
    for k in cutlass.range_constexpr(REDUCE_FEW):
        there = Int32(0)
        if Int32(k) < count:
            there = Int32(1)
        at = shared + places.mail + ((k * pitch + number) * (tile.dim * 4) + lane * (4 * vector))
        part = []
        for z in cutlass.range_constexpr(0, tile.own_elements, vector):
            part += ptx.shared_load_or(at + 32 * 4 * z, there, (0.0,) * vector)
        parts.append(part)
    return reference, total, parts
