"""Cases of ``tables_of_blocks``."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ... import paging
from ...ops.selection_tables import api
from ...ops.selection_tables.cost import cost
from .. import selected_rows
from ..case import BENCH, FULL, SUITE, VERIFY, Guarded, Prepared, check_fields
from ..compare import equal
from ..selected_rows import ENTRIES, OWNERS, Rows

# Elements between the tables of two sequences: past 2^32 bytes after one, past 2^31 elements after two.
FAR = (1 << 30) + 64


@dataclass(frozen=True)
class SelectionTablesCase:
    """One problem and the kind of its rows.

    Attributes:
        length: tokens of the longest sequence.
        entries: one of :data:`kvscout.testing.selected_rows.ENTRIES`; the same for ``owners``.
        far: let the tables of sequences lie 4 GB apart.
    """

    rows: int
    k: int
    block_size: int = 128
    page: int = 16
    sequences: int = 1
    length: int = 1000
    entries: str = "random"
    owners: str = "even"
    ends: bool = False
    strided: bool = False
    far: bool = False
    level: str = VERIFY
    op: str = "selection_tables"

    ACCEPTED: ClassVar[Mapping[str, Sequence[Any]]] = {
        "page": paging.PAGE_SIZES,
        "entries": ENTRIES,
        "owners": OWNERS,
    }
    LEAST: ClassVar[Mapping[str, int]] = dict.fromkeys(("rows", "k", "block_size", "sequences", "length"), 1)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.block_size % self.page:
            raise ValueError(f"block_size: expected a multiple of page {self.page}, got {self.block_size}")

    @property
    def name(self) -> str:
        """Shape, then whatever is not the default."""
        words = [f"{self.rows}x{self.k}", f"b{self.block_size}", f"p{self.page}", f"{self.sequences}x{self.length}"]
        words += [self.entries, self.owners]
        return "-".join(words + [word for word in ("ends", "strided", "far") if getattr(self, word)])

    def __str__(self) -> str:
        return self.name

    def prepare(self, device: torch.device, seed: int = 0) -> Prepared:
        """Draw the rows, and poison tables and lengths."""
        generator = torch.Generator(device).manual_seed(zlib.crc32(self.name.encode()) + seed)
        rows = selected_rows.draw(
            (self.rows, self.k), self.sequences, self.length, self.page, self.block_size, 2**31 - 1, generator,
            entries=self.entries, owners=self.owners, ends=self.ends, strided=self.strided,
        )  # fmt: skip
        if self.far:
            tables = torch.empty(self.sequences * FAR, dtype=torch.int32, device=device)
            tables = tables.view(self.sequences, FAR)[:, : rows.block_tables.shape[1]]
            rows = rows._replace(block_tables=tables.copy_(rows.block_tables))
        columns = self.k * self.block_size // self.page
        out = Guarded((self.rows, columns), torch.int32, device, row_gap=5 if self.strided else 0)
        lengths = Guarded((1, self.rows), torch.int32, device)
        args = api.Args(*rows, out.view, lengths.view[0])
        expected = [torch.tensor(x, dtype=torch.int32) for x in oracle(rows, self.block_size, self.page)]
        tables, counts = expected[0].view(self.rows, columns), expected[1]
        return Prepared(
            problem=api.check(args, self.block_size, self.page),
            args=args,
            outputs={"block_tables": args.out_tables, "context_lengths": args.out_lengths},
            check=lambda variant: [
                equal("block_tables", args.out_tables.cpu(), tables),
                equal("context_lengths", args.out_lengths.cpu(), counts),
            ],
            guards=[out, lengths],
            cost=cost(self.rows, self.k, int((tables >= 0).sum())),
        )


def oracle(rows: Rows, block_size: int, page: int) -> tuple[list[list[int]], list[int]]:
    """What ``tables_of_blocks`` must give, in plain Python."""
    per_block = block_size // page
    found, counts = [], []
    tables = [*rows.block_tables.tolist(), []]
    for selected, owner, end in zip(rows.selected.tolist(), *rows.seen(page), strict=True):
        blocks = sorted({b for b in selected if 0 <= b * block_size < end})
        pages = [p for b in blocks for p in range(b * per_block, (b + 1) * per_block) if p * page < end]
        row = [tables[owner][p] for p in pages]
        found.append(row + [-1] * (len(selected) * per_block - len(row)))
        counts.append(sum(min(end - b * block_size, block_size) for b in blocks))
    return found, counts


def _suite() -> Iterator[SelectionTablesCase]:
    """Small, and odd in every way."""
    for i, entries in enumerate(ENTRIES):
        for j, owners in enumerate(OWNERS):
            size, page = ((16, 16), (128, 128), (96, 32), (128, 16), (64, 64))[(i + j) % 5]
            shape = (6, (1, 5, 16, 33)[(i + 2 * j) % 4], size, page, (3, 7)[owners == "strangers"], 700)
            yield SelectionTablesCase(*shape, entries, owners, (i + j) % 2 == 0, level=SUITE)
            yield SelectionTablesCase(*shape, entries, owners, (i + j) % 2 == 1, strided=True, level=SUITE)
    yield SelectionTablesCase(2, 300, 16, 16, 2, 5000, "distinct", level=SUITE)
    yield SelectionTablesCase(1, 2048, 32, 16, 1, 70_000, level=SUITE)
    yield SelectionTablesCase(3, 2, 2048, 16, 3, 5000, ends=True, level=SUITE)


def _verify() -> Iterator[SelectionTablesCase]:
    """Each width that is sorted otherwise, long sequences, and offsets past a limit."""
    for i, k in enumerate((1, 15, 16, 17, 64, 65, 129, 500, 1024, 2048, 2049, 4096)):
        for j, entries in enumerate(ENTRIES):
            size, page = ((16, 16), (128, 16), (128, 128), (64, 32), (384, 64), (1024, 16))[(i + j) % 6]
            shape = (8, k, size, page, (1, 2, 4, 8)[j % 4], (1000, 131072)[i % 2])
            yield SelectionTablesCase(*shape, entries, OWNERS[(i + j) % 3], i % 2 == 0, j % 2 == 0)
    yield SelectionTablesCase(4096, 16, 128, 16, 8, 131072, ends=True)
    yield SelectionTablesCase(9, 40, 128, 16, 3, 20_000, owners="given", far=True)


def _full() -> Iterator[SelectionTablesCase]:
    """Every kind of entries x owners x ends x strides, with sizes that take turns."""
    for i, k in enumerate((1, 16, 100, 2048)):
        for entries in ENTRIES:
            for owners in OWNERS:
                for ends in (False, True):
                    for strided in (False, True):
                        size, page = ((16, 16), (128, 16), (160, 32), (128, 64))[(i + ends) % 4]
                        shape = (24, k, size, page, 12, 20_000)
                        yield SelectionTablesCase(*shape, entries, owners, ends, strided, level=FULL)


def _bench() -> Iterator[SelectionTablesCase]:
    """Decode steps that select blocks of 128 tokens or pages, and a prefill."""
    for rows, k, size, page in ((1, 16, 128, 16), (64, 16, 128, 16), (64, 16, 128, 128), (64, 128, 16, 16)):
        yield SelectionTablesCase(rows, k, size, page, rows, 131072, "distinct", level=BENCH)
    for rows in (1, 64):
        yield SelectionTablesCase(rows, 2048, 16, 16, rows, 131072, "distinct", level=BENCH)
    yield SelectionTablesCase(4096, 16, 128, 16, 1, 131072, "distinct", ends=True, level=BENCH)


def _unique(found: Iterator[SelectionTablesCase]) -> dict[str, SelectionTablesCase]:
    return {case.name: case for case in found}


# A name that two levels share keeps its last place.
CASES = list({**_unique(_full()), **_unique(_verify()), **_unique(_suite()), **_unique(_bench())}.values())
