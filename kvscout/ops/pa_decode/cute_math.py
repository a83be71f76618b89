"""The two multiplying warpgroups: scores, softmax and outputs of every step of a task."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...kernels.cute import ptx
from .cute_outputs import merge_warpgroups
from .cute_queries import load_queries
from .cute_scores import first_token, mask, score
from .cute_softmax import GROUP_BARRIER, NOTHING, store_probabilities, update_references
from .cute_tile import MATH_THREADS, STEP, WARPGROUPS, Tile
from .cute_values import add_outputs, clear_values
from .cute_work import partitions_of

MATH_BARRIER = 5
"""The named barrier of all multiplying warps."""


@cute.jit
def consume(tile: cutlass.Constexpr[Tile], thread, warp, lane, shared, data, work):
    """Attend to a task's tokens, and store the result or a partial one."""
    places = tile.places
    group, warp = warp >> 2, warp & 3
    in_group = thread & 127
    # What is needed last is asked for first; with scales per token it would spill.
    partitions, factor = Int32(0), data.value_factor
    if cutlass.const_expr(not tile.token_scales):
        _, partitions = partitions_of(data, work.sequence)
    load_queries(tile, thread, shared, data, work)
    if cutlass.const_expr(tile.is_e4m3 and not tile.token_scales):
        factor = _value_factor(data, work)
    if cutlass.const_expr(tile.token_scales):
        _fill_absent_scales(tile, thread, shared, data)
    ptx.fence_async_shared()
    ptx.sync(MATH_BARRIER, MATH_THREADS)
    own = tile.own_columns
    row_scales = cute.make_rmem_tensor((own,), Float32)
    for j in cutlass.range_constexpr(tile.rows // 8):
        pair = ptx.shared_load(shared + places.row_scales + (8 * j + 2 * (lane & 3)) * 4, Float32, 2)
        row_scales[2 * j], row_scales[2 * j + 1] = pair[0], pair[1]
    outputs = cute.make_rmem_tensor((4 * own,), Float32)
    outputs.fill(0.0)
    sums = cute.make_rmem_tensor((own,), Float32)
    sums.fill(0.0)
    references = cute.make_rmem_tensor((own,), Float32)
    references.fill(NOTHING)
    scores = cute.make_rmem_tensor((2 * tile.halves * own,), Float32)
    full_keys = shared + places.barriers
    full_values = full_keys + 8 * tile.stages
    empty_keys = full_keys + 16 * tile.stages
    empty_values = full_keys + 24 * tile.stages
    step = WARPGROUPS if tile.alternate else 1
    i = group if cutlass.const_expr(tile.alternate) else Int32(0)
    first = i
    stage = i
    phase = Int32(0)
    while i < work.steps:
        ptx.barrier_wait(full_keys + 8 * stage, phase)
        key_scales, value_scales, normaliser = _token_scales(tile, stage, group, warp, lane, shared)
        score(tile, scores, row_scales, key_scales, stage, group, shared)
        if lane == 0:
            ptx.barrier_arrive(empty_keys + 8 * stage)
        token = (work.first_step + i) * STEP
        if token < work.all_low or token + STEP > work.all_high:
            mask(tile, scores, token + first_token(tile, group, warp, lane), lane, shared)
        is_first = Int32(0)
        if i == first:
            is_first = Int32(1)
        update_references(tile, scores, is_first, references, sums, outputs, group, warp, lane, shared)
        store_probabilities(tile, scores, value_scales, references, sums, group, warp, lane, shared)
        ptx.barrier_wait(full_values + 8 * stage, phase)
        if token < work.lowest or token + STEP > work.highest:
            clear_values(tile, stage, token, group, in_group, shared, work)
        ptx.fence_async_shared()
        ptx.sync(GROUP_BARRIER + group, 128)
        add_outputs(tile, outputs, normaliser, stage, group, shared)
        if lane == 0:
            ptx.barrier_arrive(empty_values + 8 * stage)
        i = i + step
        stage = stage + step
        if stage >= tile.stages:
            stage = stage - tile.stages
            phase = phase ^ 1
    # Not before the last tile has been read: blocks of the next kernel would take its bandwidth.
    cute.arch.griddepcontrol_launch_dependents()
    if cutlass.const_expr(tile.token_scales):
        _, partitions = partitions_of(data, work.sequence)
        factor = _value_factor(data, work)
    merge_warpgroups(
        tile, references, sums, outputs, factor, partitions, group, warp, lane, thread, shared, data, work
    )  # fmt: skip


@cute.jit
def _value_factor(data, work):
    """What outputs are multiplied by, if values have no scale per token."""
    factor = data.value_factor
    if data.value_scale != 0 and data.values_by_token == 0:
        factor = factor * ptx.load(data.value_scale + Int64(work.kv_head) * data.value_scale_head, Float32)
    return factor


@cute.jit
def _fill_absent_scales(tile: cutlass.Constexpr[Tile], thread, shared, data):
    """Ones where only one of keys and values has a scale per token; nothing else is ever written there."""
    for i in cutlass.range_constexpr((tile.stages * STEP + MATH_THREADS - 1) // MATH_THREADS):
        at = shared + (thread + i * MATH_THREADS) * 4
        if thread + i * MATH_THREADS < tile.stages * STEP:
            if data.keys_by_token == 0:
                ptx.shared_store(at + tile.places.key_scales, [1.0], Float32)
            if data.values_by_token == 0:
                ptx.shared_store(at + tile.places.value_scales, [1.0], Float32)


@cute.jit
def _token_scales(tile: cutlass.Constexpr[Tile], stage, group, warp, lane, shared):
    """Scales of this thread's tokens, those of values divided by a power of two of the step, which comes third.

    The quotients are below 1, so that products with probabilities stay what e4m3 holds.
    """
    key_scales = []
    value_scales = []
    normaliser = Float32(1.0)
    if cutlass.const_expr(tile.token_scales):
        keys_at = shared + tile.places.key_scales + stage * (STEP * 4)
        values_at = shared + tile.places.value_scales + stage * (STEP * 4)
        largest = Float32(0.0)
        for value in ptx.shared_load(values_at + lane * 16, Float32, 4):
            largest = ptx.maximum(largest, ptx.magnitude(value))
        bits = cute.arch.warp_redux_sync(largest.bitcast(Int32), kind="max")
        exponent = cutlass.min(cutlass.max(bits >> 23, 1), 252)
        normaliser = ((exponent + 1) << 23).bitcast(Float32)
        down = ((Int32(253) - exponent) << 23).bitcast(Float32)
        for i in cutlass.range_constexpr(2 * tile.halves):
            token = first_token(tile, group, warp, lane) + 8 * (i >> 1) + 16 * (i & 1)
            key_scales.append(ptx.shared_load(keys_at + token * 4, Float32))
            value_scales.append(ptx.shared_load(values_at + token * 4, Float32) * down)
    return key_scales, value_scales, normaliser
