"""The Hopper kernel as a whole: shared memory, roles of the warps, and the host function that launches it."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .cute_fill import fill
from .cute_loads import load_matrices, load_tasks
from .cute_math import consume
from .cute_schedule import SHARE_WORDS, my_share
from .cute_tile import FILL_FLOATS, KEYS, TASK_WORDS, THREADS, Tile

# Registers of a thread: 2 * 128 threads that multiply and 128 that load and fill share 65536.
MATH_REGISTERS = 232
LOAD_REGISTERS = 40

Q_STAGES = 2


class Data(NamedTuple):
    """What a kernel reads and writes in global memory, without what comes through tensor maps."""

    k_scale: Any
    weights: Any
    q_scale: Any
    ks: Any
    ke: Any
    out: Any
    has_q_scale: Any
    clean: Any
    num_rows: Any
    num_keys: Any


class Shared(NamedTuple):
    """A thread block's shared memory, as tensors and barriers."""

    k_full: Any
    k_empty: Any
    task_full: Any
    rows_full: Any  # windows and weights of a task
    q_empty: Any
    q_full: Any  # [q stage and query tile]
    share: Any
    tasks: Any  # [q stage, (block, first tile, number of tiles, then first inner tile and its end per query tile)]
    windows: Any  # [(start, end), row in block, q stage]
    weights: Any  # [head, row in block, q stage]
    k_scale: Any  # [key in stage and stage]
    neg_inf: Any
    q_boxes: Any  # the queries as the producer's boxes
    q_tiles: Any  # the same as matrix operands
    k_stages: Any  # the keys as the producer's stages
    k_halves: Any  # the same as matrix operands of 64 keys


class Layouts(NamedTuple):
    """Layouts of queries and keys in shared memory: as the producer fills it, and as matrix operands."""

    q_box: Any
    q_boxes: Any
    q_tiles: Any
    k_stages: Any
    k_halves: Any


def _layouts(tile: Tile) -> Layouts:
    shape = (KEYS, tile.columns, tile.dim)
    row_major = LayoutEnum.ROW_MAJOR
    k_halves = hopper.make_smem_layout_a(row_major, shape, Float8E4M3FN, tile.kv_stages * tile.stage_keys // KEYS)
    q_tiles = hopper.make_smem_layout_b(row_major, shape, Float8E4M3FN, Q_STAGES * tile.query_tiles)
    dim, quad_rows, pairs = tile.dim, tile.quad_rows, tile.heads // 2
    box = cute.make_layout((dim, 2, quad_rows, pairs), stride=(1, dim, 2 * dim, 2 * quad_rows * dim))
    boxes = cute.make_layout(
        (*box.shape, Q_STAGES * tile.query_tiles * tile.groups), stride=(*box.stride, quad_rows * tile.heads * dim)
    )
    stages = cute.make_layout((tile.stage_keys, dim, tile.kv_stages), stride=(dim, 1, tile.stage_bytes))
    return Layouts(
        q_box=box,
        q_boxes=cute.make_composed_layout(q_tiles.inner, 0, boxes),
        q_tiles=q_tiles,
        k_stages=cute.make_composed_layout(k_halves.inner, 0, stages),
        k_halves=k_halves,
    )


class Kernel:
    """``fp8_mqa_logits`` for one :class:`~.cute_tile.Tile`."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        k_scale: cute.Tensor,
        weights: cute.Tensor,
        q_scale: cute.Tensor,
        ks: cute.Tensor,
        ke: cute.Tensor,
        out: cute.Tensor,
        has_q_scale: Int32,
        clean: Int32,
        thread_blocks: Int32,
        stream: Any,
    ) -> None:
        """Launch; ``q_scale`` is read where ``has_q_scale`` is not 0."""
        tile = self.tile
        k_major = OperandMajorMode.K
        mmas = [
            hopper.make_trivial_tiled_mma(
                Float8E4M3FN, Float8E4M3FN, k_major, k_major, Float32, (1, 1, 1), (KEYS, tile.columns)
            )
            for _ in range(2)
        ]
        layouts = _layouts(tile)
        box, dim = layouts.q_box, tile.dim
        q_view = cute.make_tensor(
            q.iterator,
            cute.make_layout(
                (dim, 2, q.shape[0], tile.heads // 2),
                stride=(1, q.stride[1], q.stride[0], cute.assume(q.stride[1] * 2, divby=16)),
            ),
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        copy_q, tma_q = cpasync.make_tiled_tma_atom(
            load, q_view, cute.make_composed_layout(layouts.q_tiles.inner, 0, box), box.shape
        )
        copy_k, tma_k = cpasync.make_tiled_tma_atom(
            load, k, cute.slice_(layouts.k_stages, (None, None, 0)), (tile.stage_keys, dim)
        )
        self.kernel(
            copy_q, tma_q, copy_k, tma_k, k_scale, weights, q_scale, ks, ke, out, has_q_scale, clean, *mmas
        ).launch(grid=(thread_blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

    def _shared(self) -> Shared:
        """Allocate shared memory."""
        tile = self.tile
        layouts = _layouts(tile)
        row_floats = tile.heads + 4  # rows that a quad reads at once lie in different banks

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2 * tile.kv_stages + (3 + tile.query_tiles) * Q_STAGES]
            share: cute.struct.MemRange[Int32, SHARE_WORDS]
            tasks: cute.struct.MemRange[Int32, Q_STAGES * TASK_WORDS]
            windows: cute.struct.MemRange[Int32, Q_STAGES * tile.block_rows * 2]
            weights: cute.struct.Align[cute.struct.MemRange[Float32, Q_STAGES * tile.block_rows * row_floats], 16]
            k_scale: cute.struct.Align[cute.struct.MemRange[Float32, tile.kv_stages * tile.stage_keys], 16]
            neg_inf: cute.struct.Align[cute.struct.MemRange[Float32, FILL_FLOATS], 128]
            q: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, Q_STAGES * tile.query_bytes], 1024]
            k: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, tile.kv_stages * tile.stage_bytes], 1024]

        memory = SmemAllocator().allocate(Storage)
        barrier = memory.barriers.data_ptr()
        per_row = cute.make_layout(
            (tile.heads, tile.block_rows, Q_STAGES), stride=(1, row_floats, row_floats * tile.block_rows)
        )
        return Shared(
            k_full=barrier,
            k_empty=barrier + tile.kv_stages,
            task_full=barrier + 2 * tile.kv_stages,
            rows_full=barrier + 2 * tile.kv_stages + Q_STAGES,
            q_empty=barrier + 2 * tile.kv_stages + 2 * Q_STAGES,
            q_full=barrier + 2 * tile.kv_stages + 3 * Q_STAGES,
            share=memory.share.get_tensor(cute.make_layout(SHARE_WORDS)),
            tasks=memory.tasks.get_tensor(cute.make_layout((Q_STAGES, TASK_WORDS), stride=(TASK_WORDS, 1))),
            windows=memory.windows.get_tensor(cute.make_layout((2, tile.block_rows, Q_STAGES))),
            weights=memory.weights.get_tensor(per_row),
            k_scale=memory.k_scale.get_tensor(cute.make_layout(tile.kv_stages * tile.stage_keys)),
            neg_inf=memory.neg_inf.get_tensor(cute.make_layout(FILL_FLOATS)),
            q_boxes=memory.q.get_tensor(layouts.q_boxes.outer, swizzle=layouts.q_boxes.inner),
            q_tiles=memory.q.get_tensor(layouts.q_tiles.outer, swizzle=layouts.q_tiles.inner),
            k_stages=memory.k.get_tensor(layouts.k_stages.outer, swizzle=layouts.k_stages.inner),
            k_halves=memory.k.get_tensor(layouts.k_halves.outer, swizzle=layouts.k_halves.inner),
        )

    @cute.kernel
    def kernel(
        self,
        copy_q: cute.CopyAtom,
        tma_q: cute.Tensor,
        copy_k: cute.CopyAtom,
        tma_k: cute.Tensor,
        k_scale: cute.Tensor,
        weights: cute.Tensor,
        q_scale: cute.Tensor,
        ks: cute.Tensor,
        ke: cute.Tensor,
        out: cute.Tensor,
        has_q_scale: Int32,
        clean: Int32,
        mma: cute.TiledMma,
        mma_first: cute.TiledMma,
    ) -> None:
        """Set up, find this thread block's share, then each warp does what its role is."""
        tile = self.tile
        num_rows, num_keys = cute.size(out, mode=[0]), cute.size(out, mode=[1])
        data = Data(k_scale, weights, q_scale, ks, ke, out, has_q_scale, clean, num_rows, num_keys)
        shared = self._shared()
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        if warp == 0:
            cpasync.prefetch_descriptor(copy_q)
            cpasync.prefetch_descriptor(copy_k)
        if thread == 0:
            # One thread and constants: the addresses of barriers are uniform, and lanes would take turns.
            for i in cutlass.range_constexpr(tile.kv_stages):
                cute.arch.mbarrier_init(shared.k_full + i, 33)  # the keys' bytes, 32 lanes' scales
                cute.arch.mbarrier_init(shared.k_empty + i, 8)
            for i in cutlass.range_constexpr(Q_STAGES):
                cute.arch.mbarrier_init(shared.task_full + i, 1)
                cute.arch.mbarrier_init(shared.rows_full + i, 64)  # 32 lanes' weights, 32 lanes' windows
                cute.arch.mbarrier_init(shared.q_empty + i, 8)
            for i in cutlass.range_constexpr(Q_STAGES * tile.query_tiles):
                cute.arch.mbarrier_init(shared.q_full + i, 1)
        cute.arch.mbarrier_init_fence()
        if clean != 0:
            for i in cutlass.range(thread, FILL_FLOATS, THREADS, unroll=1):
                shared.neg_inf[i] = -Float32.inf
            cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        # Everything up to here may run while the kernel before this one ends.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        # One branch per role, or the compiler ignores the register counts.
        if warp >= 8:
            # Before the registers go, since it keeps many loads under way.
            share = my_share(tile, warp - 8, lane, data, shared)
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp == 8:
                load_matrices(tile, share, lane, copy_q, tma_q, copy_k, tma_k, data, shared)
            elif warp == 9:
                load_tasks(tile, share, lane, data, shared)
            elif clean != 0:
                fill(tile, warp - 10, lane, data, shared)
        else:
            cute.arch.setmaxregister_increase(MATH_REGISTERS)
            consume(tile, thread, (mma, mma_first), data, shared)


def build(tile: Tile) -> tuple[Kernel, tuple[Any, ...]]:
    """The host function and the fake arguments to compile it with."""
    rows, keys = cute.sym_int(), cute.sym_int()

    def fake(dtype: Any, shape: tuple[Any, ...], row_divisor: int = 1, align: int = 4) -> Any:
        strides = tuple(cute.sym_int64(divisibility=row_divisor) for _ in shape[:-1])
        return make_fake_tensor(dtype, shape, stride=(*strides, 1), assumed_align=align)

    arguments = (
        fake(Float8E4M3FN, (rows, tile.heads, tile.dim), 16, 16),
        fake(Float8E4M3FN, (keys, tile.dim), 16, 16),
        fake(Float32, (keys,)),
        fake(Float32, (rows, tile.heads)),
        fake(Float32, (cute.sym_int(), tile.heads)),
        fake(Int32, (rows,)),
        fake(Int32, (rows,)),
        fake(Float32, (rows, keys)),
        Int32(0),
        Int32(0),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return Kernel(tile), arguments
