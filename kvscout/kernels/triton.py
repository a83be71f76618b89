"""Triton helpers shared by the portable kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import env, fp8

INTERPRET = env.triton_interpret()
"""Whether kernels run in Triton's CPU interpreter, whose bf16 arithmetic and ``tl.dot`` give wrong numbers."""

WAVES_PER_SIMD = 2
"""Waves that the configs for AMD GPUs leave room for on each SIMD, in registers and in shared memory.

What Triton copies there goes through registers, for the most part: what hides one wave's wait is another wave.
"""


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """``acc + a @ b`` in float32; with ``UPCAST`` the operands are widened first, for the interpreter."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


def has_native_e4m3(arch: str, dtype: torch.dtype) -> bool:
    """Whether Triton reads and multiplies this e4m3 format on ``arch``.

    Not so on the CPU: its interpreter takes the NaN of e4m3fn for 480 and does not know e4m3fnuz.
    """
    if dtype == fp8.FNUZ:
        return arch == "gfx942"
    return arch in ("gfx950", "gfx1250") or (arch.startswith("sm_") and int(arch[3:]) >= 89)


def dependent_launch(arch: str) -> tuple[bool, dict[str, bool]]:
    """Whether kernels may start before those ahead of them on the stream have ended, and the launch option for it.

    A kernel launched so calls :func:`wait_for_predecessor` before it touches memory that others write, and
    :func:`launch_dependents` once what it still has to do leaves room for the next one.
    """
    can = arch.startswith("sm_") and int(arch[3:]) >= 90
    return can, {"launch_pdl": True} if can else {}


@triton.jit
def wait_for_predecessor(DEPENDENT: tl.constexpr):
    """Wait until the kernels ahead have ended and what they wrote can be seen; every program must, and must first."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def launch_dependents(DEPENDENT: tl.constexpr):
    """Let the next kernel start once every program has said so or ended."""
    if DEPENDENT:
        gdc_launch_dependents()


def e4m3_operand(x: torch.Tensor, native: bool) -> torch.Tensor:
    """What a kernel is given for an e4m3 tensor: itself, or its bytes for :func:`e4m3_to_float16`."""
    return x if native else x.view(torch.uint8)


@triton.jit
def e4m3_to_float16(bits, FNUZ: tl.constexpr):
    """The value of e4m3 bytes, exactly, in integer arithmetic: for hardware that does not know the format."""
    wide = bits.to(tl.uint16)
    magnitude = wide & 0x7F
    # Exponent and mantissa moved to float16's places are worth 2^(7 - 15) of what they stand for, subnormals included.
    moved = (((wide & 0x80) << 8) | (magnitude << 7)).to(tl.float16, bitcast=True)
    value = moved * (128.0 if FNUZ else 256.0)
    is_nan = (wide == 0x80) if FNUZ else (magnitude == 0x7F)
    return tl.where(is_nan, float("nan"), value).to(tl.float16)


@triton.jit
def narrow(x, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """float32 ``x`` as ``DTYPE``, bfloat16 or float16, to nearest even; the interpreter would cut bfloat16 short."""
    if UPCAST and DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)
