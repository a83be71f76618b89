"""Cases of ``topk_indices``."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...ops.topk import api
from ...ops.topk.cost import cost
from .. import windows as of_windows
from ..case import BENCH, FULL, SUITE, VERIFY, Guarded, Prepared, check_fields
from ..compare import Comparison, equal
from ..windows import windows

# Logits of a large case whose rows are sorted in plain Python; every row goes through :func:`proof`,
# PROVEN_LOGITS at a time.
SORTED_LOGITS = 1 << 17
PROVEN_LOGITS = 1 << 28

INF, NAN = float("inf"), float("nan")
PECULIAR = (0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, 2.0**-149, -(2.0**-149), 3.4e38, -3.4e38)
"""Values that a wrong order of bits would put in the wrong place."""


@dataclass(frozen=True)
class TopkCase:
    """One problem and the kind of its windows and values.

    Attributes:
        windows: "none" (neither starts nor ends are given), "starts" or "ends" (only that one of "misaligned"), or a
            kind of :func:`kvscout.testing.windows.windows`.
        values: "normal", "ties" (a few integers), "peculiar" (zeros of both signs, infinities, NaN, the smallest and
            largest numbers), "nan", "-inf" and "inf" (every other row holds nothing else), "few" (all but about three
            columns of a row are -inf or NaN).
    """

    rows: int
    keys: int
    k: int
    windows: str = "causal"
    values: str = "normal"
    sorted: bool = False
    strided: bool = False
    dtype: torch.dtype = torch.float32
    sequences: int = 1
    level: str = VERIFY
    op: str = "topk"

    ACCEPTED: ClassVar[Mapping[str, Sequence[Any]]] = {
        "windows": ("none", "starts", "ends", *of_windows.KINDS),
        "values": ("normal", "ties", "peculiar", "nan", "-inf", "inf", "few"),
        "dtype": api.LOGITS_DTYPES,
    }
    LEAST: ClassVar[Mapping[str, int]] = {"rows": 1, "keys": 1, "k": 1, "sequences": 1}

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def name(self) -> str:
        """Shape, then whatever is not the default."""
        flags = [self.windows, *(word for word in ("sorted", "strided") if getattr(self, word))]
        flags += [self.values] * (self.values != "normal") + [f"x{self.sequences}"] * (self.sequences > 1)
        flags += [str(self.dtype).removeprefix("torch.")] * (self.dtype != torch.float32)
        return f"{self.rows}x{self.keys}-k{self.k}-" + "-".join(flags)

    def __str__(self) -> str:
        return self.name

    def prepare(self, device: torch.device, seed: int = 0) -> Prepared:
        """Draw the logits, spoil what lies outside the windows, and poison an output."""
        generator = torch.Generator(device).manual_seed(zlib.crc32(self.name.encode()) + seed)
        ks, ke = (None if bound is None else bound.to(device) for bound in self._windows())
        logits = self._values(generator)
        inside = _inside(logits, ks, ke)
        outside = torch.where(torch.arange(self.keys, device=device) % 2 == 0, INF, NAN).to(self.dtype)
        # Written in place, so that strided logits keep their row stride.
        logits.copy_(torch.where(inside, logits, outside))
        out = Guarded((self.rows, self.k), torch.int32, device, row_gap=5 if self.strided else 0)
        args = api.Args(logits, ks, ke, out.view)
        windowed = ks is not None or ke is not None
        return Prepared(
            problem=api.check(args, self.k, self.sorted),
            args=args,
            outputs={"indices": out.view},
            check=lambda variant: [self._compare(args), self._prove(args)],
            guards=[out],
            cost=cost(int(inside.sum()), self.rows, self.k, self.dtype.itemsize, windowed),
        )

    def _windows(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self.windows == "none":
            return None, None
        one_sided = self.windows in ("starts", "ends")
        ks, ke = windows("misaligned" if one_sided else self.windows, self.rows, self.keys, self.sequences)
        return None if self.windows == "ends" else ks, None if self.windows == "starts" else ke

    def _values(self, generator: torch.Generator) -> torch.Tensor:
        """``[rows, keys]``; seven more elements lie between two rows where strided."""
        device = generator.device
        shape = (self.rows, self.keys + 7 * self.strided)
        if self.values == "peculiar":
            chosen = torch.randint(len(PECULIAR), shape, generator=generator, device=device)
            values = torch.tensor(PECULIAR, device=device)[chosen]
        else:
            values = torch.randn(shape, generator=generator, device=device)
        if self.values == "ties":
            values = values.round()
        elif self.values in ("nan", "-inf", "inf"):
            values[::2] = float(self.values)
        elif self.values == "few":
            keep = torch.rand(shape, generator=generator, device=device) < 3 / self.keys
            masked = torch.where(values > 0, -INF, NAN)
            values = torch.where(keep, values, masked)
        return values.to(self.dtype)[:, : self.keys]

    def _compare(self, args: api.Args) -> Comparison:
        """Rows spread over the whole case, against plain Python."""
        logits, ks, ke, out = args
        count = max(1, min(self.rows, SORTED_LOGITS // self.keys))
        rows = torch.linspace(0, self.rows - 1, count, device=out.device).long().unique()
        starts, ends = (None if bound is None else bound[rows].tolist() for bound in (ks, ke))
        expected = torch.tensor(oracle(logits[rows].tolist(), self.k, starts, ends), dtype=torch.int32)
        got = out[rows].cpu()
        if self.sorted:
            return equal("indices", got, expected)
        if not torch.equal(got == -1, expected == -1):
            return equal("where indices are -1", got == -1, expected == -1)
        return equal("sorted indices", got.sort(dim=1).values, expected.sort(dim=1).values)

    def _prove(self, args: api.Args) -> Comparison:
        """Every row, as many at a time as memory has room for."""
        block = max(1, PROVEN_LOGITS // self.keys)
        found = Comparison("proof", "")
        for row in range(0, self.rows, block):
            rows = slice(row, row + block)
            ks, ke = (None if bound is None else bound[rows] for bound in (args.ks, args.ke))
            found = proof(args.logits[rows], ks, ke, args.out[rows], self.sorted)
            if not found.ok:
                break
        return found


def oracle(
    logits: Sequence[Sequence[float]], k: int, starts: Sequence[int] | None, ends: Sequence[int] | None
) -> list[list[int]]:
    """What ``topk_indices(sorted=True)`` must give, in plain Python."""
    found = []
    for i, row in enumerate(logits):
        start = min(max(0 if starts is None else starts[i], 0), len(row))
        end = min(max(len(row) if ends is None else ends[i], start), len(row))
        columns = [j for j in range(start, end) if not math.isnan(row[j]) and row[j] != -INF]
        columns.sort(key=lambda j: (-row[j], j))
        found.append((columns + [-1] * k)[:k])
    return found


def proof(
    logits: torch.Tensor, ks: torch.Tensor | None, ke: torch.Tensor | None, out: torch.Tensor, in_order: bool
) -> Comparison:
    """Whether every row's columns are distinct, selectable, as many as there can be, and better than all others.

    That is all that the definition asks for, so it needs no second selection, and it holds for any size.
    """
    keys = logits.shape[1]
    valid = out >= 0
    candidates = _inside(logits, ks, ke) & (logits > -INF)
    wrong = {
        "a number below -1 or past the last column": (out < -1) | (out >= keys),
        "-1 before a column": valid & (valid.cumsum(1) != torch.arange(1, out.shape[1] + 1, device=out.device)),
    }
    if not any(bool(where.any()) for where in wrong.values()):
        # One more column takes what the -1s would select.
        column = torch.where(valid, out, keys).long()
        times = torch.zeros(len(out), keys + 1, dtype=torch.int32, device=out.device)
        times = times.scatter_add_(1, column, torch.ones_like(out))[:, :keys]
        chosen = times > 0
        room = candidates.sum(1).clamp(max=out.shape[1])
        worst = torch.where(chosen, logits, INF).amin(1, keepdim=True)
        rest = candidates & ~chosen
        last = torch.where(chosen & (logits == worst), torch.arange(keys, device=out.device), -1).amax(1, keepdim=True)
        wrong = {
            "a column twice": times > 1,
            "a column that is masked or outside the window": chosen & ~candidates,
            "another count of columns than there are": (valid.sum(1) != room)[:, None],
            "a column although a better one is left": rest & (logits > worst),
            "a column although its equal on the left is left": rest
            & (logits == worst)
            & (torch.arange(keys, device=out.device) < last),
        }
        if in_order:
            value = logits.gather(1, column.clamp(max=keys - 1))
            before, after = value[:, :-1], value[:, 1:]
            ascending = (before < after) | ((before == after) & (out[:, :-1] > out[:, 1:]))
            wrong["a worse column before a better one"] = valid[:, 1:] & ascending
    for message, where in wrong.items():
        if where.any():
            return Comparison("proof", f"row {int(where.any(1).nonzero()[0])} has {message}")
    return Comparison("proof", "")


def _inside(logits: torch.Tensor, ks: torch.Tensor | None, ke: torch.Tensor | None) -> torch.Tensor:
    """bool ``[S, N]``: the columns of each row's window."""
    keys = logits.shape[1]
    column = torch.arange(keys, device=logits.device).expand(logits.shape)
    start = torch.zeros_like(column[:, 0]) if ks is None else ks.clamp(0, keys)
    end = torch.full_like(start, keys) if ke is None else ke.clamp(max=keys)
    return (column >= start[:, None]) & (column < end[:, None])


WINDOWS = ("none", "full", "causal", "cp", "misaligned", "empty", "past_end", "extreme", "starts", "ends")
VALUES = TopkCase.ACCEPTED["values"]


def _suite() -> Iterator[TopkCase]:
    """Small, and odd in every way."""
    for in_order in (False, True):
        for shape in ((1, 1, 1), (1, 1, 5), (3, 1, 64), (5, 70, 1), (17, 131, 5), (19, 131, 64), (4, 300, 2048)):
            yield TopkCase(*shape, windows="full", sorted=in_order, level=SUITE)
        for kind in WINDOWS:
            yield TopkCase(19, 131, 40, kind, "ties", in_order, level=SUITE)
        for values in VALUES:
            yield TopkCase(13, 97, 12, "misaligned", values, in_order, level=SUITE)
            yield TopkCase(9, 64, 64, "none", values, in_order, strided=True, level=SUITE)
        for dtype in (torch.bfloat16, torch.float16):
            yield TopkCase(13, 97, 12, "empty", "peculiar", in_order, strided=True, dtype=dtype, level=SUITE)
            yield TopkCase(13, 97, 30, "past_end", "normal", in_order, dtype=dtype, level=SUITE)
        yield TopkCase(18, 200, 64, "packed", "peculiar", in_order, strided=True, sequences=3, level=SUITE)
        yield TopkCase(4, 3000, 2048, "misaligned", "ties", in_order, level=SUITE)


SHAPES = ((1, 113), (17, 2047), (61, 2049), (64, 8192), (257, 8192), (1000, 1024))


def _verify() -> Iterator[TopkCase]:
    """Model sizes with each kind of value, and sizes that are past a limit."""
    for i, (rows, keys) in enumerate(SHAPES):
        for j, k in enumerate((1, 5, 64, 2048)):
            for n, values in enumerate(VALUES):
                yield TopkCase(rows, keys, k, WINDOWS[(i + j + n) % len(WINDOWS)], values, n % 2 == 0)
    yield TopkCase(7 * 64, 7 * 200 + 7, 2048, "packed", "ties", sequences=7)
    yield TopkCase(1, 1_500_000, 2048, "misaligned", "ties", True)
    yield TopkCase(2, 200_000, 100_000, "none", "peculiar", True)
    yield TopkCase(16, 131072, 2048, "causal", "ties")


def _full() -> Iterator[TopkCase]:
    """Every shape x k x windows x values, each with one order and one type, and more than 2^31 logits."""
    problems = itertools.product(SHAPES, (1, 5, 64, 2048), WINDOWS, VALUES)
    for i, ((rows, keys), k, kind, values) in enumerate(problems):
        dtype = api.LOGITS_DTYPES[i % 3]
        yield TopkCase(rows, keys, k, kind, values, i % 2 == 0, dtype=dtype, level=FULL)
    yield TopkCase(17000, 131072, 2048, "causal", "ties", level=FULL)


def _bench() -> Iterator[TopkCase]:
    """Decode steps, long contexts and a prefill."""
    for rows, keys in ((64, 8192), (16, 131072), (1, 131072), (4096, 8192)):
        yield TopkCase(rows, keys, 2048, level=BENCH)


def _unique(found: Iterator[TopkCase]) -> dict[str, TopkCase]:
    return {case.name: case for case in found}


# A name that two levels share keeps its last place.
CASES = list({**_unique(_full()), **_unique(_verify()), **_unique(_suite()), **_unique(_bench())}.values())
