"""Instructions that CuTe DSL has no name for, as functions that kernels call."""

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


def _asm(result: Any, operands: Sequence[Any], text: str, constraints: str, loc: Any, ip: Any) -> Any:
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def copy_async(shared, source, size, valid, *, loc=None, ip=None):
    """Start copying 4, 8 or 16 aligned bytes from global to shared memory; zeros where ``valid`` is false."""
    taken = cutlass.select_(valid, cutlass.Int32(size), cutlass.Int32(0))
    operands = [x.ir_value(loc=loc, ip=ip) for x in (shared.toint(), source.toint(), taken)]
    _asm(None, operands, f"cp.async.ca.shared.global [$0], [$1], {size}, $2;", "r,l,r", loc, ip)


@dsl_user_op
def bulk_store(destination, shared, size, *, loc=None, ip=None):
    """Start storing ``size`` bytes of shared memory in global memory; all three multiples of 16."""
    operands = [x.ir_value(loc=loc, ip=ip) for x in (destination.toint(), shared.toint(), cutlass.Int32(size))]
    _asm(None, operands, "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;", "l,r,r", loc, ip)


@dsl_user_op
def add_weighted_relu(dots, weights, sums, *, loc=None, ip=None):
    """``sums + weights * relu(dots)`` of two rows and two columns, ``[00, 01, 10, 11]``; with ``2 * relu`` in row 0.

    Row 0's doubled relu is ``x + |x|``, one addition on the multiply-add pipe. Row 1's is a maximum, at half rate but
    on a pipe that has nothing else to do: with 64 heads one of each took 3% less time than two additions, with 32 as
    long; two maxima took 7 to 9% more. Both keep NaN.
    """
    text = """{
        .reg .f32 t<4>;
        abs.f32 t0, $4;  add.f32 t0, t0, $4;
        abs.f32 t1, $5;  add.f32 t1, t1, $5;
        max.NaN.f32 t2, $6, 0f00000000;
        max.NaN.f32 t3, $7, 0f00000000;
        fma.rn.f32 $0, $8, t0, $10;
        fma.rn.f32 $2, $8, t2, $12;
        fma.rn.f32 $1, $9, t1, $11;
        fma.rn.f32 $3, $9, t3, $13;
    }"""
    float32 = cutlass.Float32.mlir_type
    operands = [cutlass.Float32(x).ir_value(loc=loc, ip=ip) for x in (*dots, *weights, *sums)]
    four = llvm.StructType.get_literal([float32] * 4)
    found = _asm(four, operands, text, "=f,=f,=f,=f" + ",f" * 10, loc, ip)
    return tuple(cutlass.Float32(llvm.extractvalue(float32, found, [i], loc=loc, ip=ip)) for i in range(4))
