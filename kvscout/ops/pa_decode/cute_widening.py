"""The four warps that make e4m3 values float16, where queries are the rows of products.

A thread has an element of the head. Of each step it reads the element's 16 tokens at a time, and stores them as two
pieces of 8 tokens, as chunked caches of 16 bits have them. Each warpgroup has a place for one step.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...kernels.cute import ptx
from .cute_tile import STEP, WARPGROUPS, Tile
from .cute_values import clear_values

TOKENS = 16
"""Tokens of 16 bytes of e4m3 values."""


@cute.jit
def widen_values(tile: cutlass.Constexpr[Tile], warp, lane, shared, work):
    """Widen the values of every step of a task."""
    places = tile.places
    thread = warp * 32 + lane
    stage, phase = Int32(0), Int32(0)
    group, wide_phase = Int32(0), Int32(1)
    i = Int32(0)
    while i < work.steps:
        ptx.barrier_wait(shared + places.full_values + 8 * stage, phase)
        token = (work.first_step + i) * STEP
        if token < work.lowest or token + STEP > work.highest:
            # Each thread clears what it reads itself.
            clear_values(tile, stage, token, group, thread, work.lowest, work.highest, shared)
        from_ = shared + places.values + stage * tile.stage_bytes + thread * 16
        to = shared + places.own + group * tile.own_bytes + thread * 16
        pitch = tile.dim * 16
        narrow = [ptx.shared_load(from_ + piece * pitch, Int32, 4) for piece in range(STEP // TOKENS)]
        if i >= WARPGROUPS:
            ptx.barrier_wait(shared + places.empty_wide + 8 * group, wide_phase)
        for piece in cutlass.range_constexpr(STEP // TOKENS):
            for half in cutlass.range_constexpr(2):
                words = narrow[piece][2 * half : 2 * half + 2]
                wide = [*ptx.unpack_e4m3(words[0]), *ptx.unpack_e4m3(words[1])]
                ptx.shared_store(to + (2 * piece + half) * pitch, wide)
        ptx.fence_async_shared()
        cute.arch.sync_warp()
        if lane == 0:
            ptx.barrier_arrive(shared + places.full_wide + 8 * group)
            ptx.barrier_arrive(shared + places.empty_values + 8 * stage)
        i = i + 1
        group = group ^ 1
        if group == 0:
            wide_phase = wide_phase ^ 1
        stage = stage + 1
        if stage == tile.value_stages:
            stage = Int32(0)
            phase = phase ^ 1
