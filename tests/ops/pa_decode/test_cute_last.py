"""The last block of a sequence of ``cute_wgmma`` to store its partial results, which merges them all, run as Python."""

import threading
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from kvscout.ops.pa_decode.cute_tile import COUNTERS, MATH_THREADS, REDUCE_FEW, REDUCE_THREADS
from kvscout.ops.pa_decode.variants.cute_wgmma import VARIANT
from tests.ops.mqa_logits import lanes
from tests.ops.mqa_logits.lanes import Int32
from tests.ops.pa_decode.device import Memory, code_of

HEADS, HEAD, SEQUENCE, SEQUENCES, SLOT = 2, 1, 1, 2, 3

TILES = {
    (program.spec.dim, program.spec.rows): program.spec
    for program in VARIANT.programs()
    if program.spec.blocks == 1 and not program.spec.cluster and not program.spec.token_scales
    and (program.spec.cache, program.spec.page, program.spec.layout) == ("bf16", 128, "chunked")
}  # fmt: skip

# A partial result that is not there counts from the least float on.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


class Call:
    """A sequence's partial results, and what becomes of them."""

    def __init__(self, tile, count, rows):
        self.tile, self.count, self.rows = tile, count, rows
        generator = np.random.default_rng(tile.dim + count)
        capacity = SLOT + count + 1
        self.output = np.full((SEQUENCES, rows * HEADS, tile.dim), np.nan, np.float16)
        self.lse = np.full((SEQUENCES, rows * HEADS), np.nan, np.float32)
        # What is added up in another order comes to something else: large terms that all but cancel.
        partials = generator.standard_normal((HEADS, rows, capacity, tile.dim)) * 2.0**12
        even = partials[:, :, : capacity // 2 * 2 : 2]
        partials[:, :, 1::2] = -even + generator.standard_normal(even.shape)
        stats = generator.uniform(0.5, 2, (HEADS, rows, capacity, 2)).astype(np.float32)
        stats[..., 0] = 4 + generator.integers(0, 2, stats.shape[:3]) / 64
        plan = np.array([[0, 0], [SLOT, count]], np.int32)
        self.arrivals = np.zeros((SEQUENCES, HEADS, COUNTERS), np.int32)
        sinks = np.resize(np.array([0, -np.inf, 2, 5], np.float32), rows * HEADS)
        arrays = [self.output, self.lse, partials.astype(np.float32), stats, plan, self.arrivals, sinks]
        self.memory = Memory(tile.places.size, arrays)
        at = self.memory.address
        self.data = SimpleNamespace(
            output=at(0), output_row=rows * HEADS * tile.dim * 2, output_head=tile.dim * 2, lse=at(1),
            lse_row=rows * HEADS * 4, partial_out=at(2), partial_stats=at(3), reduce_info=at(4), arrivals=at(5),
            sinks=at(6), sinks_are_16_bit=0, query_length=1, group=rows, per_group=np.float32(1 / rows),
            capacity=capacity, is_float16=1, num_sequences=SEQUENCES,
        )  # fmt: skip
        self.stored, self.lock = Counter(), threading.Lock()

    def ptx(self):
        """Instructions of a block, whose threads store at different times before they arrive."""
        code = self.memory.ptx
        named = {6: threading.Barrier(MATH_THREADS, timeout=20)}

        def sync(barrier, threads):
            assert named[int(barrier)].parties == threads
            named[int(barrier)].wait()

        def store(address, values, kind=np.float32, hint=""):
            with self.lock:
                for i in range(len(values)):
                    self.stored[int(address) + 4 * i] += 1
            self.memory._store(address, values, kind)

        def count_up(address, last):
            with self.lock:
                assert self.ready == MATH_THREADS
                counter = self.memory.read(address, 4).view(np.int32)
                before = int(counter[0])
                counter[0] = 0 if before >= last else before + 1
            return Int32(before)

        def past_l1(name):
            load = getattr(code, name)

            def checked(address, *arguments):
                if address >> 44 in (3, 4):
                    assert arguments[-1] == ".cg"
                return load(address, *arguments)

            return checked

        loads = {name: past_l1(name) for name in ("load", "load_or", "load_or_zero")}
        vars(code).update(sync=sync, store=store, count_up=count_up, **loads)
        return code

    def arrive(self, first_row):
        """One block's arrival."""
        merge = code_of("cute_reduce", self.ptx()).merge_as_last
        work = SimpleNamespace(sequence=Int32(SEQUENCE), kv_head=Int32(HEAD), first_row=Int32(first_row))
        self.ready = 0
        self.memory.shared[:] = 0xFF

        def one(warp, lane):
            time.sleep((warp * 32 + lane) % 3 * 0.001)
            with self.lock:
                self.ready += 1
            merge(self.tile, Int32(0), HEADS, self.data, work)

        lanes.run(one, MATH_THREADS, 0, 1)

    def merged_by_a_kernel(self):
        reduce = code_of("cute_reduce", self.memory.ptx).reduce_sequences

        def one(warp, lane):
            reduce(
                self.tile, lane, Int32(SEQUENCE), SEQUENCES, Int32(warp), REDUCE_THREADS // 32, HEAD, self.data, False
            )

        lanes.run(one, REDUCE_THREADS, 0, 1)
        found = self.output.copy(), self.lse.copy()
        self.output.fill(np.nan)
        self.lse.fill(np.nan)
        return found


@pytest.mark.parametrize(
    ("dim", "rows_of_block", "rows", "count"),
    [
        (64, 16, 9, 2), (128, 16, 16, 3), (256, 16, 5, REDUCE_FEW), (64, 16, 3, REDUCE_FEW + 1), (128, 16, 5, 33),
        (256, 16, 3, 65), (128, 64, 20, 2), (128, 64, 3, REDUCE_FEW + 1), (128, 32, 35, 2),
    ],
)  # fmt: skip
def test_the_last_block_merges_to_the_bits_of_the_kernel_and_leaves_no_count(dim, rows_of_block, rows, count):
    call = Call(TILES[dim, rows_of_block], count, rows)
    expected = call.merged_by_a_kernel()
    mine = slice(HEAD * rows, (HEAD + 1) * rows)
    first_rows = range(0, rows, rows_of_block)
    for arrived in range(min(count, 3)):
        # Blocks of the same task and other rows have counters of their own.
        for first_row in first_rows:
            # The others of many partial results are taken to have arrived.
            if arrived == 2:
                call.arrivals[SEQUENCE, HEAD, first_row // rows_of_block] = count - 1
            assert not call.stored
            call.arrive(first_row)
            done = arrived == min(count, 3) - 1
            counters = [int(arrived + 1) * (not done)] * (first_row // rows_of_block + 1)
            assert call.arrivals[SEQUENCE, HEAD, : len(counters)].tolist() == counters
            if done:
                # Each row was stored once, and nothing else.
                ended = min(first_row + rows_of_block, rows) - first_row
                assert set(call.stored.values()) == {1}
                assert len(call.stored) == ended * (dim // 2 + 1)
                call.stored.clear()
    assert not call.arrivals.any()
    output, lse = expected
    assert np.array_equal(call.output.view(np.int16), output.view(np.int16))
    assert np.array_equal(call.lse.view(np.int32), lse.view(np.int32))
    assert not np.isnan(call.output[SEQUENCE, mine]).any()
    assert np.isnan(call.output).sum() == call.output.size - rows * dim


def test_a_sequence_that_is_not_split_counts_nothing():
    call = Call(TILES[64, 16], 1, 9)
    call.arrive(0)
    assert not call.stored
    assert not call.arrivals.any()
