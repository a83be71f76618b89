"""Device code that the Triton variants of ``pa_decode`` share: the merge of partial results.

A partial result is an output that is not divided by its denominator, and two numbers: the largest logit (natural units,
-inf where nothing was visible) and the sum of exponentials relative to it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .api import Args, Problem

LOG2E = tl.constexpr(1.4426950408889634)

# Rows that one program of the merge works through: one while there are few, so that each has an SM's bandwidth; more
# where programs would only find, one after the other, that their rows were never split.
FEW_ROWS = 4096
ROWS_PER_PROGRAM = 16

# float32 values of partial outputs that a program of the merge holds at a time.
MERGE_BLOCK = 4096


@triton.jit
def normalise(largest, total, sink):
    """What to multiply an output that is relative to ``largest`` with, and the row's lse.

    ``sink`` is -inf where there is none. Differences are taken before they are scaled to base 2, so that logits near
    the end of float32's range do not overflow.
    """
    top = tl.maximum(largest, sink)
    # Anything finite will do where nothing is visible (the result is replaced) or the sink is inf (it takes all).
    top = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    weight = tl.exp2((largest - top) * LOG2E)
    nothing = largest == float("-inf")
    denominator = tl.where(nothing, 1.0, total * weight + tl.exp2((sink - top) * LOG2E))
    # Under a sink of inf both numbers of the quotient may be infinite; the lse is inf by itself.
    factor = tl.where(nothing | (sink == float("inf")), 0.0, weight / denominator)
    return factor, tl.where(nothing, float("-inf"), top + tl.log(denominator))


@triton.jit
def _merge_kernel(
    output, lse, partial_out, partial_stats, reduce_info, sinks, out_row, out_head, lse_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERY_LENGTH: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = QUERY_LENGTH * GROUP
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    program = tl.program_id(0)
    first_row = program % ROW_BLOCKS * BLOCK_ROWS
    kv_head = program // ROW_BLOCKS % KV_HEADS
    sequence = program // (ROW_BLOCKS * KV_HEADS)
    first_slot = tl.load(reduce_info + 2 * sequence)
    count = tl.load(reduce_info + 2 * sequence + 1)
    if count < 2:
        return
    dim = tl.arange(0, PADDED_DIM)
    for row in range(first_row, tl.minimum(first_row + BLOCK_ROWS, ROWS)):
        largest = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        merged = tl.zeros((PADDED_DIM,), tl.float32)
        for begin in range(0, count, BLOCK_PARTS):
            part = begin + tl.arange(0, BLOCK_PARTS)
            is_part = part < count
            at = ((first_slot + part).to(tl.int64) * KV_HEADS + kv_head) * ROWS + row
            tops = tl.load(partial_stats + 2 * at, mask=is_part, other=float("-inf"))
            totals = tl.load(partial_stats + 2 * at + 1, mask=is_part, other=0.0)
            inside = is_part[:, None] & (dim < DIM)[None, :]
            outs = tl.load(partial_out + at[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
            new = tl.maximum(largest, tl.max(tops, 0))
            reference = tl.where(new == float("-inf"), 0.0, new)
            before = tl.exp2((largest - reference) * LOG2E)
            weights = tl.exp2((tops - reference) * LOG2E)
            total = total * before + tl.sum(totals * weights, 0)
            merged = merged * before + tl.sum(outs * weights[:, None], 0)
            largest = new
        query_head = kv_head * GROUP + row % GROUP
        sink = tl.full((), float("-inf"), tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + query_head).to(tl.float32)
        factor, row_lse = normalise(largest, total, sink)
        out_at = (sequence * QUERY_LENGTH + row // GROUP).to(tl.int64)
        result = (merged * factor).to(output.dtype.element_ty)
        tl.store(output + out_at * out_row + query_head.to(tl.int64) * out_head + dim, result, mask=dim < DIM)
        if HAS_LSE:
            tl.store(lse + out_at * lse_row + query_head, row_lse)


def merge(problem: Problem, args: Args, partial_out: torch.Tensor, partial_stats: torch.Tensor) -> None:
    """Merge the partial results of every sequence that was split, in the order of its partitions."""
    all_rows = problem.num_sequences * problem.num_kv_heads * problem.rows_per_head
    block_rows = 1 if all_rows <= FEW_ROWS else min(ROWS_PER_PROGRAM, problem.rows_per_head)
    programs = problem.num_sequences * problem.num_kv_heads * triton.cdiv(problem.rows_per_head, block_rows)
    padded_dim = triton.next_power_of_2(problem.head_dim)
    output, lse = args.output, args.lse
    _merge_kernel[(programs,)](
        output, lse, partial_out, partial_stats, args.reduce_info, args.sinks,
        output.stride(0), output.stride(1), 0 if lse is None else lse.stride(0),
        KV_HEADS=problem.num_kv_heads, GROUP=problem.group, QUERY_LENGTH=problem.query_length,
        DIM=problem.head_dim, PADDED_DIM=padded_dim, BLOCK_PARTS=MERGE_BLOCK // padded_dim, BLOCK_ROWS=block_rows,
        HAS_SINKS=problem.has_sinks, HAS_LSE=problem.has_lse,
        num_warps=4,
    )  # fmt: skip
