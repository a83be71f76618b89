"""Page layouts of KV caches, and one view through which every one of them looks the same.

===========  ==================================  ==================================
layout       key cache                           value cache
===========  ==================================  ==================================
chunked      ``[blocks, Hkv, D/x, page, x]``     ``[blocks, Hkv, page/x, D, x]``
plain_v      ``[blocks, Hkv, D/x, page, x]``     ``[blocks, Hkv, D, page]``
nhd          ``[blocks, page, Hkv, D]``          ``[blocks, page, Hkv, D]``
hnd          ``[blocks, Hkv, page, D]``          ``[blocks, Hkv, page, D]``
===========  ==================================  ==================================

``x`` is the number of elements in 16 bytes. Outer strides are free, so interleaved key/value pools are fine.
A *slot* is ``block * page + position in the page``; -1 stands for no token. :mod:`kvscout.selection` makes tables of
what a row selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import checks, fp8

CHUNKED, PLAIN_V, NHD, HND = "chunked", "plain_v", "nhd", "hnd"
LAYOUTS = (CHUNKED, PLAIN_V, NHD, HND)
AUTO = "auto"

PAGE_SIZES = (16, 32, 64, 128)
CACHE_DTYPES = (*fp8.E4M3, torch.bfloat16, torch.float16)


class Pages(NamedTuple):
    """A key cache and a value cache seen token by token, without copying.

    Attributes:
        layout: one of :data:`LAYOUTS`.
        keys: ``[blocks, Hkv, page, D/kx, kx]``; ``kx`` = x where keys are chunked, D elsewhere.
        values: ``[blocks, Hkv, page/vx, vx, D]``; ``vx`` = x where values are chunked, page elsewhere.
    """

    layout: str
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def page(self) -> int:
        """Tokens per page."""
        return self.keys.shape[2]

    @property
    def num_kv_heads(self) -> int:
        """Heads in the cache."""
        return self.keys.shape[1]

    @property
    def head_dim(self) -> int:
        """Elements of one head of one token."""
        return self.values.shape[4]

    @property
    def dtype(self) -> torch.dtype:
        """Element type of both caches."""
        return self.keys.dtype

    @property
    def whole_pages(self) -> bool:
        """Whether caches are chunked and each head's page is one run of memory that begins on a 16-byte boundary."""
        return self.layout == CHUNKED and _are_runs(self.keys, (3, 2, 4)) and _are_runs(self.values, (2, 4, 3))

    @property
    def aligned(self) -> bool:
        """Whether all runs of 16 bytes, of a token's elements or of tokens side by side, lie on 16-byte boundaries."""
        tokens_inside = self.layout in (CHUNKED, PLAIN_V)
        return _is_aligned(self.keys, (0, 1, 2, 3)) and _is_aligned(self.values, (0, 1, 2, 4 if tokens_inside else 3))


def _is_aligned(view: torch.Tensor, outer: Sequence[int]) -> bool:
    """Whether a view, and each step along these dimensions, is on a 16-byte boundary."""
    steps = (view.stride(dim) * view.element_size() for dim in outer if view.shape[dim] != 1)
    return view.data_ptr() % 16 == 0 and all(step % 16 == 0 for step in steps)


def _are_runs(view: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether pages ``[blocks, Hkv, ...]`` have no gaps, their dimensions lying in this order, and are aligned."""
    shape, strides = view.shape, view.stride()
    run = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != run:
            return False
        run *= shape[dim]
    return _is_aligned(view, (0, 1))


def pages(key_cache: torch.Tensor, value_cache: torch.Tensor, num_kv_heads: int, kv_layout: str = AUTO) -> Pages:
    """Recognise the layout of a pair of caches and view them token by token.

    Args:
        key_cache: see the table above; e4m3, bfloat16 or float16.
        value_cache: same dtype and device.
        num_kv_heads: heads that the caches hold.
        kv_layout: one of :data:`LAYOUTS`, or "auto" to tell by the shapes.

    Raises:
        TypeError, ValueError: the caches do not fit a layout, or "auto" cannot tell nhd from hnd because a page holds
            as many tokens as there are heads.
    """
    checks.one_of("kv_layout", kv_layout, (AUTO, *LAYOUTS))
    checks.integer("num_kv_heads", num_kv_heads, 1)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if not isinstance(cache, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(cache).__name__}")
    layout = _recognise(key_cache, value_cache, num_kv_heads) if kv_layout == AUTO else kv_layout
    x = 16 // key_cache.element_size()
    shape = key_cache.shape
    if layout in (CHUNKED, PLAIN_V):
        checks.tensor("key_cache", key_cache, ("blocks", num_kv_heads, "D/x", "page", x), CACHE_DTYPES)
        blocks, _, chunks, page, _ = shape
        dim = chunks * x
    else:
        names = ("blocks", "page", num_kv_heads, "D") if layout == NHD else ("blocks", num_kv_heads, "page", "D")
        checks.tensor("key_cache", key_cache, names, CACHE_DTYPES)
        blocks, page, dim = shape[0], shape[1 if layout == NHD else 2], shape[3]
    checks.one_of("key_cache: page size", page, PAGE_SIZES)
    expected = {
        CHUNKED: (blocks, num_kv_heads, page // x, dim, x),
        PLAIN_V: (blocks, num_kv_heads, dim, page),
        NHD: (blocks, page, num_kv_heads, dim),
        HND: (blocks, num_kv_heads, page, dim),
    }[layout]
    checks.tensor("value_cache", value_cache, expected, key_cache.dtype, key_cache.device)
    checks.last_dim_contiguous("key_cache", key_cache)
    checks.last_dim_contiguous("value_cache", value_cache)
    return viewed(layout, key_cache, value_cache)


def viewed(layout: str, key_cache: torch.Tensor, value_cache: torch.Tensor) -> Pages:
    """View caches that were checked before, token by token; ``layout`` is none but theirs."""
    if layout == NHD:
        keys, values = key_cache.transpose(1, 2).unsqueeze(3), value_cache.transpose(1, 2).unsqueeze(2)
    elif layout == HND:
        keys, values = key_cache.unsqueeze(3), value_cache.unsqueeze(2)
    else:
        keys = key_cache.permute(0, 1, 3, 2, 4)
        tokens_first = value_cache.transpose(-1, -2)
        values = tokens_first if layout == CHUNKED else tokens_first.unsqueeze(2)
    return Pages(layout, keys, values)


def _recognise(key_cache: torch.Tensor, value_cache: torch.Tensor, num_kv_heads: int) -> str:
    if key_cache.dim() == 5:
        return CHUNKED if value_cache.dim() == 5 else PLAIN_V
    if key_cache.dim() != 4:
        raise ValueError(f"key_cache: expected 4 or 5 dimensions, got shape {list(key_cache.shape)}")
    nhd, hnd = key_cache.shape[2] == num_kv_heads, key_cache.shape[1] == num_kv_heads
    if nhd and hnd:
        raise ValueError(
            f"kv_layout: cannot tell nhd from hnd in a cache of shape {list(key_cache.shape)} "
            f"with {num_kv_heads} heads; pass kv_layout='nhd' or 'hnd'"
        )
    if not nhd and not hnd:
        raise ValueError(f"key_cache: no dimension of {list(key_cache.shape)} holds the {num_kv_heads} KV heads")
    return NHD if nhd else HND


def new_caches(
    layout: str,
    num_blocks: int,
    num_kv_heads: int,
    page: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A zeroed key cache and value cache of a layout.

    Raises:
        ValueError: there is no such layout, or it cuts the head dimension or the page into runs of 16 bytes, and they
            are no whole number of those.
    """
    checks.one_of("layout", layout, LAYOUTS)
    x = 16 // dtype.itemsize
    # A page's tokens are cut in chunked caches, whose pages are multiples of 16 tokens in any call.
    for name, size in (("head_dim", head_dim), ("page", page)) if layout in (CHUNKED, PLAIN_V) else ():
        if size % x:
            raise ValueError(
                f"{name}: expected a multiple of {x}, which are 16 bytes, in {layout} caches of {dtype}, got {size}"
            )
    chunked_keys = (num_blocks, num_kv_heads, head_dim // x, page, x)
    key_shape, value_shape = {
        CHUNKED: (chunked_keys, (num_blocks, num_kv_heads, page // x, head_dim, x)),
        PLAIN_V: (chunked_keys, (num_blocks, num_kv_heads, head_dim, page)),
        NHD: ((num_blocks, page, num_kv_heads, head_dim),) * 2,
        HND: ((num_blocks, num_kv_heads, page, head_dim),) * 2,
    }[layout]
    return torch.zeros(key_shape, dtype=dtype, device=device), torch.zeros(value_shape, dtype=dtype, device=device)
