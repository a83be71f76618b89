"""Cases of ``gather_tokens``."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ... import fp8, paging
from ...ops.selection_gather import api
from ...ops.selection_gather.cost import cost
from ...paging import CHUNKED, HND, LAYOUTS, NHD, PLAIN_V
from .. import selected_rows
from ..case import BENCH, FULL, GUARD, SUITE, VERIFY, Guarded, Prepared, check_fields
from ..compare import Comparison, equal
from ..paged_inputs import check_dim
from ..selected_rows import ENTRIES, OWNERS, Rows

FP16, BF16 = torch.float16, torch.bfloat16

# Bytes from block to block where a block holds the pages of many layers: past 2^32 in all after 1024 blocks.
LAYERS_BYTES = (1 << 22) + 256

POISON = 0xFF
"""A byte that makes NaN of bfloat16, float16 and e4m3fn."""


@dataclass(frozen=True)
class SelectionGatherCase:
    """One problem and the kind of its rows, scales and memory.

    Attributes:
        length: tokens of the longest sequence.
        scales: those per token: "none", "key", "value", "both", or "both4" (``[..., page, 1]``, with gaps).
        entries: one of :data:`kvscout.testing.selected_rows.ENTRIES`; the same for ``owners``.
        pool: where caches lie: "separate", "interleaved" (a block's keys, then its values), "layers" (blocks 4 MB
            apart), or "shifted" (each cache starts, and each block lies, an element past what vectors need).
        blocks: blocks of the caches that are read; 0: as many as the longest sequence has pages, and a few more.
    """

    rows: int
    k: int
    heads: int
    dim: int
    page: int = 16
    layout: str = HND
    dtype: torch.dtype = fp8.FN
    sequences: int = 1
    length: int = 500
    scales: str = "none"
    entries: str = "random"
    owners: str = "even"
    ends: bool = False
    strided: bool = False
    pool: str = "separate"
    blocks: int = 0
    level: str = VERIFY
    op: str = "selection_gather"

    ACCEPTED: ClassVar[Mapping[str, Sequence[Any]]] = {
        "page": paging.PAGE_SIZES,
        "layout": LAYOUTS,
        "dtype": paging.CACHE_DTYPES,
        "scales": ("none", "key", "value", "both", "both4"),
        "entries": ENTRIES,
        "owners": OWNERS,
        "pool": ("separate", "interleaved", "layers", "shifted"),
    }
    LEAST: ClassVar[Mapping[str, int]] = {
        **dict.fromkeys(("rows", "k", "heads", "dim", "sequences", "length"), 1),
        "blocks": 0,
    }

    def __post_init__(self) -> None:
        check_fields(self)
        check_dim(self.dim, self.layout, self.dtype)

    @property
    def name(self) -> str:
        """Shape, then whatever is not the default."""
        words = [f"{self.rows}x{self.k}", f"{self.heads}x{self.dim}", f"p{self.page}", self.layout]
        words += [str(self.dtype).removeprefix("torch.").removeprefix("float8_"), f"{self.sequences}x{self.length}"]
        words += [self.entries, self.owners, *(word for word in ("ends", "strided") if getattr(self, word))]
        words += [f"scales_{self.scales}"] * (self.scales != "none") + [self.pool] * (self.pool != "separate")
        return "-".join(words + [f"n{self.blocks}"] * (self.blocks > 0))

    def __str__(self) -> str:
        return self.name

    def prepare(self, device: torch.device, seed: int = 0) -> Prepared:
        """Draw the rows and caches of random bits, and poison what is written."""
        generator = torch.Generator(device).manual_seed(zlib.crc32(self.name.encode()) + seed)
        num_blocks = self.blocks or -(-self.length // self.page) + 3
        rows = selected_rows.draw(
            (self.rows, self.k), self.sequences, self.length, self.page, 1, num_blocks, generator,
            entries=self.entries, owners=self.owners, ends=self.ends, strided=self.strided,
        )  # fmt: skip
        per_row = -(-self.k // self.page)
        blocks = self.rows * per_row
        buffer, keys, values = self._pool(num_blocks, device)
        buffer.random_(generator=generator)
        to_buffer, to_keys, to_values = self._pool(blocks, device)
        key_scale, value_scale = scales = [self._scale(name, num_blocks, generator) for name in ("key", "value")]
        # A row of a scale is what a block holds.
        out_scales = [
            None if scale is None else Guarded((blocks, self.heads * self.page), torch.float32, device, self.strided)
            for scale in scales
        ]
        to_key_scale, to_value_scale = [
            None if s is None else s.view.unflatten(1, (self.heads, self.page)) for s in out_scales
        ]
        tables = Guarded((self.rows, per_row), torch.int32, device, row_gap=5 if self.strided else 0)
        lengths = Guarded((1, self.rows), torch.int32, device)
        args = api.Args(
            rows.selected, keys, values, *rows[1:], key_scale, value_scale,
            to_keys, to_values, tables.view, lengths.view[0], to_key_scale, to_value_scale,
        )  # fmt: skip
        problem = api.check(args, self.heads, self.layout)
        sets = oracle(rows, self.page)

        def restore() -> None:
            to_buffer.fill_(POISON)

        copies = {"key_cache": to_keys, "value_cache": to_values}
        copied_scales = {"key_scale": to_key_scale, "value_scale": to_value_scale}
        guards = [tables, lengths, *(scale for scale in out_scales if scale is not None)]
        return Prepared(
            problem=problem,
            args=args,
            outputs={"block_tables": tables.view, "context_lengths": args.out_lengths}
            | copies
            | {name: scale for name, scale in copied_scales.items() if scale is not None},
            check=lambda variant: [*self._compare(args, rows, sets), _untouched(to_buffer, [to_keys, to_values])],
            guards=guards,
            cost=cost(problem, sum(map(len, sets))),
            restore=restore,
        )

    def _pool(self, num_blocks: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """A buffer of bytes, and the key cache and the value cache in it, with guards around them."""
        sizes = (self.layout, num_blocks, self.heads, self.page, self.dim, self.dtype)
        shapes = [cache.shape for cache in paging.new_caches(*sizes, device="meta")]
        block = self.heads * self.page * self.dim
        size = self.dtype.itemsize
        stride, key_start, value_start = {
            "separate": (block, GUARD, 2 * GUARD + num_blocks * block),
            "interleaved": (2 * block, GUARD, GUARD + block),
            "layers": (LAYERS_BYTES // size, GUARD, GUARD + block),
            "shifted": (2 * block + 1, GUARD + 1, GUARD + 1 + block),
        }[self.pool]
        last = max(num_blocks - 1, 0) * stride + block
        buffer = torch.empty((value_start + last + GUARD) * size, dtype=torch.uint8, device=device)
        keys, values = (
            buffer.view(self.dtype).as_strided(shape, (stride, *_compact(shape[1:])), start)
            for shape, start in zip(shapes, (key_start, value_start), strict=True)
        )
        return buffer, keys, values

    def _scale(self, name: str, num_blocks: int, generator: torch.Generator) -> Tensor | None:
        if self.scales not in (name, "both", "both4"):
            return None
        wide = (num_blocks, self.heads, self.page, 1 + 2 * (self.scales == "both4"))
        scale = torch.rand(wide, generator=generator, device=generator.device)
        return scale[..., 1:2] if self.scales == "both4" else scale[..., 0]

    def _compare(self, args: api.Args, rows: Rows, sets: list[list[int]]) -> Iterator[Comparison]:
        device, page, per_row = args.selected.device, self.page, -(-self.k // self.page)
        yield equal("context_lengths", args.out_lengths.cpu(), torch.tensor([*map(len, sets)], dtype=torch.int32))
        number = torch.arange(self.rows * per_row, dtype=torch.int32, device=device).view(self.rows, per_row)
        yield equal("block_tables", args.out_tables, number)
        of_row = [row for row, tokens in enumerate(sets) for _ in tokens]
        if not of_row:
            return
        owner = torch.tensor(rows.seen(page)[0], device=device)[torch.tensor(of_row, device=device)]
        token = torch.tensor([t for tokens in sets for t in tokens], device=device)
        old = rows.block_tables[owner, token // page].long(), token % page
        slot = torch.tensor([r * per_row * page + i for r, tokens in enumerate(sets) for i in range(len(tokens))])
        new = slot.to(device) // page, slot.to(device) % page
        for name, is_key, read, written in (
            ("key_cache", True, args.key_cache, args.out_key_cache),
            ("value_cache", False, args.value_cache, args.out_value_cache),
        ):
            found, expected = (tokens_of(x, self.layout, is_key, *at) for x, at in ((written, new), (read, old)))
            yield equal(name, found, expected)
        for name, pair in zip(("key_scale", "value_scale"), args.scales(), strict=True):
            if pair is not None:
                yield equal(name, pair[1][new[0], :, new[1]], pair[0][old[0], :, old[1]])


def _compact(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _untouched(buffer: Tensor, caches: Sequence[Tensor]) -> Comparison:
    """Whether everything around the caches still holds its poison."""
    expected = torch.full_like(buffer, POISON)
    for cache in map(_integers, caches):
        expected.view(cache.dtype).as_strided(cache.shape, cache.stride(), cache.storage_offset()).copy_(cache)
    return equal("around the caches", buffer, expected)


def _integers(cache: Tensor) -> Tensor:
    return cache.view({1: torch.uint8, 2: torch.int16}[cache.element_size()])


def oracle(rows: Rows, page: int) -> list[list[int]]:
    """The tokens that each row must get, in order."""
    ends = rows.seen(page)[1]
    return [sorted({t for t in row if 0 <= t < end}) for row, end in zip(rows.selected.tolist(), ends, strict=True)]


def tokens_of(cache: Tensor, layout: str, is_key: bool, block: Tensor, place: Tensor) -> Tensor:
    """Tokens ``[T, Hkv, D]`` of a cache as integers, each layout spelt out."""
    cache = _integers(cache)
    x = 16 // cache.element_size()
    if layout == NHD:
        return cache[block, place]
    if layout == HND:
        return cache[block, :, place]
    if is_key:
        return cache[block, :, :, place].flatten(2)
    if layout == CHUNKED:
        return cache[block, :, place // x, :, place % x]
    return cache[block, :, :, place]


SCALES = SelectionGatherCase.ACCEPTED["scales"]
POOLS = ("separate", "interleaved", "shifted")


def _suite() -> Iterator[SelectionGatherCase]:
    """Small, and odd in every way."""
    for i, layout in enumerate(LAYOUTS):
        for j, dtype in enumerate(paging.CACHE_DTYPES):
            page, dim, k = (16, 32, 64, 128)[(i + j) % 4], (64, 48, 80, 16)[j], (5, 33, 1, 40)[(i + 3 * j) % 4]
            kinds = (SCALES[(i + j) % 5], ENTRIES[(i + 2 * j) % 5], OWNERS[(i + j) % 3], j % 2 == 0, i % 2 == 0)
            shape = (6, k, 1 + (i + j) % 3, dim, page, layout, dtype, 3, 300)
            yield SelectionGatherCase(*shape, *kinds, POOLS[(i + 2 * j) % 3], level=SUITE)
        for entries in ENTRIES:
            shape = (2, 20, 2, 32, 16, layout, BF16, 2, 40)
            yield SelectionGatherCase(*shape, "both", entries, "strangers", True, level=SUITE)
    yield SelectionGatherCase(1, 300, 1, 64, 128, NHD, FP16, 1, 3000, entries="distinct", level=SUITE)
    yield SelectionGatherCase(1, 2048, 1, 16, 64, HND, fp8.FN, 1, 5000, "both", level=SUITE)


def _verify() -> Iterator[SelectionGatherCase]:
    """Model sizes in every layout, each width that is sorted otherwise, and offsets past a limit."""
    for i, layout in enumerate(LAYOUTS):
        for j, dtype in enumerate((fp8.FN, BF16)):
            for n, (heads, dim) in enumerate(((1, 576), (8, 128), (2, 64), (1, 512), (3, 1024))):
                page, k = paging.PAGE_SIZES[(i + j + n) % 4], (2048, 100, 1000, 17, 4096)[(i + n) % 5]
                shape = (4, k, heads, dim, page, layout, dtype, 2, 20_000)
                kinds = (SCALES[(i + n) % 5], ENTRIES[(i + j + n) % 5], OWNERS[(j + n) % 3])
                yield SelectionGatherCase(*shape, *kinds, n % 2 == 0, j == 0, POOLS[(i + n) % 3])
        # Block ids past 65,535, then offsets past 2^32.
        shape = (3, 200, 1, 64, 16, layout, fp8.FN, 3, 5000)
        yield SelectionGatherCase(*shape, blocks=70_000, owners="given")
        yield SelectionGatherCase(*shape, "both", pool="layers", blocks=1200)


def _full() -> Iterator[SelectionGatherCase]:
    """Every layout x page x type x pool, with rows of kinds that take turns."""
    for i, layout in enumerate(LAYOUTS):
        for j, page in enumerate(paging.PAGE_SIZES):
            for n, dtype in enumerate(paging.CACHE_DTYPES):
                for m, pool in enumerate(POOLS):
                    turn = i + j + n + m
                    shape = (8, (300, 64, 2048)[turn % 3], 4, 128, page, layout, dtype, 4, 9000)
                    kinds = (SCALES[turn % 5], ENTRIES[(turn + j) % 5], OWNERS[(turn + n) % 3])
                    yield SelectionGatherCase(*shape, *kinds, m == 0, n % 2 == 0, pool, level=FULL)


def _bench() -> Iterator[SelectionGatherCase]:
    """Decode steps that select 2048 tokens, of one latent head and of eight heads."""
    for rows in (1, 64):
        for heads, dim, page in ((1, 512, 64), (8, 128, 16)):
            for layout in (NHD, CHUNKED, PLAIN_V):
                for dtype, scales in ((fp8.FN, "both"), (BF16, "none")):
                    shape = (rows, 2048, heads, dim, page, layout, dtype, rows, 65536)
                    yield SelectionGatherCase(*shape, scales, "distinct", blocks=262_144 // page, level=BENCH)


def _unique(found: Iterator[SelectionGatherCase]) -> dict[str, SelectionGatherCase]:
    return {case.name: case for case in found}


# A name that two levels share keeps its last place.
CASES = list({**_unique(_full()), **_unique(_verify()), **_unique(_suite()), **_unique(_bench())}.values())
