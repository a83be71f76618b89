"""Triton helpers shared by the portable kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import env

INTERPRET = env.triton_interpret()
"""Whether kernels run in Triton's CPU interpreter, whose bf16 arithmetic and ``tl.dot`` give wrong numbers."""


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """``acc + a @ b`` in float32; with ``UPCAST`` the operands are widened first, for the interpreter."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def narrow(x, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """float32 ``x`` as ``DTYPE``, bfloat16 or float16, to nearest even; the interpreter would cut bfloat16 short."""
    if UPCAST and DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)
