"""``write_kv_cache``: specification, checks, dispatch."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ... import checks, fp8, paging, torch_ops, tuning
from ...device import arch_of
from ...variants import AUTO, Family

FAMILY = Family("kv_cache", __package__)

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

CAST, FACTOR, PER_HEAD, PER_TOKEN = "cast", "factor", "per_head", "per_token"
"""Kinds of scale: none as the cache is 16 bits wide; one number; given ``[Hkv]``; computed ``[blocks, Hkv, page]``."""


@dataclass(frozen=True)
class Problem:
    """What variants decide on."""

    arch: str
    num_tokens: int
    num_kv_heads: int
    head_dim: int
    page: int
    layout: str
    dtype: torch.dtype
    cache_dtype: torch.dtype
    k_scaling: str = CAST
    v_scaling: str = CAST

    def bucket(self) -> tuning.Bucket:
        """What a tuned table tells apart: tokens by power of two, the rest as it is."""
        return tuning.bucket(self, classes=("num_tokens",))


class Args(NamedTuple):
    """The checked tensors of a call; ``pages`` views the caches token by token.

    A scale tensor is float32 ``[Hkv]`` (also for a single element, with stride 0) or ``[blocks, Hkv, page]``; the
    factors apply where there is none.
    """

    k: torch.Tensor
    v: torch.Tensor
    pages: paging.Pages
    slots: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    k_factor: float
    v_factor: float


def write_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    kv_layout: str = paging.AUTO,
    variant: str = AUTO,
) -> None:
    """Quantise new tokens and scatter them into the caches.

    ::

        key_cache[slot_mapping[t]][h]   = to_cache_dtype(k[t, h] / k_scale)
        value_cache[slot_mapping[t]][h] = to_cache_dtype(v[t, h] / v_scale)

    A slot is ``block * page + position in the page``. Tokens whose slot is negative, or past the last block, are
    skipped: nothing of them is written, and no other memory is touched. What two tokens of one call leave in the same
    slot is unspecified.

    FP8: quotients are rounded to nearest even in float32, then saturated at the format's largest value (448, or 240 for
    e4m3fnuz) and rounded to nearest even again. Infinities saturate, NaN stays NaN. ``stored * scale`` gives the value
    back. 16-bit caches take plain casts, in which values past float16's range become infinities.

    Args:
        k: bfloat16, float16 or float32 ``[T, Hkv, D]``, last dimension contiguous, outer strides free.
        v: like ``k``.
        key_cache: e4m3fn, e4m3fnuz, bfloat16 or float16, of one of the layouts of :mod:`kvscout.paging` with pages of
            16, 32, 64 or 128 tokens; outer strides free, so that pools which interleave keys, values and layers fit.
        value_cache: same type and layout.
        slot_mapping: int32 or int64 ``[T]``.
        k_scale: for FP8 caches only. None: 1. A positive number. A float32 tensor of one element, or ``[Hkv]``. Or
            float32 ``[blocks, Hkv, page]`` or ``[blocks, Hkv, page, 1]``, any strides, which is an **output**: each
            written token's largest finite magnitude over the format's largest value is stored at its place and used (1
            for a token of zeros).
        v_scale: likewise, and independently.
        kv_layout: "chunked", "plain_v", "nhd", "hnd", or "auto" to tell by the shapes.
        variant: a variant's name (see ``kvscout info``), or "auto": ``KVSCOUT_KV_CACHE_VARIANT`` or the best fit.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, stride or device, a 16-bit cache was given
            a scale, or "auto" cannot tell the layout; the message names the argument.
        UnsupportedProblem: no variant, or not the one asked for, serves this call.

    All tensors live on one device. Never synchronises with the host; capturable in a CUDA graph; a captured call
    follows slots that change on the device. Works under ``torch.compile(fullgraph=True)``.

    Source: the layouts are those of vLLM, FlashInfer and AITER; slots and their skipping follow vLLM.

    Example:
        >>> key_cache, value_cache = (torch.zeros(4, 16, 1, 8).to(torch.float8_e4m3fn) for _ in "kv")
        >>> k, v = torch.full((2, 1, 8), 3.0), torch.full((2, 1, 8), 1000.0)
        >>> write_kv_cache(k, v, key_cache, value_cache, torch.tensor([17, -1]), k_scale=0.5)
        >>> key_cache[1, 1, 0, :4].float().tolist(), value_cache[1, 1, 0, :4].float().tolist()
        ([6.0, 6.0, 6.0, 6.0], [448.0, 448.0, 448.0, 448.0])
    """
    k_scale, k_factor = _tensor_and_factor("k_scale", k_scale)
    v_scale, v_factor = _tensor_and_factor("v_scale", v_scale)
    call = torch_ops.traced("kv_cache") if torch.compiler.is_compiling() else run
    call(k, v, key_cache, value_cache, slot_mapping, k_scale, v_scale, k_factor, v_factor, kv_layout, variant)


def _tensor_and_factor(name: str, scale: torch.Tensor | float | None) -> tuple[torch.Tensor | None, float | None]:
    if scale is None or isinstance(scale, torch.Tensor):
        return scale, None
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"{name}: expected a torch.Tensor, a number or None, got {type(scale).__name__}")
    try:
        return None, float(scale)
    except OverflowError:
        # An int that no float holds: refused with the other numbers that are out of range.
        return None, math.inf


def run(
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_factor: float | None,
    v_factor: float | None,
    kv_layout: str,
    variant: str,
) -> None:
    """Check, choose, launch: fill the slots, and the per-token scales."""
    problem, args = check(k, v, key_cache, value_cache, slot_mapping, k_scale, v_scale, k_factor, v_factor, kv_layout)
    choice = FAMILY.choose(problem, variant)
    if k.numel() and key_cache.numel():
        choice.launch(problem, args)


def check(
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_factor: float | None = None,
    v_factor: float | None = None,
    kv_layout: str = paging.AUTO,
) -> tuple[Problem, Args]:
    """Check every argument of a call, describe it, and bring caches and scales into the form that variants take."""
    checks.tensor("k", k, ("T", "Hkv", "D"), INPUT_DTYPES)
    checks.tensor("v", v, k.shape, k.dtype, k.device)
    checks.last_dim_contiguous("k", k)
    checks.last_dim_contiguous("v", v)
    num_tokens, num_kv_heads, head_dim = k.shape
    pages = paging.pages(key_cache, value_cache, num_kv_heads, kv_layout)
    if key_cache.device != k.device:
        raise ValueError(f"key_cache: expected on {k.device}, like the other tensors, got {key_cache.device}")
    if pages.head_dim != head_dim:
        raise ValueError(f"k: expected the head dimension of the caches, {pages.head_dim}, got {head_dim}")
    checks.tensor("slot_mapping", slot_mapping, (num_tokens,), (torch.int32, torch.int64), k.device)
    checks.last_dim_contiguous("slot_mapping", slot_mapping)
    k_scaling, k_scale, k_factor = _scaling("k_scale", k_scale, k_factor, pages)
    v_scaling, v_scale, v_factor = _scaling("v_scale", v_scale, v_factor, pages)
    problem = Problem(
        arch=arch_of(k.device),
        num_tokens=num_tokens,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page=pages.page,
        layout=pages.layout,
        dtype=k.dtype,
        cache_dtype=pages.dtype,
        k_scaling=k_scaling,
        v_scaling=v_scaling,
    )
    return problem, Args(k, v, pages, slot_mapping, k_scale, v_scale, k_factor, v_factor)


def _scaling(
    name: str, scale: torch.Tensor | None, factor: float | None, pages: paging.Pages
) -> tuple[str, torch.Tensor | None, float]:
    """The kind of a scale, its tensor in the shape that variants take, and its factor."""
    if pages.dtype not in fp8.E4M3:
        if scale is not None or factor is not None:
            raise ValueError(f"{name}: expected None with caches of {pages.dtype}, which take no scales")
        return CAST, None, 1.0
    if scale is None:
        factor = 1.0 if factor is None else factor
        if not 0 < _float32(factor) < math.inf:
            raise ValueError(f"{name}: expected a positive number that float32 can hold, got {factor}")
        return FACTOR, None, factor
    blocks, num_kv_heads, page = pages.keys.shape[:3]
    checks.tensor(name, scale, scale.shape, torch.float32, pages.keys.device)
    if scale.dim() < 2 and scale.numel() == 1:
        return PER_HEAD, scale.reshape(1).expand(num_kv_heads), 1.0
    if scale.shape == (num_kv_heads,):
        return PER_HEAD, scale, 1.0
    if scale.shape in ((blocks, num_kv_heads, page), (blocks, num_kv_heads, page, 1)):
        return PER_TOKEN, scale.squeeze(3) if scale.dim() == 4 else scale, 1.0
    raise ValueError(
        f"{name}: expected shape [1], [{num_kv_heads}] (per head) or [{blocks}, {num_kv_heads}, {page}] (per token), "
        f"got {list(scale.shape)}"
    )


def _float32(number: float) -> float:
    """The number as a kernel gets it: 0 or infinity where float32 cannot hold it."""
    try:
        return float(struct.unpack("f", struct.pack("f", number))[0])
    except OverflowError:
        return math.inf
