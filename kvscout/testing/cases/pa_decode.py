"""Cases of ``pa_decode``."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ... import checks, fp8, paging
from ...ops.pa_decode import api
from ...ops.pa_decode.cost import cost
from ...ops.pa_decode.variants.torch_reference import reference, visible
from ...ops.pa_plan.api import plan_pa_decode
from ...ops.pa_plan.plan import TILES
from ...roofline import Cost
from .. import paged_inputs
from ..case import BENCH, FULL, SUITE, VERIFY, Guarded, Prepared, check_fields
from ..compare import Budget, Comparison, bits, close, equal

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": fp8.FN, "fnuz": fp8.FNUZ}

# Bound on the relative error in the Frobenius norm, every row scaled to the same size. Probabilities and a result that
# are rounded to bfloat16 give 1.2e-3 to 2.3e-3; queries or probabilities of 8 bits would give 3e-2.
FROBENIUS = 3e-3

# What rounding probabilities to 16 bits may add to the largest element's error: as much as one rounding to bfloat16.
PROBABILITY_ERROR = 2.0**-8
FLOAT32_ERROR = 2e-6

# Logits are sums of exact products in float32 or a matrix unit's accumulator; lse adds an exponential and a logarithm.
LSE_ERROR = 1e-4
# Hopper's matrix unit adds up products of e4m3 with 14 bits, relative to the largest of them and of their sums: logits
# are off by up to 3.2e-3, or 1.3e-3 of themselves, and weights by as much.
LSE_ERROR_OF_FP8_SUMS = 4e-3
OUTPUT_ERROR_OF_FP8_SUMS = 2e-3
# A first token that decides and whose own value is 0 has a logit of 13, and what it leaves to others is off by as much
# as that logit.
OUTPUT_ERROR_BESIDE_A_PEAK = 2e-2

# Sinks at the ends of what a logit can be, among ordinary ones.
SINKS = (0.0, float("-inf"), 0.5, 1000.0, float("inf"), -1000.0, 3e38, -3e38, 2.0)
WILD_SCALE = 1e9

# The first elements of every query of a "peaked" case.
PEAK_QUERY = 8.0
PEAK_ELEMENTS = 8
PEAKS = 4

# The value scale of the first tokens of a "contrast" case.
CONTRAST_SCALE = 1e6

# The largest logit of a "large" case, which times log2(e) would be infinite.
LARGE_LOGIT = 2.9e38

# Elements of gathered keys that are compared with float64, and those held at a time.
SAMPLED_ELEMENTS = {"cuda": 1 << 30, "cpu": 1 << 26}
CHUNK_ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 24}

DEFAULT_SPLITS = (132, 132)
"""Those of a plan that is not told otherwise on an H200, less what the KV heads cannot share equally."""

LEAST_LENGTH = -(2**31)
"""Negative lengths are empty sequences."""


@dataclass(frozen=True)
class PaDecodeCase:
    """One batch, its caches, and what is odd about them.

    Attributes:
        lengths: tokens of each sequence; one that is not positive is empty.
        group: query heads per KV head.
        kv_heads: KV heads.
        dim: head dimension D.
        page: tokens per page.
        layout: of the caches (:mod:`kvscout.paging`).
        cache: what keys and values are stored as.
        dtype: of queries and outputs.
        query_length: query tokens per sequence.
        scales: "none", "factor" (a number), "scalar", "head" or "token"; "token+head" is for keys and for values.
        sinks: "" (none), "ends" (:data:`SINKS`), "plain" (random, in the query's dtype).
        window: tokens that a query sees, its own included; 0 and -1 are all.
        causal: whether a query sees no token after its own.
        splits: the plan's max_partitions and workgroup_budget.
        odd: any of "magnitudes" (of tokens, by their scales if they have some), "shared" (prefix pages), "strided"
            (queries, outputs, tables, interleaved caches), "misaligned" (scratch), "large" (logits near 3e38), "tiny"
            and "huge" (queries, made up for by softmax_scale), "wild" (per-token scales of 1e9 before the window),
            "sparse" (pages drawn from one pool), "no_lse", "peaked" (the first token has 0.9 of all weight, and the
            value 0, as a model's own sinks do), "peaks" (so have the first four together), "contrast" (the first token
            has a value scale of 1e6, and so little weight that it counts about as much as all others).
        num_blocks: blocks in the pool, if more than are needed.
        tile: tokens per tile of the plan; 0 is what the plan takes by itself.
        label: a name to replace the one that is made of all this.
    """

    lengths: tuple[int, ...]
    group: int = 8
    kv_heads: int = 2
    dim: int = 128
    page: int = 16
    layout: str = "chunked"
    cache: str = "e4m3"
    dtype: str = "bf16"
    query_length: int = 1
    scales: str = "none"
    sinks: str = ""
    window: int = 0
    causal: bool = True
    splits: tuple[int, int] = DEFAULT_SPLITS
    odd: tuple[str, ...] = ()
    num_blocks: int = 0
    tile: int = 0
    label: str = ""
    level: str = VERIFY
    op: str = "pa_decode"

    ACCEPTED: ClassVar[Mapping[str, Sequence[Any]]] = {
        "dim": api.HEAD_DIMS,
        "page": paging.PAGE_SIZES,
        "layout": paging.LAYOUTS,
        "cache": tuple(DTYPES),
        "dtype": ("bf16", "fp16"),
        "scales": ("none", "factor", "scalar", "head", "token", "token+head"),
        "sinks": ("", "ends", "plain"),
        "odd": (
            "magnitudes", "shared", "strided", "misaligned", "large", "tiny", "huge", "wild", "sparse", "no_lse",
            "peaked", "peaks", "contrast",
        ),
        "tile": (0, *TILES),
    }  # fmt: skip
    LEAST: ClassVar[Mapping[str, int]] = {
        **dict.fromkeys(("group", "kv_heads", "query_length", "splits"), 1),
        "lengths": LEAST_LENGTH,
        "window": -1,
        "num_blocks": 0,
    }

    def __post_init__(self) -> None:
        check_fields(self)
        checks.integer("group", self.group, 1, api.MAX_GROUP)
        checks.integer("lengths: number of sequences", len(self.lengths), 1)
        longest = max(self.lengths)
        checks.integer("lengths", longest, LEAST_LENGTH, api.INT32_MAX)
        if not self.label.isprintable():
            raise ValueError(f"label: expected characters that can be printed, got {self.label!r}")
        if self.scales != "none" and DTYPES[self.cache] not in fp8.E4M3:
            raise ValueError(f"scales: expected none with a cache of {self.cache}, got {self.scales}")
        if "wild" in self.odd and not self.scales.startswith("token"):
            raise ValueError(f"odd: expected wild with scales per token alone, got scales {self.scales}")
        if "sparse" in self.odd and self.num_blocks * self.page < longest:
            raise ValueError(
                f"num_blocks: expected a pool of {-(-longest // self.page)} or more for sparse rows of {longest} "
                f"tokens, got {self.num_blocks}"
            )

    @property
    def name(self) -> str:
        """The label, or the shapes and then whatever is not the default."""
        if self.label:
            return self.label
        few = len(self.lengths) <= 5
        batch = "+".join(map(str, self.lengths)) if few else f"{len(self.lengths)}x{max(self.lengths)}"
        shape = f"g{self.group}x{self.kv_heads}-d{self.dim}-{self.dtype}x{self.cache}-{self.layout}{self.page}"
        flags = [f"ql{self.query_length}"] * (self.query_length > 1) + [self.scales] * (self.scales != "none")
        flags += [f"w{self.window}"] * (self.window != 0) + ["both_ways"] * (not self.causal)
        flags += [f"sinks_{self.sinks}"] * (self.sinks != "")
        flags += [f"split{self.splits[0]}of{self.splits[1]}"] * (self.splits != DEFAULT_SPLITS)
        flags += [*self.odd, *[f"pool{self.num_blocks}"] * (self.num_blocks > 0)]
        flags += [f"tile{self.tile}"] * (self.tile > 0)
        return "-".join((batch, shape, *flags))

    def __str__(self) -> str:
        return self.name

    def prepare(self, device: torch.device, seed: int = 0) -> Prepared:
        """Draw the inputs, plan, and poison outputs and scratch."""
        generator = torch.Generator(device).manual_seed(zlib.crc32(self.name.encode()) + seed)
        strided = "strided" in self.odd
        found = paged_inputs.tables(
            self.lengths, self.page, generator, num_blocks=self.num_blocks,
            shared="shared" in self.odd, overlapping="sparse" in self.odd, strided=strided,
        )  # fmt: skip
        key_cache, value_cache = paged_inputs.caches(
            self.layout, found, self.kv_heads, self.page, self.dim, DTYPES[self.cache], generator,
            magnitudes="magnitudes" in self.odd and not self.scales.startswith("token"), interleaved=strided,
        )  # fmt: skip
        rows, heads, gap = len(self.lengths) * self.query_length, self.group * self.kv_heads, 3 * strided
        query = torch.randn(rows, heads + gap, self.dim + gap, generator=generator, device=device)
        query_scale = 2.0 ** (40 * ("huge" in self.odd) - 40 * ("tiny" in self.odd))
        if "peaked" in self.odd:
            query[..., :PEAK_ELEMENTS] = PEAK_QUERY
            self._peak(found, key_cache, value_cache, math.log(0.9 / 0.1), zero=True)
        if "peaks" in self.odd:
            query[..., :PEAK_ELEMENTS] = PEAK_QUERY
            self._peak(found, key_cache, value_cache, math.log(0.9 / 0.1) - math.log(PEAKS), zero=True, count=PEAKS)
        if "contrast" in self.odd:
            query[..., :PEAK_ELEMENTS] = PEAK_QUERY
            self._peak(found, key_cache, value_cache, -math.log(CONTRAST_SCALE), zero=False)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        key_kind, _, value_kind = self.scales.partition("+")
        key_scale = self._scale(key_kind, found, generator, 1.0)
        value_scale = self._scale(value_kind or key_kind, found, generator, CONTRAST_SCALE)
        max_partitions, budget = self.splits
        if self.splits == DEFAULT_SPLITS:
            budget = budget // self.kv_heads * self.kv_heads or budget
        plan = plan_pa_decode(
            lengths, self.kv_heads, max_partitions=max_partitions, workgroup_budget=budget,
            sliding_window=self.window, query_length=self.query_length, tile=self.tile or None,
        )  # fmt: skip
        output = Guarded((rows, heads, self.dim), DTYPES[self.dtype], device, row_gap=gap)
        lse = Guarded((rows, heads), torch.float32, device, row_gap=gap)
        call = api.Call(
            output=output.view,
            query=(query * query_scale).to(DTYPES[self.dtype])[:, gap:, : self.dim],
            key_cache=key_cache,
            value_cache=value_cache,
            context_lengths=lengths,
            block_tables=found.block_tables,
            softmax_scale=self.dim**-0.5 / query_scale,
            query_length=self.query_length,
            work_info=plan.work_info,
            reduce_info=plan.reduce_info,
            arrival_counters=plan.arrival_counters,
            plan_numbers=api.plan_numbers(plan),
            key_scale=key_scale if isinstance(key_scale, Tensor) else None,
            value_scale=value_scale if isinstance(value_scale, Tensor) else None,
            key_factor=key_scale if isinstance(key_scale, float) else None,
            value_factor=value_scale if isinstance(value_scale, float) else None,
            sinks=self._sinks(generator),
            sliding_window=self.window,
            causal=self.causal,
            lse=None if "no_lse" in self.odd else lse.view,
            kv_layout=self.layout,
        )
        scratch = _Scratch(plan.capacity, self.kv_heads, "misaligned" in self.odd, device)
        problem, args = api.check(call, scratch)
        if "large" in self.odd:
            plain = args._replace(softmax_scale=1.0, sinks=None)
            peak = self._reference(problem, plain, range(len(self.lengths)))[1].max()
            args = args._replace(softmax_scale=LARGE_LOGIT / float(peak))
        plan_tensors = {name: getattr(plan, name) for name in ("work_info", "reduce_info", "arrival_counters")}
        before = {name: tensor.clone() for name, tensor in plan_tensors.items()}
        expected = functools.cache(functools.partial(self._expected, problem, args))

        def check(variant: str) -> list[Comparison]:
            found = self._compare(problem, args, expected(), variant)
            return [*found, *(equal(name, tensor, before[name]) for name, tensor in plan_tensors.items())]

        args.scratch()
        return Prepared(
            problem=problem,
            args=args,
            outputs={"output": output.view} | ({"lse": lse.view} if args.lse is not None else {}),
            check=check,
            guards=[output, lse, *scratch.guards],
            cost=self._cost(problem, found),
        )

    def _peak(
        self, found: paged_inputs.Tables, key_cache: Tensor, value_cache: Tensor, log_odds: float, *, zero: bool,
        count: int = 1,
    ) -> None:  # fmt: skip
        """Let the first elements of queries and keys, which are 0 but for each sequence's first tokens, decide.

        ``log_odds`` are those of a first token's weight against all others'; ``zero``: its value is 0.
        """
        kv = paging.pages(key_cache, value_cache, self.kv_heads, self.layout)
        # The others' logits are about normal, so that each weighs e^0.5 on average.
        logit = math.log(max(self.lengths)) + 0.5 + log_odds
        key = torch.tensor(logit * self.dim**0.5 / (PEAK_ELEMENTS * PEAK_QUERY)).to(kv.dtype)
        blocks = self._first_blocks(found)
        # Views of bit patterns: torch cannot write to all of e4m3.
        keys, values = (cache.view(bits(key).dtype) for cache in (kv.keys, kv.values))
        keys[..., 0, :PEAK_ELEMENTS] = 0
        keys[blocks, :, :count, 0, :PEAK_ELEMENTS] = bits(key).item()
        if zero:
            values[blocks, :, 0, :count] = 0

    def _first_blocks(self, found: paged_inputs.Tables) -> Tensor:
        return found.block_tables[torch.tensor(self.lengths) > 0][:, 0].long()

    def _scale(
        self, kind: str, found: paged_inputs.Tables, generator: torch.Generator, contrast: float
    ) -> Tensor | float | None:
        """A scale of a kind; ``contrast`` is that of first tokens in a case of that name."""
        draw = functools.partial(torch.rand, generator=generator, device=generator.device)
        if kind == "factor":
            return 0.75
        if kind == "scalar":
            return draw(1) + 0.5
        if kind == "head":
            return draw(self.kv_heads) + 0.5
        if kind != "token":
            return None
        scales = paged_inputs.token_scales(found, self.kv_heads, self.page, generator, "magnitudes" in self.odd)
        if "wild" in self.odd:
            low = visible(torch.tensor(self.lengths), self.query_length, self.window, self.causal)[0][:, 0]
            for sequence, first in enumerate(low.tolist()):
                token = torch.arange(first, device=scales.device)
                block = found.block_tables[sequence].long()[token // self.page]
                scales[block, :, token % self.page] = WILD_SCALE
        if "contrast" in self.odd:
            scales[self._first_blocks(found), :, 0] = contrast
        return scales[..., None] if "strided" in self.odd else scales

    def _sinks(self, generator: torch.Generator) -> Tensor | None:
        heads, device = self.group * self.kv_heads, generator.device
        if self.sinks == "plain":
            return torch.randn(heads, generator=generator, device=device).to(DTYPES[self.dtype])
        if self.sinks == "ends":
            return torch.tensor([SINKS[head % len(SINKS)] for head in range(heads)], device=device)
        return None

    def _cost(self, problem: api.Problem, found: paged_inputs.Tables) -> Cost:
        low, high = visible(torch.tensor(self.lengths), self.query_length, problem.window, self.causal)
        pairs = int((high - low).clamp(min=0).sum())
        tokens = int((high.amax(1) - low.amin(1)).clamp(min=0).sum())
        return cost(problem, pairs, min(tokens, int(found.fill.sum())))

    def _reference(
        self, problem: api.Problem, args: api.Args, sequences: Sequence[int], dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, Tensor]:
        """Output and lse of some sequences."""
        chosen = torch.tensor(sequences, device=args.query.device)
        columns = -(-max(max(self.lengths[i] for i in sequences), 0) // self.page)
        return reference(
            args.query[self._rows(sequences)], args.kv, args.context_lengths[chosen],
            args.block_tables[chosen][:, :columns], args.softmax_scale, self.query_length,
            key_scale=args.key_factor if args.key_scale is None else args.key_scale,
            value_scale=args.value_factor if args.value_scale is None else args.value_scale,
            sinks=args.sinks, window=problem.window, causal=self.causal, dtype=dtype,
        )  # fmt: skip

    def _rows(self, sequences: Sequence[int]) -> list[int]:
        return [sequence * self.query_length + query for sequence in sequences for query in range(self.query_length)]

    def _expected(self, problem: api.Problem, args: api.Args) -> Expected:
        """Sequences spread over the whole batch, as many as float64 can be afforded for."""
        device, batch = args.output.device.type, len(self.lengths)
        per_sequence = self.kv_heads * self.dim * max(*self.lengths, 1)
        count = max(1, min(batch, SAMPLED_ELEMENTS[device] // per_sequence))
        sample = [i * (batch - 1) // max(count - 1, 1) for i in range(count)]
        step = max(1, CHUNK_ELEMENTS[device] // per_sequence)
        chunks = [sample[start : start + step] for start in range(0, count, step)]
        output, lse = _concatenate([self._reference(problem, args, chunk) for chunk in chunks])
        same, _ = _concatenate([self._reference(problem, args, chunk, torch.float32) for chunk in chunks])
        return Expected(self._rows(sample), output, lse, same)

    def _compare(self, problem: api.Problem, args: api.Args, of: Expected, variant: str) -> list[Comparison]:
        """The rows that float64 was asked for; finiteness of every row."""
        rows, expected, expected_lse, same = of.rows, of.output, of.lse, of.same
        got, zero = args.output[rows], (expected == 0).all(-1)
        size = expected.norm(dim=-1, keepdim=True) / math.sqrt(self.dim)
        size = torch.where(zero[..., None], 1, size)
        extra = FLOAT32_ERROR if variant.startswith("torch") else PROBABILITY_ERROR
        fp8_sums = variant.startswith("cute") and problem.cache_dtype in fp8.E4M3
        if fp8_sums:
            extra += OUTPUT_ERROR_OF_FP8_SUMS
        most = Budget.from_same_precision(same.to(got.dtype) / size, expected / size, extra).max_rel
        # One minus the cosine is half of the squared relative error, where that is at right angles to the result.
        budget = Budget(most, FROBENIUS**2 / 2)
        if fp8_sums and {"peaked", "peaks"} & {*self.odd}:
            length = expected.norm(dim=-1, keepdim=True) / got.double().norm(dim=-1, keepdim=True)
            found = [close("direction of output", got * length / size, expected / size, budget)]
            budget = Budget(OUTPUT_ERROR_BESIDE_A_PEAK, OUTPUT_ERROR_BESIDE_A_PEAK**2 / 2)
        else:
            found = []
        found += [
            close("output", got / size, expected / size, budget),
            equal("output where it is zero", got[zero] != 0, torch.zeros_like(got[zero], dtype=torch.bool)),
            equal("output is finite", args.output.isfinite(), torch.ones_like(args.output, dtype=torch.bool)),
        ]
        if args.lse is not None:
            finite = torch.where(expected_lse.isfinite(), expected_lse, 0).abs().clamp(min=1)
            error = LSE_ERROR_OF_FP8_SUMS if fp8_sums else LSE_ERROR
            budget = Budget(error, error**2)
            found.append(close("lse", args.lse[rows] / finite, expected_lse / finite, budget))
        return found


@dataclass(frozen=True)
class Expected:
    """Some rows of a case: their output and lse in float64, and the output in float32."""

    rows: list[int]
    output: Tensor
    lse: Tensor
    same: Tensor


class _Scratch:
    """Poisoned memory for partial results; ``misaligned`` puts it on no more than an element's boundary."""

    def __init__(self, capacity: int, kv_heads: int, misaligned: bool, device: torch.device) -> None:
        self.guards: list[Guarded] = []
        self._made: tuple[Tensor, Tensor] | None = None
        self._lead = (capacity, kv_heads)
        self._skip = int(misaligned)
        self._device = device

    def __call__(self, rows_per_head: int, head_dim: int) -> tuple[Tensor, Tensor]:
        if self._made is None:
            shapes = [(*self._lead, rows_per_head, size) for size in (head_dim, 2)]
            self.guards += [Guarded((math.prod(shape) + self._skip,), torch.float32, self._device) for shape in shapes]
            out, stats = (g.view[self._skip :].view(shape) for g, shape in zip(self.guards, shapes, strict=True))
            self._made = out, stats
        return self._made


def _concatenate(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    outputs, lses = zip(*parts, strict=True)
    return torch.cat(outputs), torch.cat(lses)


def _suite() -> Iterator[PaDecodeCase]:
    """Small, and every feature once: the test suite runs these under Triton's interpreter too."""

    def case(*lengths: int, **more: Any) -> PaDecodeCase:
        return PaDecodeCase(lengths, **{"group": 5, "dim": 64, "splits": (3, 16), "level": SUITE, **more})

    for layout, page, cache, scales in (
        ("chunked", 16, "e4m3", "head"),
        ("plain_v", 32, "e4m3", "token"),
        ("nhd", 16, "e4m3", "scalar"),
        ("hnd", 64, "e4m3", "factor"),
        ("chunked", 128, "bf16", "none"),
        ("plain_v", 16, "bf16", "none"),
        ("nhd", 128, "bf16", "none"),
        ("hnd", 32, "bf16", "none"),
        ("chunked", 64, "fnuz", "token+head"),
    ):
        yield case(0, 1, 77, 530, layout=layout, page=page, cache=cache, scales=scales)
    yield case(33, 257, cache="fp16", dtype="fp16", odd=("strided", "misaligned"), sinks="plain")
    yield case(33, 257, cache="fp16", dtype="bf16", layout="nhd")
    yield case(256, 0, 259, layout="hnd", scales="token", odd=("strided", "magnitudes"), dtype="fp16")
    yield case(300, 290, 40, odd=("shared", "magnitudes"), scales="head", query_length=2)
    yield case(0, -3, 0, scales="head", sinks="ends")
    yield case(3, 600, sinks="ends", query_length=4, scales="token")
    yield case(2, 290, sinks="ends", window=17, cache="bf16", page=32)
    yield case(40, odd=("large",), sinks="ends", cache="bf16", layout="nhd")
    for odd in ("tiny", "huge"):
        yield case(40, 257, odd=(odd,), scales="head")
    for i, window in enumerate((1, 100, 256, 257, -1, 2**31 - 1, 2**40)):
        shape = {"group": (1, 4, 24)[i % 3], "kv_heads": (1, 2, 1)[i % 3], "query_length": (1, 5, 3)[i % 3]}
        yield case(2, 530, window=window, causal=i % 2 == 0, page=(16, 64)[i % 2], **shape)
    yield case(7, 520, window=60, scales="token", odd=("wild",), splits=(1, 1))
    yield case(2, 130, causal=False, query_length=4, layout="plain_v", cache="bf16", sinks="plain")
    yield case(2, 130, causal=False, query_length=4, window=2)
    for dim in (128, 192, 256, 512):
        yield case(49, dim=dim, kv_heads=1, scales="head", layout=("chunked", "nhd")[dim % 3 % 2])
    yield case(290, group=64, kv_heads=1, splits=(2, 2), odd=("no_lse",))
    for cache in ("e4m3", "bf16"):
        yield case(2100, 40, odd=("peaked",), cache=cache, splits=(1, 1))
        yield case(530, 40, odd=("peaks",), cache=cache, splits=(1, 1))
    yield case(700, 260, odd=("contrast",), scales="token", splits=(1, 1))
    # The last tile is past what the first query sees, which has rows of its own.
    yield case(257, group=64, kv_heads=1, query_length=3, splits=(2, 2))
    yield case(129, group=64, kv_heads=1, query_length=3, splits=(2, 2), tile=128)
    for i, (layout, page) in enumerate((("chunked", 16), ("plain_v", 32), ("nhd", 64), ("hnd", 128))):
        lengths = (0, 1, 127, 128, 129, 257, 640)
        yield case(*lengths, layout=layout, page=page, cache=("e4m3", "bf16")[i % 2], splits=(5, 40), tile=128)
    for i, window in enumerate((1, 127, 128, 129, 300)):
        yield case(2, 0, 530, window=window, query_length=(1, 5, 3)[i % 3], causal=i % 2 == 0, page=64, tile=128)
    # On Hopper, steps of as many tokens as a tile has.
    yield case(900, 130, kv_heads=1, dim=128, page=128, splits=(8, 32), sinks="ends", tile=128)
    yield case(0, 1100, -3, splits=(3, 1), scales="token", tile=128)


EDGES = (0, 1, 2, 3, 4, *range(255, 260), *range(511, 516), *range(2303, 2308), 4099)
SMALL_EDGES = (0, 1, *range(126, 131), *range(255, 259), *range(382, 387), 1151, 1152, 1153, 4099)
WINDOWS = (1, 255, 256, 257, 509, 1024, 4095, 4096, 6000, 8192, 8193, 2**31 - 1, 2**31, 2**40, -1)
LAYOUTS = ("chunked", "plain_v", "nhd", "hnd")
PAGES = (16, 32, 64, 128)
SCALES = PaDecodeCase.ACCEPTED["scales"]
GQA_GROUPS = (1, 4, 7, 8, *range(9, 18), 32, 64)
FEW_EDGES = (0, 1, 129, 2303, 0, 515, 4099)
"""As many as clusters of eight merge of two KV heads."""
SPLITS = ((1, 5), (2, 33), (3, 64), (4, 512), (8, 264), (16, 264), (64, 512), (256, 512))


def _verify() -> Iterator[PaDecodeCase]:
    """Each number at its ends and past a tile, the others ordinary."""
    for i, layout in enumerate(LAYOUTS):
        for j, page in enumerate(PAGES):
            scales = SCALES[(i + j) % len(SCALES)]
            odd = ("magnitudes",) * (j % 2) + ("strided",) * (i == j)
            yield PaDecodeCase(EDGES, page=page, layout=layout, scales=scales, odd=odd)
            yield PaDecodeCase(EDGES, page=page, layout=layout, cache="bf16", odd=odd)
            yield PaDecodeCase(EDGES, page=page, layout=layout, cache="fp16", dtype="fp16", query_length=2)
    for i, scales in enumerate(SCALES):
        yield PaDecodeCase(EDGES, page=PAGES[i % 4], scales=scales, odd=("magnitudes",), sinks="ends", query_length=3)
        yield PaDecodeCase(EDGES, page=64, layout=LAYOUTS[i % 4], scales=scales, window=300, odd=("shared",))
    for i, window in enumerate(WINDOWS):
        lengths = (*EDGES, 9000, 12345)
        yield PaDecodeCase(lengths, window=window, query_length=1 + i % 8, page=PAGES[i % 4], scales="head")
        yield PaDecodeCase(lengths, window=window, query_length=8 - i % 8, causal=False, cache="bf16", sinks="ends")
        yield PaDecodeCase(lengths, window=window, layout="nhd", page=64, scales="token", odd=("wild",), sinks="plain")
    for query_length in range(1, 9):
        yield PaDecodeCase(EDGES, query_length=query_length, group=16, kv_heads=1, page=128, sinks="ends")
        yield PaDecodeCase(EDGES, query_length=query_length, group=6, cache="bf16", layout="hnd", causal=False)
    for i, group in enumerate(GQA_GROUPS):
        for cache in ("e4m3", "bf16"):
            yield PaDecodeCase(EDGES, group=group, kv_heads=(1, 2, 4, 8, 16)[i % 5], cache=cache, page=PAGES[i % 4])
    for dim in api.HEAD_DIMS:
        for i, layout in enumerate(LAYOUTS):
            for cache in ("e4m3", "bf16"):
                yield PaDecodeCase(
                    EDGES, dim=dim, layout=layout, cache=cache, page=PAGES[i], query_length=1 + 3 * (i % 2)
                )
    for splits in SPLITS:
        yield PaDecodeCase(EDGES, splits=splits, scales="head", sinks="ends", odd=("misaligned",))
        yield PaDecodeCase((0, 5000, 0, 300, 0, 0), splits=splits, cache="bf16", page=128, query_length=4)
    yield PaDecodeCase(tuple(range(0, 4000, 20)), scales="token", odd=("magnitudes",))
    # Few partitions of a few sequences: clusters may merge them.
    for i, partitions in enumerate(range(2, 9)):
        for j, cache in enumerate(("e4m3", "bf16", "fp16")):
            few: dict[str, Any] = {
                "lengths": FEW_EDGES, "cache": cache, "dtype": "fp16" if cache == "fp16" else "bf16",
                "page": PAGES[(i + 2 * j) % 4], "sinks": ("ends", "plain")[j % 2],
                "splits": (partitions, 2 * len(FEW_EDGES) * partitions),
            }  # fmt: skip
            shape: dict[str, Any] = {"dim": (64, 128, 256)[(i + j) % 3], "group": (16, 5, 1)[i % 3]}
            yield PaDecodeCase(**few, **shape, layout=LAYOUTS[(i + j) % 4])
            scales = SCALES[i % len(SCALES)] if cache == "e4m3" else "none"
            window = (0, 300, 1)[i % 3]
            yield PaDecodeCase(**few, group=4, query_length=1 + i % 4, causal=j != 1, window=window, scales=scales)
    yield PaDecodeCase((2048,) * 66, group=16, kv_heads=1, splits=(2, 132))
    yield PaDecodeCase((2048,) * 67, group=16, kv_heads=1, splits=(2, 134))
    # Many sequences that are not split, and what a few become that are alone.
    yield PaDecodeCase((9000, *(0,) * 140), group=16, kv_heads=1)
    yield PaDecodeCase((300,) * 90 + (9000,), cache="bf16", page=64, query_length=3, sinks="ends")
    yield PaDecodeCase((200_000, 5), page=128, sinks="ends", query_length=2)
    yield PaDecodeCase((200_000, 5), page=16, cache="bf16", window=8193)
    yield PaDecodeCase((4099, 600), odd=("large",), sinks="ends", cache="bf16", page=64)
    yield PaDecodeCase((4099, 600), odd=("large",), scales="token", dtype="fp16")
    for layout, cache in (("chunked", "bf16"), ("nhd", "bf16"), ("nhd", "e4m3"), ("plain_v", "e4m3")):
        yield PaDecodeCase((32768,) * 3, layout=layout, cache=cache, page=128, splits=(1, 1), odd=("peaked",))
    for page in PAGES:
        for peak in ("peaked", "peaks"):
            yield PaDecodeCase((32768,) * 3, page=page, splits=(1, 1), odd=(peak,))
            yield PaDecodeCase((24, 2048, 9000), 16, 1, page=page, query_length=4, splits=(1, 1), odd=(peak,))
            # Of their last step few tokens are seen.
            yield PaDecodeCase((6, 129, 131, 259), 16, 1, page=page, splits=(1, 1), odd=(peak,))
        yield PaDecodeCase((32768, 900), page=page, splits=(1, 1), scales="token", odd=("contrast",))
    yield PaDecodeCase((32768,) * 3, cache="fp16", dtype="fp16", page=64, splits=(1, 1), odd=("peaked",))
    yield PaDecodeCase(EDGES, odd=("tiny",), query_length=2)
    yield PaDecodeCase(EDGES, odd=("huge",), page=128, layout="nhd")
    for window in (1, 2, 5):
        yield PaDecodeCase(EDGES, window=window, causal=False, query_length=8, page=64, scales="head")
    yield PaDecodeCase((0,) * 5, scales="token", sinks="ends", query_length=2)
    yield PaDecodeCase(EDGES, cache="fnuz", scales="head", page=32)
    for i, layout in enumerate(LAYOUTS):
        for j, page in enumerate(PAGES):
            scales, window = SCALES[(i + j) % len(SCALES)], (0, 1, 127, 128, 129, 600)[(i + j) % 6]
            common: dict[str, Any] = {"layout": layout, "page": page, "query_length": 1 + j, "tile": 128}
            yield PaDecodeCase(SMALL_EDGES, scales=scales, window=window, sinks="ends", **common)
            yield PaDecodeCase(SMALL_EDGES, cache="bf16", window=window, causal=False, **common)
    for i, dim in enumerate(api.HEAD_DIMS):
        for cache in ("e4m3", "bf16"):
            yield PaDecodeCase(SMALL_EDGES, dim=dim, cache=cache, page=PAGES[i % 4], splits=SPLITS[i], tile=128)
    yield PaDecodeCase((8192,), group=16, kv_heads=1, page=128, tile=128)
    yield PaDecodeCase((2048,) * 4, group=16, kv_heads=1, tile=128)
    yield PaDecodeCase((200_000, 5), page=128, sinks="ends", query_length=2, tile=128)
    # Block ids past 16 bits, and pools past 4 GB.
    yield PaDecodeCase(EDGES, kv_heads=1, dim=64, scales="token", num_blocks=70_000)
    yield PaDecodeCase(EDGES, kv_heads=1, page=128, num_blocks=280_000)
    yield PaDecodeCase(EDGES, kv_heads=1, page=128, layout="nhd", cache="bf16", num_blocks=140_000)


def _full() -> Iterator[PaDecodeCase]:
    """Layouts, pages, element types and scales, each crossed with dimensions, query lengths and windows."""
    kinds = [("e4m3", "bf16", scales) for scales in SCALES] + [("bf16", "bf16", "none"), ("fp16", "fp16", "none")]
    for layout in LAYOUTS:
        for page in PAGES:
            for cache, dtype, scales in kinds:
                for dim in api.HEAD_DIMS:
                    for query_length, window, causal in ((1, 0, True), (4, 257, True), (3, 100, False)):
                        yield PaDecodeCase(
                            EDGES, layout=layout, page=page, cache=cache, dtype=dtype, scales=scales, dim=dim,
                            query_length=query_length, window=window, causal=causal, sinks="ends", level=FULL,
                        )  # fmt: skip


DENSE = (("bs1-8k", 1, 8192), ("bs4-8k", 4, 8192), ("bs8-8k", 8, 8192), ("bs32-8k", 32, 8192), ("bs4-32k", 4, 32768),
         ("bs3-220k", 3, 220_000))  # fmt: skip
VERIFY_MTP = (("3x4-8k", 3, 8192), ("3x4-32k", 3, 32768), ("8x4-32k", 8, 32768), ("3x4-220k", 3, 220_000))
SPARSE = (("4", 4, 2048), ("64", 64, 2048))
SPARSE_PARTITIONS = (8, 2)
"""As many as clusters of blocks merge at once."""
SELECTED = 2048
PREFILL = (1024, 4096, 8192)


def _group(kind: str, shapes: Sequence[tuple[str, int, int]], *odd: str, **more: Any) -> list[PaDecodeCase]:
    """Cases of sequences of one length."""
    return _of_lengths(kind, [(label, (length,) * batch) for label, batch, length in shapes], *odd, **more)


def _of_lengths(kind: str, shapes: Sequence[tuple[str, tuple[int, ...]]], *odd: str, **more: Any) -> list[PaDecodeCase]:
    """Cases of one KV head, 16 query heads and D 128, with FP8 and with bfloat16 caches."""
    common = {"group": 16, "kv_heads": 1, "odd": (*odd, "no_lse"), "level": BENCH, **more}
    return [
        PaDecodeCase(lengths, cache=cache, label=f"{kind}-{label}-{short}", **common)
        for cache, short in (("e4m3", "fp8"), ("bf16", "bf16"))
        for label, lengths in shapes
    ]


# The i-th token of a prompt selects among the i that it sees.
SPARSE_PREFILL = [(f"prefill-{rows}", tuple(min(i + 1, SELECTED) for i in range(rows))) for rows in PREFILL]

GROUPS = {
    "decode": _group("dense", DENSE, page=128),
    "verify-mtp": _group("verify", VERIFY_MTP, page=128, query_length=4),
    "sparse": [
        case
        for (label, batch, length), partitions in zip(SPARSE, SPARSE_PARTITIONS, strict=True)
        for case in _group("sparse", [(label, batch, length)], "sparse", num_blocks=4096, splits=(partitions, 132))
    ],
    "sparse-prefill": _of_lengths("sparse", SPARSE_PREFILL, "sparse", num_blocks=4096),
}
"""What ``bench`` times, by the name of the option that selects it."""


def _bench() -> Iterator[PaDecodeCase]:
    for group in GROUPS.values():
        yield from group


def _unique(found: Iterator[PaDecodeCase]) -> dict[str, PaDecodeCase]:
    return {case.name: case for case in found}


CASES = list({**_unique(_full()), **_unique(_verify()), **_unique(_suite()), **_unique(_bench())}.values())
