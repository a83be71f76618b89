"""Which kernel ``pa_decode`` takes for which call on Hopper, and why it takes none."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from kvscout import UnsupportedProblem, paging
from kvscout.kernels import clusters
from kvscout.kernels.cute import runtime
from kvscout.ops.pa_decode.api import FAMILY, TOKEN, Problem
from kvscout.ops.pa_decode.variants import cute_wgmma
from kvscout.ops.pa_decode.variants.cute_wgmma import QUADS, VARIANT, Config

NAME = "cute_wgmma"
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def problem(**words):
    shape = {
        "arch": "sm_90", "num_sequences": 4, "query_length": 1, "num_heads": 16, "num_kv_heads": 1, "head_dim": 128,
        "dtype": torch.bfloat16, "cache_dtype": FN, "layout": "chunked", "page": 128, "capacity": 264,
        "max_partitions": 132, "tile": 256,
    }  # fmt: skip
    return Problem(**{**shape, **words})


@pytest.fixture(autouse=True)
def own_choices(forget):
    """No other test's choices."""


@pytest.fixture
def every_kernel(monkeypatch):
    monkeypatch.setattr(runtime, "refusal", lambda program: None)
    monkeypatch.setattr(runtime, "load", lambda program: print)


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ({}, Config(16, 2, 2)),
        ({"num_heads": 1}, Config(16, 2, 2)),
        ({"capacity": 132}, Config(16, 4)),
        ({"capacity": 133}, Config(16, 2, 2)),
        ({"num_heads": 128, "num_kv_heads": 8, "capacity": 16}, Config(16, 4)),
        ({"num_heads": 128, "num_kv_heads": 8, "capacity": 17}, Config(16, 2, 2)),
        ({"num_heads": 17}, Config(32, 4)),
        ({"query_length": 2}, Config(32, 4)),
        ({"query_length": 4}, Config(64, 4, by_rows=True)),
        ({"query_length": 9}, Config(64, 4, by_rows=True)),
        ({"query_length": 4, "key_scale": TOKEN}, Config(64, 4)),
        ({"cache_dtype": torch.bfloat16}, Config(16, 1, 2)),
        ({"cache_dtype": torch.bfloat16, "capacity": 8}, Config(16, 2)),
        ({"cache_dtype": torch.float16, "dtype": torch.float16, "query_length": 3}, Config(64, 2, by_rows=True)),
        ({"head_dim": 64}, Config(16, 4, 2)),
        ({"head_dim": 64, "capacity": 8, "cache_dtype": torch.bfloat16}, Config(16, 4)),
        ({"head_dim": 64, "query_length": 4}, Config(32, 8)),
        ({"layout": "plain_v", "whole_pages": False}, Config(16, 2, 2)),
        ({"layout": "plain_v", "page": 16, "num_heads": 64, "capacity": 8}, Config(32, 4)),
        ({"layout": "hnd", "cache_dtype": torch.bfloat16}, Config(16, 1, 2)),
        # Transposing takes more registers than two blocks have.
        ({"layout": "nhd"}, Config(16, 4)),
        ({"layout": "nhd", "cache_dtype": torch.bfloat16, "head_dim": 256, "num_heads": 32}, Config(32, 1)),
        # Clusters of two, while all of them run at once.
        ({"max_partitions": 2, "num_sequences": 66, "capacity": 132}, Config(16, 4, merge="cluster")),
        ({"max_partitions": 2, "num_sequences": 67, "capacity": 134}, Config(16, 2, 2)),
        (
            {"max_partitions": 2, "num_sequences": 33, "num_heads": 32, "num_kv_heads": 2, "capacity": 66},
            Config(16, 4, merge="cluster"),
        ),
        (
            {"max_partitions": 2, "num_sequences": 34, "num_heads": 32, "num_kv_heads": 2, "capacity": 68},
            Config(16, 2, 2),
        ),
        ({"max_partitions": 2, "capacity": 8, "num_heads": 17}, Config(32, 4)),
        ({"max_partitions": 2, "capacity": 8, "query_length": 2, "num_heads": 8}, Config(16, 4, merge="cluster")),
        ({"max_partitions": 2, "capacity": 8, "merge_in_tile": False}, Config(16, 4)),
        ({"max_partitions": 2, "capacity": 8, "layout": "nhd"}, Config(16, 4, merge="cluster")),
        (
            {"max_partitions": 2, "capacity": 8, "head_dim": 256, "cache_dtype": torch.bfloat16},
            Config(16, 1, merge="cluster"),
        ),
        ({"max_partitions": 1, "capacity": 4}, Config(16, 4)),
        # The last block, where most sequences are not split and no cluster merges.
        ({"num_sequences": 67, "capacity": 132, "max_partitions": 8}, Config(16, 4, merge="last")),
        ({"num_sequences": 66, "capacity": 132, "max_partitions": 8}, Config(16, 4)),
        ({"num_sequences": 67, "capacity": 132, "max_partitions": 8, "merge_in_tile": False}, Config(16, 4)),
        ({"capacity": 7, "max_partitions": 2}, Config(16, 4, merge="cluster")),
        # It would have to merge many partitions, or is one of a pair.
        ({"num_sequences": 67, "capacity": 132, "max_partitions": 9}, Config(16, 4)),
        ({"num_sequences": 133, "capacity": 133, "max_partitions": 2}, Config(16, 2, 2)),
        ({"capacity": 4, "query_length": 9, "max_partitions": 8}, Config(64, 4, by_rows=True, merge="last")),
        # A counter for each block of rows, up to as many as there are.
        (
            {"capacity": 4, "num_heads": 64, "query_length": 32, "max_partitions": 8},
            Config(64, 4, by_rows=True, merge="last"),
        ),
        ({"capacity": 4, "num_heads": 64, "query_length": 33, "max_partitions": 8}, Config(64, 4, by_rows=True)),
        # Fours of blocks, where pairs have no room for all tasks at once; not with scales per token, for which they
        # have too few registers.
        ({"num_sequences": 264, "capacity": 264}, Config(16, 2, 2)),
        ({"num_sequences": 265, "capacity": 265}, QUADS[128]),
        ({"num_sequences": 133, "capacity": 133, "num_heads": 32, "num_kv_heads": 2}, QUADS[128]),
        ({"num_sequences": 265, "capacity": 265, "head_dim": 64}, QUADS[64]),
        ({"num_sequences": 265, "capacity": 265, "page": 64, "key_scale": TOKEN}, Config(16, 2, 2)),
        ({"num_sequences": 265, "capacity": 265, "cache_dtype": torch.bfloat16}, Config(16, 1, 2)),
        ({"num_sequences": 265, "capacity": 265, "query_length": 2}, Config(32, 4)),
        # Neither where bits must not depend on how many tasks there are.
        ({"num_sequences": 265, "capacity": 265, "batch_invariant": True}, Config(16, 2, 2)),
        ({"max_partitions": 3, "capacity": 12}, Config(16, 4, merge="cluster")),
        ({"max_partitions": 8, "num_sequences": 15, "capacity": 120}, Config(16, 4, merge="cluster")),
        ({"max_partitions": 8, "num_sequences": 16, "capacity": 128}, Config(16, 4)),
        # Two blocks have no room for such stages, nor one registers for 64 rows.
        ({"head_dim": 256}, Config(16, 2)),
        ({"head_dim": 256, "cache_dtype": torch.bfloat16}, Config(16, 1)),
        ({"head_dim": 256, "query_length": 4}, Config(16, 2)),
        ({"head_dim": 256, "query_length": 4, "cache_dtype": torch.bfloat16}, Config(32, 1)),
    ],
)
def test_a_call_gets_its_config(words, config, every_kernel):
    choice = FAMILY.choose(problem(**words), NAME)
    assert (choice.variant.name, choice.config) == (NAME, config)


# As many as the driver counts, or as an H200 runs.
@pytest.mark.parametrize(("size", "counted", "most"), [(2, None, 66), (4, None, 30), (8, None, 15), (4, 6, 6)])
def test_clusters_are_there_for_plans_of_few_partitions_while_all_run_at_once(size, counted, most, monkeypatch):
    monkeypatch.setattr(clusters, "resident", lambda arch, blocks: counted if blocks == size else None)

    def has_clusters(**words):
        found = [config for config in VARIANT.configs(problem(**words)) if config.merge == "cluster"]
        assert all(config.rows == 16 and config.blocks == 1 for config in found)
        return bool(found)

    for partitions in range(size // 2 + 1, size + 1):
        words = {"max_partitions": partitions, "num_sequences": most, "capacity": most * partitions}
        assert has_clusters(**words)
        assert has_clusters(**words, query_length=2, num_heads=8)
        assert not has_clusters(**words | {"num_sequences": most + 1})
        assert not has_clusters(**words, query_length=2, num_heads=9)
        assert not has_clusters(**words, merge_in_tile=False)
        assert not has_clusters(**words | {"max_partitions": 1})
        assert not has_clusters(**words | {"max_partitions": 9})
        assert has_clusters(**words | {"num_sequences": most // 2}, num_heads=32, num_kv_heads=2)
        assert not has_clusters(**words | {"num_sequences": most // 2 + 1}, num_heads=32, num_kv_heads=2)


def test_no_cluster_merges_where_there_is_room_for_none(monkeypatch):
    call = problem(max_partitions=2, num_sequences=1, capacity=2)
    for counted, found in ((None, True), (1, True), (0, False)):
        monkeypatch.setattr(clusters, "resident", lambda arch, blocks, counted=counted: counted)
        assert any(config.merge == "cluster" for config in VARIANT.configs(call)) == found


def test_the_last_block_may_merge_whatever_can_be_split():
    def merges(**words):
        return Counter(config.merge for config in VARIANT.configs(problem(**words)))

    assert merges() == {"kernel": 5, "last": 3}
    assert merges(max_partitions=2) == {"kernel": 5, "last": 3, "cluster": 1}
    assert merges(max_partitions=1) == merges(merge_in_tile=False) == {"kernel": 5}
    assert merges(num_heads=64, query_length=9) == {"kernel": 5, "last": 2}


def test_a_tuner_may_take_blocks_in_fours_for_chunked_e4m3_caches():
    def quads(**words):
        asked = problem(**words)
        found = [config for config in VARIANT.configs(asked) if config.warpgroups == 1]
        assert all((config.rows, config.merge) == (16, "kernel") for config in found)
        tiles = [cute_wgmma._program(asked, config).spec for config in found]
        return [(tile.warpgroups, tile.blocks, tile.stages, tile.value_stages) for tile in tiles]

    for page in paging.PAGE_SIZES:
        assert quads(page=page) == quads(page=page, query_length=4) == [(1, 4, 1, 1)]
        assert quads(page=page, head_dim=64) == [(1, 4, 2, 4)]
    for words in (
        {"head_dim": 256}, {"cache_dtype": torch.bfloat16}, {"key_scale": TOKEN}, {"value_scale": TOKEN},
        {"layout": "plain_v"}, {"layout": "nhd"},
    ):  # fmt: skip
        assert quads(**words) == []


def test_every_config_of_a_call_or_a_tuner_is_among_the_programs():
    programs = list(VARIANT.programs())
    assert len(set(programs)) == len({program.name for program in programs}) == len(programs)
    seen = set()
    types = [(torch.bfloat16, FN), (torch.float16, FN), *[(t, t) for t in (torch.bfloat16, torch.float16)]]
    shapes = itertools.product(
        types, cute_wgmma.ROWS, paging.LAYOUTS, paging.PAGE_SIZES, (1, 20, 64), ("none", TOKEN), (2, 132)
    )
    for (dtype, cache), dim, layout, page, group, kind, partitions in shapes:
        if kind == "none" or cache == FN:
            asked = problem(
                dtype=dtype, cache_dtype=cache, page=page, num_heads=group, value_scale=kind, head_dim=dim,
                layout=layout, max_partitions=partitions,
            )  # fmt: skip
            seen |= {cute_wgmma._program(asked, config) for config in VARIANT.configs(asked)}
    # And none is compiled in vain.
    assert seen == set(programs)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"layout": "plain_v", "aligned": False},
            "copies pieces of 16 bytes, which must each lie on a boundary of as many",
        ),
        ({"head_dim": 192}, "serves head dimensions 64, 128, 256, this is 192"),
        ({"head_dim": 512}, "serves head dimensions 64, 128, 256, this is 512"),
        ({"cache_dtype": FNUZ}, "NVIDIA GPUs have no e4m3fnuz arithmetic; quantise to float8_e4m3fn"),
        (
            {"cache_dtype": torch.float16},
            "caches of torch.float16 need queries of the same dtype, not torch.bfloat16",
        ),
        ({"whole_pages": False}, "copies pages in bulk, which must each be one run of memory on a 16-byte boundary"),
        ({"tile": 192}, "needs a plan whose tiles are multiples of 128 tokens, these have 192"),
        (
            {"num_heads": 64, "query_length": 2, "capacity": 70_000},
            "with more than 64 query rows per KV head, a launch has no room for 70000 tasks",
        ),
        ({"query_length": 1 << 17}, "a launch has no room for 1 KV heads of 2097152 query rows"),
        ({"num_heads": 70_000, "num_kv_heads": 70_000}, "a launch has no room for 70000 KV heads of 1 query rows"),
        ({"arch": "sm_80"}, "CuTe DSL kernels are written for sm_90 (H100, H200); this is sm_80"),
    ],
)
def test_what_is_not_served_is_told(changed, reason, every_kernel):
    asked = replace(problem(), **changed)
    assert FAMILY.refusal(NAME, asked) == reason
    with pytest.raises(UnsupportedProblem, match="cute_wgmma") as raised:
        FAMILY.choose(asked, NAME)
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ({"cache_dtype": torch.bfloat16, "capacity": 70_000}, NAME),
        ({"layout": "hnd", "cache_dtype": torch.bfloat16}, NAME),
        ({"layout": "hnd"}, NAME),
        ({"layout": "plain_v", "cache_dtype": torch.bfloat16}, NAME),
        ({"head_dim": 64, "cache_dtype": torch.bfloat16}, NAME),
        # More rows than a block takes.
        ({"layout": "nhd", "query_length": 4}, "triton_tile"),
        ({"layout": "plain_v", "query_length": 4}, "triton_tile"),
        ({"head_dim": 64, "query_length": 4}, "triton_tile"),
        ({"head_dim": 256, "query_length": 4}, NAME),
        ({"query_length": 9}, NAME),
        ({"layout": "plain_v", "head_dim": 192}, "triton_tile"),
    ],
)
def test_auto_takes_what_was_faster(words, name, every_kernel):
    assert FAMILY.choose(problem(**words)).variant.name == name


@pytest.mark.parametrize("dtype", [FN, torch.bfloat16, torch.float16])
def test_it_is_what_auto_takes(dtype, every_kernel):
    asked = problem(cache_dtype=dtype, dtype=torch.bfloat16 if dtype == FN else dtype)
    assert FAMILY.choose(asked).variant.name == NAME


def caches(layout="chunked", blocks=3, heads=2, page=32, dtype=FN):
    return paging.new_caches(layout, blocks, heads, page, 128, dtype, "cpu")


@pytest.mark.parametrize("page", paging.PAGE_SIZES)
@pytest.mark.parametrize("dtype", [FN, torch.bfloat16])
def test_caches_of_whole_pages_are_told_from_others(page, dtype):
    keys, values = caches(page=page, dtype=dtype)

    def whole(keys, values):
        return paging.pages(keys, values, 2, "chunked").whole_pages

    assert whole(keys, values)
    size = keys[0].numel()
    both = torch.zeros(3, 2 * size + 16).to(dtype)
    keys, values = both[:, :size].unflatten(1, keys.shape[1:]), both[:, size:-16].unflatten(1, values.shape[1:])
    assert whole(keys, values)
    # Off a boundary, with gaps between blocks that are, and with gaps within a page.
    off = torch.zeros(3 * size + 1).to(dtype)[1:].view(values.shape)
    assert not whole(keys, off)
    odd = torch.zeros(3, size + 1).to(dtype)[:, :size].unflatten(1, values.shape[1:])
    assert not whole(keys, odd)
    gaps = torch.zeros(*values.shape[:3], 129, values.shape[4]).to(dtype)[:, :, :, :128]
    assert whole(keys, gaps) == (values.shape[2] == 1)
    assert not paging.pages(*caches("hnd"), 2, "hnd").whole_pages


@pytest.mark.parametrize("layout", paging.LAYOUTS)
@pytest.mark.parametrize("dtype", [FN, torch.bfloat16])
def test_caches_of_aligned_pieces_are_told_from_others(layout, dtype):
    keys, values = caches(layout, dtype=dtype)

    def aligned(keys, values):
        return paging.pages(keys, values, 2, layout).aligned

    assert aligned(keys, values)
    x = 16 // dtype.itemsize
    x, size = 16 // dtype.itemsize, values[0].numel()
    # From where the cache begins, between its blocks, and at the end of each of its rows.
    for gap in (x, 1):
        shifted = torch.zeros(3 * size + gap).to(dtype)[gap:].view(values.shape)
        apart = torch.zeros(3, size + gap).to(dtype)[:, :size].unflatten(1, values.shape[1:])
        rows = torch.zeros(*values.shape[:-1], values.shape[-1] + gap).to(dtype)[..., : values.shape[-1]]
        for other in (shifted, apart, rows):
            assert aligned(keys, other) == (gap == x)
            if layout in ("nhd", "hnd"):
                assert aligned(other, values) == (gap == x)
