"""Cases of ``fp8_mqa_logits``."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from ... import fp8
from ...ops.mqa_logits import api
from ...ops.mqa_logits.cost import cost
from ...ops.mqa_logits.variants.torch_reference import reference, window
from .. import windows as of_windows
from ..case import BENCH, FULL, SUITE, VERIFY, Guarded, Prepared, check_fields
from ..compare import Budget, Comparison, close
from ..windows import windows

# What e4m3 products summed in a matrix unit's narrow accumulator may be off by, relative to the largest logit:
# 1.3e-4 to 3.2e-4 was measured on an H200 (wgmma keeps about 14 bits); the field's gate is 1e-3.
MATRIX_UNIT_ERROR = 1e-3
FLOAT32_ERROR = 2e-6

# A matrix unit errs by the size of a sum's terms. The largest of many logits is of that size too; of a few, it may be
# what is left of larger terms: a single logit of 16 heads was off by 1.16e-3 of itself on an H200. Of at most so many
# logits the error is therefore relative to the terms of the largest sum.
FEW_LOGITS = 16

# A NaN of e4m3fn.
NAN_BITS = 0x7F

# Rows of a large case that are compared with float64; its -inf and NaN positions are compared in every row, a block of
# rows with at most so many logits at a time, so that a case of 4 GB needs a few hundred MB more.
SAMPLED_DOTS = 1 << 27
BLOCK_LOGITS = 1 << 26


class Sample(NamedTuple):
    """Rows of a case with their logits in float64 and in float32.

    ``cancelled`` is how many times larger than the largest logit the terms of the largest sum are, for a few logits; 1
    for more of them.
    """

    rows: torch.Tensor
    expected: torch.Tensor
    same: torch.Tensor
    cancelled: float


@dataclass(frozen=True)
class MqaLogitsCase:
    """One problem and the kind of its windows and values.

    Attributes:
        rows: query rows S.
        keys: cached keys N.
        heads: indexer heads H.
        dim: head dimension D.
        clean: whether -inf is written outside the windows.
        windows: a kind of :func:`kvscout.testing.windows.windows`; "packed" has ``sequences`` of them.
        values: "normal", "negative" (no dot product is positive), "ties" (few distinct values), "magnitudes", "nan"
            (one query row and every seventh key hold a NaN).
        q_scale: whether the queries have scales.
        strided: whether inputs and output lie in wider rows.
        fnuz: whether queries and keys are AMD's e4m3fnuz.
        sequences: sequences that the rows and keys are of, where windows are "packed".
    """

    rows: int
    keys: int
    heads: int = 64
    dim: int = 128
    clean: bool = True
    windows: str = "causal"
    values: str = "normal"
    q_scale: bool = False
    strided: bool = False
    fnuz: bool = False
    sequences: int = 1
    level: str = VERIFY
    op: str = "mqa_logits"

    ACCEPTED: ClassVar[Mapping[str, Sequence[Any]]] = {
        "heads": api.NUM_HEADS,
        "dim": api.HEAD_DIMS,
        "windows": of_windows.KINDS,
        "values": ("normal", "negative", "ties", "magnitudes", "nan"),
    }
    LEAST: ClassVar[Mapping[str, int]] = {"rows": 1, "keys": 1, "sequences": 1}

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def name(self) -> str:
        """Shape, then whatever is not the default."""
        flags = [self.windows, *(["clean"] if self.clean else [])]
        flags += [word for word in ("q_scale", "strided", "fnuz") if getattr(self, word)]
        flags += [self.values] * (self.values != "normal") + [f"x{self.sequences}"] * (self.sequences > 1)
        return f"{self.rows}x{self.keys}-h{self.heads}-d{self.dim}-" + "-".join(flags)

    def __str__(self) -> str:
        return self.name

    def prepare(self, device: torch.device, seed: int = 0) -> Prepared:
        """Draw the inputs and poison an output."""
        generator = torch.Generator(device).manual_seed(zlib.crc32(self.name.encode()) + seed)
        dtype = fp8.FNUZ if self.fnuz else fp8.FN
        q = self._values((self.rows, self.heads, self.dim * (1 + self.strided)), generator).to(dtype)[..., : self.dim]
        k = self._values((self.keys, self.dim * (1 + self.strided)), generator).to(dtype)[:, : self.dim]
        if self.values == "negative":
            q, k = q.float().abs().to(dtype), (-k.float().abs()).to(dtype)
        if self.values == "nan":
            q.view(torch.uint8)[self.rows // 2, self.heads // 3, 1] = NAN_BITS
            k.view(torch.uint8)[::7, self.dim - 1] = NAN_BITS
        k_scale = torch.rand(self.keys, generator=generator, device=device) + 0.5
        width = self.heads + 3 * self.strided
        weights = torch.randn(self.rows, width, generator=generator, device=device)[:, : self.heads]
        q_scale = torch.rand(self.rows, width, generator=generator, device=device)[:, : self.heads]
        ks, ke = (bound.to(device) for bound in windows(self.windows, self.rows, self.keys, self.sequences))
        out = Guarded((self.rows, self.keys), torch.float32, device, row_gap=5 if self.strided else 0)
        args = api.Args(q, k, k_scale, weights, ks, ke, q_scale if self.q_scale else None, out.view)
        problem = api.check(args, self.clean)
        scored = int((ke.clamp(max=self.keys) - ks.clamp(0, self.keys)).clamp(min=0).sum())
        return Prepared(
            problem=problem,
            args=args,
            outputs={"logits": out.view},
            check=functools.partial(self._check, args, functools.cache(functools.partial(self._sample, args))),
            guards=[out],
            cost=cost(scored, self.rows, self.keys, self.heads, self.dim, self.clean),
        )

    def _values(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device=generator.device)
        if self.values == "ties":
            return values.sign()
        if self.values == "magnitudes":
            return values * torch.randn(shape[:-1], generator=generator, device=generator.device).exp()[..., None]
        return values

    def _check(self, args: api.Args, sample: Callable[[], Sample], variant: str) -> list[Comparison]:
        """The positions of every logit, then the values of some rows, which float64 is asked for once a case."""
        positions = self._positions(args)
        if not positions.ok:
            return [positions]
        rows, expected, same, cancelled = sample()
        by_torch = variant.startswith("torch") or not args.out.is_cuda
        extra = FLOAT32_ERROR if by_torch else MATRIX_UNIT_ERROR * cancelled
        return [close("logits", args.out[rows], expected, Budget.from_same_precision(same, expected, extra))]

    def _positions(self, args: api.Args) -> Comparison:
        """Whether -inf and NaN are where they must be, and numbers where they are not."""
        nan_of_rows_and_keys = self._nan_inside(args)
        block = max(1, BLOCK_LOGITS // max(1, self.keys))
        for first in range(0, self.rows, block):
            rows = slice(first, first + block)
            out, inside = args.out[rows], window(args.ks[rows], args.ke[rows], self.keys)
            expected = torch.where(inside, 0.0, self._outside)
            if nan_of_rows_and_keys is not None:
                of_rows, of_keys = nan_of_rows_and_keys
                expected.masked_fill_(inside & (of_rows[rows, None] | of_keys), float("nan"))
            got = torch.where(inside & out.isfinite(), 0.0, out)
            if not ((got == expected) | (got.isnan() & expected.isnan())).all():
                name = "positions" if block >= self.rows else f"positions in the rows from {first}"
                return close(name, got, expected, Budget(0, 0))
        return Comparison("positions", "")

    @property
    def _outside(self) -> float:
        """What lies outside the windows: -inf, or the poison that must not be written over."""
        return float("-inf" if self.clean else "nan")

    def _sample(self, args: api.Args) -> Sample:
        """Rows spread over the whole case, as many as the float64 reference can hold at once."""
        count = max(1, min(self.rows, SAMPLED_DOTS // max(1, self.heads * self.keys)))
        rows = torch.linspace(0, self.rows - 1, count, device=args.q.device).long().unique()
        q, k, k_scale, weights, ks, ke, q_scale, _ = args
        some = (q[rows], k, k_scale, weights[rows], ks[rows], ke[rows], None if q_scale is None else q_scale[rows])
        inside = window(ks[rows], ke[rows], self.keys)
        double, single = (reference(*some, dtype=dtype) for dtype in (torch.float64, torch.float32))
        cancelled = 1.0
        if self.rows * self.keys <= FEW_LOGITS:
            terms = reference(q, k, k_scale, weights.abs(), ks, ke, q_scale)
            largest, of_terms = (
                float(logits[inside].nan_to_num().abs().amax()) if inside.any() else 0.0 for logits in (double, terms)
            )
            cancelled = max(1.0, of_terms / largest) if largest > 0 else 1.0
        expected, same = (torch.where(inside, logits, self._outside) for logits in (double, single))
        return Sample(rows, expected, same, cancelled)

    def _nan_inside(self, args: api.Args) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Which rows and which keys hold a NaN; None where the values are not of that kind."""
        if self.values != "nan":
            return None
        return args.q.float().isnan().any(2).any(1), args.k.float().isnan().any(1)


def _suite() -> Iterator[MqaLogitsCase]:
    """Small, and odd in every way: the test suite runs these under Triton's interpreter too."""
    for heads, dim in ((8, 64), (16, 32), (32, 128), (64, 128), (128, 64), (64, 256), (8, 512)):
        yield MqaLogitsCase(17, 76, heads, dim, level=SUITE)
    for clean in (True, False):
        for kind in ("full", "cp", "misaligned", "empty", "past_end"):
            yield MqaLogitsCase(19, 131, 16, 64, clean, kind, level=SUITE)
    for values in ("negative", "ties", "magnitudes", "nan"):
        yield MqaLogitsCase(5, 70, 32, 64, True, "misaligned", values, level=SUITE)
    yield MqaLogitsCase(18, 90, 16, 64, False, "misaligned", "nan", level=SUITE)
    yield MqaLogitsCase(1, 1, 8, 32, level=SUITE)
    yield MqaLogitsCase(1, 300, 64, 128, False, "misaligned", level=SUITE)
    yield MqaLogitsCase(20, 16, 16, 64, windows="past_end", level=SUITE)
    yield MqaLogitsCase(18, 200, 32, 64, False, "packed", sequences=3, level=SUITE)
    yield MqaLogitsCase(18, 90, 16, 128, False, "misaligned", q_scale=True, strided=True, level=SUITE)
    yield MqaLogitsCase(18, 90, 64, 64, True, "misaligned", q_scale=True, strided=True, level=SUITE)
    yield MqaLogitsCase(7, 40, 16, 64, True, "misaligned", fnuz=True, level=SUITE)


SHAPES = (
    (1, 1), (1, 16), (1, 113), (17, 76), (61, 113), (61, 1024), (128, 1024), (1024, 1024), (1024, 1560), (64, 2048),
    (64, 8192), (256, 8192), (257, 8192), (128, 64), (1024, 1000),
)  # fmt: skip
WINDOWS = ("causal", "cp", "misaligned", "empty", "past_end")


def _verify() -> Iterator[MqaLogitsCase]:
    """Every shape with the model's heads, each with one kind of window; then sizes that are past a limit."""
    for i, (rows, keys) in enumerate(SHAPES):
        for heads in (32, 64):
            for clean in (True, False):
                yield MqaLogitsCase(rows, keys, heads, 128, clean, WINDOWS[i % 5], level=VERIFY)
    yield MqaLogitsCase(7 * 64, 7 * 200 + 7, 64, 128, False, "packed", sequences=7, level=VERIFY)
    yield MqaLogitsCase(1, 1_500_000, 64, 128, False, "misaligned", level=VERIFY)
    yield MqaLogitsCase(16, 131072, 64, 128, True, "causal", level=VERIFY)


def _full() -> Iterator[MqaLogitsCase]:
    """Every shape x heads x dimension x clean x windows, and more than 2^31 logits."""
    for rows, keys in SHAPES:
        for heads in api.NUM_HEADS:
            for dim in api.HEAD_DIMS:
                for clean in (True, False):
                    for kind in WINDOWS:
                        yield MqaLogitsCase(rows, keys, heads, dim, clean, kind, level=FULL)
    yield MqaLogitsCase(17000, 131072, 8, 64, False, "causal", level=FULL)


SQUARES = (1024, 2048, 4096, 8192, 16384)
FEW_ROWS = ((64, 8192), (16, 131072), (1, 131072))
LONG_CONTEXT = ((1024, 131072), (1365, 98304), (2048, 65536), (4096, 32768), (4096, 36864), (8192, 40960))
# Sequences, then the rows and the keys of each.
MODEL_SHAPES = ((1, 4096, 4096), (1, 8192, 8192), (2, 8192, 8192), (4, 8192, 8192), (1, 8192, 32768), (2, 8192, 32768))
# Sequences, then the rows and the keys of all: prompts, the last one shorter; chunks of rows after long prefixes; many
# short prompts; a few rows of each of many sequences.
PACKED = ((7, 20007, 20007), (7, 7 * 512, 7 * 20007), (64, 64 * 257, 64 * 257), (32, 32 * 4, 32 * 4099))
UNALIGNED = ((1023, 1023), (4095, 4095), (8191, 8191), (16383, 16383), (4095, 36863), (8191, 40959))


def _bench_case(rows: int, keys: int, heads: int, clean: bool = False, sequences: int = 1) -> MqaLogitsCase:
    kind = "packed" if sequences > 1 else "causal"
    return MqaLogitsCase(rows, keys, heads, 128, clean, kind, sequences=sequences, level=BENCH)


def _of_shapes(shapes: Iterable[tuple[int, int]]) -> list[MqaLogitsCase]:
    return [_bench_case(*shape, heads) for heads in (64, 32) for shape in shapes]


GROUPS = {
    "squares": _of_shapes([(n, n) for n in SQUARES]),
    "few-rows": _of_shapes(FEW_ROWS),
    "long-context": _of_shapes(LONG_CONTEXT),
    "model-shapes": [
        _bench_case(batch * rows, batch * keys, heads, clean, batch)
        for heads in (64, 32)
        for batch, rows, keys in MODEL_SHAPES
        for clean in (False, True)
    ],
    "packed-shapes": [
        _bench_case(rows, keys, heads, sequences=batch) for heads in (64, 32) for batch, rows, keys in PACKED
    ],
    "unaligned": _of_shapes(UNALIGNED),
}
"""What ``bench`` times, by the name of the option that selects it. A case may be in several groups."""


def _bench() -> Iterator[MqaLogitsCase]:
    for group in GROUPS.values():
        yield from group


def _unique(found: Iterator[MqaLogitsCase]) -> dict[str, MqaLogitsCase]:
    return {case.name: case for case in found}


# A name that two levels share keeps its last place: a model shape stays a bench case.
CASES = list({**_unique(_full()), **_unique(_verify()), **_unique(_suite()), **_unique(_bench())}.values())
