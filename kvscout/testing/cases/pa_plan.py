"""Cases of ``plan_pa_decode``."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...ops.pa_plan import api
from ...ops.pa_plan.cost import cost
from ...ops.pa_plan.plan import TILES
from .. import oracles
from ..case import BENCH, FULL, SUITE, VERIFY, Guarded, Prepared, check_fields
from ..compare import Comparison, equal

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

EDGES = (
    *(0, 1, 2, 3, 4), *range(255, 260), *range(511, 516), *range(2303, 2308), 4099, 200_000, -1, INT32_MIN,
)  # fmt: skip
"""Lengths around the ends of tiles of 256, and those that stand for nothing."""

SMALL_EDGES = (*range(126, 131), *EDGES, *range(382, 387))
"""The same, and lengths around the ends of tiles of 128."""


@dataclass(frozen=True)
class PaPlanCase:
    """One batch, the kind of its lengths, and how it is to be split.

    Attributes:
        lengths: "edges" (the tile's over and over), "equal" (8192 each), "random" (up to 20,000), "empty" (none has a
            token), "sparse" (every seventh has some), "skewed" (one of 200,000 among short ones), "extreme" (INT32_MAX
            among edges), "huge" (INT32_MAX each).
        tiles_per_partition: of a batch-invariant plan; 0 is any other plan.
        tile: tokens per tile.
    """

    sequences: int
    lengths: str = "edges"
    kv_heads: int = 1
    max_partitions: int = 132
    budget: int = 264
    window: int = 0
    query_length: int = 1
    tiles_per_partition: int = 0
    tile: int = 256
    level: str = VERIFY
    op: str = "pa_plan"

    ACCEPTED: ClassVar[Mapping[str, Sequence[Any]]] = {
        "lengths": ("edges", "equal", "random", "empty", "sparse", "skewed", "extreme", "huge"),
        "tile": TILES,
    }
    LEAST: ClassVar[Mapping[str, int]] = {
        **dict.fromkeys(("sequences", "kv_heads", "max_partitions", "budget", "query_length"), 1),
        "window": -1,
        "tiles_per_partition": 0,
    }

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def name(self) -> str:
        """Batch and split, then whatever is not the default."""
        split = f"kv{self.kv_heads}-p{self.max_partitions}-b{self.budget}"
        flags = [f"w{self.window}"] * (self.window != 0) + [f"ql{self.query_length}"] * (self.query_length != 1)
        flags += [f"invariant{self.tiles_per_partition}"] * (self.tiles_per_partition != 0)
        flags += [f"tile{self.tile}"] * (self.tile != 256)
        return "-".join((f"{self.sequences}x{self.lengths}", split, *flags))

    def __str__(self) -> str:
        return self.name

    def values(self, seed: int = 0) -> list[int]:
        """The lengths."""
        count = self.sequences
        if self.lengths == "random":
            generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()) + seed)
            drawn: list[int] = torch.randint(-500, 20_000, (count,), generator=generator).tolist()
            return drawn
        edges = EDGES if self.tile == 256 else SMALL_EDGES
        pattern: tuple[int, ...] = {
            "edges": edges,
            "equal": (8192,),
            "empty": (0, -1, INT32_MIN),
            "sparse": (0, 0, 0, 3000, 0, 0, 0),
            "skewed": (40, 300),
            "extreme": (*edges, INT32_MAX, INT32_MAX - self.tile + 1),
            "huge": (INT32_MAX,),
        }[self.lengths]
        lengths = [pattern[i % len(pattern)] for i in range(count)]
        if self.lengths == "skewed":
            lengths[count // 2] = 200_000
        return lengths

    def prepare(self, device: torch.device, seed: int = 0) -> Prepared:
        """Make the lengths, and poison a plan's tensors."""
        lengths = self.values(seed)
        split = (self.kv_heads, self.max_partitions, self.budget)
        capacity = oracles.pa_capacity(self.sequences, *split, self.tiles_per_partition > 0)
        window = max(self.window, 0)
        work = Guarded((capacity, 4), torch.int32, device)
        reduce = Guarded((self.sequences, 2), torch.int32, device)
        args = api.Args(torch.tensor(lengths, dtype=torch.int32, device=device), work.view, reduce.view)
        numbers = (self.max_partitions, window, self.query_length, self.tile, self.tiles_per_partition)
        expected = oracles.pa_plan(lengths, capacity, *numbers)

        def check(variant: str) -> list[Comparison]:
            return [
                equal("reduce_info", reduce.view, torch.tensor(expected.reduce, dtype=torch.int32, device=device)),
                equal("work_info", work.view, torch.tensor(expected.work, dtype=torch.int32, device=device)),
            ]

        return Prepared(
            problem=api.check(args, *numbers),
            args=args,
            outputs={"work_info": work.view, "reduce_info": reduce.view},
            check=check,
            guards=[work, reduce],
            cost=cost(self.sequences, capacity),
        )


WINDOWS = (-1, 1, 255, 256, 257, 4096, INT32_MAX, 2**31, 2**40)
SPLITS = ((1, 5), (2, 17), (3, 512), (8, 264), (132, 264), (256, 512))
"""(max_partitions, budget)"""


def _suite() -> Iterator[PaPlanCase]:
    """Each number at its ends, the others ordinary."""
    for i, (max_partitions, budget) in enumerate(SPLITS):
        yield PaPlanCase(25, "edges", (1, 2, 8)[i % 3], max_partitions, budget, level=SUITE)
    for i, window in enumerate(WINDOWS):
        yield PaPlanCase(26, "edges", 1, 8, 300, window, query_length=1 + i % 8, level=SUITE)
        yield PaPlanCase(28, "extreme", 1, 4, 100, window, query_length=8 - i % 8, level=SUITE)
    for lengths in ("empty", "sparse", "skewed", "random", "huge"):
        yield PaPlanCase(1, lengths, level=SUITE)
        yield PaPlanCase(17, lengths, 2, 64, 256, 256, level=SUITE)
        yield PaPlanCase(200, lengths, 1, 132, 512, level=SUITE)
    yield PaPlanCase(200, "edges", level=SUITE)
    # More than 2^31 tiles in one block of sequences.
    yield PaPlanCase(300, "huge", 1, 132, 600, level=SUITE)
    yield PaPlanCase(1100, "random", 1, 2, 1500, level=SUITE)
    for i, tiles in enumerate((1, 2, 7, INT32_MAX)):
        max_partitions, budget = SPLITS[(i + 1) % len(SPLITS)]
        shape = ((1, 2, 8)[i % 3], max_partitions, budget, (0, 300)[i % 2])
        yield PaPlanCase(28, "extreme", *shape, query_length=1 + i, tiles_per_partition=tiles, level=SUITE)
    for lengths in ("empty", "random", "huge"):
        yield PaPlanCase(70, lengths, 1, 8, tiles_per_partition=4, level=SUITE)
    for i, window in enumerate((0, 127, 128, 129, 257, INT32_MAX)):
        max_partitions, budget = SPLITS[i]
        shape = ((1, 2, 8)[i % 3], max_partitions, budget, window)
        for tiles in (0, 3):
            yield PaPlanCase(36, "extreme", *shape, 1 + i % 4, tiles, tile=128, level=SUITE)
    for lengths in ("sparse", "skewed", "random"):
        yield PaPlanCase(200, lengths, 1, 132, 512, tile=128, level=SUITE)
    # More than 2^31 tiles in one block of sequences.
    yield PaPlanCase(150, "huge", 1, 132, 600, tile=128, level=SUITE)


def _verify() -> Iterator[PaPlanCase]:
    """Batches up to past every block size, long loops, and products that need 64 bits."""
    for sequences in (1, 2, 15, 16, 17, 64, 65, 200, 256, 257, 1024, 1025, 16384):
        for lengths in ("edges", "random", "sparse", "skewed", "extreme"):
            yield PaPlanCase(sequences, lengths)
            yield PaPlanCase(sequences, lengths, 8, 256, 512, 4095, query_length=4)
            yield PaPlanCase(sequences, lengths, 1, 16, tiles_per_partition=3)
    yield PaPlanCase(16384, "huge", 1, 64, 1 << 20)
    yield PaPlanCase(1, "huge", 1, 1 << 20, 1 << 20)
    yield PaPlanCase(4, "huge", 1, 1 << 20, 1 << 20, 2**30)
    for sequences in (1, 16, 65, 257, 1025, 16384):
        for lengths in ("edges", "random", "skewed", "extreme"):
            yield PaPlanCase(sequences, lengths, tile=128)
            yield PaPlanCase(sequences, lengths, 8, 256, 512, 4095, query_length=4, tile=128)
            yield PaPlanCase(sequences, lengths, 1, 16, tiles_per_partition=3, tile=128)
    yield PaPlanCase(16384, "huge", 1, 64, 1 << 20, tile=128)
    yield PaPlanCase(1, "huge", 1, 1 << 20, 1 << 20, tile=128)


def _full() -> Iterator[PaPlanCase]:
    """Every window x query length x split x number of heads."""
    for window in WINDOWS:
        for query_length in range(1, 9):
            for max_partitions, budget in SPLITS:
                for kv_heads in (1, 2, 8):
                    shape = (200, "extreme", kv_heads, max_partitions, budget, window, query_length)
                    yield PaPlanCase(*shape, level=FULL)


def _bench() -> Iterator[PaPlanCase]:
    """Decode batches of equal lengths, the worst skew, and a batch past every block size."""
    for sequences in (1, 4, 8, 32, 64, 256):
        yield PaPlanCase(sequences, "equal", level=BENCH)
    for sequences in (32, 256):
        yield PaPlanCase(sequences, "skewed", level=BENCH)
    for sequences in (1, 32):
        yield PaPlanCase(sequences, "equal", tiles_per_partition=1, level=BENCH)
    yield PaPlanCase(4096, "random", level=BENCH)


def _unique(found: Iterator[PaPlanCase]) -> dict[str, PaPlanCase]:
    return {case.name: case for case in found}


# A name that two levels share keeps its last place.
CASES = list({**_unique(_full()), **_unique(_verify()), **_unique(_suite()), **_unique(_bench())}.values())
