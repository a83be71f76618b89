"""One program per token and head: load, divide, round, store.

Wins: on every GPU.
Limit: where a layout puts neighbours of a token's row far apart (chunked and plain values), every element is a store of
its own and the L2 cache has to gather them.
Measured: 2026-11-30, H200, 8 heads of 128, pages of 16, hot L2, us: 64 bf16 tokens into e4m3 2.4 (nhd, per-token
scales 2.5); 8192 tokens, nhd 42, chunked 111.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .... import fp8
from ....kernels.triton import INTERPRET, has_native_e4m3, narrow
from ....variants import Variant
from ..api import CAST, FACTOR, PER_HEAD, PER_TOKEN, Args, Problem

# Kinds of scale as the kernel knows them.
KINDS = {CAST: 0, FACTOR: 1, PER_HEAD: 2, PER_TOKEN: 3}

# What an element is stored as.
DTYPES = {fp8.FN: tl.uint8, fp8.FNUZ: tl.uint8, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Config:
    """Warps a program, and whether float32 becomes e4m3 in one instruction or by integer arithmetic, bit for bit."""

    num_warps: int
    convert: bool


def _default_config(problem: Problem) -> Config:
    # On AMD GPUs the instruction's rounding has not been checked.
    converts = problem.arch.startswith("sm_") and has_native_e4m3(problem.arch, fp8.FN)
    return Config(1 if problem.head_dim <= 128 else 2, converts and problem.cache_dtype == fp8.FN)


def _space(problem: Problem) -> Iterable[Config]:
    default = _default_config(problem)
    yield Config(4, default.convert)
    yield Config(default.num_warps, False)


@triton.jit
def _e4m3_bits(x, FNUZ: tl.constexpr):
    """uint8 patterns of float32 ``x``, which is NaN or within the format's range, rounded to nearest even."""
    BIAS: tl.constexpr = 8 if FNUZ else 7
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True)
    # The power of two at or below it. Adding 1.5 * 2^20 of those leaves float32 just e4m3's four significant bits.
    power = tl.maximum((bits & 0x7F800000).to(tl.float32, bitcast=True), SMALLEST_NORMAL)
    shift = power * (1.5 * 2.0**20)
    rounded = (magnitude + shift) - shift
    normal = (rounded.to(tl.int32, bitcast=True) >> 20) - ((127 - BIAS) << 3)
    subnormal = (rounded * (8.0 / SMALLEST_NORMAL)).to(tl.int32)
    code = tl.where(rounded < SMALLEST_NORMAL, subnormal, normal)
    negative = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    if FNUZ:
        # There is no negative zero: its pattern is the NaN.
        code = tl.where(code == 0, 0, code | negative)
        code = tl.where(x != x, 0x80, code)
    else:
        code = tl.where(x != x, 0x7F, code | negative)
    return code.to(tl.uint8)


@triton.jit
def _quantize(x, factor, scale, live, SCALING: tl.constexpr, LIMIT: tl.constexpr, FNUZ: tl.constexpr,
              CONVERT: tl.constexpr):  # fmt: skip
    """A head's row as e4m3 bit patterns; stores the scale that is computed on the way."""
    if SCALING == 1:
        divisor = factor
    elif SCALING == 2:
        divisor = tl.load(scale)
    else:
        magnitude = tl.abs(x)
        amax = tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), 0)
        divisor = tl.div_rn(amax, tl.full((), LIMIT, tl.float32))
        divisor = tl.where(divisor > 0, divisor, 1.0)
        tl.store(scale, divisor, mask=live)
    # torch's division: `/` may be off by two units in the last place on a GPU.
    quotient = tl.div_rn(x, tl.broadcast_to(divisor, x.shape))
    # tl.clamp would turn NaN into a limit.
    quotient = tl.where(quotient > LIMIT, LIMIT, tl.where(quotient < -LIMIT, -LIMIT, quotient))
    if CONVERT:
        patterns = quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        patterns = _e4m3_bits(quotient, FNUZ)
    return patterns


@triton.jit
def _to_cache(x, factor, scale, live, SCALING: tl.constexpr, LIMIT: tl.constexpr, FNUZ: tl.constexpr,
              CONVERT: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """A head's row as it is stored."""
    x = x.to(tl.float32)
    if SCALING == 0:
        stored = narrow(x, DTYPE, UPCAST)
    else:
        stored = _quantize(x, factor, scale, live, SCALING, LIMIT, FNUZ, CONVERT)
    return stored


@triton.jit
def _scatter(k, v, slots, keys, values, k_scale, v_scale, k_factor, v_factor, num_slots,
             k_t, k_h, v_t, v_h,
             keys_b, keys_h, keys_p, keys_c,
             values_b, values_h, values_c, values_p, values_d,
             k_scale_b, k_scale_h, k_scale_p, v_scale_b, v_scale_h, v_scale_p,
             D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
             KEY_CHUNK: tl.constexpr, VALUE_CHUNK: tl.constexpr,
             K_SCALING: tl.constexpr, V_SCALING: tl.constexpr, LIMIT: tl.constexpr, FNUZ: tl.constexpr,
             CONVERT: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + t).to(tl.int64)
    live = (slot >= 0) & (slot < num_slots)
    # A skipped token computes where slot 0 is, and stores nothing.
    slot = tl.where(live, slot, 0)
    block, position = slot // PAGE, slot % PAGE
    d = tl.arange(0, BLOCK_D)
    # Not (d < D) & live: of a block and a scalar, Triton 3.9's interpreter makes no mask.
    mask = d < tl.where(live, D, 0)

    row = tl.load(k + t * k_t + h * k_h + d, mask=mask, other=0.0)
    scale = k_scale + block * k_scale_b + h * k_scale_h + position * k_scale_p
    stored = _to_cache(row, k_factor, scale, live, K_SCALING, LIMIT, FNUZ, CONVERT, DTYPE, UPCAST)
    inside = (d // KEY_CHUNK).to(tl.int64) * keys_c + d % KEY_CHUNK
    tl.store(keys + block * keys_b + h * keys_h + position * keys_p + inside, stored, mask=mask)

    row = tl.load(v + t * v_t + h * v_h + d, mask=mask, other=0.0)
    scale = v_scale + block * v_scale_b + h * v_scale_h + position * v_scale_p
    stored = _to_cache(row, v_factor, scale, live, V_SCALING, LIMIT, FNUZ, CONVERT, DTYPE, UPCAST)
    place = values + block * values_b + h * values_h
    place += position // VALUE_CHUNK * values_c + position % VALUE_CHUNK * values_p
    tl.store(place + d.to(tl.int64) * values_d, stored, mask=mask)


def _launch(problem: Problem, config: Config, args: Args) -> None:
    keys, values = args.pages.keys, args.pages.values
    is_e4m3 = problem.cache_dtype in fp8.E4M3
    if is_e4m3:
        # Stored as bit patterns: Triton has no pointers to some e4m3 formats on some GPUs.
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    _scatter[problem.num_tokens, problem.num_kv_heads](
        args.k, args.v, args.slots, keys, values,
        # Where there is no scale tensor the kernel never looks at the one it gets.
        args.k if args.k_scale is None else args.k_scale,
        args.v if args.v_scale is None else args.v_scale,
        args.k_factor, args.v_factor, keys.shape[0] * problem.page,
        *args.k.stride()[:2], *args.v.stride()[:2],
        *keys.stride()[:4],
        *values.stride(),
        *_scale_strides(args.k_scale), *_scale_strides(args.v_scale),
        D=problem.head_dim, BLOCK_D=triton.next_power_of_2(problem.head_dim), PAGE=problem.page,
        KEY_CHUNK=keys.shape[4], VALUE_CHUNK=values.shape[3],
        K_SCALING=KINDS[problem.k_scaling], V_SCALING=KINDS[problem.v_scaling],
        LIMIT=fp8.max_value(problem.cache_dtype) if is_e4m3 else 0.0, FNUZ=problem.cache_dtype == fp8.FNUZ,
        CONVERT=config.convert and not INTERPRET, DTYPE=DTYPES[problem.cache_dtype], UPCAST=INTERPRET,
        num_warps=config.num_warps,
    )  # fmt: skip


def _scale_strides(scale: torch.Tensor | None) -> tuple[int, int, int]:
    """Strides over blocks, heads and positions."""
    if scale is None:
        return 0, 0, 0
    return (0, scale.stride(0), 0) if scale.dim() == 1 else (scale.stride(0), scale.stride(1), scale.stride(2))


VARIANT = Variant(
    launch=_launch,
    default_config=_default_config,
    space=_space,
    rank=lambda problem: 50,
)
