"""One program per row, one launch: sort, number what is there for the first time, look its pages up.

Wins: on a GPU, where the definition is some 35 launches.
Limit: a row is sorted by one SM, and has at most 4096 entries.
Measured: nothing yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import triton
import triton.language as tl

from ....kernels.triton_selection import block_of, distinct, owner_and_end, refuses, sorting_warps
from ....variants import Variant
from ..api import Args, Problem
from ..rows import rows_per_sequence

# Table entries that a thread has in flight at a time.
PAGES_PER_THREAD = 8


@dataclass(frozen=True)
class Config:
    """Warps of a program, and pages of each block that are looked up at a time."""

    num_warps: int
    block_pages: int


def _default_config(problem: Problem) -> Config:
    block = block_of(problem.k)
    num_warps = sorting_warps(block)
    pages = min(triton.next_power_of_2(problem.pages_per_block), PAGES_PER_THREAD * 32 * num_warps // block)
    return Config(num_warps, max(pages, 1))


def _space(problem: Problem) -> Iterable[Config]:
    default = _default_config(problem)
    yield Config(max(default.num_warps // 2, 1), default.block_pages)
    yield Config(default.num_warps, 1)


@triton.jit(do_not_specialize=["k", "num_sequences", "rows_per_sequence", "max_tokens", "size", "page", "per_block"])
def _tables(selected, block_tables, context_lengths, sequences, ends, out_tables, out_lengths,
            selected_row, selected_k, tables_row, tables_page, lengths_s, sequences_s, ends_s,
            out_row, out_page, out_s,
            k, num_sequences, rows_per_sequence, max_tokens, size, page, per_block,
            BLOCK: tl.constexpr, PAGES: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    owner, end = owner_and_end(
        row, context_lengths, lengths_s, sequences, sequences_s, ends, ends_s,
        num_sequences, rows_per_sequence, max_tokens,
    )  # fmt: skip
    # Rounds up; a division of what is negative would round the other way.
    bound = tl.where(end > 0, (end + (size - 1)) // size, 0)
    block, counts, place, count = distinct(selected + row * selected_row, selected_k, k, bound, BLOCK)
    start = block.to(tl.int64) * size
    tokens = tl.where(counts, tl.minimum(end - start, size), 0)
    tl.store(out_lengths + row * out_s, tl.sum(tokens, 0).to(tl.int32))

    i = tl.arange(0, BLOCK)
    behind = (i >= count) & (i < k)
    table = block_tables + owner * tables_row
    out = out_tables + row * out_row
    for base in range(0, per_block, PAGES):
        j = base + tl.arange(0, PAGES)[None, :]  # [1, PAGES]
        inside = j < per_block
        at = block.to(tl.int64)[:, None] * per_block + j
        has_token = counts[:, None] & inside & (at * page < end)
        found = tl.load(table + at * tables_page, mask=has_token, other=-1)
        to = place.to(tl.int64)[:, None] * per_block + j
        tl.store(out + to * out_page, found, mask=counts[:, None] & inside)
        to = i.to(tl.int64)[:, None] * per_block + j
        tl.store(out + to * out_page, -1, mask=behind[:, None] & inside)


def _launch(problem: Problem, config: Config, args: Args) -> None:
    _tables[(problem.num_rows,)](
        *args,
        *args.selected.stride(), *args.block_tables.stride(), *args.context_lengths.stride(),
        0 if args.sequences is None else args.sequences.stride(0), 0 if args.ends is None else args.ends.stride(0),
        *args.out_tables.stride(), *args.out_lengths.stride(),
        problem.k, problem.num_sequences, rows_per_sequence(problem.num_rows, problem.num_sequences),
        problem.max_blocks * problem.page, problem.block_size, problem.page, problem.pages_per_block,
        BLOCK=block_of(problem.k), PAGES=config.block_pages,
        num_warps=config.num_warps,
    )  # fmt: skip


VARIANT = Variant(
    launch=_launch,
    default_config=_default_config,
    space=_space,
    refuses=lambda problem: refuses(problem.k),
    rank=lambda problem: 60,
    records_grad=False,
)
