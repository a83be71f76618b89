"""Several query rows share each staged key tile; a wave multiplies its keys by the heads of 1, 2 or 4 rows.

The product is ``K . Q^T`` with keys along M, so that the sum over heads runs along N: inside a thread and its quad.
The key tile is the pipelined operand; the queries of the block are loaded once.

Wins: on every shape that was timed with D <= 256, one row included.
Limit: relu and multiply-add on every dot product, 2 to 3 operations for each 2 * D of the matrix unit.
Measured: 2026-11-30, H200, D128, clean off, causal, cold L2, us: 8192^2 H64 636 (871 TFLOPS), H32 346 (802); 1024 x
128k H64 2514 (878), H32 1390; 4096^2 H64 171; 1024^2 H64 20.4; 64 x 8192 H64 16.7; 16 x 128k 50; 1 x 128k 13.6. Under
a load of a minute, which the power cap slows: single bursts of the large shapes took 7% less.
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

MAX_HEAD_DIM = 256

# Columns of one product: more than 256 would need more accumulator registers than a thread has.
MAX_COLUMNS = 256

# Bytes of queries that a block keeps in shared memory: with two stages of 64 keys it then fits into 64 KB.
MAX_QUERY_BYTES = 32 << 10


@dataclass(frozen=True)
class Config:
    """Tile shape: query rows per wave, keys per tile, warps, pipeline stages, and the least tiles a program walks."""

    rows_per_wave: int
    block_kv: int = 64
    num_warps: int = 4
    num_stages: int = 3
    least_tiles: int = 8


def _refuses(problem: Problem) -> str | None:
    if problem.head_dim > MAX_HEAD_DIM:
        return f"stages keys of head dimension up to {MAX_HEAD_DIM}, this is {problem.head_dim}"
    return fp8_refusal(problem)


def _default_config(problem: Problem) -> Config:
    # 128 columns a product were best (64 took 8 to 17% longer, 256 up to 7%), unless the rows run out.
    fits = [r for r in _row_choices(problem) if r * problem.num_heads <= 128 and r <= problem.num_rows]
    rows, stages = max(fits, default=1), _stages(problem)
    is_widened = e4m3_way(problem) == WIDENED
    if problem.head_dim > 128 and is_widened:
        # float16 operands are twice as wide: anything else spills on sm_80.
        return Config(rows, num_warps=8, num_stages=stages)
    if problem.arch.startswith("gfx"):
        # Compiled, not timed: WAVES_PER_SIMD fit, mostly three.
        return Config(rows, num_warps=8 if is_widened or problem.arch == "gfx1250" else 4, num_stages=stages)
    # Wide tiles took 1% more to 6% less time at H64, and 5 to 9% more at H32. Blackwell multiplies 128 keys at a time.
    if problem.num_heads >= 64 or problem.arch == "sm_100":
        return Config(rows, block_kv=128, num_warps=8, num_stages=stages)
    return Config(rows, num_stages=stages)


def _stages(problem: Problem) -> int:
    """Stages that fit into the shared memory of every architecture: two of head dimension 256 on AMD and on sm_89."""
    is_small = problem.arch.startswith("gfx") or shared_bytes(problem.arch) < 128 << 10
    return 2 if problem.head_dim > 128 and (is_small or e4m3_way(problem) == WIDENED) else 3


def _row_choices(problem: Problem) -> list[int]:
    bytes_per_row = problem.num_heads * problem.head_dim
    fits = [r for r in (2, 4) if r * problem.num_heads <= MAX_COLUMNS and r * bytes_per_row <= MAX_QUERY_BYTES]
    return [1, *fits]


def _space(problem: Problem) -> Iterable[Config]:
    stages = _stages(problem)
    for rows in _row_choices(problem):
        yield Config(rows, num_stages=stages)
        yield Config(rows, block_kv=128, num_warps=8, num_stages=stages)


@triton.jit
def _kernel(
    q, k, k_scale, weights, q_scale, ks, ke, out,
    num_rows, num_keys, q_row, q_head, k_row, w_row, qs_row, out_row, keys_per_program,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_KV: tl.constexpr,
    CLEAN: tl.constexpr, HAS_Q_SCALE: tl.constexpr,
    RELU_SELECTS: tl.constexpr, WAY: tl.constexpr, FNUZ: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    # The last rows see the most keys under a causal window: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    row = block * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    start, end = load_window(ks, ke, row, is_row, num_keys)
    # Empty rows must not widen the block's range.
    union_start = tl.min(tl.where(start < end, start, num_keys), 0)
    union_end = tl.max(tl.where(start < end, end, 0), 0)
    first = tl.program_id(1) * keys_per_program
    last = tl.minimum(first + keys_per_program, num_keys)
    begin = tl.minimum(tl.maximum(union_start // BLOCK_KV * BLOCK_KV, first), last)
    stop = tl.maximum(tl.minimum(tl.cdiv(union_end, BLOCK_KV) * BLOCK_KV, last), begin)
    if CLEAN:
        fill_neg_inf(out, row, is_row, out_row, first, begin, 1024 // ROWS)
        fill_neg_inf(out, row, is_row, out_row, stop, last, 1024 // ROWS)
    if begin < stop:
        column = tl.arange(0, ROWS * HEADS)
        head = column % HEADS
        column_row = (block * ROWS + column // HEADS).to(tl.int64)
        is_column = column_row < num_rows
        # With DIM along K, a column for each row and head.
        queries = load_operand(q, column_row * q_row + head * q_head, is_column, DIM, True, WAY, FNUZ, INTERPRETED)
        weight = load_weights(
            weights, q_scale, column_row * w_row + head, column_row * qs_row + head, is_column, HAS_Q_SCALE, WAY
        )
        for tile in range(begin, stop, BLOCK_KV):
            key = tile + tl.arange(0, BLOCK_KV)
            is_key = key < num_keys
            keys = load_operand(k, key.to(tl.int64) * k_row, is_key, DIM, False, WAY, FNUZ, INTERPRETED)
            scale = tl.load(k_scale + key, mask=is_key, other=0.0)
            dots = tl.dot(keys, queries)  # [BLOCK_KV, ROWS * HEADS]
            terms = relu(dots, RELU_SELECTS) * weight[None, :]
            logits = tl.sum(tl.reshape(terms, (BLOCK_KV, ROWS, HEADS)), 2) * scale[:, None]  # [BLOCK_KV, ROWS]
            inside = (key[:, None] >= start[None, :]) & (key[:, None] < end[None, :])
            pointers = out + row.to(tl.int64)[None, :] * out_row + key[:, None]
            if CLEAN:
                tl.store(pointers, tl.where(inside, logits, float("-inf")), mask=is_row[None, :] & is_key[:, None])
            else:
                tl.store(pointers, logits, mask=inside)


def _launch(problem: Problem, config: Config, args: Args) -> None:
    weights, q_scale, out = args.weights, args.q_scale, args.out
    row_blocks = triton.cdiv(problem.num_rows, config.rows_per_wave)
    tiles = tiles_per_program(out.device, row_blocks, problem.num_keys, config.block_kv, config.least_tiles)
    keys_per_program = tiles * config.block_kv
    (q, k, *strides), e4m3 = e4m3_arguments(problem, args)
    _kernel[(row_blocks, triton.cdiv(problem.num_keys, keys_per_program))](
        q, k, args.k_scale, weights, weights if q_scale is None else q_scale, args.ks, args.ke, out,
        problem.num_rows, problem.num_keys, *strides, weights.stride(0),
        0 if q_scale is None else q_scale.stride(0), out.stride(0), keys_per_program,
        HEADS=problem.num_heads, DIM=problem.head_dim, ROWS=config.rows_per_wave, BLOCK_KV=config.block_kv,
        CLEAN=problem.clean_logits, HAS_Q_SCALE=problem.has_q_scale,
        RELU_SELECTS=relu_selects(problem), **e4m3,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


VARIANT = Variant(
    launch=_launch,
    default_config=_default_config,
    refuses=_refuses,
    space=_space,
    records_grad=False,
    rank=lambda problem: 70,
)
