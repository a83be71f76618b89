"""One query row's heads per program, multiplied with a run of key tiles.

The product is ``Q . K^T`` with heads along M; nothing is shared between rows, so no row waits for another's window.

Wins: D = 512, which ``triton_staged`` leaves out.
Limit: every row reads its keys anew, the sum over heads crosses warps, and under 64 heads there is no wgmma.
Measured: 2026-11-30, H200, D128, clean off, cold L2, us (``triton_staged``): 1 x 128k H64 15.1 (12.4), H32 13.9 (11.8);
4 x 128k H64 36.0 (17.2); 16 x 128k H64 119 (48); 64 x 8192 H64 34.6 (15.9).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import triton
import triton.language as tl

from ....device import shared_bytes
from ....variants import Variant
from ..api import Args, Problem
from ..triton_parts import (
    WIDENED,
    e4m3_arguments,
    e4m3_way,
    fill_neg_inf,
    fp8_refusal,
    load_operand,
    load_weights,
    load_window,
    relu,
    relu_selects,
    tiles_per_program,
)

# Bytes of shared memory that queries and stages of head dimension 512 can take.
LARGE_SHARED_BYTES = 160 << 10


@dataclass(frozen=True)
class Config:
    """Keys per tile, warps, pipeline stages, and the least tiles a program walks."""

    block_kv: int = 128
    num_warps: int = 4
    num_stages: int = 3
    least_tiles: int = 4


def _default_config(problem: Problem) -> Config:
    is_wide, is_widened = problem.head_dim > 256, e4m3_way(problem) == WIDENED
    if problem.arch.startswith("gfx"):
        if is_wide and (is_widened or problem.arch == "gfx1250"):
            # A second stage spills.
            return Config(block_kv=32, num_warps=8, num_stages=1)
        # Compiled, not timed: WAVES_PER_SIMD fit, which 128 keys' shared memory or a third stage's registers prevent.
        many = problem.num_heads > 64
        return Config(32 if is_wide and not many else 64, 8 if is_wide or is_widened or many else 4, num_stages=2)
    if is_wide and (is_widened or shared_bytes(problem.arch) < LARGE_SHARED_BYTES):
        # float16 operands are twice as wide: anything else spills on sm_80. Nor do more keys of 512 fit on sm_89.
        return Config(block_kv=32, num_warps=8, num_stages=2)
    return Config(block_kv=64 if problem.head_dim > 128 else 128)


def _space(problem: Problem) -> Iterable[Config]:
    if problem.head_dim > 256 and shared_bytes(problem.arch) < LARGE_SHARED_BYTES:
        return
    if problem.arch.startswith("gfx"):
        if problem.head_dim <= 256:
            yield Config(block_kv=64, num_warps=8, num_stages=2)
            yield Config(block_kv=32, num_warps=8, num_stages=2)
        return
    yield Config(block_kv=64)
    yield Config(block_kv=64, num_stages=2, least_tiles=8)
    if problem.head_dim <= 128:
        yield Config(block_kv=256, num_warps=8)


@triton.jit
def _kernel(
    q, k, k_scale, weights, q_scale, ks, ke, out,
    num_keys, q_row, q_head, k_row, w_row, qs_row, out_row, keys_per_program,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_KV: tl.constexpr,
    CLEAN: tl.constexpr, HAS_Q_SCALE: tl.constexpr,
    RELU_SELECTS: tl.constexpr, WAY: tl.constexpr, FNUZ: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    # The last rows see the most keys under a causal window: they start first.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    row = index + tl.zeros((1,), tl.int32)
    is_row = row >= 0
    starts, ends = load_window(ks, ke, row, is_row, num_keys)
    start, end = tl.min(starts, 0), tl.max(ends, 0)
    first = tl.program_id(1) * keys_per_program
    last = tl.minimum(first + keys_per_program, num_keys)
    begin = tl.minimum(tl.maximum(start, first), last)
    stop = tl.maximum(tl.minimum(end, last), begin)
    if CLEAN:
        fill_neg_inf(out, row, is_row, out_row, first, begin, 1024)
        fill_neg_inf(out, row, is_row, out_row, stop, last, 1024)
    if begin < stop:
        at = index.to(tl.int64)
        head = tl.arange(0, PADDED_HEADS)
        is_head = head < HEADS
        queries = load_operand(q, at * q_row + head * q_head, is_head, DIM, False, WAY, FNUZ, INTERPRETED)
        weight = load_weights(weights, q_scale, at * w_row + head, at * qs_row + head, is_head, HAS_Q_SCALE, WAY)
        # Tiles start on a multiple of their width, so that neighbours never share a cache line of keys.
        for tile in range(begin // BLOCK_KV * BLOCK_KV, stop, BLOCK_KV):
            key = tile + tl.arange(0, BLOCK_KV)
            inside = (key >= begin) & (key < stop)
            keys = load_operand(k, key.to(tl.int64) * k_row, inside, DIM, True, WAY, FNUZ, INTERPRETED)
            scale = tl.load(k_scale + key, mask=inside, other=0.0)
            dots = tl.dot(queries, keys)  # [PADDED_HEADS, BLOCK_KV]
            logits = tl.sum(relu(dots, RELU_SELECTS) * weight[:, None], 0) * scale
            tl.store(out + at * out_row + key, logits, mask=inside)


def _launch(problem: Problem, config: Config, args: Args) -> None:
    weights, q_scale, out = args.weights, args.q_scale, args.out
    tiles = tiles_per_program(out.device, problem.num_rows, problem.num_keys, config.block_kv, config.least_tiles)
    keys_per_program = tiles * config.block_kv
    (q, k, *strides), e4m3 = e4m3_arguments(problem, args)
    _kernel[(problem.num_rows, triton.cdiv(problem.num_keys, keys_per_program))](
        q, k, args.k_scale, weights, weights if q_scale is None else q_scale, args.ks, args.ke, out,
        problem.num_keys, *strides, weights.stride(0),
        0 if q_scale is None else q_scale.stride(0), out.stride(0), keys_per_program,
        HEADS=problem.num_heads, PADDED_HEADS=max(16, problem.num_heads), DIM=problem.head_dim,
        BLOCK_KV=config.block_kv, CLEAN=problem.clean_logits, HAS_Q_SCALE=problem.has_q_scale,
        RELU_SELECTS=relu_selects(problem), **e4m3,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


VARIANT = Variant(
    launch=_launch,
    default_config=_default_config,
    refuses=fp8_refusal,
    space=_space,
    records_grad=False,
    rank=lambda problem: 60,
)
