"""Runs device code of ``cute_wgmma`` as Python: integers that raise where 32 bits would not hold them, and memory.

Operands are read as the matrix instructions in the PTX text read them. Neither time nor memory order is modelled.
"""

import builtins
import functools
import re
import threading
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import torch

import kvscout
from kvscout.ops.pa_decode import cute_tile
from tests.ops.mqa_logits import lanes
from tests.ops.mqa_logits.lanes import Int32, _Constexpr

RANK_BIT = 24
"""Where a block's rank begins in shared addresses of a cluster."""

NAN = 0xFF
"""A byte of which elements of each type are NaN."""
SWIZZLE_128 = 1
"""The swizzle of 128 bytes, in a descriptor."""


class Int64(Int32):
    """What a 32-bit integer becomes beside one of 64 bits."""

    def __new__(cls, value):
        return int.__new__(cls, value)


def _unchecked(name):
    operation = getattr(int, name)
    return lambda self, other: Int64(operation(self, int(other)))


class Float32(np.float32):
    """A float of 32 bits; results of arithmetic are numpy's."""

    inf = np.float32("inf")


class Registers(list):
    """A thread's array."""

    def __init__(self, shape, kind):
        super().__init__([kind(0)] * shape[0])

    def fill(self, value):
        self[:] = [value] * len(self)


for _name in ("add", "sub", "mul"):
    setattr(Int64, f"__{_name}__", _unchecked(f"__{_name}__"))
    setattr(Int64, f"__r{_name}__", _unchecked(f"__r{_name}__"))


def _meet(*barrier):
    lanes._lane.block.exchange(lanes._lane.thread, None)


def _exchange(value, distance, kind=Float32):
    return lanes._warp(value)[(lanes._lane.thread & 31) ^ distance]


def _ballot(flag):
    return Int32(np.uint32(sum(1 << i for i, one in enumerate(lanes._warp(flag)) if one)).view(np.int32))


def _unpack_e4m3(word):
    """The four numbers of a word as float16, two a word."""
    four = torch.tensor([int(word)], dtype=torch.int32).view(torch.float8_e4m3fn).to(torch.float16)
    return [Int32(pair) for pair in four.view(torch.int32).tolist()]


E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
"""What each byte is."""


def as_e4m3(numbers):
    """The bytes of rounded numbers; none is larger than the type holds."""
    return torch.tensor(np.asarray(numbers, np.float32)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def split(values, shifts, count):
    """Words of four e4m3 terms each, as the instructions make them."""
    left, words = np.array(values, np.float16), []
    for shift in (*shifts, 0):
        term = as_e4m3(left)
        words.append(Int32(term.view(np.int32)[0]))
        left = ((left - E4M3[term].astype(np.float16)) * np.float16(2**shift)).astype(np.float16)
    return words[-count:]


def _unpack_float16(word):
    return [Float32(half) for half in np.array([word], np.int32).view(np.float16)]


def _unpack_bfloat16(word):
    halves = np.array([word], np.int32).view(np.uint16).astype(np.uint32) << 16
    return [Float32(half) for half in halves.view(np.float32)]


def code_of(name, ptx=None, arch=None):
    """The functions of a file of device code of ``pa_decode``; instructions are attributes of ``ptx``.

    ``arch`` is what ``cute.arch`` has besides, or instead.
    """
    cute, cutlass = ModuleType("cutlass.cute"), ModuleType("cutlass")
    cute.jit = cute.kernel = lambda function: function
    cute.make_rmem_tensor = Registers
    cute.Tensor = None
    cute.arch = SimpleNamespace(
        sync_warp=lambda: None,
        sync_threads=_meet,
        griddepcontrol_wait=lambda: None,
        griddepcontrol_launch_dependents=lambda: None,
        thread_idx=lambda: (Int32(lanes._lane.thread), 0, 0),
        warp_idx=lambda: Int32(lanes._lane.thread // 32),
        make_warp_uniform=lambda warp: warp,
    )
    vars(cute.arch).update(arch or {})
    vars(cutlass).update(
        cute=cute,
        make_fake_stream=None,
        make_fake_tensor=None,
        Uint8=np.uint8,
        Int32=Int32,
        Int64=Int64,
        Float32=Float32,
        Constexpr=_Constexpr,
        const_expr=lambda value: value,
        range=lambda *bounds, unroll=1: (Int32(i) for i in range(*map(int, bounds))),
        range_constexpr=range,
        min=lambda one, other: Int32(min(one, other)),
        max=lambda one, other: Int32(max(one, other)),
    )
    ptx = ptx or SimpleNamespace(load=None, load_or=None)

    def import_(module, globals_=None, locals_=None, names=(), level=0):
        if module.startswith("cutlass"):
            return cutlass
        if module.endswith("ptx"):
            return ptx
        if module.endswith("kernels.cute"):
            return SimpleNamespace(ptx=ptx)
        if level == 1 and module.startswith("cute_") and module != "cute_tile":
            return code_of(module, ptx, arch)
        return builtins.__import__(module, globals_, locals_, names, level)

    path = Path(cute_tile.__file__).with_name(f"{name}.py")
    found = {
        "__name__": f"kvscout.ops.pa_decode.{name}",
        "__package__": "kvscout.ops.pa_decode",
        "__builtins__": {**vars(builtins), "__import__": import_},
    }
    exec(compile(path.read_text(), str(path), "exec"), found)
    return SimpleNamespace(**found)


@functools.cache
def instructions():
    """The functions of ``ptx.py``, which make text."""
    fakes = {name: MagicMock() for name in ("cutlass", "cutlass._mlir.dialects", "cutlass.cutlass_dsl")}
    fakes["cutlass.cutlass_dsl"].dsl_user_op = lambda function: function

    def import_(module, *arguments):
        return fakes[module] if module in fakes else builtins.__import__(module, *arguments)

    path = Path(kvscout.__file__).with_name("kernels") / "cute" / "ptx.py"
    found = {"__name__": "ptx", "__builtins__": {**vars(builtins), "__import__": import_}}
    exec(compile(path.read_text(), str(path), "exec"), found)
    return found


class Memory:
    """Shared memory, and arrays of global memory, for a thread block; what its lanes do with them is kept.

    Attributes:
        shared: the bytes of shared memory.
        copies: for each warp and lane, (shared address, global address, bytes) of what it copied, in order.
        stores: for each warp and lane, where it stored in shared memory.
        products: for each matrix instruction, the bytes of its operand A: ``[64, bytes]``.
        waits: (warp, barrier, parity of the phase) of every wait; none is waited for.
    """

    def __init__(self, size, arrays):
        self.shared = np.full(size, NAN, np.uint8)
        # Far apart, so that no address of one is an address of another.
        self.arrays = {(i + 1) << 44: array.reshape(-1).view(np.uint8) for i, array in enumerate(arrays)}
        self.copies, self.stores, self.products = {}, {}, []
        self.expected, self.arrived, self.waits = {}, {}, set()

    def address(self, i):
        """Where an array begins."""
        return Int64((i + 1) << 44)

    def read(self, address, size):
        """Bytes of global memory, which must be there."""
        array, at = self.arrays[address >> 44 << 44], address & ((1 << 44) - 1)
        assert at + size <= array.size
        return array[at : at + size]

    def copy(self, shared, source, size, most):
        thread = lanes._lane.thread
        self.copies.setdefault((thread // 32, thread % 32), []).append((int(shared), int(source), int(size)))
        self.shared[shared : shared + most] = 0
        if size:
            self.shared[shared : shared + size] = self.read(source, size)

    def _bulk(self, shared, source, size, barrier):
        assert shared % 16 == source % 16 == size % 16 == 0
        self.copy(shared, source, size, size)
        self.arrived[barrier] = self.arrived.get(barrier, 0) + size

    def _expect(self, barrier, size):
        self.expected[barrier] = self.expected.get(barrier, 0) + size

    def _arrive(self, barrier):
        self.expected[barrier] = self.expected.get(barrier, 0) + 1
        self.arrived[barrier] = self.arrived.get(barrier, 0) + 1

    def _shared_load(self, address, kind=Int32, count=1):
        found = [kind(word) for word in self.shared[address : address + 4 * count].view(_dtype(kind))]
        return found[0] if count == 1 else found

    def _load(self, address, kind=Int32, count=1, hint=""):
        found = [kind(word) for word in self.read(address, 4 * count).view(_dtype(kind))]
        return found[0] if count == 1 else found

    def _load_or(self, address, valid, default, hint=""):
        if valid:
            return self._load(address, Float32, len(default))
        return Float32(default[0]) if len(default) == 1 else [Float32(x) for x in default]

    def _load_or_zero(self, address, valid, count, kind=Float32, hint=""):
        return self._load(address, kind, count) if valid else [kind(0)] * count

    def _store(self, address, values, kind=Float32, hint=""):
        self.read(address, 4 * len(values))[:] = np.array(values, _dtype(kind)).view(np.uint8)

    def _shared_store(self, address, values, kind=Int32):
        if hasattr(lanes._lane, "thread"):
            thread = lanes._lane.thread
            self.stores.setdefault((thread // 32, thread % 32), []).append(int(address))
        self.shared[address : address + 4 * len(values)] = np.array(values, _dtype(kind)).view(np.uint8)

    @property
    def ptx(self):
        """The instructions."""
        text_of = dict(instructions())
        code = SimpleNamespace(
            SHARED_ADDRESS=text_of["SHARED_ADDRESS"],
            descriptor=text_of["descriptor"],
            load=self._load,
            store=self._store,
            load_or=self._load_or,
            sync=_meet,
            thread_index=lambda: Int32(lanes._lane.thread),
            exchange=_exchange,
            ballot=_ballot,
            sync_any=lambda barrier, threads, flag: Int32(-any(lanes._lane.block.exchange(lanes._lane.thread, flag))),
            unpack_e4m3=_unpack_e4m3,
            unpack_float16=_unpack_float16,
            unpack_bfloat16=_unpack_bfloat16,
            split=split,
            magnitude=abs,
            bits_of=lambda x: Int32(np.float32(x).view(np.int32)),
            float_of=lambda bits: Float32(np.int32(bits).view(np.float32)),
            sign=lambda x: Float32(np.copysign(1, x)),
            maximum=max,
            exp2=np.exp2,
            log2=np.log2,
            reciprocal=lambda x: Float32(1) / x,
            pack_float16=lambda low, high: Int32(np.array([low, high], np.float16).view(np.int32)[0]),
            pack_bfloat16=lambda low, high: None,
            shared_load=self._shared_load,
            shared_store=self._shared_store,
            load_or_zero=self._load_or_zero,
            permute_bytes=_permute_bytes,
            select=lambda flag, x, y, kind=Float32: x if flag else y,
            low_bits=lambda word, count: Int32(np.uint32(int(word) & ((1 << int(count)) - 1)).view(np.int32)),
            copy_16=lambda shared, source, size: self.copy(shared, source, size, 16),
            copy_16_or_zeros=lambda shared, source, flags, flag: self.copy(shared, source, 16 * bool(flags & flag), 16),
            copy_4=lambda shared, source, valid: self.copy(shared, source, 4 * valid, 4),
            bulk_load=self._bulk,
            barrier_expect=self._expect,
            barrier_arrive=self._arrive,
            barrier_arrive_after_copies=self._arrive,
            fence_async_shared=lambda: None,
            barrier_wait=lambda barrier, phase: self.waits.add((lanes._lane.thread // 32, int(barrier), int(phase))),
            from_lane=lambda value, lane, kind=Int32: lanes._warp(value)[lane],
            multiply_add=lambda x, y, z: x * y + z,
            multiply=self._multiply,
        )
        return code

    def _multiply(self, *arguments, **named):
        """Read the operands A of the text that the device would get; products are zeros."""
        asked = []
        function = instructions()["multiply"]
        code = type(function)(
            function.__code__,
            {**instructions(), "ptx": lambda *text: asked.append(text)},
            argdefs=function.__defaults__,
        )
        code(*arguments, **named)
        ((text, outputs, inputs, *_),) = asked
        high = int(re.search(r"mov.b32 ha, (\d+);", text)[1])
        # Of the high word: the stride, an offset of where the swizzle's pattern begins, and the swizzle.
        stride, offset, swizzle = (high & 0x3FFF) << 4, high >> 17 & 7, high >> 30
        assert offset == 0 and swizzle in (0, SWIZZLE_128)
        low = int(inputs[0][1])
        k16 = "k16" in text
        found = re.findall(r"add.s32 t, \$(\d+), (\d+); mov.b64 da, {t, ha};[^{]*{t, hb};\n(wgmma[^;]*);", text)
        assert found
        for register, offset, instruction in found:
            assert int(register) == len(outputs)
            begin, leading = ((low + int(offset)) & 0x3FFF) << 4, ((low + int(offset)) >> 16 & 0x3FFF) << 4
            turned = k16 and instruction.rpartition(",")[0].rpartition(",")[2].strip() == "1"
            self.products.append(_operand(self.shared, begin, leading, stride, turned, swizzle))
        return [np.float32(0)] * len(outputs)


class Cluster:
    """The blocks of a cluster, each with shared memory of its own, and global memory of all.

    The rank of a block is the bits of its shared addresses from the 24th on, as on the device. A barrier that blocks of
    a cluster wait at is waited for indeed, and no byte is sent twice.

    Attributes:
        memories: those of the blocks.
        stored: how often each address of global memory was stored to.
        sent: for each block, how often each byte of its shared memory was sent by another.
    """

    def __init__(self, size, shared_size, arrays):
        self.memories = [Memory(shared_size, arrays) for _ in range(size)]
        self.sent = [np.zeros(shared_size, np.int64) for _ in range(size)]
        self.stored = Counter()
        self.changed = threading.Condition()

    def shared(self, rank):
        """Where a block's shared memory begins."""
        return Int32(rank << RANK_BIT)

    def local(self, address):
        """The block of a shared address, and the address without it."""
        return address >> RANK_BIT, Int32(address & instructions()["SHARED_ADDRESS"])

    def _send(self, address, values, barrier):
        (rank, at), (its_rank, its_barrier) = self.local(address), self.local(barrier)
        size = 4 * len(values)
        assert rank == its_rank
        assert len(values) in (2, 4)
        assert at % size == 0
        memory = self.memories[rank]
        with self.changed:
            memory.shared[at : at + size] = np.array(values, np.float32).view(np.uint8)
            self.sent[rank][at : at + size] += 1
            memory.arrived[its_barrier] = memory.arrived.get(its_barrier, 0) + size
            self.changed.notify_all()

    def _expect(self, barrier, size):
        rank, barrier = self.local(barrier)
        memory = self.memories[rank]
        with self.changed:
            # As `Memory` has it, with an arrival that counts for as many bytes as none.
            assert barrier not in memory.expected
            memory.expected[barrier] = size
            self.changed.notify_all()

    def is_complete(self, barrier):
        """Whether a barrier has all bytes that it expects."""
        rank, barrier = self.local(barrier)
        memory = self.memories[rank]
        return barrier in memory.expected and memory.arrived.get(barrier, 0) == memory.expected[barrier]

    def _wait(self, barrier, phase):
        assert phase == 0
        with self.changed:
            if not self.changed.wait_for(lambda: self.is_complete(barrier), 20):
                raise TimeoutError("not all bytes have come")

    def _store(self, address, values, kind=Float32, hint=""):
        for i in range(len(values)):
            self.stored[int(address) + 4 * i] += 1
        self.memories[0]._store(address, values, kind)

    def _of_block(self, name):
        def call(address, *arguments):
            rank, address = self.local(address)
            return getattr(self.memories[rank], name)(address, *arguments)

        return call

    @property
    def ptx(self):
        """The instructions."""
        code = SimpleNamespace(**vars(self.memories[0].ptx))
        shared_load = self._of_block("_shared_load")
        vars(code).update(
            store=self._store,
            shared_load=shared_load,
            shared_store=self._of_block("_shared_store"),
            shared_load_or=lambda address, valid, default: (
                shared_load(address, Float32, len(default)) if valid else [Float32(x) for x in default]
            ),
            address_in_block=lambda address, rank: Int32(
                (address & instructions()["SHARED_ADDRESS"]) + (range(len(self.memories))[rank] << RANK_BIT)
            ),
            send=self._send,
            barrier_expect=self._expect,
            barrier_wait_for_cluster=self._wait,
        )
        return code


def _dtype(kind):
    return np.int32 if issubclass(kind, int) else np.float32


def _permute_bytes(x, y, selector):
    data = np.array([x, y], np.int32).view(np.uint8)
    picked = np.array([data[int(selector) >> 4 * i & 7] for i in range(4)], np.uint8)
    return Int32(picked.view(np.int32)[0])


def _operand(shared, begin, leading, stride, turned, swizzle):
    """The 64 rows of a matrix instruction's A, of 32 bytes each.

    K-major: eight rows of 16 bytes of K lie together, ``stride`` is from eight rows to the next, ``leading`` from 16
    bytes of K to the next. MN-major, for two-byte elements: eight of K, of eight rows each, lie together, ``stride`` is
    from eight rows to the next, ``leading`` from eight of K to the next.

    With the swizzle eight rows are 128 bytes apart, of which ``begin`` is the first that are taken, and ``leading`` is
    nothing; or eight of K are, of 64 rows each, ``stride`` is from eight of K to the next and ``leading`` from 64 rows
    to the next. Bits 7 to 9 of the sum flip bits 4 to 6.
    """
    row, byte = np.mgrid[:64, :32]
    k = byte // 2
    if swizzle:
        if turned:
            at = begin + row // 64 * leading + row % 64 * 2 + k // 8 * stride + k % 8 * 128 + byte % 2
        else:
            at = begin + row // 8 * stride + row % 8 * 128 + byte
        return shared[at ^ (at >> 7 & 7) << 4]
    if turned:
        at = row // 8 * stride + row % 8 * 2 + k // 8 * leading + k % 8 * 16 + byte % 2
    else:
        at = row // 8 * stride + row % 8 * 16 + byte // 16 * leading + byte % 16
    return shared[begin + at]
