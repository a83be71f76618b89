"""What the Triton variants of ``mqa_logits`` share: how e4m3 is multiplied, windows, the -inf fill, the keys' split."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import device, fp8
from ...kernels.triton import INTERPRET, e4m3_to_float16, has_native_e4m3
from .api import Args, Problem

NATIVE, WIDENED, HALVED = "native", "widened", "halved"
"""How e4m3 is multiplied: as it is; by way of float16, which holds it exactly; as e4m3fnuz of half its value."""

# Programs to start per multiprocessor, so that causal rows of unequal length even out.
PROGRAMS_PER_SM = 8


def fp8_refusal(problem: Problem) -> str | None:
    """Why a Triton variant cannot multiply this e4m3 format on this architecture."""
    if problem.fnuz and problem.arch.startswith("sm_"):
        return "NVIDIA GPUs have no e4m3fnuz arithmetic; quantise to float8_e4m3fn"
    return None


def tiles_per_program(gpu: torch.device, row_blocks: int, num_keys: int, block_kv: int, least: int) -> int:
    """Key tiles that one program walks: all of them where the rows alone fill the chip, fewer where they do not.

    ``least`` tiles amortise a program's start (its windows, weights and queries are loaded anew).
    """
    tiles = -(-num_keys // block_kv)
    splits = -(-PROGRAMS_PER_SM * device.num_sms(gpu) // row_blocks)
    return max(-(-tiles // splits), min(least, tiles))


def e4m3_way(problem: Problem) -> str:
    """How a problem's e4m3 format is multiplied on its architecture."""
    if has_native_e4m3(problem.arch, fp8.FNUZ if problem.fnuz else fp8.FN):
        return NATIVE
    return HALVED if problem.arch == "gfx942" else WIDENED


def e4m3_arguments(problem: Problem, args: Args) -> tuple[list[torch.Tensor | int], dict[str, object]]:
    """Queries, keys and their strides (by row and head, by key) as a kernel takes them, and its constexprs for them."""
    q, k, way = args.q, args.k, e4m3_way(problem)
    strides = [q.stride(0), q.stride(1), k.stride(0)]
    if way == HALVED:
        # Every row starts on a 16-byte boundary; the stride of a dimension of size 1 is never used.
        strides = [stride // 4 for stride in strides]
    if way != NATIVE:
        q, k = q.view(torch.uint8), k.view(torch.uint8)
    return [q, k, *strides], {"WAY": way, "FNUZ": problem.fnuz, "INTERPRETED": INTERPRET}


@triton.jit
def _fn_to_fnuz(word):
    """Four bytes of e4m3fn in a uint32, as e4m3fnuz bytes of half their value.

    e4m3fnuz has the same bytes for half of each number, but 0x80, the negative zero of e4m3fn, is its one NaN.
    """
    magnitude = word & 0x7F7F7F7F
    # Sums of bytes reach 0xFE at most, so none carries into its neighbour; bit 7 of each says what it was.
    number = word & ((magnitude + 0x7F7F7F7F) | 0x7F7F7F7F)
    is_nan = (magnitude + 0x01010101) & 0x80808080
    cleared = is_nan - (is_nan >> 7)
    return ((number | cleared) ^ cleared) | is_nan


@triton.jit
def _bytes_of(word):
    """The bytes of uint32 ``[rows, words]``, lowest first: uint8 ``[rows, 4 * words]``."""
    even = tl.join(word.to(tl.uint8), (word >> 16).to(tl.uint8))
    odd = tl.join((word >> 8).to(tl.uint8), (word >> 24).to(tl.uint8))
    return tl.reshape(tl.join(even, odd), (word.shape[0], 4 * word.shape[1]))


@triton.jit
def load_operand(elements, row, is_row, DIM: tl.constexpr, TRANSPOSED: tl.constexpr,
                 WAY: tl.constexpr, FNUZ: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """Rows of e4m3 elements, or of their bytes, as something to multiply: ``[rows, DIM]``, or ``[DIM, rows]``.

    ``row`` is where each starts, in elements, or, where they are halved, in fours of them.
    """
    if WAY == "halved":
        words = elements.to(tl.pointer_type(tl.int32)) + row[:, None] + tl.arange(0, DIM // 4)[None, :]
        word = tl.load(words, mask=is_row[:, None], other=0).to(tl.uint32, bitcast=True)
        x = _bytes_of(_fn_to_fnuz(word))
        if INTERPRETED:
            x = e4m3_to_float16(x, True)
        else:
            x = x.to(tl.float8e4b8, bitcast=True)
        if TRANSPOSED:
            x = tl.trans(x)
    else:
        dim = tl.arange(0, DIM)
        if TRANSPOSED:
            x = tl.load(elements + row[None, :] + dim[:, None], mask=is_row[None, :], other=0.0)
        else:
            x = tl.load(elements + row[:, None] + dim[None, :], mask=is_row[:, None], other=0.0)
        if WAY == "widened":
            x = e4m3_to_float16(x, FNUZ)
    return x


@triton.jit
def load_weights(weights, q_scale, w_at, qs_at, is_weight, HAS_Q_SCALE: tl.constexpr, WAY: tl.constexpr):
    """A row's weights, by which its dot products are multiplied, with all else that is a factor of each head."""
    weight = tl.load(weights + w_at, mask=is_weight, other=0.0)
    if HAS_Q_SCALE:
        weight *= tl.load(q_scale + qs_at, mask=is_weight, other=0.0)
    if WAY == "halved":
        # Both factors of a product are half of what they stand for.
        weight *= 4.0
    return weight


def relu_selects(problem: Problem) -> bool:
    """Whether :func:`relu` had better select: gfx942 has no maximum that keeps NaN, and makes it of four."""
    return problem.arch == "gfx942"


@triton.jit
def relu(x, SELECTS: tl.constexpr):
    """``max(x, 0)``; NaN stays NaN."""
    if SELECTS:
        x = tl.where(x < 0.0, 0.0, x)
    else:
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return x


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
