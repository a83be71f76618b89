"""Paged key/value caches to test with: everything that no sequence owns is NaN, and tables are garbage past the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import fp8, paging

SPARE_BLOCKS = 3
"""Blocks of a pool that no sequence uses."""


def check_dim(dim: int, layout: str, dtype: torch.dtype) -> None:
    """Check that a layout can hold a head dimension: chunks have 16 bytes, and what is chunked has whole ones.

    Raises:
        ValueError: it cannot.
    """
    x = 16 // dtype.itemsize
    if layout in (paging.CHUNKED, paging.PLAIN_V) and dim % x:
        raise ValueError(f"dim: expected a multiple of {x} in {layout} caches of {dtype}, got {dim}")


class Tables(NamedTuple):
    """Which blocks hold the tokens of which sequence.

    Attributes:
        block_tables: int32 ``[B, max_blocks]``; past a sequence's last page it alternates between -1 and INT32_MAX.
        fill: int64 ``[num_blocks]``: how many tokens of each block are owned, from its start.
    """

    block_tables: Tensor
    fill: Tensor

    @property
    def used(self) -> Tensor:
        """Blocks of which some token is owned."""
        return self.fill.nonzero().squeeze(1)

    def owned(self, page: int) -> Tensor:
        """bool ``[num_blocks, page]``: whether some sequence owns the token."""
        return torch.arange(page, device=self.fill.device) < self.fill[:, None]


def tables(
    lengths: Sequence[int],
    page: int,
    generator: torch.Generator,
    *,
    num_blocks: int = 0,
    shared: bool = False,
    overlapping: bool = False,
    strided: bool = False,
) -> Tables:
    """Tables over a pool in random order.

    Args:
        lengths: tokens of each sequence.
        page: tokens per block.
        generator: source of randomness; its device is where the tables are made.
        num_blocks: blocks of the pool, if that is more than are needed.
        shared: sequences after the first begin with the first one's pages, as far as both are full.
        overlapping: every sequence draws its pages from the whole pool anew, as rows of sparse attention do.
        strided: let rows lie further apart than they are long.
    """
    device = generator.device
    length = torch.tensor(lengths, dtype=torch.long, device=device).clamp(min=0)
    counts = (length + page - 1) // page
    needed = int(counts.sum())
    num_blocks = num_blocks if overlapping else max(num_blocks, needed + SPARE_BLOCKS)
    columns = max(counts.tolist(), default=0) + 2
    column = torch.arange(columns, device=device)
    inside = column < counts[:, None]
    garbage = torch.where(column % 2 == 0, -1, 2**31 - 1).expand(len(lengths), -1)
    if overlapping:
        drawn = torch.rand(len(lengths), num_blocks, generator=generator, device=device).argsort(1)[:, :columns]
        drawn = torch.nn.functional.pad(drawn, (0, columns - drawn.shape[1]))
    else:
        order = torch.randperm(num_blocks, generator=generator, device=device)
        drawn = torch.zeros(len(lengths), columns, dtype=torch.long, device=device)
        drawn[inside] = order[:needed]
    if shared:
        both_full = torch.minimum(length, length[0]) // page
        drawn = torch.where(column < both_full[:, None], drawn[0], drawn)
    tokens = (length[:, None] - column * page).clamp(max=page)
    fill = torch.zeros(num_blocks, dtype=torch.long, device=device)
    fill.scatter_reduce_(0, drawn[inside], tokens[inside], "amax")
    wide = torch.full((len(lengths), columns + 3 * strided), -1, dtype=torch.int32, device=device)
    block_tables = wide[:, :columns]
    block_tables.copy_(torch.where(inside, drawn, garbage))
    return Tables(block_tables, fill)


def caches(
    layout: str,
    found: Tables,
    num_kv_heads: int,
    page: int,
    head_dim: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    magnitudes: bool = False,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """A key cache and a value cache of random owned tokens; ``magnitudes`` scales each token by e^N(0, 1).

    ``interleaved`` takes both from one buffer in which a block's keys are followed by its values.
    """
    shapes = [cache.shape[1:] for cache in paging.new_caches(layout, 0, num_kv_heads, page, head_dim, dtype, "cpu")]
    num_blocks, used = found.fill.shape[0], found.used
    owned = found.owned(page)[used][:, None, :, None]
    sizes = [shape.numel() for shape in shapes]
    pool = _nan(num_blocks, sum(sizes), dtype=dtype, device=generator.device)
    if interleaved:
        flat = pool.split(sizes, 1)
    else:
        flat = tuple(part.view(num_blocks, -1) for part in pool.view(-1).split([num_blocks * size for size in sizes]))
    key_cache, value_cache = (part.unflatten(1, shape) for part, shape in zip(flat, shapes, strict=True))
    kv = paging.pages(key_cache, value_cache, num_kv_heads, layout)
    for view in (kv.keys, kv.values):
        tokens = torch.randn(len(used), num_kv_heads, page, head_dim, generator=generator, device=generator.device)
        if magnitudes:
            tokens *= torch.randn(tokens.shape[:3], generator=generator, device=generator.device).exp()[..., None]
        limit = fp8.max_value(dtype) if dtype in fp8.E4M3 else torch.finfo(dtype).max
        tokens = tokens.clamp_(-limit, limit).masked_fill_(~owned, float("nan")).to(dtype)
        _bits(view)[used] = _bits(tokens.view(len(used), *view.shape[1:]))
    return key_cache, value_cache


def token_scales(found: Tables, num_kv_heads: int, page: int, generator: torch.Generator, magnitudes: bool) -> Tensor:
    """float32 ``[num_blocks, Hkv, page]``, NaN where nobody owns the token; of e^N(0, 1) or between 0.5 and 1.5."""
    shape, device = (found.fill.shape[0], num_kv_heads, page), generator.device
    if magnitudes:
        scales = torch.randn(shape, generator=generator, device=device).exp()
    else:
        scales = torch.rand(shape, generator=generator, device=device) + 0.5
    return scales.masked_fill(~found.owned(page)[:, None], float("nan"))


def _nan(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype in fp8.E4M3:
        return torch.full(shape, 0x7F if dtype == fp8.FN else 0x80, dtype=torch.uint8, device=device).view(dtype)
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype in fp8.E4M3 else x
