"""What both selections say of rows: their checks, and how plain torch puts their entries in order."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import checks

NOTHING = 2**31 - 1
"""Stands for no block or token, behind all others when sorted: no context is so long that it holds this one."""


def check_selected(selected: Tensor) -> None:
    """Check what rows select: all that the shapes of a new result depend on."""
    checks.tensor("selected", selected, ("rows", "k"), torch.int32)
    checks.integer("selected: number of columns k", selected.shape[1], 1)


def check(
    selected: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    sequences: Tensor | None,
    ends: Tensor | None,
) -> None:
    """Check the rows and the sequences that they belong to."""
    check_selected(selected)
    rows, device = selected.shape[0], selected.device
    checks.tensor("context_lengths", context_lengths, ("B",), torch.int32, device)
    count = context_lengths.shape[0]
    checks.tensor("block_tables", block_tables, (count, "max_blocks"), torch.int32, device)
    if sequences is not None:
        checks.tensor("sequences", sequences, (rows,), (torch.int32, torch.int64), device)
    elif rows % max(count, 1) or (rows and not count):
        raise ValueError(f"sequences: expected a tensor, as {rows} rows are no equal parts of {count} sequences")
    if ends is not None:
        checks.tensor("ends", ends, (rows,), torch.int32, device)


def check_out(selected: Tensor, pages: int, tables: Tensor, lengths: Tensor) -> None:
    """Check the tables and lengths that are written."""
    rows, device = selected.shape[0], selected.device
    checks.tensor("out.block_tables", tables, (rows, pages), torch.int32, device)
    checks.tensor("out.context_lengths", lengths, (rows,), torch.int32, device)
    checks.elements_apart("out.block_tables", tables)
    checks.elements_apart("out.context_lengths", lengths)


def rows_per_sequence(num_rows: int, num_sequences: int) -> int:
    """Successive rows of each sequence where no ``sequences`` are given."""
    return max(num_rows // max(num_sequences, 1), 1)


def owner_and_end(
    block_tables: Tensor,
    context_lengths: Tensor,
    page: int,
    num_rows: int,
    sequences: Tensor | None,
    ends: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The sequence of each row, B if it has none, and one past the last token that it sees: int64 ``[rows]`` twice."""
    count = context_lengths.shape[0]
    if sequences is None:
        owner = torch.arange(num_rows, device=block_tables.device) // rows_per_sequence(num_rows, count)
    else:
        owner = sequences.long()
        owner = owner.masked_fill((owner < 0) | (owner > count), count)
    end = torch.nn.functional.pad(context_lengths, (0, 1))[owner].long().clamp(max=block_tables.shape[1] * page)
    return owner, end if ends is None else torch.minimum(end, ends)


def distinct(selected: Tensor, bound: Tensor) -> Tensor:
    """Each row's entries of ``[0, bound)``, each once and ascending, then NOTHING: int64 ``[rows, k]``."""
    legal = (selected >= 0) & (selected < bound[:, None])
    ordered = selected.masked_fill(~legal, NOTHING).sort(1).values
    before = torch.nn.functional.pad(ordered[:, :-1], (1, 0), value=-1)
    return ordered.masked_fill(ordered == before, NOTHING).sort(1).values.long()


def look_up(block_tables: Tensor, owner: Tensor, pages: Tensor) -> Tensor:
    """The block of each page of each row's sequence: int64 ``[rows, pages]``, anything where there is none."""
    count, columns = block_tables.shape
    if not count or not columns:
        return torch.zeros_like(pages)
    return block_tables[owner.clamp(max=count - 1)[:, None], pages.clamp(max=columns - 1)].long()
