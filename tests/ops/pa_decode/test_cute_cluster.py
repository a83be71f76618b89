"""What blocks of a cluster of ``cute_wgmma`` send to each other and merge, run as Python."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from kvscout.ops.pa_decode.cute_tile import LOAD_THREADS, MATH_THREADS, REDUCE_FEW, REDUCE_THREADS
from kvscout.ops.pa_decode.variants.cute_wgmma import VARIANT
from tests.ops.mqa_logits import lanes
from tests.ops.mqa_logits.lanes import Int32
from tests.ops.pa_decode.device import Cluster, Float32, code_of

HEADS, HEAD, SEQUENCE, SEQUENCES = 2, 1, 1, 3
CAPACITY = 14
BLOCK = MATH_THREADS + LOAD_THREADS
SINKS = np.array([0.0, -np.inf, 2.0, np.inf, 3e38, -3e38, 0.5], np.float32)

TILES = {
    (program.spec.dim, program.spec.cluster): program.spec
    for program in VARIANT.programs()
    if program.spec.rows == 16
    and program.spec.blocks == 1
    and (program.spec.cache, program.spec.layout) == ("bf16", "plain_v")
}

# A partial result that is not there counts from the least float on.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")


class Call:
    """One call's plan, partial results and outputs, for a cluster and for the kernel that merges."""

    def __init__(self, dim, size, count, rows, first_slot=3, max_partitions=None):
        self.tile, self.size, self.count, self.rows = TILES[dim, True], size, count, rows
        self.slots = slice(first_slot, first_slot + count)
        max_partitions = max_partitions or size
        generator = np.random.default_rng(dim + size + 10 * count)
        self.output = np.full((SEQUENCES, rows * HEADS, dim), np.nan, np.float16)
        self.lse = np.full((SEQUENCES, rows * HEADS), np.nan, np.float32)
        # What is added up in another order comes to something else: large terms that all but cancel.
        partials = generator.standard_normal((HEADS, rows, CAPACITY, dim)) * 2.0**12
        partials[:, :, 1::2] = -partials[:, :, :-1:2] + generator.standard_normal((HEADS, rows, CAPACITY // 2, dim))
        self.partials = partials.astype(np.float32)
        self.stats = generator.uniform(0.5, 2, (HEADS, rows, CAPACITY, 2)).astype(np.float32)
        self.stats[..., 0] = 4 + generator.integers(0, 2, (HEADS, rows, CAPACITY)) / 64
        work = generator.integers(1000, 2000, (CAPACITY, 4), np.int32)
        for k in range(count):
            work[first_slot + k] = SEQUENCE, 3 * k, 3 * k + 2, 4000
        plan = np.array([[0, 0], [first_slot, count], [0, 0]], np.int32)
        self.sinks = np.resize(SINKS, rows * HEADS)
        arrays = [self.output, self.lse, self.partials, self.stats, plan, self.sinks, work]
        self.cluster = Cluster(size, self.tile.places.size, arrays)
        at = self.cluster.memories[0].address
        self.data = SimpleNamespace(
            output=at(0), output_row=rows * HEADS * dim * 2, output_head=dim * 2, lse=at(1), lse_row=rows * HEADS * 4,
            partial_out=at(2), partial_stats=at(3), reduce_info=at(4), sinks=at(5), work_info=at(6),
            sinks_are_16_bit=0, query_length=1, group=rows, per_group=np.float32(1 / rows), capacity=CAPACITY,
            is_float16=1, num_sequences=SEQUENCES, rows_first=0, max_partitions=max_partitions,
            cluster_bits=size.bit_length() - 1, back=2**31 - 1, ahead=1, task_steps=1,
        )  # fmt: skip

    def found(self):
        """What outputs and their logarithms are, with how often each was stored, and start anew."""
        result = self.output.copy(), self.lse.copy(), dict(self.cluster.stored)
        self.output.fill(np.nan)
        self.lse.fill(np.nan)
        self.cluster.stored.clear()
        return result

    def merged_by_a_kernel(self):
        reduce = code_of("cute_reduce", self.cluster.ptx).reduce_sequences

        def one(warp, lane):
            reduce(
                TILES[self.tile.dim, False], lane, Int32(SEQUENCE), SEQUENCES, Int32(warp), REDUCE_THREADS // 32, HEAD,
                self.data, False,
            )  # fmt: skip

        lanes.run(one, REDUCE_THREADS, 0, 1)
        return self.found()

    def elements(self, rank, row, slot):
        """What a thread makes of a row in a block: its elements, and the row's reference and sum."""
        partial = self.partials[HEAD, row, self.slots.start + rank]
        vector = self.tile.vector
        mine = [partial[k * 32 + slot * vector :][:vector] for k in range(0, self.tile.own_elements, vector)]
        top, total = self.stats[HEAD, row, self.slots.start + rank]
        return [Float32(x) for part in mine for x in part], Float32(top), Float32(total)

    def check(self, found):
        """Every row of the sequence and the head was stored once, and nothing else."""
        output, lse, stored = found
        mine = slice(HEAD * self.rows, (HEAD + 1) * self.rows)
        is_stored = np.zeros(output.shape[:2], bool)
        is_stored[SEQUENCE, mine] = True
        assert np.array_equal(~np.isnan(output).all(2), is_stored)
        assert not np.isnan(output[is_stored]).any()
        assert np.array_equal(~np.isnan(lse), is_stored)
        assert set(stored.values()) == {1}
        assert len(stored) == self.rows * (self.tile.dim // 2 + 1)


def sizes_and_counts():
    return [(size, count) for size in (2, 4, 8) for count in range(2, size + 1)]


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("size", "count"), sizes_and_counts())
def test_a_cluster_merges_each_row_once_and_to_the_bits_of_the_kernel(dim, size, count):
    rows = {0: 16, 1: 5, 2: 9, 3: 1}[(count + size // 2) % 4]
    call = Call(dim, size, count, rows)
    tile, cluster, data = call.tile, call.cluster, call.data
    assert size <= REDUCE_FEW
    expected = call.merged_by_a_kernel()
    call.check(expected)
    code = code_of("cute_cluster", cluster.ptx)
    for rank in range(count):
        for row in range(rows):
            for slot in range(32):
                code.send_row(
                    tile, *call.elements(rank, row, slot), Int32(row), Int32(slot), cluster.shared(rank), data,
                    SimpleNamespace(rank=Int32(rank)),
                )  # fmt: skip
    mail = np.zeros(tile.places.size, bool)
    for rank, sent in enumerate(cluster.sent):
        code.expect_mail(tile, Int32(rank), Int32(count), cluster.shared(rank), data)
        assert cluster.is_complete(cluster.shared(rank) + tile.places.mail_barrier)
        assert sent.max() <= 1
        mail |= sent > 0
    # Nothing but mail, and all of it where rows and partitions are as many as there may be.
    assert not mail[: tile.places.mail].any()
    assert not mail[tile.places.bounds :].any()
    assert (mail.sum() == 16 * (dim * 4 + 8)) == (rows == 16 and count == size)
    merge_mail = code_of("cute_reduce", cluster.ptx).merge_mail
    for rank in range(size):

        def one(warp, lane, rank=rank):
            merge_mail(
                tile, warp, lane, Int32(rank), Int32(count), cluster.shared(rank), Int32(SEQUENCE), HEAD, data
            )  # fmt: skip

        # As many warps as there are rows to merge: the others would find none.
        lanes.run(one, 32 * (16 // size), 0, 1)
    found = call.found()
    call.check(found)
    assert np.array_equal(found[0].view(np.int16), expected[0].view(np.int16))
    assert np.array_equal(found[1].view(np.int32), expected[1].view(np.int32))


@pytest.mark.parametrize("first_slot", [0, 2, 4, CAPACITY - 4])
@pytest.mark.parametrize(("size", "count", "most"), [(2, 2, 2), (2, 1, 2), (4, 0, 3), (4, 3, 3), (4, 4, 4), (8, 2, 7)])
def test_a_block_finds_its_task_in_one_go_where_all_sequences_are_split_alike(size, count, most, first_slot):
    call = Call(64, size, count, 1, first_slot, most)
    reads = []
    ptx = call.cluster.ptx
    load = ptx.load

    def noted(address, *arguments):
        reads.append(int(address))
        return load(address, *arguments)

    ptx.load = noted
    find = code_of("cute_cluster", ptx).read_task_of_rank
    for rank in range(size):
        reads.clear()
        slot, begin, end, context, tasks = find(call.data, Int32(SEQUENCE), Int32(rank))
        assert tasks == count
        # The guess, which slots are the sequence's, and another task if that is not the one.
        in_time = first_slot == most * SEQUENCE or rank >= count
        assert len(reads) == 3 + (not in_time)
        if rank < count:
            assert slot == first_slot + rank
            assert (begin, end, context) == (3 * rank, 3 * rank + 2, 4000)
        else:
            assert begin >= end


class Threads:
    """All threads of a cluster run the kernel, at a time; what multiplies and loads is left out."""

    def __init__(self, call):
        self.call, self.total = call, call.size * BLOCK
        self.arrived, self.waited = Counter(), Counter()
        self.sent_by, self.ended, self.inits = Counter(), Counter(), Counter()
        self.changed = threading.Condition()
        cluster = call.cluster
        ptx = cluster.ptx
        ptx.barrier_init = self._init
        ptx.barrier_init_fence = lambda: None
        send = ptx.send

        def checked(address, values, barrier):
            rank, _ = cluster.local(address)
            with self.changed:
                assert self.arrived.total() == self.total
                assert self.waited[self._me()] == 1
                assert self.inits[cluster.local(barrier)] == 1
                assert self.ended[rank] < BLOCK
            send(address, values, barrier)

        ptx.send = checked
        arch = {
            "cluster_arrive_relaxed": self._arrive,
            "cluster_wait": self._wait,
            "block_idx": lambda: (lanes._lane.cta, Int32(SEQUENCE), Int32(HEAD)),
            "get_dyn_smem": lambda *_, **__: SimpleNamespace(toint=lambda: cluster.shared(lanes._lane.cta)),
        }
        self.code = code_of("cute_launch", ptx, arch)
        decode = self.code.Kernel.decode
        self.store_rows = code_of("cute_outputs", ptx, arch)._store_rows
        decode.__globals__.update(
            consume=self._consume, produce_pieces=lambda *_: None, touch_constants=lambda *_: None
        )  # fmt: skip

    @staticmethod
    def _me():
        return int(lanes._lane.cta), lanes._lane.thread

    def _init(self, barrier, count):
        self.inits[self.call.cluster.local(barrier)] += 1
        if barrier % (1 << 24) == self.call.tile.places.mail_barrier:
            assert count == 1

    def _arrive(self):
        with self.changed:
            self.arrived[self._me()] += 1
            self.changed.notify_all()

    def _wait(self):
        with self.changed:
            assert self.arrived[self._me()] == 1
            self.waited[self._me()] += 1
            if not self.changed.wait_for(lambda: self.arrived.total() == self.total, 20):
                raise TimeoutError("not all threads of the cluster have arrived")

    def _consume(self, tile, thread, warp, lane, shared, data, work):
        """What is left of it: rows of a thread, as the other warpgroup's are added up."""
        assert (work.sequence, work.kv_head, work.first_row) == (SEQUENCE, HEAD, 0)
        assert work.steps == 2
        self._wait()
        rows, slot = [], (warp & 3) * 8 + (lane >> 2)
        for e in range(2):
            row = (warp >> 2) * 8 + (lane & 3) * 2 + e
            rows.append((*self.call.elements(work.rank, min(row, self.call.rows - 1), slot), Int32(row)))
        self.store_rows(tile, rows, slot, Int32(self.call.count), shared, data, work)

    def run(self):
        kernel = self.code.Kernel(self.call.tile)

        def one(warp, lane):
            kernel.decode(self.call.data)
            with self.changed:
                self.ended[int(lanes._lane.cta)] += 1

        with ThreadPoolExecutor(self.call.size) as pool:
            blocks = [pool.submit(lanes.run, one, BLOCK, rank, self.call.size) for rank in range(self.call.size)]
        errors = [error for block in blocks if (error := block.exception()) is not None]
        # What the others waited for says more than that they waited too long.
        for error in sorted(errors, key=lambda error: isinstance(error, TimeoutError)):
            raise error
        everyone = {(rank, thread): 1 for rank in range(self.call.size) for thread in range(BLOCK)}
        assert self.arrived == self.waited == everyone
        return self.call.found()


@pytest.mark.parametrize(("size", "count", "rows"), [(2, 0, 9), (2, 1, 16), (2, 2, 16), (2, 2, 1), (4, 3, 10)])
def test_a_cluster_s_threads_meet_and_leave_nothing_undone(size, count, rows):
    call = Call(64, size, count, rows)
    expected = call.merged_by_a_kernel() if count > 1 else None
    found = Threads(call).run()
    call.check(found)
    if count > 1:
        assert np.array_equal(found[0].view(np.int16), expected[0].view(np.int16))
        assert np.array_equal(found[1].view(np.int32), expected[1].view(np.int32))
        for rank in range(size):
            assert call.cluster.is_complete(call.cluster.shared(rank) + call.tile.places.mail_barrier)
    else:
        # One task's result is stored as it is, without mail; an empty sequence's rows are zeros.
        assert not any(sent.any() for sent in call.cluster.sent)
        mine = slice(HEAD * rows, (HEAD + 1) * rows)
        assert (not found[0][SEQUENCE, mine].any()) == (count == 0)


def test_a_thread_sends_what_the_warpgroups_have_merged():
    """The same elements as a partial result would have in memory."""
    call = Call(128, 2, 2, 16)
    tile, cluster, data = call.tile, call.cluster, call.data
    rows = [(warp, lane) for warp in range(MATH_THREADS // 32) for lane in range(32)]
    store = code_of("cute_outputs", cluster.ptx)._store_rows
    for rank in range(2):
        for warp, lane in rows:
            slot = (warp & 3) * 8 + (lane >> 2)
            mine = [(warp >> 2) * 8 + (lane & 3) * 2 + e for e in range(2)]
            work = SimpleNamespace(rank=Int32(rank), slot=call.slots.start + rank, kv_head=HEAD)
            made = [(*call.elements(rank, row, slot), Int32(row)) for row in mine]
            store(tile, made, slot, Int32(2), cluster.shared(rank), data, work)
    for rank, memory in enumerate(cluster.memories):
        places = tile.places
        mail = memory.shared[places.mail : places.mail_stats].view(np.float32).reshape(2, 8, 128)
        stats = memory.shared[places.mail_stats : places.bounds].view(np.float32).reshape(2, 8, 2)
        assert np.array_equal(mail, call.partials[HEAD, rank::2, call.slots].swapaxes(0, 1))
        assert np.array_equal(stats, call.stats[HEAD, rank::2, call.slots].swapaxes(0, 1))
