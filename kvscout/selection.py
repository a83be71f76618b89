"""From selected blocks or tokens to what ``pa_decode`` attends to: plain torch, every row a sequence of its own.

:func:`tables_of_blocks` serves models that select whole blocks of tokens: the pages stay where they are, and each row
gets a block table of its own. :func:`gather_tokens` serves those that select single tokens, which no table of pages can
describe: it copies them together. Both take what ``topk_indices`` returns, and both give tables and lengths for a
``pa_decode`` of ``query_length=1`` with as many sequences as there are rows, causal or not, without a sliding window:
that would count places in the row's pages, not in the sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import checks, fp8, paging

NOTHING = 2**31 - 1
"""Stands for no block or token, behind all others when sorted: no context is so long that it holds this one."""


class Tables(NamedTuple):
    """What each row attends to, as ``pa_decode`` takes it.

    Attributes:
        block_tables: int32 ``[rows, pages]``, -1 behind a row's last page.
        context_lengths: int32 ``[rows]``: tokens in a row's pages.
    """

    block_tables: Tensor
    context_lengths: Tensor


class Tokens(NamedTuple):
    """Copies of what each row attends to, as ``pa_decode`` takes them.

    Attributes:
        key_cache: layout, page size and dtype of the cache that was read; ``ceil(k / page)`` blocks a row, row by row.
        value_cache: likewise.
        block_tables: int32 ``[rows, ceil(k / page)]``, the same for every selection.
        context_lengths: int32 ``[rows]``: how many tokens a row selects.
        key_scale: float32 ``[blocks, Hkv, page]`` if it was given per token; else as it was given.
        value_scale: likewise.
    """

    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    context_lengths: Tensor
    key_scale: Tensor | float | None = None
    value_scale: Tensor | float | None = None


def tables_of_blocks(
    selected: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    block_size: int,
    page: int,
    *,
    sequences: Tensor | None = None,
    ends: Tensor | None = None,
    out: Tables | None = None,
) -> Tables:
    """Block tables of the pages of selected blocks: block b is the tokens ``[b * block_size, (b + 1) * block_size)``.

    A row attends to the tokens of its blocks that lie before its end, to each once, in the order of the sequence. So
    only its last page can be partly filled, and one length describes the row::

        tokens of row i: all t of [0, end_i) with t // block_size in selected[i]
        end_i = min(context_lengths[sequences[i]], ends[i], max_blocks * page)

    Args:
        selected: int32 ``[rows, k]``, any strides. Negative entries, those selected before in the row and blocks
            without a token before the row's end count for nothing. Any order.
        block_tables: int32 ``[B, max_blocks]``, any strides: the pages of each sequence.
        context_lengths: int32 ``[B]``: tokens of each sequence.
        block_size: tokens per selected block: ``page`` times a whole number.
        page: tokens per page of the caches: 16, 32, 64 or 128.
        sequences: int32 or int64 ``[rows]``: the sequence that each row belongs to; rows of none (less than 0, or from
            B on) see nothing. None: each sequence has ``rows / B`` successive rows, as ``pa_decode``'s queries have.
        ends: int32 ``[rows]``: one past the last token that each row sees, as for ``topk_indices``. None: all of its
            sequence's.
        out: a former result of these shapes, to write into.

    Returns:
        ``out``, or new :class:`Tables` of ``k * block_size / page`` pages a row.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device; the message names it.

    All tensors live on one device. Never synchronises with the host; capturable in a CUDA graph, whose replays follow
    all tensors. Works under ``torch.compile(fullgraph=True)``. Costs about 35 small launches of torch's, two of them
    sorts of ``[rows, k]``: on a GPU more time than a small decode itself takes, unless ``torch.compile`` fuses them.

    Source: the block selection of MiniMax-M3: blocks of 128 tokens over smaller pages.

    Example:
        >>> selected = torch.tensor([[2, 0, 2, -1]], dtype=torch.int32)
        >>> pages = torch.tensor([[7, 3, 8, 5, 1, 9]], dtype=torch.int32)
        >>> tables, lengths = tables_of_blocks(selected, pages, torch.tensor([70]).int(), block_size=32, page=16)
        >>> tables.tolist(), lengths.tolist()
        ([[7, 3, 1, -1, -1, -1, -1, -1]], [38])
    """
    checks.one_of("page", page, paging.PAGE_SIZES)
    checks.integer("block_size", block_size, page)
    if block_size % page:
        raise ValueError(f"block_size: expected {page}, the page size, times a whole number, got {block_size}")
    owner, end = _owner_and_end(selected, block_tables, context_lengths, page, sequences, ends)
    blocks = _distinct(selected, -(-end // block_size))
    per_block = block_size // page
    if out is None:
        out = Tables(*_new_tables(selected, selected.shape[1] * per_block))
    _check_tables(out, Tables, selected, selected.shape[1] * per_block)
    pages = (blocks[:, :, None] * per_block + torch.arange(per_block, device=selected.device)).flatten(1)
    out.block_tables.copy_(_look_up(block_tables, owner, pages).masked_fill(pages * page >= end[:, None], -1))
    out.context_lengths.copy_((end[:, None] - blocks * block_size).clamp(0, block_size).sum(1))
    return out


def gather_tokens(
    selected: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    block_tables: Tensor,
    context_lengths: Tensor,
    *,
    sequences: Tensor | None = None,
    ends: Tensor | None = None,
    key_scale: Tensor | float | None = None,
    value_scale: Tensor | float | None = None,
    kv_layout: str = paging.AUTO,
    out: Tokens | None = None,
) -> Tokens:
    """Copy selected tokens, bit for bit, into a compact paged cache of the same layout, page size and dtype.

    Row i gets the tokens of ``selected[i]`` that lie in ``[0, end_i)``, each once, in the order of the sequence, with
    the ``end_i`` of :func:`tables_of_blocks`. What lies behind a row's last token is unspecified, and may be NaN.

    Args:
        selected: int32 ``[rows, k]``, any strides: places in the sequence. Those before 0, past the row's end or
            selected before in the row count for nothing. Any order.
        key_cache: what to read, as ``pa_decode`` takes it: one of the layouts of :mod:`kvscout.paging`.
        value_cache: likewise.
        num_kv_heads: heads of the caches.
        block_tables: int32 ``[B, max_blocks]``, any strides: the pages of each sequence.
        context_lengths: int32 ``[B]``: tokens of each sequence.
        sequences: as for :func:`tables_of_blocks`.
        ends: as for :func:`tables_of_blocks`.
        key_scale: as ``pa_decode`` takes it. Scales per token, ``[blocks, Hkv, page]`` or ``[blocks, Hkv, page, 1]``,
            are copied with their tokens; all others are handed on.
        value_scale: likewise.
        kv_layout: layout of the caches, or "auto" to tell by their shapes.
        out: what to write into: a former result of these shapes, or one made of other memory, for instance with caches
            of ``paging.new_caches(layout, rows * ceil(k / page), ...)``. May not overlap what is read.

    Returns:
        The result: new memory, or that of ``out``, beside scales that were handed on.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, stride or device; the message names it.

    All tensors live on one device. Never synchronises with the host; capturable in a CUDA graph, whose replays follow
    all tensors. Works under ``torch.compile(fullgraph=True)``.

    Costs about 40 launches of torch's, two of them sorts of ``[rows, k]``, and the copies, which rows do not share:
    ``rows * k * Hkv * D`` elements of each cache are read, written to memory that is freed again, and from there to the
    result. In nhd and hnd a token's elements lie together, in chunked and plain_v its values are strewn.

    Source: the token selection of DeepSeek-V3.2, whose kernels read pages of one token.

    Example:
        >>> key_cache, value_cache = paging.new_caches("nhd", 4, 1, 16, 64, torch.bfloat16, "cpu")
        >>> key_cache[2, 3, 0, 0] = 5.0
        >>> selected = torch.tensor([[19, 1, 19, -1]], dtype=torch.int32)
        >>> pages, lengths = torch.tensor([[0, 2]]).int(), torch.tensor([20]).int()
        >>> found = gather_tokens(selected, key_cache, value_cache, 1, pages, lengths)
        >>> found.key_cache[0, :2, 0, 0].tolist(), found.block_tables.tolist(), found.context_lengths.tolist()
        ([0.0, 5.0], [[0]], [2])
    """
    kv = paging.pages(key_cache, value_cache, num_kv_heads, kv_layout)
    page = kv.page
    owner, end = _owner_and_end(selected, block_tables, context_lengths, page, sequences, ends)
    if kv.keys.device != selected.device:
        raise ValueError(f"key_cache: expected on {selected.device}, like selected, got {kv.keys.device}")
    rows, k = selected.shape
    per_row = -(-k // page)
    per_token = [_per_token("key_scale", key_scale, kv), _per_token("value_scale", value_scale, kv)]
    if out is None:
        out = _new_tokens(kv, selected, per_row, per_token)
    _check_tables(out, Tokens, selected, per_row)
    copies, scales = _check_tokens(out, (key_cache, value_cache), kv.layout, num_kv_heads, per_token)
    tokens = _distinct(selected, end)
    out.context_lengths.copy_((tokens < NOTHING).sum(1))
    out.block_tables.copy_(torch.arange(rows * per_row, device=selected.device).view(rows, per_row))
    if kv.keys.shape[0] and rows * k:
        tokens = torch.nn.functional.pad(tokens, (0, per_row * page - k), value=NOTHING)
        block = _look_up(block_tables, owner, tokens // page).masked_fill(tokens == NOTHING, 0).view(-1, page)
        place = (tokens % page).view(-1, page)  # [rows * per_row, page]
        _copy(kv, copies, block, place)
        for scale, copy in zip(per_token, scales, strict=True):
            if scale is not None and copy is not None:
                copy.copy_(scale[block, :, place].transpose(1, 2))
    key_scale, value_scale = (
        given if copy is None else copy for given, copy in zip((key_scale, value_scale), scales, strict=True)
    )
    return Tokens(out.key_cache, out.value_cache, out.block_tables, out.context_lengths, key_scale, value_scale)


def _owner_and_end(
    selected: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    page: int,
    sequences: Tensor | None,
    ends: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The sequence of each row, B if it has none, and one past the last token that it sees: int64 ``[rows]`` twice."""
    checks.tensor("selected", selected, ("rows", "k"), torch.int32)
    checks.integer("selected: number of columns k", selected.shape[1], 1)
    rows, device = selected.shape[0], selected.device
    checks.tensor("context_lengths", context_lengths, ("B",), torch.int32, device)
    count = context_lengths.shape[0]
    checks.tensor("block_tables", block_tables, (count, "max_blocks"), torch.int32, device)
    if sequences is None:
        if rows % max(count, 1) or (rows and not count):
            raise ValueError(f"sequences: expected a tensor, as {rows} rows are no equal parts of {count} sequences")
        owner = torch.arange(rows, device=device) // max(rows // max(count, 1), 1)
    else:
        checks.tensor("sequences", sequences, (rows,), (torch.int32, torch.int64), device)
        owner = sequences.long()
        owner = owner.masked_fill((owner < 0) | (owner > count), count)
    end = torch.nn.functional.pad(context_lengths, (0, 1))[owner].long().clamp(max=block_tables.shape[1] * page)
    if ends is not None:
        checks.tensor("ends", ends, (rows,), torch.int32, device)
        end = torch.minimum(end, ends)
    return owner, end


def _distinct(selected: Tensor, bound: Tensor) -> Tensor:
    """Each row's entries of ``[0, bound)``, each once and ascending, then NOTHING: int64 ``[rows, k]``."""
    legal = (selected >= 0) & (selected < bound[:, None])
    ordered = selected.masked_fill(~legal, NOTHING).sort(1).values
    before = torch.nn.functional.pad(ordered[:, :-1], (1, 0), value=-1)
    return ordered.masked_fill(ordered == before, NOTHING).sort(1).values.long()


def _look_up(block_tables: Tensor, owner: Tensor, pages: Tensor) -> Tensor:
    """The block of each page of each row's sequence: int64 ``[rows, pages]``, anything where there is none."""
    count, columns = block_tables.shape
    if not count or not columns:
        return torch.zeros_like(pages)
    return block_tables[owner.clamp(max=count - 1)[:, None], pages.clamp(max=columns - 1)].long()


def _copy(source: paging.Pages, to: paging.Pages, block: Tensor, place: Tensor) -> None:
    """Fill every token of every page of ``to`` with that at a place ``[pages, page]`` of a block of ``source``."""
    chunk = source.values.shape[3]
    keys = _bits(source.keys)[block, :, place]  # [pages, page, Hkv, D/kx, kx]
    _bits(to.keys).copy_(keys.transpose(1, 2))
    values = _bits(source.values)[block, :, place // chunk, place % chunk]  # [pages, page, Hkv, D]
    _bits(to.values).copy_(values.unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4))


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype in fp8.E4M3 else x


def _per_token(name: str, scale: Tensor | float | None, kv: paging.Pages) -> Tensor | None:
    """A scale per token as ``[blocks, Hkv, page]``; None for any other, which ``pa_decode`` checks."""
    if not isinstance(scale, Tensor) or scale.dim() < 3:
        return None
    shape = (kv.keys.shape[0], kv.num_kv_heads, kv.page)
    checks.tensor(name, scale, shape if scale.dim() == 3 else (*shape, 1), torch.float32, kv.keys.device)
    return scale.squeeze(3) if scale.dim() == 4 else scale


def _new_tables(selected: Tensor, pages: int) -> tuple[Tensor, Tensor]:
    rows = selected.shape[0]
    return selected.new_empty(rows, pages), selected.new_empty(rows)


def _new_tokens(kv: paging.Pages, selected: Tensor, per_row: int, per_token: list[Tensor | None]) -> Tokens:
    blocks = selected.shape[0] * per_row
    caches = paging.new_caches(kv.layout, blocks, kv.num_kv_heads, kv.page, kv.head_dim, kv.dtype, selected.device)
    scales = [None if s is None else s.new_zeros(blocks, kv.num_kv_heads, kv.page) for s in per_token]
    return Tokens(*caches, *_new_tables(selected, per_row), *scales)


def _check_tables(out: object, kind: type[Tables | Tokens], selected: Tensor, pages: int) -> None:
    if not isinstance(out, kind):
        raise TypeError(f"out: expected {kind.__name__}, got {type(out).__name__}")
    rows, device = selected.shape[0], selected.device
    checks.tensor("out.block_tables", out.block_tables, (rows, pages), torch.int32, device)
    checks.tensor("out.context_lengths", out.context_lengths, (rows,), torch.int32, device)


def _check_tokens(
    out: Tokens, caches: tuple[Tensor, Tensor], layout: str, num_kv_heads: int, per_token: list[Tensor | None]
) -> tuple[paging.Pages, list[Tensor | None]]:
    """The caches of ``out`` token by token, and its scales where those that are read are per token."""
    blocks, device = out.block_tables.numel(), caches[0].device
    for name, copy, cache in zip(("key_cache", "value_cache"), out[:2], caches, strict=True):
        checks.tensor(f"out.{name}", copy, (blocks, *cache.shape[1:]), cache.dtype, device)
        checks.last_dim_contiguous(f"out.{name}", copy)
    copies: list[Tensor | None] = [None, None]
    for i, (name, scale) in enumerate(zip(("key_scale", "value_scale"), per_token, strict=True)):
        if scale is not None:
            copies[i] = getattr(out, name)
            checks.tensor(f"out.{name}", copies[i], (blocks, *scale.shape[1:]), torch.float32, device)
    return paging.pages(out.key_cache, out.value_cache, num_kv_heads, layout), copies
