"""Page layouts: recognising them, and reading back through the common view what was written into each."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvscout import fp8, paging, write_kv_cache
from kvscout.paging import CACHE_DTYPES, CHUNKED, HND, LAYOUTS, NHD, PAGE_SIZES, PLAIN_V

HEADS, DIM = 3, 32
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


def read(pages, slots):
    """Keys and values ``[T, Hkv, D]`` of slots, as float32, through the common view."""
    block, position = slots // pages.page, slots % pages.page
    keys = pages.keys.float()[block, :, position].flatten(2)
    chunk = pages.values.shape[3]
    return keys, pages.values.float()[block, :, position // chunk, position % chunk]


@st.composite
def writes(draw):
    """A cache and slots in any order: a permutation of some of them, the last block's last one among them."""
    page, blocks = draw(st.sampled_from(PAGE_SIZES)), draw(st.integers(1, 4))
    layout, dtype = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(CACHE_DTYPES))
    size = blocks * page
    chosen = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    slots = torch.tensor([*(slot for slot in chosen if slot != size - 1), size - 1])
    return paging.new_caches(layout, blocks, HEADS, page, DIM, dtype, "cpu"), layout, slots


@given(writes(), st.integers(0, 2**31))
def test_what_is_written_is_read_back(written, seed):
    (key_cache, value_cache), layout, slots = written
    k, v = torch.randn(2, len(slots), HEADS, DIM, generator=torch.Generator().manual_seed(seed))
    write_kv_cache(k, v, key_cache, value_cache, slots, kv_layout=layout)
    pages = paging.pages(key_cache, value_cache, HEADS, layout)
    keys, values = read(pages, slots)
    assert keys.equal(k.to(pages.dtype).float())
    assert values.equal(v.to(pages.dtype).float())


@LAYOUT
@pytest.mark.parametrize("page", PAGE_SIZES)
@pytest.mark.parametrize("kind", ["number", "head", "token"])
@pytest.mark.parametrize("dtype", fp8.E4M3)
def test_dequantised_tokens_are_near(layout, page, kind, dtype):
    """Every slot of every page, in random order: half a unit in the last of four significant bits."""
    blocks, generator = 3, torch.Generator().manual_seed(page)
    slots = torch.randperm(blocks * page, generator=generator)
    k, v = torch.randn(2, len(slots), HEADS, DIM, generator=generator)
    caches = paging.new_caches(layout, blocks, HEADS, page, DIM, dtype, "cpu")
    k_scale, v_scale = {
        "number": lambda: (0.02, 0.03),
        "head": lambda: (torch.tensor([0.02, 0.03, 0.04]), torch.tensor([0.03, 0.04, 0.02])),
        "token": lambda: torch.zeros(2, blocks, HEADS, page),
    }[kind]()
    write_kv_cache(k, v, *caches, slots, k_scale=k_scale, v_scale=v_scale, kv_layout=layout)
    found = read(paging.pages(*caches, HEADS, layout), slots)
    for x, stored, scale in zip((k, v), found, (k_scale, v_scale), strict=True):
        if kind == "token":
            per_token = scale[slots // page, :, slots % page]
            assert per_token.equal(fp8.amax_scale(x, 2, dtype))
        else:
            per_token = torch.as_tensor(scale).expand(len(slots), HEADS)
        error = (stored * per_token[..., None] - x).abs()
        # The last term: below the smallest normal number the step no longer shrinks.
        smallest = torch.finfo(dtype).smallest_normal / 8 * per_token[..., None]
        assert (error <= 1.001 * torch.maximum(x.abs() / 16, smallest / 2)).all()


@LAYOUT
def test_every_element_of_the_caches_is_one_element_of_the_view(layout):
    """A permutation: each slot, head and dimension is at one place, and none is left over."""
    key_cache, value_cache = paging.new_caches(layout, 2, HEADS, 16, DIM, torch.float16, "cpu")
    count = key_cache.numel()
    numbers = torch.arange(count).to(torch.int16).view(torch.float16)
    key_cache.view(-1).copy_(numbers)
    value_cache.view(-1).copy_(numbers)
    pages = paging.pages(key_cache, value_cache, HEADS, layout)
    assert (pages.layout, pages.page, pages.num_kv_heads, pages.head_dim) == (layout, 16, HEADS, DIM)
    for view in (pages.keys, pages.values):
        assert view.contiguous().view(torch.int16).flatten().sort().values.equal(torch.arange(count).to(torch.int16))


@pytest.mark.parametrize(("page", "heads"), [(16, 3), (32, 1), (64, 2)])
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@LAYOUT
def test_layouts_are_recognised(layout, dtype, page, heads):
    caches = paging.new_caches(layout, 4, heads, page, 64, dtype, "cpu")
    assert paging.pages(*caches, heads).layout == layout


def test_views_share_memory_with_interleaved_pools():
    pool = torch.zeros(5, 2, 16, HEADS, DIM, dtype=torch.bfloat16)
    pages = paging.pages(pool[:, 0], pool[:, 1], HEADS)
    assert pages.layout == NHD
    pages.keys[3, 1, 7] = 1
    pages.values[3, 1, 0, 7] = 2
    assert pool[3, 0, 7, 1].unique().tolist() == [1]
    assert pool[3, 1, 7, 1].unique().tolist() == [2]
    assert pool.count_nonzero() == 2 * DIM


def test_new_caches_are_zero_and_have_the_shapes_of_the_table():
    x = 16
    keys = {CHUNKED: (4, HEADS, DIM // x, 32, x), NHD: (4, 32, HEADS, DIM), HND: (4, HEADS, 32, DIM)}
    values = keys | {CHUNKED: (4, HEADS, 32 // x, DIM, x), PLAIN_V: (4, HEADS, DIM, 32)}
    keys[PLAIN_V] = keys[CHUNKED]
    for layout in LAYOUTS:
        key_cache, value_cache = paging.new_caches(layout, 4, HEADS, 32, DIM, fp8.FN, "cpu")
        assert (tuple(key_cache.shape), tuple(value_cache.shape)) == (keys[layout], values[layout])
        assert not key_cache.float().any()
        assert not value_cache.float().any()


def caches(key_shape, value_shape=None, dtype=torch.float16):
    value_shape = key_shape if value_shape is None else value_shape
    return torch.zeros(key_shape, dtype=dtype), torch.zeros(value_shape, dtype=dtype)


BAD = [
    (caches((2, 16, 16, 64)), 16, "auto", ValueError, "kv_layout: cannot tell nhd from hnd .* pass kv_layout='nhd' or"),
    (caches((2, 16, 4, 64)), 3, "auto", ValueError, "key_cache: no dimension of .* holds the 3 KV heads"),
    (caches((2, 16, 64)), 3, "auto", ValueError, "key_cache: expected 4 or 5 dimensions, got shape"),
    ((None, torch.zeros(1)), 3, "auto", TypeError, "key_cache: expected a torch.Tensor, got NoneType"),
    ((torch.zeros(1), 7), 3, "auto", TypeError, "value_cache: expected a torch.Tensor, got int"),
    (caches((2, 4, 16, 64)), 4, "sbhd", ValueError, "kv_layout: expected one of auto, chunked, .* got sbhd"),
    (caches((2, 4, 24, 64)), 4, "hnd", ValueError, "key_cache: page size: expected one of 16, 32, 64, 128, got 24"),
    (caches((2, 4, 16, 64), dtype=torch.float32), 4, "hnd", TypeError, "key_cache: expected dtype .* torch.float32"),
    (caches((2, 4, 16, 64), (2, 4, 16, 32)), 4, "hnd", ValueError, r"value_cache: expected shape \[2, 4, 16, 64\]"),
    (caches((2, 4, 8, 16, 16)), 4, "chunked", ValueError, r"key_cache: expected shape \[blocks, 4, D/x, page, 8\]"),
    (caches((2, 4, 8, 16, 8), (2, 4, 16, 64)), 4, "auto", ValueError, r"value_cache: expected shape \[2, 4, 64, 16\]"),
    (
        (torch.zeros(2, 4, 16, 128).half()[..., ::2], torch.zeros(2, 4, 16, 64).half()),
        *(4, "hnd", ValueError, "key_cache: expected a contiguous last dimension"),
    ),
    (
        (torch.zeros(2, 4, 16, 64).half(), torch.zeros(2, 4, 16, 128).half()[..., ::2]),
        *(4, "hnd", ValueError, "value_cache: expected a contiguous last dimension"),
    ),
]


@pytest.mark.parametrize(("pair", "heads", "layout", "error", "message"), BAD)
def test_bad_input(pair, heads, layout, error, message):
    with pytest.raises(error, match=message):
        paging.pages(*pair, heads, layout)


def test_new_caches_refuse_an_unknown_layout():
    with pytest.raises(ValueError, match="layout: expected one of chunked, plain_v, nhd, hnd, got auto"):
        paging.new_caches("auto", 1, 1, 16, 16, torch.float16, "cpu")
