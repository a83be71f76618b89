"""The shares of thread blocks, which the kernel finds for itself: every tile lies in exactly one.

A model of ``cute_schedule`` in numpy is tried on many shapes; the device code itself, run lane by lane as Python, is
compared with it on few.
"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvscout.device import DEFAULT_NUM_SMS
from kvscout.ops.mqa_logits.cute_tile import COST_KEYS, THREADS, WARPGROUPS, Tile
from kvscout.ops.mqa_logits.variants.cute_wgmma import VARIANT
from kvscout.testing.windows import windows
from tests.ops.mqa_logits import lanes

SEARCHERS = THREADS // (WARPGROUPS + 1)
"""Threads that look for a share: a warpgroup."""
MOST = 2**31 - 1
TILES = sorted({p.spec for p in VARIANT.programs() if p.spec.dim == 64}, key=lambda tile: tile.name)
ULPS = (-1, 0, 1)
"""What an approximate reciprocal may be off by."""


def reciprocal(ulps):
    """``1 / x`` in float32, so many units in the last place off."""

    def approximate(x):
        exact = np.float32(1) / np.float32(x)
        return exact if ulps == 0 else np.nextafter(exact, np.float32(np.inf * ulps))

    return approximate


def begins(total, ctas, ulps=0):
    """Where the shares begin, and where the last one ends: ``_share_begin`` of 0 to ``ctas``."""
    part = np.float32(total) * (np.arange(ctas, dtype=np.float32) * reciprocal(ulps)(ctas))
    assert part.dtype == np.float32
    assert (part < 2**31).all()
    return np.append(np.minimum(part.astype(np.int64), total), total)


def blocks(tile, ks, ke, num_keys):
    """First tile and number of tiles of every block of rows."""
    start = np.clip(ks.astype(np.int64), 0, num_keys)
    end = np.clip(ke.astype(np.int64), start, num_keys)
    count = -(-len(ks) // tile.block_rows)
    first_key, last_key = np.full(count, num_keys), np.zeros(count, np.int64)
    for row in np.flatnonzero(start < end):
        block = row // tile.block_rows
        first_key[block], last_key[block] = min(first_key[block], start[row]), max(last_key[block], end[row])
    first = first_key // tile.stage_keys
    return first, np.where(first_key < last_key, -(-last_key // tile.stage_keys) - first, 0)


def costs(tile, counts):
    return counts * (tile.stage_keys // COST_KEYS) + tile.block_cost


def tasks(tile, first, counts, ctas, ulps=0):
    """``(thread block, block, first tile, one past the last)`` of everything that the thread blocks do."""
    cost, unit = costs(tile, counts), tile.stage_keys // COST_KEYS
    before = np.append(0, np.cumsum(cost))
    assert before[-1] <= MOST
    bounds = begins(before[-1], ctas, ulps)
    found = []
    for cta, (begin, end) in enumerate(itertools.pairwise(bounds)):
        block = int(np.searchsorted(before, begin, side="right")) - 1 if begin < end else len(cost)
        while block < len(cost) and before[block] < end:
            at = before[block] + tile.block_cost
            low, high = (min(-(-max(x - at, 0) // unit), counts[block]) for x in (begin, end))
            if low < high:
                found.append((cta, block, int(first[block] + low), int(first[block] + high)))
            block += 1
    return found


def covered(first, counts, found):
    """How often each tile of each block is computed, and how often anything else is."""
    seen = [np.zeros(count, int) for count in counts]
    for _, block, low, high in found:
        assert first[block] <= low
        assert high <= first[block] + counts[block]
        seen[block][low - first[block] : high - first[block]] += 1
    return np.concatenate(seen)


@pytest.mark.parametrize("ulps", ULPS)
def test_shares_follow_each_other_from_nothing_to_all(ulps):
    totals = [1, 2, 7, 131, 132, 133, 2**24 - 1, 2**24, 2**24 + 1, 2**30 + 3, MOST - 200, MOST]
    totals += np.random.default_rng(0).integers(1, MOST, 500).tolist()
    for ctas in range(1, DEFAULT_NUM_SMS + 1):
        exact = np.arange(ctas + 1) / ctas
        for total in totals:
            found = begins(total, ctas, ulps)
            assert found[0] == 0
            assert found[-1] == total
            assert (np.diff(found) >= 0).all()
            # Equal shares, to the roundings.
            assert (abs(found - total * exact) <= 1 + total * 2**-21).all()


@pytest.mark.parametrize("kind", ["causal", "full", "cp", "misaligned", "empty", "past_end", "extreme", "packed"])
@pytest.mark.parametrize(("rows", "keys"), [(1, 5000), (5, 70), (1000, 1560), (4099, 4099)])
def test_every_tile_is_in_one_share(kind, rows, keys):
    ks, ke = (x.numpy() for x in windows(kind, rows, keys, 3))
    for i, tile in enumerate(TILES):
        first, counts = blocks(tile, ks, ke, keys)
        for ctas in (1, 7 + i, DEFAULT_NUM_SMS):
            found = tasks(tile, first, counts, ctas, ULPS[(i + ctas) % 3])
            assert (covered(first, counts, found) == 1).all(), (tile.name, ctas)


bound = st.integers(-(2**31), MOST) | st.integers(-5, 1100)


@given(
    window=st.lists(st.tuples(bound, bound), min_size=1, max_size=300),
    keys=st.integers(1, 1100),
    ctas=st.integers(1, DEFAULT_NUM_SMS),
    tile=st.sampled_from(TILES),
    ulps=st.sampled_from(ULPS),
)
def test_every_tile_of_any_windows_is_in_one_share(window, keys, ctas, tile, ulps):
    ks, ke = np.array(window, np.int32).T
    first, counts = blocks(tile, ks, ke, keys)
    assert (covered(first, counts, tasks(tile, first, counts, ctas, ulps)) == 1).all()


@pytest.mark.parametrize("ulps", ULPS)
def test_every_tile_of_as_many_as_can_be_counted_is_in_one_share(ulps):
    """Float32 no longer tells neighbouring costs apart."""
    tile = Tile(64, 64, 4, "rows", 128, 4, 4)
    counts = np.random.default_rng(1).integers(0, 2**20, 250)
    counts[-1] += (MOST - costs(tile, counts).sum()) // (tile.stage_keys // COST_KEYS)
    assert 2**31 - 8 <= costs(tile, counts).sum() <= MOST
    first = np.zeros(len(counts), int)
    for ctas in (1, 3, 128, 131, DEFAULT_NUM_SMS):
        spans = {block: [] for block in range(len(counts))}
        for _, block, low, high in tasks(tile, first, counts, ctas, ulps):
            spans[block].append((low, high))
        for block, found in spans.items():
            edges = [0, *itertools.chain.from_iterable(sorted(found)), counts[block]]
            assert all(a == b for a, b in zip(edges[::2], edges[1::2], strict=True))


def test_shares_are_equal():
    tile = Tile(64, 64, 4, "rows", 128, 4, 4)
    ks, ke = (x.numpy() for x in windows("causal", 8192, 8192))
    first, counts = blocks(tile, ks, ke, 8192)
    work = np.zeros(DEFAULT_NUM_SMS)
    for cta, _, low, high in tasks(tile, first, counts, DEFAULT_NUM_SMS):
        work[cta] += (high - low) * (tile.stage_keys // COST_KEYS) + tile.block_cost
    assert work.max() <= work.mean() + 2 * tile.block_cost + tile.stage_keys // COST_KEYS


# Shapes whose blocks are fewer than a warp's lanes, more than a warp's, more than all the searchers', and more than 32
# steps of a warp: each is looked for in another way. Addresses that are and are not aligned.
DEVICE = [
    ((20, 300), Tile(64, 64, 4, "rows", 64, 8, 3), "misaligned", 3, 0),
    ((3, 3000), Tile(64, 64, 4, "keys", 128, 4, 4), "full", 9, 0),
    ((301, 700), Tile(128, 64, 2, "rows", 64, 8, 3), "empty", 4, 4),
    ((700, 500), Tile(128, 64, 2, "rows", 128, 4, 4), "packed", 4, 16),
    ((259, 90), Tile(128, 64, 1, "keys", 128, 4, 4), "extreme", 3, 0),
    ((4300, 130), Tile(128, 64, 1, "keys", 128, 4, 4), "empty", 5, 0),
]
MOST_WALKED = 512
"""Blocks; a lane takes half a millisecond for each."""


@pytest.mark.parametrize(("shape", "tile", "kind", "ctas", "address"), DEVICE, ids=lambda x: str(getattr(x, "name", x)))
def test_the_device_code_finds_the_model_s_shares(shape, tile, kind, ctas, address):
    ks, ke = windows(kind, *shape, 3)
    rows, keys = map(lanes.Int32, shape)
    first, counts = blocks(tile, ks.numpy(), ke.numpy(), keys)
    cost, ulps = costs(tile, counts), ULPS[ctas % 3]
    befores, bounds = np.append(0, np.cumsum(cost)), begins(cost.sum(), ctas, ulps)
    schedule = lanes.device_code("kvscout.ops.mqa_logits.cute_schedule", reciprocal(ulps))
    data = SimpleNamespace(
        ks=lanes.Vector(ks.tolist(), address), ke=lanes.Vector(ke.tolist(), address), num_rows=rows, num_keys=keys
    )
    walked = []
    for cta in range(ctas):
        shared = SimpleNamespace(share=[lanes.Int32(MOST)] * schedule.SHARE_WORDS)

        def search_and_walk(warp, lane, cta=cta, shared=shared):
            share = schedule.my_share(tile, warp, lane, data, shared)
            return share, walk(schedule, tile, lane, share, cta, data) if warp == 0 else None

        (share, found), *others = lanes.run(search_and_walk, SEARCHERS, cta, ctas)
        assert {(share, tuple(found))} == {(s, tuple(found if f is None else f)) for s, f in others}
        block, before, begin, end = share
        assert (begin, end) == tuple(bounds[cta : cta + 2])
        assert begin == end or (before == befores[block] and before <= begin < befores[block + 1])
        walked += found
    if len(counts) <= MOST_WALKED:
        assert walked == tasks(tile, first, counts, ctas, ulps)
        assert (covered(first, counts, walked) == 1).all()


def walk(schedule, tile, lane, share, cta, data):
    """The tasks of a share, as the producer warps find them."""
    block, before, begin, end = share
    found = []
    if -(-data.num_rows // tile.block_rows) <= MOST_WALKED:
        while before < end:
            low, high, before = schedule.task_of(tile, block, before, begin, end, lane, data)
            if low < high:
                found.append((cta, block, low, high))
            block += 1
    return found


def test_windows_of_any_int32_are_clamped():
    schedule = lanes.device_code("kvscout.ops.mqa_logits.cute_schedule", reciprocal(0))
    extremes = [-(2**31), -1, 0, 1, 5, 9, 10, MOST]
    keys = lanes.Int32(9)
    for start, end in itertools.product(extremes, extremes):
        data = SimpleNamespace(ks=lanes.Vector([start]), ke=lanes.Vector([end]), num_rows=lanes.Int32(1), num_keys=keys)
        low, high = schedule.window(data, lanes.Int32(3))
        expected = torch.zeros(9)[max(start, 0) : max(end, 0)].numel() if start < 9 else 0
        assert 0 <= low <= high <= 9
        assert high - low == expected


@pytest.mark.parametrize("cta", [0, 77, DEFAULT_NUM_SMS - 1])
def test_rows_of_nearly_as_many_keys_as_an_int32_counts_do_not_overflow(cta):
    keys = lanes.Int32(2**31 - 8192)
    tile = Tile(64, 64, 1, "keys", 128, 4, 4)
    schedule = lanes.device_code("kvscout.ops.mqa_logits.cute_schedule", reciprocal(0))
    data = SimpleNamespace(ks=lanes.Vector([0]), ke=lanes.Vector([MOST]), num_rows=lanes.Int32(1), num_keys=keys)
    shared = SimpleNamespace(share=[lanes.Int32(MOST)] * schedule.SHARE_WORDS)

    def search_and_walk(warp, lane):
        share = schedule.my_share(tile, warp, lane, data, shared)
        return walk(schedule, tile, lane, share, cta, data) if warp == 0 else None

    found = lanes.run(search_and_walk, SEARCHERS, cta, DEFAULT_NUM_SMS)[0]
    first, counts = blocks(tile, np.array([0]), np.array([MOST]), keys)
    assert found == [task for task in tasks(tile, first, counts, DEFAULT_NUM_SMS) if task[0] == cta]
