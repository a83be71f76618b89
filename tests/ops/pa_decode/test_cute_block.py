"""A whole thread block of ``cute_wgmma``, run as Python: rings that go round, steps, and what is stored in the end.

Barriers are waited for indeed, and matrix instructions multiply what lies in shared memory when they are reached. What
makes two e4m3 numbers of one is numpy's and torch's here.
"""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvscout import paging
from kvscout.ops.pa_decode.cute_tile import STEP
from kvscout.ops.pa_decode.variants import cute_wgmma
from tests.ops.mqa_logits import lanes
from tests.ops.mqa_logits.lanes import Int32
from tests.ops.pa_decode.device import E4M3, Float32, Int64, Memory, _operand, as_e4m3, code_of, split

GROUP, HEADS, HEAD, SEQUENCES, SEQUENCE, SLOT = 9, 2, 1, 3, 1, 2
PATIENCE = 60
"""Seconds after which nobody will come any more."""

TILES = [
    tile
    for tile in (program.spec for program in cute_wgmma.VARIANT.programs())
    if tile.is_e4m3
    and tile.in_bulk
    and (tile.blocks > 1 or (tile.long_stages < tile.stages and tile.rows == 16 and not tile.cluster))
    and not tile.token_scales
    # Pages of 32 and 64 are copied alike.
    and tile.page == {64: 32, 128: 16}[tile.dim]
]


class Barrier:
    """A barrier of shared memory."""

    def __init__(self, count):
        self.count = self.left = count
        self.bytes = self.phase = 0
        self.changed = threading.Condition()

    def change(self, arrivals, size):
        """Arrive, and expect bytes, or fewer."""
        with self.changed:
            self.left -= arrivals
            self.bytes += size
            assert self.left >= 0
            if self.left == self.bytes == 0:
                self.left, self.phase = self.count, self.phase + 1
                self.changed.notify_all()

    def wait(self, parity):
        """Wait for the end of the phase of this parity."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase % 2 != parity, PATIENCE):
                raise TimeoutError(f"phase {self.phase}, {self.left} arrivals and {self.bytes} bytes before its end")


class Block(Memory):
    """Shared memory, and what threads wait for.

    Attributes:
        barriers: those of shared memory, by address.
        named: the others, by number.
        asked: the named barriers to which some thread has brought something.
        has_finer: whether some step needed finer terms of probabilities.
        added: how many products of values each warp has ended.
        lag: seconds that the last warp of each warpgroup takes longer for these than the others.
    """

    def __init__(self, tile, arrays):
        super().__init__(tile.places.size, arrays)
        self.tile, self.added, self.lag = tile, [0] * (tile.threads // 32), 0
        self.barriers, self.named, self.asked, self.has_finer = {}, {}, set(), False
        self.lock = threading.Lock()

    def _init(self, barrier, count):
        self.barriers[int(barrier)] = Barrier(count)

    def _shared_store(self, address, values, kind=Int32):
        warp = lanes._lane.thread // 32
        own = self.tile.places.own + warp // 4 * self.tile.own_bytes
        if own <= address < own + self.tile.probability_bytes:
            # No warp of the warpgroup still multiplies what lay there.
            assert len(set(self.added[warp // 4 * 4 : warp // 4 * 4 + 4])) == 1
        super()._shared_store(address, values, kind)

    def _bulk(self, shared, source, size, barrier):
        assert shared % 16 == source % 16 == size % 16 == 0
        self.shared[shared : shared + size] = self.read(source, size)
        self.barriers[int(barrier)].change(0, -int(size))

    def _sync(self, number, threads):
        with self.lock:
            meeting = self.named.setdefault(int(number), threading.Barrier(threads, timeout=PATIENCE))
        assert meeting.parties == threads
        meeting.wait()

    def _sync_any(self, number, threads, flag):
        if flag != 0:
            self.asked.add(int(number))
        self._sync(number, threads)
        found = int(number) in self.asked
        # Nobody asks anew before all have looked.
        self._sync(number, threads)
        self.asked.discard(int(number))
        self._sync(number, threads)
        return int(found)

    def _split(self, values, shifts, count):
        self.has_finer |= len(shifts) + 1 > count
        return split(values, shifts, count)

    def _place(self, word):
        """Where an operand begins."""
        return (int(word) & 0x3FFF) << 4

    def _multiply(self, kind, columns, a, b, strides, chains, turned=False, swizzled=False):
        assert "e4m3" in kind and not turned and not swizzled
        thread = lanes._lane.thread
        rows = thread // 32 % 4 * 16 + thread % 32 // 4 + 8 * np.arange(2)

        def operand(word, offset, stride, count):
            word = int(word) + (offset >> 4)
            parts = [
                _operand(
                    self.shared, self._place(word) + part * stride * 8, (word >> 16 & 0x3FFF) << 4, stride, False,
                    0,
                )
                for part in range(-(-count // 64))
            ]  # fmt: skip
            return E4M3[np.concatenate(parts)[:count]]

        found = []
        for products in chains:
            sums = np.zeros((2, columns))
            for from_a, from_b in products:
                sums += operand(a, from_a, strides[0], 64)[rows] @ operand(b, from_b, strides[1], columns).T
            found += [Float32(sums[(k >> 1) & 1, (k >> 2) * 8 + thread % 4 * 2 + (k & 1)]) for k in range(columns // 2)]
        # No thread of a warp goes on before all have read.
        lanes._warp(None)
        if thread % 32 == 0 and self._place(a) >= self.tile.places.values:
            if thread // 32 % 4 == 3:
                time.sleep(self.lag)
            self.added[thread // 32] += 1
        lanes._warp(None)
        return found

    @property
    def ptx(self):
        code = super().ptx
        vars(code).update(
            barrier_init=self._init,
            barrier_init_fence=lambda: None,
            barrier_expect=lambda barrier, size: self.barriers[int(barrier)].change(1, int(size)),
            barrier_arrive=lambda barrier: self.barriers[int(barrier)].change(1, 0),
            barrier_wait=lambda barrier, parity: self.barriers[int(barrier)].wait(parity),
            sync=self._sync,
            sync_any=self._sync_any,
            count_bits=lambda word: bin(int(word) & 0xFFFFFFFF).count("1"),
            split=self._split,
        )
        return code


class Call:
    """One task, and the block that does it."""

    def __init__(self, tile, lowest, context, spread):
        self.tile, self.lowest, self.context = tile, lowest, context
        generator = np.random.default_rng(context)
        tokens, page, dim = -(-context // STEP) * STEP, tile.page, tile.dim
        # Halves of them are e4m3 numbers, whatever the scale is.
        self.queries = generator.integers(-15, 16, (SEQUENCES, GROUP * HEADS, dim)).astype(np.float16)
        self.keys, self.values = as_e4m3(generator.normal(size=(2, tokens, dim)) * np.array([[[1.0]], [[2.0]]]))
        self.scale = spread / np.sqrt(80 * dim)
        caches = paging.new_caches(paging.CHUNKED, tokens // page + 3, HEADS, page, dim, torch.float8_e4m3fn, "cpu")
        for cache in caches:
            cache.view(torch.uint8).fill_(0x7F)
        kv = paging.viewed(paging.CHUNKED, *caches)
        keys, values = kv.keys.view(torch.uint8), kv.values.view(torch.uint8)
        order = generator.permutation(tokens // page + 3)[: tokens // page].astype(np.int32)
        for token in range(context):
            block, in_page = order[token // page], token % page
            keys[block, HEAD, in_page] = torch.from_numpy(self.keys[token]).view(keys.shape[3:])
            values[block, HEAD, in_page // values.shape[3], in_page % values.shape[3]] = torch.from_numpy(
                self.values[token]
            )
        self.output = np.full((SEQUENCES, GROUP * HEADS, dim), np.nan, np.float16)
        self.lse = np.full((SEQUENCES, GROUP * HEADS), np.nan, np.float32)
        work_info = np.zeros((4, 4), np.int32)
        work_info[SLOT] = SEQUENCE, 0, -(-context // STEP), context
        reduce_info = np.array([[0, 1], [SLOT, 1], [1, 1]], np.int32)
        uint8 = [cache.view(torch.uint8).numpy() for cache in caches]
        self.block = Block(
            tile, [*uint8, order, self.queries, self.output, self.lse, work_info, reduce_info]
        )  # fmt: skip
        at = self.block.address
        names = ("key_block", "key_head", "key_token", "key_chunk", "value_block", "value_head", "value_pitch")
        self.data = SimpleNamespace(
            keys=at(0), values=at(1), tables=at(2), query=at(3), output=at(4), lse=at(5), work_info=at(6),
            reduce_info=at(7), key_scale=0, key_scale_head=0, value_scale=0, value_scale_head=0, sinks=0, partial_out=0,
            partial_stats=0, arrivals=0,
            table_row=0, query_row=GROUP * HEADS * dim * 2, query_head=dim * 2, output_row=GROUP * HEADS * dim * 2,
            output_head=dim * 2, lse_row=GROUP * HEADS * 4, num_sequences=SEQUENCES, capacity=4,
            query_length=Int32(1), group=Int32(GROUP), per_group=np.float32(1 / GROUP), task_steps=Int32(1),
            back=Int32(context - lowest), ahead=Int32(1), is_float16=1, keys_by_token=0, values_by_token=0,
            page_bits=page.bit_length() - 1, rows_first=0, max_partitions=1, cluster_bits=0,
            softmax_scale=Float32(self.scale), value_factor=Float32(0.5),
            **dict(zip(names, map(Int64, cute_wgmma._cache_strides(kv)), strict=True)),
        )  # fmt: skip

    def run(self):
        nothing = dict.fromkeys(("setmaxregister_increase", "setmaxregister_decrease"), lambda count: None)
        arch = {
            "block_idx": lambda: (Int32(SLOT), Int32(0), Int32(HEAD)),
            "get_dyn_smem": lambda *_, **__: SimpleNamespace(toint=lambda: Int32(0)),
            "sync_warp": lambda: lanes._warp(None),
            **nothing,
        }
        code = code_of("cute_launch", self.block.ptx, arch)
        decode = code.Kernel.decode
        decode.__globals__["touch_constants"] = lambda *_: None
        kernel = code.Kernel(self.tile)
        lanes.run(lambda warp, lane: kernel.decode(self.data), self.tile.threads, 0, 1)

    def check(self, tolerance):
        seen = slice(self.lowest, self.context)
        keys, values = E4M3[self.keys][seen], E4M3[self.values][seen]
        rows = slice(HEAD * GROUP, (HEAD + 1) * GROUP)
        logits = self.queries[SEQUENCE, rows].astype(np.float64) @ keys.T * self.scale
        weights = np.exp(logits - logits.max(1, keepdims=True))
        wanted = weights @ values * 0.5 / weights.sum(1, keepdims=True)
        assert np.abs(self.output[SEQUENCE, rows] - wanted).max() <= tolerance * np.abs(wanted).max()
        lse = logits.max(1) + np.log(weights.sum(1))
        assert np.abs(self.lse[SEQUENCE, rows] - lse).max() <= 1e-4
        # Nothing of another head or sequence, and no stage that its readers have not left.
        assert np.isnan(self.output).sum() == self.output.size - GROUP * self.tile.dim
        assert np.isnan(self.lse).sum() == self.lse.size - GROUP
        steps = -(-self.context // STEP) - self.lowest // STEP
        for name, stages in (("keys", self.tile.stages), ("values", self.tile.value_stages)):
            # Long tasks may leave the others alone.
            used = self.tile.long_stages if self.tile.long_stages < self.tile.stages < steps else stages
            for kind in ("full", "empty"):
                begin = getattr(self.tile.places, f"{kind}_{name}")
                found = [self.block.barriers[begin + 8 * stage] for stage in range(stages)]
                rounds = [len(range(i, steps, used)) if i < used else 0 for i in range(stages)]
                assert [barrier.phase for barrier in found] == rounds
                assert all((barrier.left, barrier.bytes) == (barrier.count, 0) for barrier in found)


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize(("lowest", "context", "spread"), [(0, 1, 1.0), (147, 805, 1.0), (3, 300, 12.0)])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
def test_a_block_attends_to_its_task_s_tokens(tile, lowest, context, spread):
    call = Call(tile, lowest, context, spread)
    call.run()
    call.check(2e-3)
    # Few tokens outweigh all others where logits are far apart.
    assert call.block.has_finer == (spread > 2)


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("tile", [tile for tile in TILES if tile.dim == 128], ids=lambda tile: tile.name)
def test_probabilities_wait_for_a_warp_that_lags(tile):
    call = Call(tile, 0, 800, 1.0)
    call.block.lag = 0.8
    call.run()
    call.check(2e-3)
