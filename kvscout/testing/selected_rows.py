"""Rows that select blocks or tokens of sequences in pages, of every kind, and what they select, in plain Python."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ENTRIES = ("random", "distinct", "repeated", "extreme", "none")
OWNERS = ("even", "given", "strangers")
EXTREMES = (-1, -2, -(2**31), 2**31 - 1, 2**31 - 2, 2**30)


class Rows(NamedTuple):
    """The arguments that both selections share."""

    selected: Tensor
    block_tables: Tensor
    context_lengths: Tensor
    sequences: Tensor | None
    ends: Tensor | None

    def seen(self, page: int) -> tuple[list[int], list[int]]:
        """Each row's sequence, -1 if it has none, and one past the last token that it sees."""
        count, columns = self.block_tables.shape
        num_rows = len(self.selected)
        if self.sequences is None:
            owners = [row * count // num_rows for row in range(num_rows)]
        else:
            owners = [owner if 0 <= owner < count else -1 for owner in self.sequences.tolist()]
        lengths = [*self.context_lengths.tolist(), 0]
        ends = [min(lengths[owner], columns * page) for owner in owners]
        if self.ends is not None:
            ends = [min(pair) for pair in zip(ends, self.ends.tolist(), strict=True)]
        return owners, ends


def draw(
    shape: tuple[int, int],
    num_sequences: int,
    length: int,
    page: int,
    unit: int,
    num_blocks: int,
    generator: torch.Generator,
    *,
    entries: str = "random",
    owners: str = "even",
    ends: bool = False,
    strided: bool = False,
) -> Rows:
    """Draw ``[rows, k]`` entries that select ``unit`` tokens each.

    Args:
        shape: rows and k.
        num_sequences: sequences; the first has ``length`` tokens, the others as many or fewer, or a negative number.
        length: tokens of the longest sequence.
        page: tokens per page.
        unit: tokens per entry.
        num_blocks: blocks that the tables name.
        generator: source of randomness; its device is where everything is made.
        entries: one of :data:`ENTRIES`: some past the end, each but once, most more than once, hostile, all -1.
        owners: one of :data:`OWNERS`: rows are dealt out, name their sequence, or some name one that is none.
        ends: let each row end somewhere else.
        strided: let nothing be contiguous.
    """
    device = generator.device

    def integers(low: int, high: int, *size: int) -> Tensor:
        """Of ``[low, high)``, every second column of a wider tensor where strided."""
        wide = (*size[:-1], size[-1] * (1 + strided))
        drawn = torch.randint(low, max(high, low + 1), wide, generator=generator, device=device, dtype=torch.int32)
        return drawn[..., :: 1 + strided]

    lengths = integers(0, length + 1, num_sequences)
    lengths[:1], lengths[3:4], lengths[5:6] = length, -3, 1
    columns = -(-length // page)
    tables = integers(0, num_blocks, num_sequences, columns + 2)
    past = torch.arange(columns + 2, device=device) * page >= lengths[:, None]
    tables.copy_(torch.where(past, torch.where(tables % 2 == 0, -1, 2**31 - 1), tables))
    sequences = {
        "even": lambda: None,
        "given": lambda: integers(0, num_sequences, shape[0]).long(),
        "strangers": lambda: integers(-3, num_sequences + 3, shape[0]),
    }[owners]()
    units = -(-length // unit)
    selected = integers(0, units // 8 if entries == "repeated" else units + 2, *shape)
    if entries == "distinct":
        order = torch.rand(shape[0], units, generator=generator, device=device).argsort(1)[:, : shape[1]]
        selected.fill_(-1)[:, : order.shape[1]] = order.int()
    elif entries == "extreme":
        hostile = torch.tensor(EXTREMES, dtype=torch.int32, device=device)[integers(0, len(EXTREMES), *shape).long()]
        selected.copy_(torch.where(integers(0, 2, *shape) == 0, hostile, selected))
    elif entries == "none":
        selected.fill_(-1)
    return Rows(selected, tables, lengths, sequences, integers(-3, length + 5, shape[0]) if ends else None)
