"""``tables_of_blocks``: specification, checks, dispatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks, paging, torch_ops, tuning
from ...device import arch_of
from ...variants import AUTO, Family
from . import rows

FAMILY = Family("selection_tables", __package__)


@dataclass(frozen=True)
class Problem:
    """What variants decide on."""

    arch: str
    num_rows: int
    k: int
    num_sequences: int
    max_blocks: int
    block_size: int
    page: int
    has_sequences: bool = False
    has_ends: bool = False

    def bucket(self) -> tuning.Bucket:
        """What a tuned table tells apart: sizes by power of two, the rest as it is."""
        return tuning.bucket(self, classes=("num_rows", "k", "num_sequences", "max_blocks"))

    @property
    def pages_per_block(self) -> int:
        """Pages of a selected block."""
        return self.block_size // self.page


class Args(NamedTuple):
    """The checked tensors of a call."""

    selected: Tensor
    block_tables: Tensor
    context_lengths: Tensor
    sequences: Tensor | None
    ends: Tensor | None
    out_tables: Tensor
    out_lengths: Tensor


class Tables(NamedTuple):
    """What each row attends to, as ``pa_decode`` takes it.

    Attributes:
        block_tables: int32 ``[rows, pages]``, -1 behind a row's last page.
        context_lengths: int32 ``[rows]``: tokens in a row's pages.
    """

    block_tables: Tensor
    context_lengths: Tensor


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
    variant: str = AUTO,
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
        variant: a variant's name (see ``kvscout info``), or "auto": ``KVSCOUT_SELECTION_TABLES_VARIANT`` or the best
            fit.

    Returns:
        ``out``, or new :class:`Tables` of ``k * block_size / page`` pages a row.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device; the message names it.
        UnsupportedProblem: no variant, or not the one asked for, serves this call.

    All tensors live on one device. Never synchronises with the host; capturable in a CUDA graph, whose replays follow
    all tensors. Works under ``torch.compile(fullgraph=True)``. One launch on a GPU, for up to
    4096 entries a row.

    Source: the block selection of MiniMax-M3: blocks of 128 tokens over smaller pages.

    Example:
        >>> selected = torch.tensor([[2, 0, 2, -1]], dtype=torch.int32)
        >>> pages = torch.tensor([[7, 3, 8, 5, 1, 9]], dtype=torch.int32)
        >>> tables, lengths = tables_of_blocks(selected, pages, torch.tensor([70]).int(), block_size=32, page=16)
        >>> tables.tolist(), lengths.tolist()
        ([[7, 3, 1, -1, -1, -1, -1, -1]], [38])
    """
    _check_sizes(block_size, page)
    if out is None:
        rows.check_selected(selected)
        out = Tables(*new_tables(selected, selected.shape[1] * (block_size // page)))
    elif not isinstance(out, Tables):
        raise TypeError(f"out: expected Tables, got {type(out).__name__}")
    call = torch_ops.traced("selection_tables") if torch.compiler.is_compiling() else run
    call(selected, block_tables, context_lengths, sequences, ends, *out, block_size, page, variant)
    return out


def run(
    selected: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    sequences: Tensor | None,
    ends: Tensor | None,
    out_tables: Tensor,
    out_lengths: Tensor,
    block_size: int,
    page: int,
    variant: str,
) -> None:
    """Check, choose, launch: fill the tables and lengths."""
    args = Args(selected, block_tables, context_lengths, sequences, ends, out_tables, out_lengths)
    problem = check(args, block_size, page)
    choice = FAMILY.choose(problem, variant)
    if problem.num_rows:
        choice.launch(problem, args)


@checks.once_per_layout()
def check(args: Args, block_size: int, page: int) -> Problem:
    """Check every argument of a call and describe it."""
    _check_sizes(block_size, page)
    selected = args.selected
    rows.check(selected, args.block_tables, args.context_lengths, args.sequences, args.ends)
    num_rows, k = selected.shape
    num_sequences, max_blocks = args.block_tables.shape
    rows.check_out(selected, k * (block_size // page), args.out_tables, args.out_lengths)
    return Problem(
        arch=arch_of(selected.device),
        num_rows=num_rows,
        k=k,
        num_sequences=num_sequences,
        max_blocks=max_blocks,
        block_size=block_size,
        page=page,
        has_sequences=args.sequences is not None,
        has_ends=args.ends is not None,
    )


def _check_sizes(block_size: int, page: int) -> None:
    checks.one_of("page", page, paging.PAGE_SIZES)
    checks.integer("block_size", block_size, page)
    if block_size % page:
        raise ValueError(f"block_size: expected {page}, the page size, times a whole number, got {block_size}")


def new_tables(selected: Tensor, pages: int) -> tuple[Tensor, Tensor]:
    """Tables of so many pages a row, and lengths, not yet written."""
    num_rows = selected.shape[0]
    return selected.new_empty(num_rows, pages), selected.new_empty(num_rows)
