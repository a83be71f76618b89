"""Device code that the Triton variants of ``mqa_logits`` share: windows, the -inf fill, and the split of the keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import device, fp8
from ...kernels.triton import e4m3_to_float16, has_native_e4m3
from .api import Problem

# Programs to start per multiprocessor, so that causal rows of unequal length even out.
PROGRAMS_PER_SM = 8


def fp8_refusal(problem: Problem) -> str | None:
    """Why a Triton variant cannot multiply this e4m3 format on this architecture."""
    if problem.fnuz and problem.arch.startswith("sm_"):
        return "NVIDIA GPUs have no e4m3fnuz arithmetic; quantise to float8_e4m3fn"
    if not problem.fnuz and problem.arch == "gfx942":
        return "gfx942 multiplies e4m3fnuz only; quantise to float8_e4m3fnuz"
    return None


def tiles_per_program(gpu: torch.device, row_blocks: int, num_keys: int, block_kv: int, least: int) -> int:
    """Key tiles that one program walks: all of them where the rows alone fill the chip, fewer where they do not.

    ``least`` tiles amortise a program's start (its windows, weights and queries are loaded anew).
    """
    tiles = -(-num_keys // block_kv)
    splits = -(-PROGRAMS_PER_SM * device.num_sms(gpu) // row_blocks)
    return max(-(-tiles // splits), min(least, tiles))


def is_native(problem: Problem) -> bool:
    """Whether this e4m3 format is multiplied as it is; otherwise, by way of float16, which holds it exactly."""
    return has_native_e4m3(problem.arch, fp8.FNUZ if problem.fnuz else fp8.FN)


@triton.jit
def operand(x, NATIVE: tl.constexpr, FNUZ: tl.constexpr):
    """e4m3 elements, or their bytes, as something to multiply."""
    if not NATIVE:
        x = e4m3_to_float16(x, FNUZ)
    return x


@triton.jit
def relu(x):
    """``max(x, 0)``; NaN stays NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_window(ks, ke, row, is_row, num_keys):
    """Start and end of each row's window, clamped; equal where the window is empty or the row does not exist."""
    start = tl.minimum(tl.maximum(tl.load(ks + row, mask=is_row, other=0), 0), num_keys)
    end = tl.minimum(tl.maximum(tl.load(ke + row, mask=is_row, other=0), start), num_keys)
    return start, end


@triton.jit
def fill_neg_inf(out, row, is_row, out_row, begin, end, WIDTH: tl.constexpr):
    """-inf into columns ``[begin, end)`` of every row of the block."""
    for first in range(begin, end, WIDTH):
        column = first + tl.arange(0, WIDTH)
        pointers = out + row.to(tl.int64)[:, None] * out_row + column[None, :]
        tl.store(pointers, float("-inf"), mask=is_row[:, None] & (column < end)[None, :])
