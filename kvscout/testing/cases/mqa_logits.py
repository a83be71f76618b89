"""Cases of ``fp8_mqa_logits``."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ... import fp8
from ...ops.mqa_logits import api
from ...ops.mqa_logits.cost import cost
from ...ops.mqa_logits.variants.torch_reference import reference, window
from ..case import BENCH, FULL, SUITE, VERIFY, Guarded, Prepared
from ..compare import Budget, Comparison, close
from ..windows import windows

# What e4m3 products summed in a matrix unit's narrow accumulator may be off by, relative to the largest logit:
# 1.3e-4 to 3.2e-4 was measured on an H200 (wgmma keeps about 14 bits); the field's gate is 1e-3.
MATRIX_UNIT_ERROR = 1e-3
FLOAT32_ERROR = 2e-6

# A NaN of e4m3fn.
NAN_BITS = 0x7F

# Rows of a large case that are compared with float64; its -inf and NaN positions are compared in every row.
SAMPLED_DOTS = 1 << 27


@dataclass(frozen=True)
class MqaLogitsCase:
    """One problem and the kind of its windows and values.

    Attributes:
        windows: a kind of :func:`kvscout.testing.windows.windows`; "packed" has ``sequences`` of them.
        values: "normal", "negative" (no dot product is positive), "ties" (few distinct values), "magnitudes", "nan"
            (one query row and every seventh key hold a NaN).
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
            check=lambda variant: [self._compare(args, variant)],
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

    def _compare(self, args: api.Args, variant: str) -> Comparison:
        inside = window(args.ks, args.ke, self.keys)
        outside = float("-inf" if self.clean else "nan")
        positions = torch.where(inside, self._nan_inside(args), outside)
        found = close("positions", torch.where(inside & args.out.isfinite(), 0.0, args.out), positions, Budget(0, 0))
        if not found.ok:
            return found
        # Rows spread over the whole case, as many as the float64 reference can hold at once.
        count = max(1, min(self.rows, SAMPLED_DOTS // max(1, self.heads * self.keys)))
        rows = torch.linspace(0, self.rows - 1, count, device=inside.device).long().unique()
        q, k, k_scale, weights, ks, ke, q_scale, out = args
        some = (q[rows], k, k_scale, weights[rows], ks[rows], ke[rows], None if q_scale is None else q_scale[rows])
        expected = torch.where(inside[rows], reference(*some), outside)
        extra = FLOAT32_ERROR if variant.startswith("torch") or not out.is_cuda else MATRIX_UNIT_ERROR
        same = torch.where(inside[rows], reference(*some, dtype=torch.float32), outside)
        return close("logits", out[rows], expected, Budget.from_same_precision(same, expected, extra))

    def _nan_inside(self, args: api.Args) -> torch.Tensor:
        """``[S, N]``: NaN where a row or a key holds one, 0 elsewhere."""
        if self.values != "nan":
            return torch.zeros_like(args.out)
        of_rows = args.q.float().isnan().any(2).any(1)
        return torch.where(of_rows[:, None] | args.k.float().isnan().any(1), float("nan"), 0.0)


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


MODEL_SHAPES = ((1, 4096, 4096), (1, 8192, 8192), (2, 8192, 8192), (4, 8192, 8192), (1, 8192, 32768), (2, 8192, 32768))
LONG_CONTEXT = ((1024, 131072), (1365, 98304), (2048, 65536), (4096, 32768), (4096, 36864), (8192, 40960))
SQUARES = (1024, 2048, 4096, 8192, 16384)
FEW_ROWS = ((64, 8192), (16, 131072), (1, 131072))


def _bench() -> Iterator[MqaLogitsCase]:
    """Squares, few rows, the model shapes (block-diagonal) and long cached prefixes."""
    for heads in (64, 32):
        for rows, keys in (*((n, n) for n in SQUARES), *FEW_ROWS, *LONG_CONTEXT):
            yield MqaLogitsCase(rows, keys, heads, 128, False, level=BENCH)
        for batch, rows, keys in MODEL_SHAPES:
            for clean in (False, True):
                kind = "packed" if batch > 1 else "causal"
                shape = (batch * rows, batch * keys, heads, 128, clean, kind)
                yield MqaLogitsCase(*shape, sequences=batch, level=BENCH)


def _unique(found: Iterator[MqaLogitsCase]) -> dict[str, MqaLogitsCase]:
    return {case.name: case for case in found}


# A name that two levels share keeps its last place: a model shape stays a bench case.
CASES = list({**_unique(_full()), **_unique(_verify()), **_unique(_suite()), **_unique(_bench())}.values())
