"""The Hopper kernels as a whole: shared memory, roles of the warps, and the host function that launches them."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ...kernels.cute import ptx
from .cute_cluster import expect_mail, read_task_of_rank
from .cute_loads import produce
from .cute_math import consume
from .cute_outputs import clear_rows
from .cute_pieces import produce_pieces
from .cute_reduce import merge_as_last, merge_mail, reduce_sequences
from .cute_rows import consume_rows
from .cute_tile import LOAD_THREADS, REDUCE_THREADS, WIDEN_THREADS, Tile
from .cute_widening import widen_values
from .cute_work import Data, Work, partitions_of, positions_of, read_task, row_span, steps_of, touch_constants

# Blocks of the merge, of as many threads as they have at most, that a multiprocessor has room for.
REDUCE_BLOCKS = 4


class Kernel:
    """``pa_decode`` for one :class:`~.cute_tile.Tile`."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile

    @cute.jit
    def __call__(
        self,
        device: cute.Tensor,
        data: Data,
        grid_x: Int32,
        grid_y: Int32,
        num_kv_heads: Int32,
        reduce_x: Int32,
        reduce_y: Int32,
        reduce_threads: Int32,
        stream: Any,
    ) -> None:
        """Launch; ``device`` is any tensor there. ``reduce_x`` is 0 where no sequence is split.

        Of clusters, ``grid_x`` is the blocks of each.
        """
        tile = self.tile
        self.decode(data).launch(
            grid=(grid_x, grid_y, num_kv_heads), block=(tile.threads, 1, 1), smem=tile.places.size, stream=stream,
            use_pdl=True, min_blocks_per_mp=tile.blocks, preferred_smem_carveout=100,
            cluster=(grid_x, 1, 1) if cutlass.const_expr(tile.cluster) else None,
        )  # fmt: skip
        if cutlass.const_expr(not tile.cluster):
            if reduce_x > 0:
                self.reduce(data).launch(
                    grid=(reduce_x, reduce_y, num_kv_heads), block=(reduce_threads, 1, 1),
                    max_number_threads=(REDUCE_THREADS, 1, 1), smem=4 * REDUCE_THREADS // 32, stream=stream,
                    use_pdl=True, min_blocks_per_mp=REDUCE_BLOCKS, preferred_smem_carveout=100,
                )  # fmt: skip

    @cute.kernel
    def decode(self, data: Data) -> None:
        """Find this thread block's task, then each warp does what its role is."""
        tile = self.tile
        thread, _, _ = cute.arch.thread_idx()
        x, y, kv_head = cute.arch.block_idx()
        slot, first_row = x, y * tile.rows
        if cutlass.const_expr(tile.cluster):
            first_row = Int32(0)
        elif data.rows_first != 0:
            slot, first_row = y, x * tile.rows
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread & 31
        shared = cute.arch.get_dyn_smem(Uint8, alignment=1024).toint()
        # Or it would be found anew, which takes long, in every step. Pairs with scales per token have no register left.
        if cutlass.const_expr(tile.blocks == 1 or not tile.token_scales):
            shared = cute.arch.make_warp_uniform(shared)
        if thread == tile.math_threads:
            readers = 4 if tile.alternate else tile.math_threads // 32
            keys, values = (2 + (64 if tile.token_scales else 0), 2) if tile.in_bulk else (64, 64)
            for i in cutlass.range_constexpr(tile.stages):
                ptx.barrier_init(shared + tile.places.full_keys + 8 * i, keys)
                ptx.barrier_init(shared + tile.places.empty_keys + 8 * i, readers)
            for i in cutlass.range_constexpr(tile.value_stages):
                ptx.barrier_init(shared + tile.places.full_values + 8 * i, values)
                ptx.barrier_init(shared + tile.places.empty_values + 8 * i, readers)
            if cutlass.const_expr(tile.widens):
                for i in cutlass.range_constexpr(tile.warpgroups):
                    ptx.barrier_init(shared + tile.places.full_wide + 8 * i, WIDEN_THREADS // 32)
                    ptx.barrier_init(shared + tile.places.empty_wide + 8 * i, 4)
            if cutlass.const_expr(tile.cluster):
                ptx.barrier_init(shared + tile.places.mail_barrier, 1)
            ptx.barrier_init_fence()
        if cutlass.const_expr(tile.cluster):
            cute.arch.sync_warp()
            cute.arch.cluster_arrive_relaxed()
        if lane == 0:
            touch_constants(data, shared + tile.places.constants + warp * 4)
        first_position, last_position = positions_of(tile, data, first_row)
        # Everything up to here may run while the kernel before this one ends.
        cute.arch.griddepcontrol_wait()
        rank, count = Int32(0), Int32(0)
        if cutlass.const_expr(tile.cluster):
            rank, sequence = x, y
            slot, first_tile, end_tile, context, count = read_task_of_rank(data, sequence, rank)
        else:
            sequence, first_tile, end_tile, context = read_task(data, slot)
        cute.arch.sync_threads()
        lowest, highest, all_low, all_high = row_span(data, context, first_position, last_position)
        first_step, steps = steps_of(data, first_tile, end_tile, lowest, highest)
        work = Work(
            slot, kv_head, first_row, sequence, first_step, steps, lowest, highest, all_low, all_high, context, rank
        )  # fmt: skip
        is_task = first_tile < end_tile
        if warp >= tile.math_threads // 32:
            if cutlass.const_expr(tile.widens):
                first_widening = (tile.math_threads + LOAD_THREADS) // 32
                if warp >= first_widening:
                    cute.arch.setmaxregister_decrease(tile.widening_registers)
                    if is_task:
                        widen_values(tile, warp - first_widening, lane, shared, work)
                else:
                    self.load(thread, warp, lane, shared, data, work, is_task, count)
            else:
                self.load(thread, warp, lane, shared, data, work, is_task, count)
        else:
            if cutlass.const_expr(tile.moves_registers):
                cute.arch.setmaxregister_increase(tile.registers[0])
            if cutlass.const_expr(tile.cluster):
                if thread == 0 and count > 1:
                    expect_mail(tile, rank, count, shared, data)
                if is_task:
                    consume(tile, thread, warp, lane, shared, data, work)
                else:
                    cute.arch.cluster_wait()
                merge_mail(tile, warp, lane, rank, count, shared, sequence, kv_head, data)
            elif is_task:
                if cutlass.const_expr(tile.by_rows):
                    consume_rows(tile, thread, warp, lane, shared, data, work)
                else:
                    consume(tile, thread, warp, lane, shared, data, work)
                if cutlass.const_expr(tile.can_last_merge):
                    if data.arrivals != 0:
                        _, _, num_kv_heads = cute.arch.grid_dim()
                        merge_as_last(tile, shared, num_kv_heads, data, work)

    @cute.jit
    def load(self, thread, warp, lane, shared, data, work, is_task, count):
        """Load a task's keys and values, and clear the rows of an empty sequence."""
        tile = self.tile
        if cutlass.const_expr(tile.moves_registers):
            cute.arch.setmaxregister_decrease(tile.registers[1])
        if is_task:
            load_all = produce if cutlass.const_expr(tile.in_bulk) else produce_pieces
            load_all(tile, warp - tile.math_threads // 32, lane, shared, data, work)
        if cutlass.const_expr(tile.cluster):
            if count == 0 and work.rank == 0:
                clear_rows(tile, thread - tile.math_threads, work.sequence, work.kv_head, work.first_row, data)
            cute.arch.cluster_wait()
        # There are at least as many slots as sequences: each also clears the sequence of its number if empty.
        elif work.slot < data.num_sequences:
            _, partitions = partitions_of(data, work.slot)
            if partitions == 0:
                clear_rows(tile, thread - tile.math_threads, work.slot, work.kv_head, work.first_row, data)

    @cute.kernel
    def reduce(self, data: Data) -> None:
        """Merge the partial results of sequences that were split."""
        thread, _, _ = cute.arch.thread_idx()
        threads, _, _ = cute.arch.block_dim()
        sequence, block, kv_head = cute.arch.block_idx()
        sequence_step, blocks, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane, warps = thread & 31, threads >> 5
        # Blocks of the next call that share a multiprocessor would take the places of this kernel's: up to 25% slower.
        is_late = self.tile.blocks > 1
        if lane == 0:
            touch_constants(data, cute.arch.get_dyn_smem(Uint8, alignment=128).toint() + warp * 4)
        reduce_sequences(
            self.tile, lane, sequence, sequence_step, block * warps + warp, blocks * warps, kv_head, data, is_late
        )


def build(tile: Tile) -> tuple[Kernel, tuple[Any, ...]]:
    """The host function and the fake arguments to compile it with."""
    device = make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,), assumed_align=4)
    data = Data(*(kind(0) for kind in Data.__annotations__.values()))
    arguments = (device, data, *(Int32(1) for _ in range(6)), make_fake_stream(use_tvm_ffi_env_stream=True))
    return Kernel(tile), arguments
