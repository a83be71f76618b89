"""The least CuTe DSL kernel that is one: ``c = a + b``, and two that ptxas has something to say about."""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum


@dataclass(frozen=True)
class Spec:
    threads: int = 128
    builds: str = ""
    """A file that gets a line for each time that the kernel is built."""


@cute.kernel
def _add(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, n: Int32, threads: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * threads + thread
    if i < n:
        c[i] = a[i] + b[i]


def build(spec):
    if spec.builds:
        with open(spec.builds, "a") as file:
            file.write("built\n")

    @cute.jit
    def add(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, n: Int32, stream: cuda.CUstream):
        grid = (n + spec.threads - 1) // spec.threads
        _add(a, b, c, n, spec.threads).launch(grid=(grid, 1, 1), block=(spec.threads, 1, 1), stream=stream)

    return add, (*_vectors(3), Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True))


def _vectors(count):
    size = cute.sym_int()
    return [make_fake_compact_tensor(Float32, (size,), assumed_align=4) for _ in range(count)]


@cute.kernel
def _pick(a: cute.Tensor, n: Int32):
    """An array that is indexed at run time cannot be kept in registers."""
    picked = cute.make_rmem_tensor((64,), Float32)
    for i in cutlass.range_constexpr(64):
        picked[i] = a[i]
    for i in cutlass.range(n, unroll=1):
        picked[(i * 7) % 64] += picked[i % 64]
    thread, _, _ = cute.arch.thread_idx()
    a[thread] = picked[n % 64]


def build_on_stack(spec):
    @cute.jit
    def pick(a: cute.Tensor, n: Int32, stream: cuda.CUstream):
        _pick(a, n).launch(grid=(1, 1, 1), block=(spec.threads, 1, 1), stream=stream)

    return pick, (*_vectors(1), Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True))


@cute.kernel
def _multiply(out: cute.Tensor, mma: cute.TiledMma, layout_a: cute.ComposedLayout, layout_b: cute.ComposedLayout):
    """Reads what wgmma computes without waiting for it."""
    thread, _, _ = cute.arch.thread_idx()
    shared = SmemAllocator()
    a = shared.allocate_tensor(Float16, layout_a.outer, 1024, layout_a.inner)
    b = shared.allocate_tensor(Float16, layout_b.outer, 1024, layout_b.inner)
    mine = mma.get_slice(thread)
    left, right = mma.make_fragment_A(mine.partition_A(a)), mma.make_fragment_B(mine.partition_B(b))
    sums = cute.make_rmem_tensor(mine.partition_shape_C((64, 64)), Float32)
    warpgroup.fence()
    cute.gemm(mma, sums, left[None, None, 0, 0], right[None, None, 0, 0], sums)
    warpgroup.commit_group()
    for i in cutlass.range_constexpr(cute.size(sums)):
        out[thread * 32 + i] = sums[i]


def build_without_wait(spec):
    @cute.jit
    def multiply(out: cute.Tensor, stream: cuda.CUstream):
        major = OperandMajorMode.K
        mma = hopper.make_trivial_tiled_mma(Float16, Float16, major, major, Float32, (1, 1, 1), (64, 64))
        a = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (64, 64, 64), Float16, 1)
        b = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (64, 64, 64), Float16, 1)
        _multiply(out, mma, a, b).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)

    return multiply, (*_vectors(1), make_fake_stream(use_tvm_ffi_env_stream=True))


def build_nothing(spec):
    raise ArithmeticError("there is no such kernel")
