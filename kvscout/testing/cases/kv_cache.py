"""Cases of ``write_kv_cache``."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ... import fp8, paging
from ...ops.kv_cache import api
from ...ops.kv_cache.cost import cost
from ...paging import CHUNKED, HND, NHD, PLAIN_V
from ..case import BENCH, FULL, GUARD, SUITE, VERIFY, Prepared, check_fields
from ..compare import Comparison, bits, equal
from ..paged_inputs import check_dim

# Pools of up to so many elements are compared as a whole, gaps and guards included; of larger ones the caches alone.
WHOLE_POOL = 1 << 28

# Elements from block to block where a block holds the pages of many layers: past 2^32 in all after 1024 blocks.
LAYERS_STRIDE = (1 << 22) + 256

INF, NAN = float("inf"), float("nan")

KINDS = ("none", "number", "one", "head", "token", "token4")
"""Of scales."""


@dataclass(frozen=True)
class KvCacheCase:
    """One problem and the kind of its scales, slots and values.

    Attributes:
        k_scale: "none", "number", "one" (a tensor of one element), "head", "token" or "token4" (``[..., page, 1]``,
            with gaps); the same for ``v_scale``.
        slots: "all" (distinct, in any order), "skips" (about half of them negative or past the end), "skipped" (all).
        values: "normal", or "peculiar" (rows of zeros, NaN, infinities, subnormal numbers, values past the range).
        pool: "separate", "interleaved" (a block's keys, then its values), or "layers" (blocks 4 MB apart).
    """

    tokens: int
    heads: int
    dim: int
    page: int = 16
    layout: str = HND
    cache_dtype: torch.dtype = fp8.FN
    dtype: torch.dtype = torch.bfloat16
    k_scale: str = "none"
    v_scale: str = "none"
    slots: str = "skips"
    values: str = "normal"
    pool: str = "separate"
    strided: bool = False
    int32_slots: bool = False
    blocks: int = 0
    level: str = VERIFY
    op: str = "kv_cache"

    ACCEPTED: ClassVar[Mapping[str, Sequence[Any]]] = {
        "page": paging.PAGE_SIZES,
        "layout": paging.LAYOUTS,
        "cache_dtype": paging.CACHE_DTYPES,
        "dtype": api.INPUT_DTYPES,
        "k_scale": KINDS,
        "v_scale": KINDS,
        "slots": ("all", "skips", "skipped"),
        "values": ("normal", "peculiar"),
        "pool": ("separate", "interleaved", "layers"),
    }
    LEAST: ClassVar[Mapping[str, int]] = {**dict.fromkeys(("tokens", "heads", "dim"), 1), "blocks": 0}

    def __post_init__(self) -> None:
        check_fields(self)
        check_dim(self.dim, self.layout, self.cache_dtype)
        for name in ("k_scale", "v_scale"):
            if self.cache_dtype not in fp8.E4M3 and getattr(self, name) != "none":
                raise ValueError(f"{name}: expected none with a 16-bit cache, got {getattr(self, name)}")

    @property
    def name(self) -> str:
        """Shape, then whatever is not the default."""
        words = [f"{self.tokens}x{self.heads}x{self.dim}", f"p{self.page}", self.layout]
        words += [str(dtype).removeprefix("torch.").removeprefix("float8_") for dtype in (self.dtype, self.cache_dtype)]
        words += [f"k_{self.k_scale}"] * (self.k_scale != "none") + [f"v_{self.v_scale}"] * (self.v_scale != "none")
        words += [self.slots, *(word for word in ("strided", "int32_slots") if getattr(self, word))]
        words += [self.values] * (self.values != "normal") + [self.pool] * (self.pool != "separate")
        return "-".join(words + [f"b{self.blocks}"] * (self.blocks > 0))

    def __str__(self) -> str:
        return self.name

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache: as given, or a few more than the tokens need."""
        return self.blocks or -(-self.tokens // self.page) + 2

    def prepare(self, device: torch.device, seed: int = 0) -> Prepared:
        """Draw tokens, slots and the former contents of the caches."""
        generator = torch.Generator(device).manual_seed(zlib.crc32(self.name.encode()) + seed)
        k, v = self._values(generator), self._values(generator)
        slots = self._slots(generator)
        pool, expected = Pool(self, device), Pool(self, device)
        k_scale, v_scale = (self._scale(kind, generator) for kind in (self.k_scale, self.v_scale))
        (k_tensor, k_factor), (v_tensor, v_factor) = (
            (x, None) if isinstance(x, torch.Tensor) else (None, x) for x in (k_scale, v_scale)
        )
        problem, args = api.check(
            k, v, pool.keys, pool.values, slots, k_tensor, v_tensor, k_factor, v_factor, self.layout
        )
        computed = {
            name: tensor
            for name, tensor, kind in (("k_scale", k_tensor, self.k_scale), ("v_scale", v_tensor, self.v_scale))
            if tensor is not None and kind.startswith("token")
        }
        former = [fill(part, generator) for part in pool.parts] + [scale.clone() for scale in computed.values()]

        def restore() -> None:
            for part, contents in zip([*pool.parts, *computed.values()], former, strict=True):
                part.copy_(contents)

        def check(variant: str) -> list[Comparison]:
            for part, contents in zip(expected.parts, former, strict=False):
                part.copy_(contents)
            scales = [contents.clone() for contents in former[len(pool.parts) :]]
            waiting = iter(scales)
            places = slots.tolist()
            for x, scale, kind, cache, is_key in (
                (k, k_scale, self.k_scale, expected.keys, True),
                (v, v_scale, self.v_scale, expected.values, False),
            ):
                stored, token_scale = oracle(x.cpu(), scale, self.cache_dtype)
                scatter(cache, self.layout, is_key, self.page, places, stored.to(device))
                if kind.startswith("token"):
                    scatter_scales(next(waiting), self.page, places, token_scale.to(device))
            names = ["pool"] if len(pool.parts) == 1 else ["key_cache", "value_cache"]
            found = [same(*three) for three in zip(names, pool.parts, expected.parts, strict=True)]
            return found + [same(*three) for three in zip(computed, computed.values(), scales, strict=True)]

        written = int(((slots >= 0) & (slots < self.num_blocks * self.page)).sum())
        sizes = self.dtype.itemsize, self.cache_dtype.itemsize
        return Prepared(
            problem=problem,
            args=args,
            outputs={"key_cache": pool.keys, "value_cache": pool.values, **computed},
            check=check,
            cost=cost(written, self.heads, self.dim, *sizes, len(computed)),
            restore=restore,
        )

    def _values(self, generator: torch.Generator) -> torch.Tensor:
        """``[tokens, heads, dim]``; strided ones as a slice of wider rows, as a fused projection gives them."""
        shape = (self.tokens, self.heads + 3 * self.strided, self.dim)
        x = torch.randn(shape, generator=generator, device=generator.device)
        if self.values == "peculiar":
            x *= 10 ** (12 * torch.rand(shape, generator=generator, device=generator.device) - 6)
            x[::4] *= 1e-38
            x[1::5] = 0
            special = torch.tensor([NAN, INF, -INF, -0.0, 448.0, 464.0, -465.0, 2.0**-10], device=x.device)
            chosen = torch.randint(4 * len(special), shape, generator=generator, device=x.device)
            x = torch.where(chosen < len(special), special[chosen % len(special)], x)
            x[2::5] = 0
        return x.to(self.dtype)[:, : self.heads]

    def _slots(self, generator: torch.Generator) -> torch.Tensor:
        size = self.num_blocks * self.page
        slots = torch.randperm(size, generator=generator, device=generator.device)[: self.tokens]
        # The ends of the cache are where a wrong offset would leave it.
        ends = torch.tensor([size - 1, 0], device=slots.device)[: self.tokens]
        slots = torch.cat([ends, slots[~torch.isin(slots, ends)]])[: self.tokens]
        slots = torch.cat([slots, slots.new_full((self.tokens - len(slots),), -1)])
        if self.slots != "all":
            limits = torch.iinfo(torch.int32 if self.int32_slots else torch.int64)
            nowhere = torch.tensor([-1, -2, -size, limits.min, size, size + 1, limits.max], device=slots.device)
            skip = torch.arange(self.tokens, device=slots.device) % 2 == 0
            others = nowhere[torch.arange(self.tokens, device=slots.device) % len(nowhere)]
            slots = others if self.slots == "skipped" else torch.where(skip, others, slots)
        return slots.int() if self.int32_slots else slots

    def _scale(self, kind: str, generator: torch.Generator) -> torch.Tensor | float | None:
        device = generator.device
        if kind == "none":
            return None
        if kind == "number":
            return 0.3
        shape = {"one": (1,), "head": (self.heads,)}.get(kind, (self.num_blocks, self.heads, self.page))
        if kind == "token4":
            return (torch.rand(*shape, 3, generator=generator, device=device) + 0.1)[..., 1:2]
        return torch.rand(shape, generator=generator, device=device) + 0.1


class Pool:
    """One buffer that holds a key cache and a value cache, with guard elements around them.

    Attributes:
        keys: the key cache, a view.
        values: the value cache, a view.
        parts: what can be compared: the whole buffer, or the two caches where it is too large.
    """

    def __init__(self, case: KvCacheCase, device: torch.device) -> None:
        sizes = (case.layout, case.num_blocks, case.heads, case.page, case.dim, case.cache_dtype)
        shapes = [cache.shape for cache in paging.new_caches(*sizes, device="meta")]
        block = case.heads * case.page * case.dim
        stride, key_start, value_start = {
            "separate": (block, GUARD, GUARD + case.num_blocks * block + GUARD),
            "interleaved": (2 * block, GUARD, GUARD + block),
            "layers": (LAYERS_STRIDE, GUARD, GUARD + block),
        }[case.pool]
        size = value_start + (case.num_blocks - 1) * stride + block + GUARD
        buffer = torch.empty(size, dtype=case.cache_dtype, device=device)
        self.keys, self.values = (
            buffer.as_strided(shape, (stride, *_compact(shape[1:])), start)
            for shape, start in zip(shapes, (key_start, value_start), strict=True)
        )
        self.parts = [buffer] if size <= WHOLE_POOL else [self.keys, self.values]


def _compact(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def fill(part: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random contents for a part of a pool, and none of them NaN, so that a NaN found there was written there."""
    shape = (*part.shape, part.element_size())
    patterns = torch.randint(64, shape, dtype=torch.uint8, generator=generator, device=part.device)
    return patterns.view(part.dtype).squeeze(-1)


def same(name: str, got: torch.Tensor, expected: torch.Tensor) -> Comparison:
    """Compare bit for bit, but let any NaN stand for another."""
    both_nan = got.float().isnan() & expected.float().isnan()
    return equal(name, torch.where(both_nan, bits(expected), bits(got)).view(expected.dtype), expected)


def oracle(
    x: torch.Tensor, scale: torch.Tensor | float | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What must be stored for ``x`` ``[T, Hkv, D]``, and the scale of each token and head."""
    if dtype not in fp8.E4M3:
        return x.to(dtype), torch.ones(x.shape[:2])
    largest = torch.finfo(dtype).max
    if not isinstance(scale, torch.Tensor):
        per_token = torch.full(x.shape[:2], 1.0 if scale is None else scale)
    elif scale.dim() == 1:
        per_token = scale.cpu().expand(x.shape[:2])
    else:
        amax = torch.where(x.isfinite(), x, 0).double().abs().amax(2)
        per_token = (amax / largest).float()
        per_token[per_token == 0] = 1.0
    # A quotient of two float32 that is rounded to float64 and then to float32 is rounded as if once.
    return e4m3((x.double() / per_token.double()[..., None]).float(), dtype), per_token


def e4m3(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The format's number nearest to each of ``x``, found among all of them; the even one of two that are as near."""
    negative, unsigned = x.signbit(), x.abs().double()
    numbers = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    numbers = numbers[numbers.isfinite()]
    middles = (numbers[1:] + numbers[:-1]) / 2
    code = torch.searchsorted(middles, unsigned.nan_to_num(0.0))
    tie = unsigned == middles[code.clamp(max=len(middles) - 1)]
    code += (tie & (code % 2 == 1)).long()
    signed_zero = dtype == fp8.FN
    code += 0x80 * (negative & (signed_zero | (code > 0))).long()
    code = torch.where(x.isnan(), 0x7F if signed_zero else 0x80, code)
    return code.to(torch.uint8).view(dtype)


def scatter(
    cache: torch.Tensor, layout: str, is_key: bool, page: int, slots: Sequence[int], tokens: torch.Tensor
) -> None:
    """Store ``[T, Hkv, D]`` in a cache one token at a time, each layout spelt out."""
    x = 16 // cache.element_size()
    for slot, token in zip(slots, tokens, strict=True):
        if not 0 <= slot < cache.shape[0] * page:
            continue
        block, p = divmod(slot, page)
        if layout == NHD:
            cache[block, p] = token
        elif layout == HND:
            cache[block, :, p] = token
        elif is_key:
            cache[block, :, :, p] = token.unflatten(1, (-1, x))
        elif layout == CHUNKED:
            cache[block, :, p // x, :, p % x] = token
        else:
            cache[block, :, :, p] = token


def scatter_scales(scale: torch.Tensor, page: int, slots: Sequence[int], computed: torch.Tensor) -> None:
    """Store ``[T, Hkv]`` scales in ``[blocks, Hkv, page]`` or ``[blocks, Hkv, page, 1]``."""
    for slot, heads in zip(slots, computed, strict=True):
        if 0 <= slot < scale.shape[0] * page:
            scale[slot // page, :, slot % page] = heads if scale.dim() == 3 else heads[:, None]


LAYOUTS = (CHUNKED, PLAIN_V, NHD, HND)
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def _suite() -> Iterator[KvCacheCase]:
    """Small, and odd in every way: the test suite runs these under Triton's interpreter too."""
    for i, layout in enumerate(LAYOUTS):
        for j, cache_dtype in enumerate(paging.CACHE_DTYPES):
            of_fp8 = cache_dtype in fp8.E4M3
            kinds = (KINDS[(i + 2 * j) % 6], KINDS[(i + 2 * j + 3) % 6]) if of_fp8 else ("none", "none")
            page, dtype = (16, 32)[(i + j) % 2], (BF16, FP16, FP32)[(i + j) % 3]
            yield KvCacheCase(5, 2, 32, page, layout, cache_dtype, dtype, *kinds, values="peculiar", level=SUITE)
    for i, kind in enumerate(KINDS):
        layout, other = LAYOUTS[i % 4], KINDS[(i + 1) % 6]
        yield KvCacheCase(5, 3, 48, 16, layout, k_scale=kind, v_scale=other, pool="interleaved", level=SUITE)
        yield KvCacheCase(
            4, 2, 64, 16, layout, fp8.FN, (BF16, FP16, FP32)[i % 3], kind, kind, "all", "peculiar", level=SUITE
        )
    for dtype in (BF16, FP16, FP32):
        for cache_dtype in (FP16, BF16):
            yield KvCacheCase(4, 2, 40, 16, CHUNKED, cache_dtype, dtype, values="peculiar", strided=True, level=SUITE)
    for layout in LAYOUTS:
        shape = (5, 2, 32, 16, layout, fp8.FN, BF16, "token", "token4")
        yield KvCacheCase(*shape, slots="skipped", level=SUITE)
        yield KvCacheCase(*shape, strided=True, int32_slots=True, level=SUITE)
    yield KvCacheCase(1, 1, 64, 128, CHUNKED, slots="all", int32_slots=True, level=SUITE)
    yield KvCacheCase(16, 1, 16, 16, PLAIN_V, BF16, slots="all", blocks=1, level=SUITE)
    yield KvCacheCase(3, 1, 256, 64, NHD, slots="skips", level=SUITE)


def _verify() -> Iterator[KvCacheCase]:
    """A prefill of a model's size in every layout, every head dimension, and offsets past a limit."""
    for i, layout in enumerate(LAYOUTS):
        for j, cache_dtype in enumerate((fp8.FN, BF16)):
            kinds = (KINDS[i], KINDS[i + 2]) if cache_dtype == fp8.FN else ("none", "none")
            page = paging.PAGE_SIZES[(i + j) % 4]
            yield KvCacheCase(4096, 8, 128, page, layout, cache_dtype, BF16, *kinds)
            yield KvCacheCase(4096, 8, 128, page, layout, cache_dtype, FP32, *kinds, slots="all", values="peculiar")
        for dim in (64, 192, 256, 512):
            yield KvCacheCase(100, 3, dim, 64, layout, k_scale="token", v_scale="head", pool="interleaved")
        # Block ids past 65,535, then offsets past 2^32.
        yield KvCacheCase(300, 1, 64, 16, layout, v_scale="token", blocks=70_000)
        yield KvCacheCase(300, 2, 64, 64, layout, k_scale="token", pool="layers", blocks=1200)
    yield KvCacheCase(300, 2, 64, 64, HND, FP16, int32_slots=True, pool="layers", blocks=1200)


def _full() -> Iterator[KvCacheCase]:
    """Every layout x page x cache type x type x kind of scale."""
    for layout in LAYOUTS:
        for page in paging.PAGE_SIZES:
            for dtype in api.INPUT_DTYPES:
                for cache_dtype in paging.CACHE_DTYPES:
                    for kind in KINDS if cache_dtype in fp8.E4M3 else ("none",):
                        shape = (200, 4, 128, page, layout, cache_dtype, dtype, kind, kind)
                        yield KvCacheCase(*shape, values="peculiar", strided=True, level=FULL)


def _bench() -> Iterator[KvCacheCase]:
    """A decode step and a prefill."""
    for tokens in (64, 8192):
        for layout in LAYOUTS:
            for cache_dtype, kind in ((fp8.FN, "one"), (fp8.FN, "token"), (BF16, "none")):
                shape = (tokens, 8, 128, 16, layout, cache_dtype, BF16, kind, kind)
                yield KvCacheCase(*shape, slots="all", blocks=8192, level=BENCH)


def _unique(found: Iterator[KvCacheCase]) -> dict[str, KvCacheCase]:
    return {case.name: case for case in found}


# A name that two levels share keeps its last place.
CASES = list({**_unique(_full()), **_unique(_verify()), **_unique(_suite()), **_unique(_bench())}.values())
