"""Two launches: a program per row finds its tokens' slots; a program per tile of a page and head copies what is there.

Wins: on a GPU, where the definition is some 40 launches and copies everything twice.
Limit: a row is sorted by one SM, and has at most 4096 entries. Where a layout strews a token's values (chunked and
plain_v), they are read one element at a time. Head dimensions past 1024 are refused.
Measured: nothing yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .... import paging
from ....kernels.triton_selection import block_of, distinct, owner_and_end, refuses, sorting_warps
from ....variants import Variant
from ...selection_tables.rows import rows_per_sequence
from ..api import Args, Problem
from ..triton_parts import copy

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

VECTOR_BYTES = 16
"""As many as one instruction of a thread moves."""

MAX_DIM = 1024


class Runs(NamedTuple):
    """Caches as runs of words that one instruction moves, or of which two make a vector that it moves.

    Attributes:
        source: ``[blocks, Hkv, page, chunks, run]``, to be read.
        to: likewise, to be written.
        vector: words of a vector.
        strides: of ``source`` and of ``to`` in vectors, all but those of neighbours.
    """

    source: torch.Tensor
    to: torch.Tensor
    vector: int
    strides: list[int]


@dataclass(frozen=True)
class Config:
    """Warps that sort a row; bytes that a program copies, and those of each of its warps."""

    sorting_warps: int
    tile_bytes: int
    warp_bytes: int


def _default_config(problem: Problem) -> Config:
    # A thread moves four vectors, or two where it gathers them by element: of four, FP8's addresses would not fit.
    tile_bytes, warp_bytes = (4 << 10, 1 << 10) if _is_strewn(problem) else (16 << 10, 2 << 10)
    return Config(sorting_warps(_block(problem)), tile_bytes, warp_bytes)


def _space(problem: Problem) -> Iterable[Config]:
    default = _default_config(problem)
    for tile_bytes, warp_bytes in ((2 << 10, 1 << 10), (4 << 10, 1 << 10), (8 << 10, 2 << 10), (16 << 10, 2 << 10)):
        yield Config(default.sorting_warps, tile_bytes, warp_bytes)


def _refuses(problem: Problem) -> str | None:
    if problem.head_dim > MAX_DIM:
        return f"a program copies at most {MAX_DIM} elements of a token and head, not {problem.head_dim}"
    return refuses(problem.k)


def _is_strewn(problem: Problem) -> bool:
    """Whether a token's values do not lie together."""
    return problem.layout in (paging.CHUNKED, paging.PLAIN_V)


def _block(problem: Problem) -> int:
    """Entries that a row is sorted as: also its pages to their ends."""
    return max(block_of(problem.k), problem.page)


@triton.jit(do_not_specialize=["k", "num_sequences", "rows_per_sequence", "max_tokens", "num_blocks", "pages"])
def _find(selected, block_tables, context_lengths, sequences, ends, slots, out_tables, out_lengths,
          selected_row, selected_k, tables_row, tables_page, lengths_s, sequences_s, ends_s,
          out_row, out_page, out_s,
          k, num_sequences, rows_per_sequence, max_tokens, num_blocks, pages,
          PAGE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    owner, end = owner_and_end(
        row, context_lengths, lengths_s, sequences, sequences_s, ends, ends_s,
        num_sequences, rows_per_sequence, max_tokens,
    )  # fmt: skip
    token, counts, place, count = distinct(selected + row * selected_row, selected_k, k, end, BLOCK)
    tl.store(out_lengths + row * out_s, count)
    i = tl.arange(0, BLOCK)
    number = row * pages + i
    tl.store(out_tables + row * out_row + i.to(tl.int64) * out_page, number.to(tl.int32), mask=i < pages)

    at = block_tables + owner * tables_row + (token // PAGE).to(tl.int64) * tables_page
    block = tl.load(at, mask=counts, other=-1).to(tl.int64)
    # What no table should hold is not followed out of the cache.
    slot = tl.where((block >= 0) & (block < num_blocks), block * PAGE + token % PAGE, -1)
    slots += row * pages * PAGE
    tl.store(slots + place, slot, mask=counts)
    tl.store(slots + i, tl.full((BLOCK,), -1, tl.int64), mask=(i >= count) & (i < pages * PAGE))


def _launch(problem: Problem, config: Config, args: Args) -> None:
    pages, page = problem.pages_per_row, problem.page
    slots = torch.empty(problem.num_rows, pages * page, dtype=torch.int64, device=args.selected.device)
    _find[(problem.num_rows,)](
        args.selected, args.block_tables, args.context_lengths, args.sequences, args.ends,
        slots, args.out_tables, args.out_lengths,
        *args.selected.stride(), *args.block_tables.stride(), *args.context_lengths.stride(),
        0 if args.sequences is None else args.sequences.stride(0), 0 if args.ends is None else args.ends.stride(0),
        *args.out_tables.stride(), *args.out_lengths.stride(),
        problem.k, problem.num_sequences, rows_per_sequence(problem.num_rows, problem.num_sequences),
        problem.max_blocks * page, problem.num_blocks, pages,
        PAGE=page, BLOCK=_block(problem), num_warps=config.sorting_warps,
    )  # fmt: skip
    if args.out_key_cache.numel():
        _copy(problem, config, args, slots)


def _copy(problem: Problem, config: Config, args: Args, slots: torch.Tensor) -> None:
    source, to = args.pages(problem.layout)
    keys = _runs(source.keys, to.keys)
    strewn = _is_strewn(problem)
    if strewn:
        values = _strewn(source.values, to.values)
    else:
        # As keys of these layouts: [blocks, Hkv, page, 1, D].
        values = _runs(source.values.transpose(2, 3), to.values.transpose(2, 3))
    scales = args.scales()
    row_bytes = triton.next_power_of_2(problem.head_dim) * problem.dtype.itemsize
    # A chunk of strewn values is written whole.
    tokens = min(max(config.tile_bytes // row_bytes, VECTOR_BYTES // problem.dtype.itemsize), problem.page)
    copy[(problem.num_rows * problem.pages_per_row * (problem.page // tokens), problem.num_kv_heads, 2)](
        slots, keys.source, values.source, *(None if pair is None else pair[0] for pair in scales),
        keys.to, values.to, *(None if pair is None else pair[1] for pair in scales),
        *keys.strides, *values.strides, *(stride for pair in scales for stride in _scale_strides(pair)),
        PAGE=problem.page, TOKENS=tokens, STREWN=strewn,
        K_CHUNKS=keys.source.shape[3], K_RUN=keys.source.shape[4], K_VECTOR=keys.vector,
        V_CHUNKS=values.source.shape[3], V_RUN=values.source.shape[4], V_VECTOR=values.vector,
        num_warps=min(max(tokens * row_bytes // config.warp_bytes, 1), 8),
    )  # fmt: skip


def _runs(source: torch.Tensor, to: torch.Tensor) -> Runs:
    """Caches ``[blocks, Hkv, page, chunks, run]`` in the widest words that their memory allows."""
    size = source.element_size()
    strides = [*source.stride()[:4], *to.stride()[:4]]
    word = _aligned(size, source.shape[4], *strides, source, to)
    integer = INTEGERS[min(word, 8)]
    per_word = word // size
    return Runs(
        source.view(integer), to.view(integer), word // integer.itemsize, [stride // per_word for stride in strides]
    )


def _strewn(source: torch.Tensor, to: torch.Tensor) -> Runs:
    """Values ``[blocks, Hkv, chunks, tokens, D]`` by element; only the strides of ``to`` are counted in vectors."""
    size = source.element_size()
    strides = [to.stride(place) for place in (0, 1, 2, 4)]
    vector = _aligned(size, *strides, to) // size
    read = [source.stride(place) for place in (0, 1, 2, 4)]
    integer = INTEGERS[size]
    return Runs(source.view(integer), to.view(integer), vector, [*read, *(stride // vector for stride in strides)])


def _aligned(size: int, *of: int | torch.Tensor) -> int:
    """Bytes, up to a vector's, that divide these numbers of elements and the places where these tensors start."""
    found = VECTOR_BYTES
    for x in of:
        places = (x * size,) if isinstance(x, int) else (x.data_ptr(), x.storage_offset() * size)
        found = math.gcd(found, *places)
    return found


def _scale_strides(pair: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[int, ...]:
    """Strides of both by block, head and position."""
    return (0,) * 6 if pair is None else (*pair[0].stride(), *pair[1].stride())


VARIANT = Variant(
    launch=_launch,
    default_config=_default_config,
    space=_space,
    refuses=_refuses,
    rank=lambda problem: 60,
    records_grad=False,
)
