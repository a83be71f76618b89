"""One program per task of the plan, KV head and block of query rows: keys and values pass through a pipelined ring.

Keys and values go from memory into shared memory by asynchronous copies, some steps ahead, and from there into the
registers of matrix instructions, where e4m3 is widened to float16 (which holds it exactly). More than one partition is
merged by a second kernel, or, where a plan has one slot a sequence, by the last program of a row's partitions.

Wins: wherever no kernel made for the architecture serves the problem.
Limit: more than 32 rows go to instructions that read shared memory, whose fences wait for all copies under way. From
nhd and hnd caches e4m3 values leave the ring byte by byte. No context may come within 1024 tokens of 2^31.
Measured: 2026-12-01, H200, 16 heads on one KV head of 128, pages of 128, hot L2, us, e4m3 (bf16): 1 x 8k tokens 9.3
(9.8), 4 x 8k 9.7 (10.7), 8 x 8k 11.0 (13.0), 32 x 8k 29.2 (41.3), 4 x 32k 17.3 (26.3), 3 x 220k 61.2 (91.0); 4 query
tokens, 8 x 32k 54.4 (62.4); 64 rows of 2048 tokens in pages of 16, 20.2 (22.7). Tiles of 256 tokens instead of 128 take
less where a batch is small: 1 x 8k 8.7 (9.5), 4 x 8k 9.1 (9.9). Plans of 264 slots instead of 132 take less where there
is much to read: 32 x 8k 26.1 (40.0), 3 x 220k 53.1 (89.8), 4 query tokens 48.0 (51.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from .... import fp8
from ....kernels.triton import (
    INTERPRET,
    dependent_launch,
    dot,
    e4m3_operand,
    e4m3_to_float16,
    has_native_e4m3,
    launch_dependents,
    wait_for_predecessor,
)
from ....paging import CHUNKED, PLAIN_V
from ....variants import Variant
from ..api import HEAD, SCALAR, TOKEN, Args, Problem
from ..triton_loads import load_keys, load_values, pages_of_tokens, step_pages
from ..triton_merge import LOG2E, MERGE_BLOCK, merge, merge_rows, store_rows

# Probabilities are kept times 2^15 in float16, so that those down to 2^-29 still have all of its bits.
FLOAT16_BIAS = 15

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# From so many programs on, a GPU has enough to do while one waits.
MANY_PROGRAMS = 1024

# GPUs whose shared memory has room for a deeper ring: 227 KB per multiprocessor.
LARGE_SHARED_MEMORY = ("sm_90", "sm_100")


@dataclass(frozen=True)
class Config:
    """How a tile is cut, and who merges.

    Attributes:
        block_tokens: tokens per step.
        block_rows: most query rows per program.
        num_warps: warps per program.
        num_stages: stages of the pipeline: steps under way.
        last_merges: the last program of a row's partitions merges them, instead of a second kernel.
    """

    block_tokens: int
    block_rows: int
    num_warps: int
    num_stages: int
    last_merges: bool = False


def _default_config(problem: Problem) -> Config:
    """What :func:`_tile` says, and who merges.

    A plan with as many slots as sequences splits one only where another is empty. Then a second kernel would cost its
    launch for nothing. Elsewhere the rows of a split are better merged by as many programs as there are rows.
    """
    return replace(_tile(problem), last_merges=_last_can_merge(problem) and problem.capacity == problem.num_sequences)


def _last_can_merge(problem: Problem) -> bool:
    # Not on AMD, where a program's barrier does not order all of its waves' stores before one wave's release.
    return problem.merge_in_tile and not problem.arch.startswith("gfx")


def _amd_tile(problem: Problem) -> Config:
    # Compiled, not timed: WAVES_PER_SIMD fit without spilling, except one of head dimension 512 on gfx942 and gfx950.
    by_token = TOKEN in (problem.key_scale, problem.value_scale)
    if problem.head_dim > 256:
        return Config(16, 16, 8, 1) if problem.arch == "gfx1250" else Config(16, 16, 4, 2)
    if problem.head_dim > 128:
        # Scales per token take the registers of a second stage.
        return Config(32, 16, 8, 1 if by_token else 2)
    if problem.cache_dtype not in fp8.E4M3 and problem.rows_per_head <= 16:
        return Config(64, 16, 4, 2)
    return Config(32, 16 if by_token else 32, 4, 2)


def _tile(problem: Problem) -> Config:
    # What was not timed on an H200 is chosen by what compiles without spilling registers.
    if problem.arch.startswith("gfx"):
        return _amd_tile(problem)
    is_e4m3 = problem.cache_dtype in fp8.E4M3
    if problem.arch not in LARGE_SHARED_MEMORY:
        if problem.head_dim > 128:
            return Config(32, 16, 8, 2) if problem.head_dim <= 256 else Config(16, 16, 8, 2)
        return Config(32 if is_e4m3 and problem.rows_per_head > 16 else 64, 32, 4, 2)
    if problem.head_dim > 256:
        return Config(32, 16, 8, 3)
    if problem.head_dim > 128 and problem.arch == "sm_100":
        # Compiled for Blackwell, four warps spill.
        return Config(32, 16, 8, 3)
    if problem.head_dim > 128:
        return Config(32, 16, 4, 4 if is_e4m3 else 3)
    # Up to 32 rows are multiplied by instructions that take keys and values through registers. More than that are
    # rows of instructions that read shared memory: fewer instructions, but each step waits for all copies under way.
    if problem.rows_per_head > 32:
        # Compiled for Blackwell, 64 tokens of head dimension 64 spill.
        return Config(32 if problem.arch == "sm_100" and problem.head_dim == 64 else 64, 64, 4, 3)
    # So many programs hide each other's latency, and warps that share less wait less for each other: 1024 rows of 2048
    # tokens took 108 us with two warps and 133 with four (bf16 143 and 162).
    if not problem.batch_invariant and problem.capacity * problem.num_kv_heads >= MANY_PROGRAMS:
        return Config(64, 32, 2, 4 if is_e4m3 else 3)
    # Times of the bench cases relative to the best config: within 1.09, dense ones of e4m3 within 1.04.
    if not is_e4m3:
        return Config(64, 32, 4, 3)
    by_token = TOKEN in (problem.key_scale, problem.value_scale)
    # Registers suffice for 128 tokens of e4m3 where nothing else needs them.
    if problem.layout == CHUNKED and problem.rows_per_head <= 16:
        if problem.head_dim == 64:
            return Config(128, 32, 4, 2)
        if not by_token:
            return Config(128, 32, 4, 3)
    return Config(32 if by_token and problem.layout == PLAIN_V else 64, 32, 4, 4)


def _space(problem: Problem) -> Iterable[Config]:
    default = _default_config(problem)
    if _last_can_merge(problem):
        yield replace(default, last_merges=not default.last_merges)
    if problem.head_dim <= 128:
        yield replace(default, block_tokens=32)
        yield replace(default, block_tokens=64, num_warps=2)
        yield replace(default, block_tokens=64, block_rows=16)
    if problem.head_dim <= 128 and problem.arch in LARGE_SHARED_MEMORY:
        yield replace(default, block_tokens=128, num_warps=8, num_stages=2)


def _refuses(problem: Problem) -> str | None:
    if problem.cache_dtype not in (*fp8.E4M3, problem.dtype):
        return f"caches of {problem.cache_dtype} need queries of the same dtype, not {problem.dtype}"
    return None


@triton.jit
def _attend(
    keys, values, key_scale, value_scale, queries, row_scale, token, low, high, largest, total, result,
    PROBABILITY: tl.constexpr, BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One step of the softmax: 16-bit keys ``[D, tokens]`` and values ``[tokens, D]``, scales per token or None."""
    scores = tl.zeros((queries.shape[0], keys.shape[1]), tl.float32)
    scores = dot(queries, keys, scores, UPCAST)
    if key_scale is not None:
        scores *= key_scale[None, :]
    scores *= row_scale[:, None]
    is_visible = (token[None, :] >= low[:, None]) & (token[None, :] < high[:, None])
    scores = tl.where(is_visible, scores, float("-inf"))
    new = tl.maximum(largest, tl.max(scores, 1))
    reference = tl.where(new == float("-inf"), 0.0, new)
    # The difference first: a large finite logit times log2(e) would overflow.
    probability = tl.exp2((scores - reference[:, None]) * LOG2E + BIAS)
    rescale = tl.exp2((largest - reference) * LOG2E)
    total = total * rescale + tl.sum(probability, 1)
    if value_scale is not None:
        probability *= value_scale[None, :]
    # The interpreter, for which dot widens its operands, rounds to float16 but cuts off to bfloat16.
    if not UPCAST or PROBABILITY == tl.float16:
        probability = probability.to(PROBABILITY)
    result = dot(probability, values, result * rescale[:, None], UPCAST)
    return new, total, result


@triton.jit
def _widen(x, DTYPE: tl.constexpr, E4M3_BITS: tl.constexpr, FNUZ: tl.constexpr):
    """Cache elements in the 16-bit type that they are multiplied in."""
    if E4M3_BITS:
        x = e4m3_to_float16(x, FNUZ)
    return x.to(DTYPE)


@triton.jit
def _tile_kernel(
    output, lse, partial_out, partial_stats, query, keys, values, block_tables, work_info, reduce_info,
    arrival_counters, key_scale, value_scale, sinks, softmax_scale, value_factor, window, num_sequences,
    out_row, out_head, lse_row, query_row, query_head, table_row,
    key_block, key_head, key_token, key_chunk, value_block, value_head, value_chunk, value_token, value_dim,
    key_scale_block, key_scale_head, key_scale_token, value_scale_block, value_scale_head, value_scale_token,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERY_LENGTH: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PAGE: tl.constexpr, KEY_X: tl.constexpr, VALUE_X: tl.constexpr, VECTOR: tl.constexpr, TOKENS_INNER: tl.constexpr,
    KEY_RUNS: tl.constexpr, VALUE_RUNS: tl.constexpr,
    TILE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr, NUM_STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    KEY_SCALE: tl.constexpr, VALUE_SCALE: tl.constexpr, E4M3: tl.constexpr, E4M3_BITS: tl.constexpr,
    FNUZ: tl.constexpr, SCORE: tl.constexpr, PROBABILITY: tl.constexpr, BIAS: tl.constexpr, UPCAST: tl.constexpr,
    LAST_MERGES: tl.constexpr, MERGE_LANES: tl.constexpr, COUNTER_STRIDE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = QUERY_LENGTH * GROUP
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    # Blocks of pages are looked up once a page, unless something needs them by token.
    PER_PAGE: tl.constexpr = KEY_RUNS and VALUE_RUNS
    program = tl.program_id(0)
    first_row = program % ROW_BLOCKS * BLOCK_ROWS
    kv_head = program // ROW_BLOCKS % KV_HEADS
    slot = program // (ROW_BLOCKS * KV_HEADS)
    kv_head_at = kv_head.to(tl.int64)

    row = first_row + tl.arange(0, BLOCK_ROWS)
    is_row = row < ROWS
    position = tl.minimum(row // GROUP, QUERY_LENGTH - 1)
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < DIM
    inside = is_row[:, None] & is_dim[None, :]  # [BLOCK_ROWS, PADDED_DIM]

    wait_for_predecessor(DEPENDENT)
    # There are at least as many slots as sequences: program i also clears sequence i where it is empty.
    if slot < num_sequences:
        if tl.load(reduce_info + 2 * slot + 1) == 0:
            out_at = (slot * QUERY_LENGTH + position).to(tl.int64)
            pointers = output + (out_at * out_row + head.to(tl.int64) * out_head)[:, None] + dim[None, :]
            tl.store(pointers, tl.zeros((BLOCK_ROWS, PADDED_DIM), output.dtype.element_ty), mask=inside)
            if HAS_LSE:
                nothing = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
                tl.store(lse + out_at * lse_row + head, nothing, mask=is_row)

    first_tile = tl.load(work_info + 4 * slot + 1)
    end_tile = tl.load(work_info + 4 * slot + 2)
    if first_tile == end_tile:
        return
    sequence = tl.load(work_info + 4 * slot)
    context = tl.load(work_info + 4 * slot + 3)
    partitions = tl.load(reduce_info + 2 * sequence + 1)

    # Row r sees tokens [low, high); all rows of the program together see [lowest, highest), and nothing else is used.
    # No sum passes 2^31: a window is subtracted from what is at least as large.
    at = context - QUERY_LENGTH + position
    first_at = context - QUERY_LENGTH + first_row // GROUP
    if CAUSAL:
        high = at + 1
    elif HAS_WINDOW:
        high = tl.minimum(at, context - window) + window
    else:
        high = at * 0 + context
    if HAS_WINDOW:
        low = tl.maximum(at + 1, window) - window
        lowest = tl.maximum(first_at + 1, window) - window
    else:
        low = at * 0
        lowest = 0
    highest = tl.max(high, 0)
    begin = tl.maximum(first_tile * TILE, lowest // BLOCK_TOKENS * BLOCK_TOKENS)
    end = tl.maximum(tl.minimum(end_tile * TILE, highest), begin)

    query_at = (sequence * QUERY_LENGTH + position).to(tl.int64) * query_row + head.to(tl.int64) * query_head
    queries = tl.load(query + query_at[:, None] + dim[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)
    queries = queries.to(tl.float32)
    row_scale = tl.full((BLOCK_ROWS,), 0.0, tl.float32) + softmax_scale
    if KEY_SCALE == "scalar":
        row_scale *= tl.load(key_scale)
    if KEY_SCALE == "head":
        row_scale *= tl.load(key_scale + kv_head_at * key_scale_head)
    if E4M3:
        # float16 holds bfloat16 queries once a power of two brings each row's largest value into [1, 2).
        exponent = tl.max(tl.abs(queries), 1).to(tl.int32, bitcast=True) >> 23
        exponent = tl.minimum(exponent, 253)
        queries *= ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
        row_scale *= (exponent << 23).to(tl.float32, bitcast=True)
    queries = queries.to(SCORE)

    keys += kv_head_at * key_head * VECTOR
    values += kv_head_at * value_head * VECTOR
    if KEY_SCALE == "token":
        key_scale += kv_head_at * key_scale_head
    if VALUE_SCALE == "token":
        value_scale += kv_head_at * value_scale_head
    table = block_tables + sequence.to(tl.int64) * table_row

    # A probability of zero does not silence the NaN of a value that nobody wrote: values past the end are not loaded.
    # Where 16 tokens' values share a vector, the vector at the end is left to a step of its own, which can afford to
    # select; a select in the loop would send all values through registers and shared memory once more.
    loop_end = end // 16 * 16 if TOKENS_INNER else end
    step = tl.arange(0, BLOCK_TOKENS)
    largest = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    result = tl.zeros((BLOCK_ROWS, PADDED_DIM), tl.float32)
    # Pages are looked up a step ahead: a lookup within the step would take half of the pipeline's depth.
    page = step_pages(table, begin, loop_end, lowest, PAGE, BLOCK_TOKENS, PER_PAGE, HAS_WINDOW)
    for first in tl.range(begin, loop_end, BLOCK_TOKENS, num_stages=NUM_STAGES):
        tile_keys = load_keys(
            keys, page, first, key_block, key_token, key_chunk,
            KEY_RUNS, PER_PAGE, DIM, PADDED_DIM, PAGE, KEY_X, VECTOR, BLOCK_TOKENS,
        )  # fmt: skip
        tile_values = load_values(
            values, page, first, loop_end, lowest, value_block, value_chunk, value_token, value_dim,
            VALUE_RUNS, PER_PAGE, TOKENS_INNER, HAS_WINDOW, DIM, PADDED_DIM, PAGE, VALUE_X, VECTOR, BLOCK_TOKENS,
        )  # fmt: skip
        token_key_scale = None
        token_value_scale = None
        if KEY_SCALE == "token" or VALUE_SCALE == "token":
            block = pages_of_tokens(page, PAGE, BLOCK_TOKENS, PER_PAGE)
            place = (first + step) % PAGE
            is_read = first + step < loop_end
            if HAS_WINDOW:
                is_read = is_read & (step // PAGE * PAGE + PAGE > lowest - first)
            if KEY_SCALE == "token":
                scale_at = block * key_scale_block + place.to(tl.int64) * key_scale_token
                token_key_scale = tl.load(key_scale + scale_at, mask=is_read, other=0.0)
            if VALUE_SCALE == "token":
                scale_at = block * value_scale_block + place.to(tl.int64) * value_scale_token
                token_value_scale = tl.load(value_scale + scale_at, mask=is_read, other=0.0)
        page = step_pages(table, first + BLOCK_TOKENS, loop_end, lowest, PAGE, BLOCK_TOKENS, PER_PAGE, HAS_WINDOW)
        largest, total, result = _attend(
            tl.trans(_widen(tile_keys, SCORE, E4M3_BITS, FNUZ)), _widen(tile_values, PROBABILITY, E4M3_BITS, FNUZ),
            token_key_scale, token_value_scale, queries, row_scale, first + step, low, tl.minimum(high, loop_end),
            largest, total, result, PROBABILITY, BIAS, UPCAST,
        )  # fmt: skip
    if TOKENS_INNER:
        if loop_end < end:
            tail_page = tl.load(table + loop_end // PAGE)
            tail_token = loop_end + tl.arange(0, 16)
            is_tail = tail_token < end
            tail_keys = load_keys(
                keys, tail_page, loop_end, key_block, key_token, key_chunk,
                KEY_RUNS, PER_PAGE, DIM, PADDED_DIM, PAGE, KEY_X, VECTOR, 16,
            )  # fmt: skip
            tail_values = load_values(
                values, tail_page, loop_end, loop_end + 16, lowest, value_block, value_chunk, value_token, value_dim,
                VALUE_RUNS, PER_PAGE, TOKENS_INNER, HAS_WINDOW, DIM, PADDED_DIM, PAGE, VALUE_X, VECTOR, 16,
            )  # fmt: skip
            tail_values = tl.where(is_tail[:, None], _widen(tail_values, PROBABILITY, E4M3_BITS, FNUZ), 0.0)
            tail_key_scale = None
            tail_value_scale = None
            tail_place = (tail_token % PAGE).to(tl.int64)
            if KEY_SCALE == "token":
                scale_at = tail_page.to(tl.int64) * key_scale_block + tail_place * key_scale_token
                tail_key_scale = tl.load(key_scale + scale_at, mask=is_tail, other=0.0)
            if VALUE_SCALE == "token":
                scale_at = tail_page.to(tl.int64) * value_scale_block + tail_place * value_scale_token
                tail_value_scale = tl.load(value_scale + scale_at, mask=is_tail, other=0.0)
            largest, total, result = _attend(
                tl.trans(_widen(tail_keys, SCORE, E4M3_BITS, FNUZ)), tail_values,
                tail_key_scale, tail_value_scale, queries, row_scale, tail_token, low, high,
                largest, total, result, PROBABILITY, BIAS, UPCAST,
            )  # fmt: skip

    launch_dependents(DEPENDENT)
    total *= 1.0 / (1 << BIAS)
    factor = value_factor * (1.0 / (1 << BIAS))
    if VALUE_SCALE == "scalar":
        factor *= tl.load(value_scale)
    if VALUE_SCALE == "head":
        factor *= tl.load(value_scale + kv_head_at * value_scale_head)
    result *= factor
    if partitions > 1 and partial_out is not None:
        partial_at = (slot.to(tl.int64) * KV_HEADS + kv_head) * ROWS + row
        tl.store(partial_out + (partial_at * DIM)[:, None] + dim[None, :], result, mask=inside)
        tl.store(partial_stats + 2 * partial_at, largest, mask=is_row)
        tl.store(partial_stats + 2 * partial_at + 1, total, mask=is_row)
        if LAST_MERGES:
            # All of the program's stores come before its arrival, which releases them to whoever arrives last.
            tl.debug_barrier()
            counter = arrival_counters + (sequence * KV_HEADS + kv_head) * COUNTER_STRIDE + first_row // BLOCK_ROWS
            if tl.atomic_add(counter, 1, sem="acq_rel") == partitions - 1:
                tl.store(counter, 0)
                merge_rows(
                    output, lse, partial_out, partial_stats, sinks, tl.load(reduce_info + 2 * sequence), partitions,
                    sequence, kv_head, first_row, tl.minimum(first_row + BLOCK_ROWS, ROWS), out_row, out_head, lse_row,
                    KV_HEADS, GROUP, QUERY_LENGTH, DIM, PADDED_DIM, MERGE_LANES, 2, HAS_SINKS, HAS_LSE, UPCAST,
                )  # fmt: skip
    else:
        if partial_out is None:
            # More than one partition breaks a promise of the caller.
            spoilt = tl.where(partitions == 1, 0.0, float("nan"))
            result += spoilt
            largest += spoilt
        store_rows(
            output, lse, sinks, result, largest, total, sequence, kv_head, row, out_row, out_head, lse_row,
            GROUP, QUERY_LENGTH, DIM, HAS_SINKS, HAS_LSE, UPCAST,
        )  # fmt: skip


def _launch(problem: Problem, config: Config, args: Args) -> None:
    rows = problem.rows_per_head
    block_rows = min(config.block_rows, max(16, triton.next_power_of_2(rows)))
    row_blocks = triton.cdiv(rows, block_rows)
    padded_dim = triton.next_power_of_2(problem.head_dim)
    is_e4m3 = problem.cache_dtype in fp8.E4M3
    bits = is_e4m3 and not has_native_e4m3(problem.arch, problem.cache_dtype)
    keys, values = (e4m3_operand(cache, not bits) for cache in (args.kv.keys, args.kv.values))
    # Scales per token differ by orders of magnitude, and only bfloat16 holds a probability times any of them.
    bf16 = problem.value_scale == TOKEN if is_e4m3 else problem.cache_dtype == torch.bfloat16
    tokens_inner = problem.layout in (CHUNKED, PLAIN_V)
    vector, strides = _vectors(keys, values, tokens_inner)
    # Runs: the elements of a page's tokens at one chunk of keys, or of a chunk of tokens' values, without a gap.
    key_runs = tokens_inner and vector == keys.shape[4] == keys.stride(2)
    value_runs = problem.layout == CHUNKED and vector == values.shape[3] == values.stride(4)
    partials = args.scratch() if problem.max_partitions > 1 else None
    last_merges = config.last_merges and partials is not None and row_blocks <= args.arrival_counters.shape[2]
    dependent, option = dependent_launch(problem.arch)
    output, query, lse = args.output, args.query, args.lse
    _tile_kernel[(problem.capacity * problem.num_kv_heads * row_blocks,)](
        output, lse, *(partials or (None, None)), query, keys, values, args.block_tables,
        args.work_info, args.reduce_info, args.arrival_counters, args.key_scale, args.value_scale, args.sinks,
        args.softmax_scale * args.key_factor, args.value_factor, problem.window, problem.num_sequences,
        output.stride(0), output.stride(1), 0 if lse is None else lse.stride(0), query.stride(0), query.stride(1),
        args.block_tables.stride(0), *strides,
        *_scale_strides(problem.key_scale, args.key_scale), *_scale_strides(problem.value_scale, args.value_scale),
        KV_HEADS=problem.num_kv_heads, GROUP=problem.group, QUERY_LENGTH=problem.query_length,
        DIM=problem.head_dim, PADDED_DIM=padded_dim,
        PAGE=problem.page, KEY_X=keys.shape[4], VALUE_X=values.shape[3], VECTOR=vector, TOKENS_INNER=tokens_inner,
        KEY_RUNS=key_runs, VALUE_RUNS=value_runs,
        TILE=problem.tile, BLOCK_TOKENS=config.block_tokens, BLOCK_ROWS=block_rows, NUM_STAGES=config.num_stages,
        CAUSAL=problem.causal, HAS_WINDOW=problem.window > 0, HAS_SINKS=problem.has_sinks, HAS_LSE=problem.has_lse,
        KEY_SCALE=problem.key_scale, VALUE_SCALE=problem.value_scale, E4M3=is_e4m3, E4M3_BITS=bits,
        FNUZ=problem.cache_dtype == fp8.FNUZ, SCORE=tl.float16 if is_e4m3 else _TYPES[problem.cache_dtype],
        PROBABILITY=tl.bfloat16 if bf16 else tl.float16, BIAS=0 if bf16 else FLOAT16_BIAS, UPCAST=INTERPRET,
        LAST_MERGES=last_merges, MERGE_LANES=MERGE_BLOCK // padded_dim,
        COUNTER_STRIDE=args.arrival_counters.shape[2], DEPENDENT=dependent,
        num_warps=config.num_warps, num_stages=config.num_stages, **option,
    )  # fmt: skip
    if partials is not None and not last_merges:
        merge(problem, args, *partials)


def _vectors(keys: torch.Tensor, values: torch.Tensor, tokens_inner: bool) -> tuple[int, list[int]]:
    """How many elements make 16 bytes (fewer if strides are not whole vectors), and the strides in such vectors.

    The strides are those of keys by block, head, token and chunk, and of values by block, head, chunk, token and
    element; neighbours in memory are still counted in elements.
    """
    inner = 4 + (3 if tokens_inner else 4)
    strides = [*keys.stride()[:4], *values.stride()]
    size = keys.element_size()
    vector = math.gcd(16, *(stride * size for place, stride in enumerate(strides) if place != inner)) // size
    return vector, [stride if place == inner else stride // vector for place, stride in enumerate(strides)]


def _scale_strides(kind: str, scale: torch.Tensor | None) -> tuple[int, int, int]:
    """Strides of a scale by block, head and token."""
    if scale is None or kind == SCALAR:
        return 0, 0, 0
    return (0, scale.stride(0), 0) if kind == HEAD else (scale.stride(0), scale.stride(1), scale.stride(2))


VARIANT = Variant(
    launch=_launch,
    default_config=_default_config,
    refuses=_refuses,
    space=_space,
    rank=lambda problem: 60,
)
