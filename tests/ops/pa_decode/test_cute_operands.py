"""Where ``cute_wgmma`` puts keys and values, and what its matrix instructions make of them, run as Python.

Copies, and the descriptors of operands, are those of the device code itself; how a matrix instruction walks shared
memory is what PTX says of it.
"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvscout import paging
from kvscout.ops.pa_decode.cute_tile import STEP, Tile
from kvscout.ops.pa_decode.variants import cute_wgmma
from tests.ops.mqa_logits import lanes
from tests.ops.mqa_logits.lanes import Int32
from tests.ops.pa_decode.device import E4M3, NAN, Int64, Memory, code_of

HEADS, HEAD = 2, 1
FIRST_STEP = 1

TYPES = {"e4m3": torch.uint8, "bf16": torch.int16}


def tiles():
    """One tile of each way to copy, with the layout and the page of a cache that it is for."""
    found = {}
    for program in cute_wgmma.VARIANT.programs():
        tile = program.spec
        if tile.rows != 16 or tile.cache == "fp16" or tile.cluster:
            continue
        if tile.blocks != 1 and tile.warpgroups != 1:
            continue
        layouts = {"token_major": ("nhd", "hnd")}.get(tile.layout, (tile.layout,))
        pages = [tile.page] if tile.in_bulk else paging.PAGE_SIZES
        for layout, page in itertools.product(layouts, pages):
            # Scales, pages that are copied in pieces, and what tells nhd from hnd, are the same for all dimensions.
            if tile.dim != 64 and (tile.token_scales or layout == "hnd" or not (tile.in_bulk or page == 32)):
                continue
            found[f"{tile.name}-{layout}{page}"] = tile, layout, page
    return [pytest.param(*case, id=name) for name, case in found.items()]


class Loaded:
    """A task of two steps, or one, whose stages are loaded; the rest of memory is NaN."""

    def __init__(self, tile, layout, page):
        self.tile = tile
        steps = min(tile.stages, 2)
        tokens = (FIRST_STEP + steps) * STEP
        self.lowest, self.highest, self.steps = FIRST_STEP * STEP + 37, tokens - 21, steps
        generator = np.random.default_rng(page)
        width = tile.dim * tile.element_bytes
        self.keys, self.values = generator.integers(0, NAN, (2, tokens, width), np.uint8)
        dtype = TYPES[tile.cache]
        key_cache, value_cache = paging.new_caches(layout, tokens // page + 5, HEADS, page, tile.dim, dtype, "cpu")
        for cache in (key_cache, value_cache):
            cache.fill_(torch.full((tile.element_bytes,), NAN, dtype=torch.uint8).view(dtype).item())
        kv = paging.viewed(layout, key_cache, value_cache)
        order = generator.permutation(tokens // page + 5)
        table = np.full(tokens // page, -(1 << 20), np.int32)
        x = tile.tokens_of_piece
        for token in range(self.lowest // x * x, self.highest):
            table[token // page] = block = order[token // page]
            in_page = token % page
            kv.values[block, HEAD, in_page // kv.values.shape[3], in_page % kv.values.shape[3]] = torch.from_numpy(
                self.values[token]
            ).view(dtype)
            if token >= self.lowest:
                kv.keys[block, HEAD, in_page] = torch.from_numpy(self.keys[token]).view(dtype).view(kv.keys.shape[3:])
        self.scales = generator.integers(1, 99, (tokens // page + 5, HEADS, page), np.int32)
        self.scale_of = [
            self.scales[table[t // page], HEAD, t % page] if self.lowest <= t < self.highest else 0
            for t in range(tokens)
        ]
        self.memory = Memory(tile.places.size, [key_cache.numpy(), value_cache.numpy(), table, self.scales])
        names = ("key_block", "key_head", "key_token", "key_chunk", "value_block", "value_head", "value_pitch")
        self.data = SimpleNamespace(
            keys=self.memory.address(0), values=self.memory.address(1), tables=self.memory.address(2), table_row=0,
            page_bits=Int32(page.bit_length() - 1), keys_by_token=1, values_by_token=0,
            key_scale=self.memory.address(3), key_scale_block=4 * HEADS * page, key_scale_head=4 * page,
            key_scale_token=4, **dict(zip(names, map(Int64, cute_wgmma._cache_strides(kv)), strict=True)),
        )  # fmt: skip
        self.work = SimpleNamespace(
            kv_head=HEAD, sequence=0, first_step=Int32(FIRST_STEP), steps=steps, lowest=Int32(self.lowest),
            highest=Int32(self.highest),
        )  # fmt: skip
        code = code_of("cute_loads" if tile.in_bulk else "cute_pieces", self.memory.ptx)
        load = code.produce if tile.in_bulk else code.produce_pieces
        lanes.run(lambda warp, lane: load(tile, warp, lane, Int32(0), self.data, self.work), 128, 0, 1)

    def stages(self):
        """Stage, first token, and warpgroup of all that is multiplied."""
        for i in range(self.steps):
            for group in [i % self.tile.warpgroups] if self.tile.alternate else (0, 1):
                yield i, (FIRST_STEP + i) * STEP, group

    def products(self, function, *arguments):
        """What a matrix instruction takes for A, ``[64-row half, K step, row, byte]`` made ``[row, byte]`` per half."""
        self.memory.products.clear()
        function(self.tile, *arguments, Int32(0))
        return np.array(self.memory.products)

    def is_seen(self, token):
        return self.lowest <= token < self.highest


def loaded_queries(tile, queries, scale, is_float16):
    """Shared memory once the queries of the second KV head of the last of some sequences have been loaded."""
    group = queries.shape[1] // 2
    memory = Memory(tile.places.size, [queries])
    data = SimpleNamespace(
        query=memory.address(0), query_row=queries.strides[0], query_head=queries.strides[1], query_length=1,
        group=group, per_group=np.float32(1 / group), softmax_scale=np.float32(scale), back=Int32(1), ahead=Int32(1),
        is_float16=is_float16, key_scale=0, keys_by_token=0, key_scale_head=0,
    )  # fmt: skip
    work = SimpleNamespace(sequence=len(queries) - 1, kv_head=1, first_row=Int32(0), context=Int32(700))
    ptx = memory.ptx
    ptx.arrive = lambda barrier, threads: None
    load = code_of("cute_queries", ptx).load_queries
    lanes.run(
        lambda warp, lane: load(tile, Int32(warp * 32 + lane), Int32(0), data, work), tile.math_threads, 0, 1
    )  # fmt: skip
    bounds = memory.shared[tile.places.bounds : tile.places.bounds + 8 * tile.rows].view(np.int32)
    assert (bounds.reshape(tile.rows, 2) == (699, 700)).all()
    return memory


def check_stores(memory, tile, size):
    """Whether what lanes store at once, ``size`` bytes each, takes all banks once: 128 bytes of them at a time."""
    places = tile.places
    for warp in range(tile.math_threads // 32):
        of_lanes = [
            [at for at in memory.stores[warp, lane] if places.queries <= at < places.own] for lane in range(32)
        ]  # fmt: skip
        assert all(of_lanes)
        for at_once in zip(*of_lanes, strict=True):
            for first in range(0, 32, 128 // size):
                assert len({at % 128 // size for at in at_once[first : first + 128 // size]}) == 128 // size


@pytest.mark.parametrize(("scale", "row_scale"), [(0.5, 0.5), (-0.5, 0.5), (-(2.0**-130), 2.0**-125), (0.0, 2.0**-125)])
@pytest.mark.parametrize(("dim", "rows"), [(64, 16), (64, 32), (128, 16), (128, 32), (128, 64), (256, 16), (256, 32)])
def test_queries_are_the_other_operand_of_the_scores(dim, rows, scale, row_scale):
    group = 11
    tile = Tile("bf16", 128, rows, 1 if rows < 64 else 2, dim=dim, by_rows=rows == 64)
    queries = np.random.default_rng(dim).integers(1, 2**15, (3, 2 * group, dim), np.int16)
    memory, places = loaded_queries(tile, queries, scale, 0), tile.places
    check_stores(memory, tile, 16)
    found = memory.shared[places.queries : places.own].view(np.int16).reshape(dim // 8, -1)[:, : 8 * rows]
    by_row = found.reshape(dim // 8, rows, 8).transpose(1, 0, 2).reshape(rows, dim)
    # Queries take the scale's sign.
    signs = np.int16(-(2**15) if scale < 0 else 0)
    assert (by_row[:group] == queries[2, group:] ^ signs).all()
    scales = memory.shared[places.row_scales : places.row_scales + 4 * rows].view(np.float32)
    assert (scales == row_scale).all()


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float16, 0.5), (torch.bfloat16, 0.5), (torch.bfloat16, -0.25)])
@pytest.mark.parametrize(
    "tile",
    [
        Tile("e4m3", 128, 16, 2),
        Tile("e4m3", 128, 16, 1, blocks=4, value_stages=1, warpgroups=1),
        Tile("e4m3", 128, 16, 2, dim=64),
        Tile("e4m3", 128, 16, 2, dim=256),
        Tile("e4m3", 128, 32, 2),
        Tile("e4m3", 128, 64, 2, by_rows=True),
        Tile("e4m3", 128, 64, 2, token_scales=True),
    ],
    ids=lambda tile: getattr(tile, "name", None),
)
def test_queries_are_sums_of_two_e4m3_numbers_times_a_scale(tile, dtype, scale):
    group, rows, dim = 11, tile.rows, tile.dim
    # As many bits as such a sum has, in rows of other magnitudes.
    wanted = torch.randint(-127, 128, (3, 2 * group, dim), generator=torch.Generator().manual_seed(dim)).double()
    wanted = wanted * 2.0 ** -torch.arange(2 * group)[:, None]
    queries = wanted.to(dtype).view(torch.int16).numpy()
    memory, places = loaded_queries(tile, queries, scale, int(dtype == torch.float16)), tile.places
    check_stores(memory, tile, 8)
    pieces = memory.shared[places.queries : places.own].reshape(dim // 16, -1)[:, : 2 * 16 * rows]
    high, low = E4M3[pieces].reshape(dim // 16, 2, rows, 16).transpose(1, 2, 0, 3).reshape(2, rows, dim)
    scales = memory.shared[places.row_scales : places.row_scales + 4 * rows].view(np.float32)
    assert (np.abs(high[:group]).max(1) >= 128).all()
    assert (np.abs(low) <= 8).all()
    assert (scales > 0).all()
    assert ((high + low)[:group] * scales[:group, None] == wanted[2, group:].numpy() * scale).all()


def tokens_of(tile, group):
    """Tokens of a step that a warpgroup multiplies values of, in the order of its probabilities."""
    return range(STEP) if tile.alternate else [16 * g + 8 * group + i for g in range(STEP // 16) for i in range(8)]


def check_copies(loaded):
    """Barriers, scales, and how copies meet memory; all before anything is multiplied."""
    memory, tile = loaded.memory, loaded.tile
    places = tile.places
    full = [place + 8 * i for place in (places.full_keys, places.full_values) for i in range(loaded.steps)]
    assert set(memory.expected) == set(full)
    # Values do not begin to arrive before the first keys have.
    waits = tile.in_bulk and not tile.token_scales and tile.stages > 1
    assert memory.waits == ({(warp, places.full_keys, 0) for warp in (2, 3)} if waits else set())
    assert memory.arrived == memory.expected | ({} if tile.in_bulk else dict.fromkeys(full, 64))
    if tile.token_scales:
        for i in range(loaded.steps):
            at = places.key_scales + i * STEP * 4
            first = (FIRST_STEP + i) * STEP
            assert memory.shared[at : at + STEP * 4].view(np.int32).tolist() == loaded.scale_of[first : first + STEP]
    if tile.in_bulk:
        return
    pieces = [
        [[copy for copy in memory.copies.get((warp, lane), []) if copy[0] < places.queries] for lane in range(32)]
        for warp in range(4)
    ]
    stores = [[memory.stores.get((warp, lane), []) for lane in range(32)] for warp in range(4)]
    assert any(any(of_warp) for of_warp in stores) == tile.turns_values
    for at_once in itertools.chain(*(zip(*of_warp, strict=True) for of_warp in stores)):
        for quarter in range(0, 32, 8):
            assert len({shared // 16 % 8 for shared in at_once[quarter : quarter + 8]}) == 8
    for warp, of_warp in enumerate(pieces):
        is_swizzled = tile.are_keys_swizzled if warp < 2 else tile.are_values_turned
        for at_once in zip(*of_warp, strict=True):
            for quarter in range(0, 32, 8):
                # Once around the banks of shared memory.
                assert len({shared // 16 % 8 for shared, _, _ in at_once[quarter : quarter + 8]}) == 8
                if is_swizzled:
                    # A whole line of memory.
                    first = at_once[quarter][1]
                    read = [source for _, source, _ in at_once[quarter : quarter + 8]]
                    assert first % 128 == 0 and read == list(range(first, first + 128, 16))
            if all(size == 16 for _, _, size in at_once):
                read = {source for _, source, _ in at_once}
                assert all(source ^ 16 in read for source in read)


@pytest.mark.parametrize(("tile", "layout", "page"), tiles())
def test_operands_are_the_keys_and_values_of_their_tokens(tile, layout, page):
    loaded = Loaded(tile, layout, page)
    check_copies(loaded)
    ptx = loaded.memory.ptx
    scores, values = code_of("cute_scores", ptx), code_of("cute_values", ptx)
    zeros = [np.float32(0)] * (64 * tile.rows)
    for stage, first_token, group in loaded.stages():
        if tile.in_bulk and (first_token < loaded.lowest or first_token + STEP > loaded.highest):
            for thread in range(128):
                values.clear_values(
                    tile, stage, Int32(first_token), group, Int32(thread), loaded.work.lowest, loaded.work.highest,
                    Int32(0),
                )  # fmt: skip
        products = loaded.products(scores.score, zeros, zeros, zeros, stage, group)
        halves = products.reshape(tile.halves, -1, 64, 32).transpose(0, 2, 1, 3).reshape(tile.halves, 64, -1)
        for half, row in itertools.product(range(tile.halves), range(64)):
            token = first_token + 16 * (row // 8) + 8 * (half if tile.alternate else group) + row % 8
            if loaded.is_seen(token):
                assert (halves[half, row] == loaded.keys[token]).all()
            elif not tile.in_bulk:
                assert not halves[half, row].any()
        products = loaded.products(values.add_outputs, zeros, zeros, False, stage, group)
        halves = products.reshape(tile.dim // 64, -1, 64, 32).transpose(0, 2, 1, 3)
        by_token = halves.reshape(tile.dim, -1, tile.element_bytes)
        for k, in_step in enumerate(tokens_of(tile, group)):
            token = first_token + in_step
            found = by_token[:, k].reshape(-1)
            # What precedes the first token that is seen may stay as it is: it is the sequence's own.
            assert loaded.is_seen(token) or not found.any() or token < loaded.lowest
            if found.any():
                assert (found == loaded.values[token]).all()
            assert found.any() or not loaded.is_seen(token)
