"""PTX on raw addresses: shared memory by 32-bit integers, global memory by 64-bit ones.

For kernels whose operands no CuTe layout describes, such as pages of a cache that are copied as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

_CLASSES = {Float32: "f", Int32: "r", Int64: "l"}

SHARED_ADDRESS = 0x3FFFF
"""Bits of a shared address that name memory; in a cluster those above hold the block's rank."""


@dsl_user_op
def ptx(
    text: str,
    outputs: Sequence[Any] = (),
    inputs: Sequence[tuple[Any, Any]] = (),
    effects: bool = True,
    before: int = 0,
    *,
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """Inline ``text`` with ``$0``, ``$1``, ... for outputs and then inputs, the latter pairs of type and value.

    Returns a list of the outputs, the only one, or None. ``effects=False`` lets the compiler move or drop it. The first
    ``before`` inputs are what outputs are before.
    """
    classes = [f"={_CLASSES[kind]}" for kind in outputs]
    classes += [str(i) if i < before else _CLASSES[kind] for i, (kind, _) in enumerate(inputs)]
    operands = [kind(value).ir_value(loc=loc, ip=ip) for kind, value in inputs]
    types = [kind.mlir_type for kind in outputs]
    found = llvm.inline_asm(
        None if not types else types[0] if len(types) == 1 else llvm.StructType.get_literal(types),
        operands,
        text,
        ",".join([*classes, *["~{memory}"] * effects]),
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if not outputs:
        return None
    if len(outputs) == 1:
        return outputs[0](found)
    return [kind(llvm.extractvalue(kind.mlir_type, found, [i], loc=loc, ip=ip)) for i, kind in enumerate(outputs)]


# Barriers.


def barrier_init(barrier: Any, count: int) -> None:
    """Let ``count`` arrivals complete a phase."""
    ptx("mbarrier.init.shared::cta.b64 [$0], $1;", (), [(Int32, barrier), (Int32, count)])


def barrier_init_fence() -> None:
    """Show the initial state of barriers to copies."""
    ptx("fence.mbarrier_init.release.cluster;")


def barrier_expect(barrier: Any, size: Any) -> None:
    """Arrive, and let the phase wait for ``size`` bytes too."""
    ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", (), [(Int32, barrier), (Int32, size)])


def barrier_arrive(barrier: Any) -> None:
    """Arrive."""
    ptx("mbarrier.arrive.shared::cta.b64 _, [$0];", (), [(Int32, barrier)])


def barrier_arrive_after_copies(barrier: Any) -> None:
    """Arrive when all copies that this thread started with :func:`copy_4` and :func:`copy_16` are done."""
    ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", (), [(Int32, barrier)])


def barrier_wait(barrier: Any, phase: Any) -> None:
    """Wait for the end of the phase of this parity."""
    text = """{
        .reg .pred p;
        WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;
        @p bra DONE;
        bra WAIT;
        DONE:
    }"""
    ptx(text, (), [(Int32, barrier), (Int32, phase)])


def barrier_wait_for_cluster(barrier: Any, phase: Any) -> None:
    """Wait for the end of the phase of this parity, and see what blocks of the cluster wrote with :func:`send`."""
    text = """{
        .reg .pred p;
        WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$0], $1;
        @p bra DONE;
        bra WAIT;
        DONE:
    }"""
    ptx(text, (), [(Int32, barrier), (Int32, phase)])


def sync(barrier: Any, threads: int) -> None:
    """Meet at a named barrier."""
    ptx(f"bar.sync $0, {threads};", (), [(Int32, barrier)])


def arrive(barrier: Any, threads: int) -> None:
    """Arrive at a named barrier, where others wait for it, without waiting."""
    ptx(f"bar.arrive $0, {threads};", (), [(Int32, barrier)])


def sync_any(barrier: Any, threads: int, flag: Any) -> Any:
    """Meet at a named barrier; -1 if any thread brought something other than 0, else 0.

    Ends with a vote: what is the same for all lanes of a warp stays in uniform registers past a branch on it.
    """
    text = f"""{{
        .reg .pred p, q;
        setp.ne.u32 p, $1, 0;
        bar.red.or.pred q, $2, {threads}, p;
        vote.sync.ballot.b32 $0, q, -1;
    }}"""
    return ptx(text, (Int32,), [(Int32, flag), (Int32, barrier)])


def fence_async_shared() -> None:
    """Show this thread's writes to shared memory to matrix instructions and bulk copies."""
    ptx("fence.proxy.async.shared::cta;")


def thread_index() -> Any:
    """The thread's number in its block, read anew, where no register could keep it."""
    return ptx("mov.u32 $0, %tid.x;", (Int32,))


# Copies and memory.


def bulk_load(shared: Any, source: Any, size: Any, barrier: Any) -> None:
    """Start copying ``size`` bytes from global memory; all three multiples of 16. The barrier counts the bytes."""
    ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        (),
        [(Int32, shared), (Int64, source), (Int32, size), (Int32, barrier)],
    )


def copy_16(shared: Any, source: Any, size: Any) -> None:
    """Start copying 16 bytes from global memory; zeros for those from ``size`` on."""
    ptx("cp.async.cg.shared.global [$0], [$1], 16, $2;", (), [(Int32, shared), (Int64, source), (Int32, size)])


def copy_16_or_zeros(shared: Any, source: Any, flags: Any, flag: int) -> None:
    """Start copying 16 bytes from global memory, or as many zeros where ``flags`` lack the bit ``flag``."""
    text = f"""{{
        .reg .pred p;
        .reg .b32 t;
        and.b32 t, $2, {flag};
        setp.eq.u32 p, t, 0;
        cp.async.cg.shared.global [$0], [$1], 16, p;
    }}"""
    ptx(text, (), [(Int32, shared), (Int64, source), (Int32, flags)])


def copy_4(shared: Any, source: Any, valid: Any) -> None:
    """Start copying 4 bytes from global memory, or a zero where ``valid`` is 0."""
    ptx("cp.async.ca.shared.global [$0], [$1], 4, $2;", (), [(Int32, shared), (Int64, source), (Int32, valid * 4)])


def load(address: Any, kind: Any = Int32, count: int = 1, hint: str = "") -> Any:
    """``count`` 32-bit values of global memory, read as a vector."""
    registers = ",".join(f"${i}" for i in range(count))
    word = "f32" if kind is Float32 else "u32"
    vector, registers = ("", registers) if count == 1 else (f".v{count}", f"{{{registers}}}")
    return ptx(f"ld.global{hint}{vector}.{word} {registers}, [${count}];", (kind,) * count, [(Int64, address)])


def load_or(address: Any, valid: Any, default: Sequence[float], hint: str = "") -> Any:
    """As many floats of global memory as ``default`` has, read as a vector, or those where ``valid`` is 0."""
    return _load_or(f"ld.global{hint}", (Int64, address), valid, default)


def load_or_zero(address: Any, valid: Any, count: int, kind: Any = Float32, hint: str = "") -> Any:
    """``count`` 32-bit values of global memory, read as a vector, or zeros where ``valid`` is 0."""
    registers = [f"${i}" for i in range(count)]
    zeros = " ".join(f"mov.b32 {register}, 0;" for register in registers)
    vector = f"@p ld.global{hint}.v{count}.b32 {{{','.join(registers)}}}, [${count}];"
    text = f"{{.reg .pred p; setp.ne.u32 p, ${count + 1}, 0; {zeros} {vector}}}"
    return ptx(text, (kind,) * count, [(Int64, address), (Int32, valid)])


def count_up(address: Any, last: Any) -> Any:
    """Add 1 to a number in global memory, or put 0 in its place if it is ``last``; what it was before.

    What this thread wrote, or saw before it by a barrier, is seen by whoever counts after it.
    """
    return ptx("atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;", (Int32,), [(Int64, address), (Int32, last)])


def load_16(address: Any) -> Any:
    """16 bits of global memory, in the low half of a word."""
    return ptx("{.reg .u16 h; ld.global.u16 h, [$1]; cvt.u32.u16 $0, h;}", (Int32,), [(Int64, address)])


def store(address: Any, values: Sequence[Any], kind: Any = Float32, hint: str = "") -> None:
    """Store 32-bit values in global memory as a vector."""
    count = len(values)
    registers = ",".join(f"${i}" for i in range(1, count + 1))
    vector, registers = ("", registers) if count == 1 else (f".v{count}", f"{{{registers}}}")
    ptx(f"st.global{hint}{vector}.b32 [$0], {registers};", (), [(Int64, address), *[(kind, value) for value in values]])


def store_16(address: Any, value: Any) -> None:
    """Store the low half of a word in global memory."""
    ptx("{.reg .u16 h; cvt.u16.u32 h, $1; st.global.u16 [$0], h;}", (), [(Int64, address), (Int32, value)])


def shared_load(address: Any, kind: Any = Int32, count: int = 1) -> Any:
    """``count`` 32-bit values of shared memory, read as a vector."""
    registers = ",".join(f"${i}" for i in range(count))
    vector, registers = ("", registers) if count == 1 else (f".v{count}", f"{{{registers}}}")
    return ptx(f"ld.shared{vector}.b32 {registers}, [${count}];", (kind,) * count, [(Int32, address)])


def shared_store(address: Any, values: Sequence[Any], kind: Any = Int32) -> None:
    """Store 32-bit values in shared memory as a vector."""
    count = len(values)
    registers = ",".join(f"${i}" for i in range(1, count + 1))
    vector, registers = ("", registers) if count == 1 else (f".v{count}", f"{{{registers}}}")
    ptx(f"st.shared{vector}.b32 [$0], {registers};", (), [(Int32, address), *[(kind, value) for value in values]])


def shared_load_or(address: Any, valid: Any, default: Sequence[float]) -> Any:
    """As :func:`load_or`, of shared memory."""
    return _load_or("ld.shared", (Int32, address), valid, default)


def _load_or(instruction: str, address: tuple[Any, Any], valid: Any, default: Sequence[float]) -> Any:
    count = len(default)
    registers = ",".join(f"${i}" for i in range(count))
    moves = " ".join(f"mov.b32 ${i}, ${count + 2 + i};" for i in range(count))
    vector, registers = ("", registers) if count == 1 else (f".v{count}", f"{{{registers}}}")
    load = f"@p {instruction}{vector}.b32 {registers}, [${count}];"
    text = f"{{.reg .pred p; setp.ne.u32 p, ${count + 1}, 0; {moves} {load}}}"
    return ptx(text, (Float32,) * count, [address, (Int32, valid), *[(Float32, x) for x in default]])


def address_in_block(address: Any, rank: Any) -> Any:
    """Where an address of shared memory lies in the block of this rank in the cluster."""
    return ptx("mapa.shared::cluster.u32 $0, $1, $2;", (Int32,), [(Int32, address), (Int32, rank)], False)


def send(address: Any, values: Sequence[Any], barrier: Any) -> None:
    """Start storing 2 or 4 floats in another block's shared memory; a barrier there counts the bytes."""
    count = len(values)
    registers = ",".join(f"${i}" for i in range(1, count + 1))
    ptx(
        f"st.async.shared::cluster.mbarrier::complete_tx::bytes.v{count}.f32 [$0], {{{registers}}}, [${count + 1}];",
        (),
        [(Int32, address), *[(Float32, value) for value in values], (Int32, barrier)],
    )


def store_matrices_transposed(address: Any, words: Sequence[Any]) -> None:
    """Store four 8 x 8 matrices of 16 bits in shared memory, transposed; lane i gives the address of row i."""
    inputs = [(Int32, address), *[(Int32, word) for word in words]]
    ptx("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1,$2,$3,$4};", (), inputs)


# Arithmetic.


def exp2(x: Any) -> Any:
    """``2 ** x``."""
    return ptx("ex2.approx.ftz.f32 $0, $1;", (Float32,), [(Float32, x)], False)


def log2(x: Any) -> Any:
    """Logarithm to base 2."""
    return ptx("lg2.approx.ftz.f32 $0, $1;", (Float32,), [(Float32, x)], False)


def reciprocal(x: Any) -> Any:
    """``1 / x``."""
    return ptx("rcp.approx.ftz.f32 $0, $1;", (Float32,), [(Float32, x)], False)


def maximum(x: Any, y: Any) -> Any:
    """The larger float; the other one where one is NaN."""
    return ptx("max.f32 $0, $1, $2;", (Float32,), [(Float32, x), (Float32, y)], False)


def magnitude(x: Any) -> Any:
    """``abs(x)``."""
    return ptx("abs.f32 $0, $1;", (Float32,), [(Float32, x)], False)


def sign(x: Any) -> Any:
    """1 with the sign of ``x``."""
    return ptx("copysign.f32 $0, $1, 0f3f800000;", (Float32,), [(Float32, x)], False)


def multiply_add(x: Any, y: Any, z: Any) -> Any:
    """``x * y + z``, rounded once."""
    return ptx("fma.rn.f32 $0, $1, $2, $3;", (Float32,), [(Float32, x), (Float32, y), (Float32, z)], False)


def bits_of(x: Any) -> Any:
    """The bits of a float."""
    return ptx("mov.b32 $0, $1;", (Int32,), [(Float32, x)], False)


def float_of(bits: Any) -> Any:
    """The float of these bits."""
    return ptx("mov.b32 $0, $1;", (Float32,), [(Int32, bits)], False)


def permute_bytes(x: Any, y: Any, selector: Any) -> Any:
    """Four of the eight bytes of two words."""
    return ptx("prmt.b32 $0, $1, $2, $3;", (Int32,), [(Int32, x), (Int32, y), (Int32, selector)], False)


def select(flag: Any, x: Any, y: Any, kind: Any = Float32) -> Any:
    """``x`` where ``flag`` is not 0, else ``y``."""
    text = "{.reg .pred p; setp.ne.u32 p, $3, 0; selp.b32 $0, $1, $2, p;}"
    return ptx(text, (kind,), [(kind, x), (kind, y), (Int32, flag)], False)


def exchange(x: Any, distance: int, kind: Any = Float32) -> Any:
    """The value of the lane whose number differs in the bits of ``distance``."""
    return ptx(f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;", (kind,), [(kind, x)])


def ballot(flag: Any) -> Any:
    """A bit of each lane: whether its flag is not 0."""
    text = "{.reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1;}"
    return ptx(text, (Int32,), [(Int32, flag)])


def count_bits(word: Any) -> Any:
    """How many bits are 1."""
    return ptx("popc.b32 $0, $1;", (Int32,), [(Int32, word)], False)


def from_lane(x: Any, lane: Any, kind: Any = Int32) -> Any:
    """The value of a lane."""
    text = "shfl.sync.idx.b32 $0, $1, $2, 31, -1;"
    if kind is Int64:
        halves = "shfl.sync.idx.b32 l, l, $2, 31, -1; shfl.sync.idx.b32 h, h, $2, 31, -1;"
        text = f"{{.reg .b32 l, h; mov.b64 {{l, h}}, $1; {halves} mov.b64 $0, {{l, h}};}}"
    return ptx(text, (kind,), [(kind, x), (Int32, lane)])


def pack_bfloat16(low: Any, high: Any) -> Any:
    """Two floats rounded to bfloat16, in a word."""
    return ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", (Int32,), [(Float32, high), (Float32, low)], False)


def pack_float16(low: Any, high: Any) -> Any:
    """Two floats rounded to float16, in a word."""
    return ptx("cvt.rn.f16x2.f32 $0, $1, $2;", (Int32,), [(Float32, high), (Float32, low)], False)


def unpack_bfloat16(word: Any) -> Any:
    """The two floats of a word."""
    text = "{.reg .b32 t; shl.b32 t, $2, 16; mov.b32 $0, t; and.b32 t, $2, 0xffff0000; mov.b32 $1, t;}"
    return ptx(text, (Float32, Float32), [(Int32, word)], False)


def unpack_float16(word: Any) -> Any:
    """The two floats of a word."""
    text = "{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}"
    return ptx(text, (Float32, Float32), [(Int32, word)], False)


def unpack_e4m3(word: Any) -> Any:
    """The four e4m3 numbers of a word as float16, two a word."""
    text = "{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h;}"
    return ptx(text, (Int32, Int32), [(Int32, word)], False)


def low_bits(word: Any, count: Any) -> Any:
    """The lowest ``count`` bits, 0 to 32 of them."""
    text = """{
        .reg .b64 m;
        .reg .b32 l, h;
        mov.u64 m, 1;
        shl.b64 m, m, $2;
        sub.u64 m, m, 1;
        mov.b64 {l, h}, m;
        and.b32 $0, $1, l;
    }"""
    return ptx(text, (Int32,), [(Int32, word), (Int32, count)], False)


# Matrix instructions.

WAIT = "wgmma.wait_group.sync.aligned 0;"


def descriptor(shared: Any, leading: int) -> Any:
    """Low word of an operand's descriptor: where it begins, and the bytes from one core matrix to the next along K.

    With a swizzle a K-major operand needs no such number, and an MN-major one's is from 64 rows to the next.
    """
    return ((shared & SHARED_ADDRESS) >> 4) | (leading >> 4 << 16)


def multiply(
    kind: str, columns: int, a: Any, b: Any, strides: tuple[int, int], chains: Sequence[Sequence[tuple[int, int]]],
    turned: bool = False, swizzled: bool = False, added_to: Sequence[Any] = (), is_waited_for: bool = True,
) -> Any:  # fmt: skip
    """Start sums of wgmma products, of 64 x ``columns`` each, and wait for them: their accumulators.

    All in one block of text whose accumulators are its outputs: ptxas finds nothing that touches them meanwhile, which
    it would have to serialise. Operands are K-major without swizzle, unless A is said to be otherwise.

    Args:
        kind: the end of the instruction's name, such as "k16.f32.bf16.bf16".
        columns: N.
        a: low descriptor word of A, or a list of the registers of each of a sum's products: four of each.
        b: low descriptor word of B.
        strides: bytes from 8 rows to the next 8 of A, or from 8 of K if it is MN-major and swizzled; and of B.
        chains: for each sum, the bytes from A and from B to those of each of its products.
        turned: whether A, of 16-bit elements, is MN-major: its core matrices are eight of K, of 16 bytes of rows each.
        swizzled: whether A has the swizzle of 128 bytes: bits 7 to 9 of an address flip bits 4 to 6. Its atoms, eight
            rows of 128 bytes of K or eight of K of 128 bytes of rows, begin at multiples of 1024 bytes.
        added_to: accumulators that the sums are added to, or none.
        is_waited_for: whether to wait; else the results must not be touched before :func:`multiply_wait`, or before
            another call that waits.
    """
    per_chain = columns // 2
    at = len(chains) * per_chain
    in_registers = isinstance(a, list)
    inputs = [(Int32, word) for word in a] if in_registers else [(Int32, a)]
    at_a = at + len(added_to)
    at_b = at_a + len(inputs)
    lines = [
        "{.reg .b32 t, ha, hb; .reg .b64 da, db; .reg .pred first, then;",
        "setp.ne.b32 first, 0, 0; setp.eq.b32 then, 0, 0;",
        f"mov.b32 ha, {strides[0] >> 4 | swizzled << 30}; mov.b32 hb, {strides[1] >> 4};",
        "wgmma.fence.sync.aligned;",
    ]
    # Whether A and B are transposed, of which only 16-bit types have a choice, and A only in shared memory.
    transposed = "" if "e4m3" in kind else ", 0" if in_registers else f", {int(turned)}, 0"
    for chain, products in enumerate(chains):
        registers = ",".join(f"${chain * per_chain + i}" for i in range(per_chain))
        for step, (from_a, from_b) in enumerate(products):
            if in_registers:
                operand = "{" + ",".join(f"${at_a + 4 * step + i}" for i in range(4)) + "}"
            else:
                lines.append(f"add.s32 t, ${at_a}, {from_a >> 4}; mov.b64 da, {{t, ha}};")
                operand = "da"
            lines += [
                f"add.s32 t, ${at_b}, {from_b >> 4}; mov.b64 db, {{t, hb}};",
                f"wgmma.mma_async.sync.aligned.m64n{columns}{kind} {{{registers}}}, {operand}, db, "
                f"{'then' if step or added_to else 'first'}, 1, 1{transposed};",
            ]
    lines.append("wgmma.commit_group.sync.aligned;" + (WAIT if is_waited_for else "") + "}")
    before = [(Float32, value) for value in added_to]
    return ptx("\n".join(lines), (Float32,) * at, [*before, *inputs, (Int32, b)], True, len(before))


def multiply_wait() -> None:
    """Wait for all products that were started."""
    ptx(WAIT)


# Sums of e4m3 numbers.


def split(values: Sequence[Any], shifts: Sequence[int], count: int) -> Any:
    """Four floats up to 256 as words of e4m3: the last ``count`` terms of ``a + 2^-s0 (b + 2^-s1 (c + ...))``.

    The subtractions are in float16, where they are exact once the value is rounded to float16.
    """
    terms = len(shifts) + 1
    lines = ["{.reg .b32 v<2>, up; .reg .b16 t<2>;"]
    lines += [f"cvt.rn.f16x2.f32 v{i}, ${count + 2 * i + 1}, ${count + 2 * i};" for i in range(2)]
    for term in range(terms):
        lines += [f"cvt.rn.satfinite.e4m3x2.f16x2 t{i}, v{i};" for i in range(2)]
        if term >= terms - count:
            lines.append(f"mov.b32 ${term - (terms - count)}, {{t0, t1}};")
        if term < terms - 1:
            for i in range(2):
                lines.append(f"cvt.rn.f16x2.e4m3x2 up, t{i}; sub.rn.f16x2 v{i}, v{i}, up;")
                if shifts[term]:
                    power = 15 + shifts[term] << 10
                    lines.append(f"mov.b32 up, {power << 16 | power}; mul.rn.f16x2 v{i}, v{i}, up;")
    return ptx("\n".join([*lines, "}"]), (Int32,) * count, [(Float32, value) for value in values], False)
