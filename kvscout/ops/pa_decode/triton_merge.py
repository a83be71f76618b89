"""How the Triton variant merges partial results: in a kernel of its own, or by the last program of a tile kernel.

A partial result is an output that is not divided by its denominator, and two numbers: the largest logit (natural
units, -inf where nothing was visible) and the sum of exponentials relative to it. Both ways call :func:`merge_rows`,
whose sums have one order, whatever the number of warps and rows: so they give the same bits, and a row's do not depend
on the rows beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...kernels.triton import INTERPRET, dependent_launch, launch_dependents, narrow, wait_for_predecessor
from .api import Args, Problem

LOG2E = tl.constexpr(1.4426950408889634)

# Rows that one program of the merge works through: one while there are few, so that each has an SM's bandwidth; more
# where programs would only find, one after the other, that their rows were never split.
FEW_ROWS = 4096
ROWS_PER_PROGRAM = 16

# float32 values of partial outputs that a program of the merge holds at a time, for each of its rows.
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
def store_rows(
    output, lse, sinks, result, largest, total, sequence, kv_head, row, out_row, out_head, lse_row,
    GROUP: tl.constexpr, QUERY_LENGTH: tl.constexpr, DIM: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Divide a KV head's rows ``[rows, PADDED_DIM]`` of one sequence by their denominators and store them."""
    is_row = row < QUERY_LENGTH * GROUP
    head = kv_head * GROUP + row % GROUP
    sink = tl.full((row.shape[0],), float("-inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=float("-inf")).to(tl.float32)
    factor, row_lse = normalise(largest, total, sink)
    dim = tl.arange(0, result.shape[1])
    out_at = (sequence * QUERY_LENGTH + tl.minimum(row // GROUP, QUERY_LENGTH - 1)).to(tl.int64)
    pointers = output + (out_at * out_row + head.to(tl.int64) * out_head)[:, None] + dim[None, :]
    inside = is_row[:, None] & (dim < DIM)[None, :]
    tl.store(pointers, narrow(result * factor[:, None], output.dtype.element_ty, UPCAST), mask=inside)
    if HAS_LSE:
        tl.store(lse + out_at * lse_row + head, row_lse, mask=is_row)


@triton.jit
def _fold(x):
    """Sum of ``[rows, LANES, elements]`` over the lanes, half by half: ``[rows, elements]``.

    Each step adds whole tensors, so that it is the same sum wherever a lane's elements are held.
    """
    if x.shape[1] == 1:
        return tl.reshape(x, (x.shape[0], x.shape[2]))
    else:
        halves = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2, x.shape[2]))
        low, high = tl.split(tl.permute(halves, (0, 2, 3, 1)))
        return _fold(low + high)


@triton.jit
def merge_rows(
    output, lse, partial_out, partial_stats, sinks, first_slot, count, sequence, kv_head, first_row, end_row,
    out_row, out_head, lse_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERY_LENGTH: tl.constexpr, DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, LANES: tl.constexpr, AT_ONCE: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Merge and store rows ``[first_row, end_row)`` of a sequence and KV head, whose partitions fill ``count`` slots.

    Partition p belongs to lane ``p % LANES``. Reads past L1, which may hold what was in the slots before.
    """
    ROWS: tl.constexpr = QUERY_LENGTH * GROUP
    dim = tl.arange(0, PADDED_DIM)
    lane = tl.arange(0, LANES)
    hop = tl.full((), KV_HEADS * ROWS, tl.int64)
    for begin_row in range(first_row, end_row, AT_ONCE):
        row = begin_row + tl.arange(0, AT_ONCE)
        first = (first_slot.to(tl.int64) * KV_HEADS + kv_head) * ROWS + row
        tops = tl.full((AT_ONCE, LANES), float("-inf"), tl.float32)
        totals = tl.zeros((AT_ONCE, LANES), tl.float32)
        results = tl.zeros((AT_ONCE, LANES, PADDED_DIM), tl.float32)
        for begin in range(0, count, LANES):
            at = first[:, None] + (begin + lane)[None, :] * hop
            is_partial = (row < ROWS)[:, None] & (begin + lane < count)[None, :]
            top = tl.load(partial_stats + 2 * at, mask=is_partial, other=float("-inf"), cache_modifier=".cg")
            total = tl.load(partial_stats + 2 * at + 1, mask=is_partial, other=0.0, cache_modifier=".cg")
            inside = is_partial[:, :, None] & (dim < DIM)[None, None, :]
            pointers = partial_out + (at * DIM)[:, :, None] + dim[None, None, :]
            result = tl.load(pointers, mask=inside, other=0.0, cache_modifier=".cg")
            new = tl.maximum(tops, top)
            reference = tl.where(new == float("-inf"), 0.0, new)
            before = tl.exp2((tops - reference) * LOG2E)
            weight = tl.exp2((top - reference) * LOG2E)
            totals = totals * before + total * weight
            results = results * before[:, :, None] + result * weight[:, :, None]
            tops = new
        largest = tl.max(tops, 1)
        reference = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp2((tops - reference[:, None]) * LOG2E)
        merged = _fold(results * weights[:, :, None])
        mass = tl.reshape(_fold((totals * weights)[:, :, None]), (AT_ONCE,))
        store_rows(
            output, lse, sinks, merged, largest, mass, sequence, kv_head, row, out_row, out_head, lse_row,
            GROUP, QUERY_LENGTH, DIM, HAS_SINKS, HAS_LSE, UPCAST,
        )  # fmt: skip


@triton.jit
def _merge_kernel(
    output, lse, partial_out, partial_stats, reduce_info, sinks, out_row, out_head, lse_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERY_LENGTH: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, LANES: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, DEPENDENT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = QUERY_LENGTH * GROUP
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    program = tl.program_id(0)
    first_row = program % ROW_BLOCKS * BLOCK_ROWS
    kv_head = program // ROW_BLOCKS % KV_HEADS
    sequence = program // (ROW_BLOCKS * KV_HEADS)
    wait_for_predecessor(DEPENDENT)
    first_slot = tl.load(reduce_info + 2 * sequence)
    count = tl.load(reduce_info + 2 * sequence + 1)
    if count < 2:
        return
    merge_rows(
        output, lse, partial_out, partial_stats, sinks, first_slot, count, sequence, kv_head,
        first_row, tl.minimum(first_row + BLOCK_ROWS, ROWS), out_row, out_head, lse_row,
        KV_HEADS, GROUP, QUERY_LENGTH, DIM, PADDED_DIM, LANES, 1, HAS_SINKS, HAS_LSE, UPCAST,
    )  # fmt: skip
    # Not before: a tile kernel that starts while others' rows are merged piles up on the SMs that are free by then.
    launch_dependents(DEPENDENT)


def merge(problem: Problem, args: Args, partial_out: torch.Tensor, partial_stats: torch.Tensor) -> None:
    """Merge the partial results of every sequence that was split."""
    all_rows = problem.num_sequences * problem.num_kv_heads * problem.rows_per_head
    block_rows = 1 if all_rows <= FEW_ROWS else min(ROWS_PER_PROGRAM, problem.rows_per_head)
    programs = problem.num_sequences * problem.num_kv_heads * triton.cdiv(problem.rows_per_head, block_rows)
    padded_dim = triton.next_power_of_2(problem.head_dim)
    output, lse = args.output, args.lse
    dependent, option = dependent_launch(problem.arch)
    # Compiled for Blackwell, four warps spill; the number of warps does not change a bit.
    warps = 8 if problem.arch == "sm_100" and problem.head_dim > 256 else 4
    _merge_kernel[(programs,)](
        output, lse, partial_out, partial_stats, args.reduce_info, args.sinks,
        output.stride(0), output.stride(1), 0 if lse is None else lse.stride(0),
        KV_HEADS=problem.num_kv_heads, GROUP=problem.group, QUERY_LENGTH=problem.query_length,
        DIM=problem.head_dim, PADDED_DIM=padded_dim, BLOCK_ROWS=block_rows, LANES=MERGE_BLOCK // padded_dim,
        HAS_SINKS=problem.has_sinks, HAS_LSE=problem.has_lse, DEPENDENT=dependent, UPCAST=INTERPRET,
        num_warps=warps, **option,
    )  # fmt: skip
