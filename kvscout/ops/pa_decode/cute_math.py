"""The multiplying warpgroups: scores, softmax and outputs of every step of a task."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...kernels.cute import ptx
from .cute_outputs import merge_warpgroups
from .cute_queries import load_queries, span_of
from .cute_scores import first_token, mask, scale_rows, score
from .cute_softmax import (
    BELOW,
    GROUP_BARRIER,
    LOG2E,
    NOTHING,
    add_probabilities,
    expect_probabilities,
    expect_tops,
    expected_below,
    find_factors,
    find_largest,
    find_tops,
    raise_references,
    store_probabilities,
)
from .cute_tile import MATH_BARRIER, STEP, Tile
from .cute_values import add_outputs, clear_values
from .cute_work import is_seen_in_part, partitions_of, stages_of, value_scale

LEAST_SCALE = 2.0**-60
"""Values of a smaller scale are taken to have this one, and their probabilities so much less."""


@cute.jit
def consume(tile: cutlass.Constexpr[Tile], thread, warp, lane, shared, data, work):
    """Attend to a task's tokens, and store the result or a partial one."""
    places = tile.places
    group, warp = warp >> 2, warp & 3
    if cutlass.const_expr(tile.warpgroups == 1):
        group = Int32(0)
    in_group = thread & 127
    # What is needed last is asked for first; with scales per token it would spill.
    partitions, scale_of_values = Int32(0), Float32(1.0)
    if cutlass.const_expr(not tile.token_scales):
        _, partitions = partitions_of(data, work.sequence)
    load_queries(tile, thread, shared, data, work)
    if cutlass.const_expr(tile.is_e4m3 and not tile.token_scales):
        scale_of_values = value_scale(data, work.kv_head)
    if cutlass.const_expr(tile.token_scales):
        _fill_absent_scales(tile, thread, shared, data)
    ptx.fence_async_shared()
    ptx.sync(MATH_BARRIER, tile.math_threads)
    own = tile.own_columns
    row_scales = cute.make_rmem_tensor((own,), Float32)
    for j in cutlass.range_constexpr(tile.rows // 8):
        pair = ptx.shared_load(shared + places.row_scales + (8 * j + 2 * (lane & 3)) * 4, Float32, 2)
        row_scales[2 * j], row_scales[2 * j + 1] = pair[0], pair[1]
    outputs = cute.make_rmem_tensor((tile.own_elements * own,), Float32)
    outputs.fill(0.0)
    sums = cute.make_rmem_tensor((own,), Float32)
    sums.fill(0.0)
    references = cute.make_rmem_tensor((own,), Float32)
    references.fill(NOTHING)
    scores = cute.make_rmem_tensor((2 * tile.halves * own,), Float32)
    tops = cute.make_rmem_tensor((own,), Float32)
    factors = cute.make_rmem_tensor((own,), Float32)
    probabilities = cute.make_rmem_tensor((2 * tile.halves * own,), Float32)
    found = cute.make_rmem_tensor((own,), Float32)
    # Whether tops of a step before may serve the next one.
    serve = Int32(0)
    full_keys, full_values = shared + places.full_keys, shared + places.full_values
    empty_keys, empty_values = shared + places.empty_keys, shared + places.empty_values
    step = tile.warpgroups if tile.alternate else 1
    i = group if cutlass.const_expr(tile.alternate) else Int32(0)
    stages = stages_of(tile, work)
    stage, phase = i, Int32(0)
    value_stage, value_phase = stage, phase
    # Where the step before had its values; before the first step, a phase that is taken to have ended.
    stage_before, phase_before = value_stage, Int32(1)
    while i < work.steps:
        ptx.barrier_wait(full_keys + 8 * stage, phase)
        if cutlass.const_expr(tile.blocks == 1):
            # The merge's blocks are on their way while the last step is multiplied; they load none of its results yet.
            if i + step >= work.steps:
                cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(not tile.in_bulk):
            ptx.fence_async_shared()
        key_scales, value_logs, value_signs, per_value_scale = _token_scales(tile, stage, group, warp, lane, shared)
        score(tile, scores, row_scales, key_scales, stage, group, shared)
        if lane == 0:
            ptx.barrier_arrive(empty_keys + 8 * stage)
        token = (work.first_step + i) * STEP
        if is_seen_in_part(token, work):
            mask(tile, scores, token + first_token(tile, group, warp, lane), lane, shared)
        if cutlass.const_expr(tile.value_stages == tile.stages):
            value_stage, value_phase = stage, phase
        # Tops cost an exchange between all threads, which most steps can do without: those of a step before serve.
        are_served = Int32(0)
        if cutlass.const_expr(not tile.token_scales):
            are_new = 1 - serve
            if are_new != 0:
                find_largest(tile, scores, row_scales, tops, group, warp, lane, shared)
                serve = expect_tops(tile, tops, -expected_below(tile))
            is_surprise = expect_probabilities(
                tile, scores, row_scales, tops, probabilities, found, _least(token, work), lane
            )
            is_surprise = is_surprise | (1 - serve)
            # All warps have multiplied the probabilities of the step before, in whose place these go.
            ptx.barrier_wait(empty_values + 8 * stage_before, phase_before)
            store_probabilities(tile, probabilities, value_signs, False, group, warp, lane, shared)
            if are_new != 0:
                raise_references(tile, tops, references, sums, outputs)
                find_factors(tile, tops, references, factors)
            _wait_for_values(
                tile, full_values + 8 * value_stage, value_phase, value_stage, token, group, in_group, shared, work
            )
            ptx.fence_async_shared()
            if ptx.sync_any(GROUP_BARRIER + group, 128, is_surprise) == 0:
                are_served = Int32(1)
                for column in cutlass.range_constexpr(own):
                    sums[column] = ptx.multiply_add(found[column], factors[column], sums[column])
        if are_served == 0:
            if cutlass.const_expr(tile.token_scales):
                for place in cutlass.range_constexpr(2 * tile.halves * own):
                    scores[place] = scores[place] + value_logs[place // own]
            else:
                scale_rows(tile, scores, row_scales)
            find_tops(tile, scores, tops, group, warp, lane, shared)
            raise_references(tile, tops, references, sums, outputs)
            find_factors(tile, tops, references, factors)
            few = add_probabilities(tile, scores, per_value_scale, tops, factors, sums, _least(token, work), lane)
            store_probabilities(tile, scores, value_signs, False, group, warp, lane, shared)
            if cutlass.const_expr(tile.token_scales):
                _wait_for_values(
                    tile, full_values + 8 * value_stage, value_phase, value_stage, token, group, in_group, shared, work
                )
            ptx.fence_async_shared()
            if cutlass.const_expr(tile.is_e4m3):
                if ptx.sync_any(GROUP_BARRIER + group, 128, few) != 0:
                    store_probabilities(tile, scores, value_signs, True, group, warp, lane, shared)
                    ptx.fence_async_shared()
                    ptx.sync(GROUP_BARRIER + group, 128)
                    add_outputs(tile, outputs, factors, True, value_stage, group, shared)
                    if cutlass.const_expr(tile.places.finer == tile.places.own):
                        ptx.sync(GROUP_BARRIER + group, 128)
                        store_probabilities(tile, scores, value_signs, False, group, warp, lane, shared)
                        ptx.fence_async_shared()
                        ptx.sync(GROUP_BARRIER + group, 128)
            else:
                ptx.sync(GROUP_BARRIER + group, 128)
        add_outputs(tile, outputs, factors, False, value_stage, group, shared)
        if lane == 0:
            ptx.barrier_arrive(empty_values + 8 * value_stage)
        if cutlass.const_expr(not tile.token_scales):
            if are_served == 0:
                serve = expect_tops(tile, tops, BELOW - expected_below(tile))
                find_factors(tile, tops, references, factors)
        stage_before, phase_before = value_stage, value_phase
        i = i + step
        stage = stage + step
        if stage >= stages:
            stage = stage - stages
            phase = phase ^ 1
        if cutlass.const_expr(tile.value_stages != tile.stages):
            value_stage = value_stage + step
            if value_stage >= tile.value_stages:
                value_stage = value_stage - tile.value_stages
                value_phase = value_phase ^ 1
    if cutlass.const_expr(tile.blocks > 1):
        # Not earlier: blocks of the next kernel would find room here, and take bandwidth.
        cute.arch.griddepcontrol_launch_dependents()
    if cutlass.const_expr(tile.token_scales):
        _, partitions = partitions_of(data, work.sequence)
        scale_of_values = value_scale(data, work.kv_head)
    if cutlass.const_expr(tile.cluster):
        # All blocks' barriers are there.
        cute.arch.cluster_wait()
    factor = data.value_factor * scale_of_values
    merge_warpgroups(
        tile, references, sums, outputs, factor, partitions, group, warp, lane, thread, shared, data, work
    )  # fmt: skip


@cute.jit
def _wait_for_values(tile: cutlass.Constexpr[Tile], barrier, phase, stage, token, group, thread, shared, work):
    """Wait for a stage's values, and clear those that no row sees."""
    ptx.barrier_wait(barrier, phase)
    if cutlass.const_expr(tile.in_bulk):
        if is_seen_in_part(token, work):
            lowest, highest = span_of(tile, shared)
            if token < lowest or token + STEP > highest:
                clear_values(tile, stage, token, group, thread, lowest, highest, shared)


@cute.jit
def _least(token, work):
    """Of how many lanes tokens must weigh little for a row to need more care: four, or one where some see no token."""
    least = Int32(4)
    if is_seen_in_part(token, work):
        least = Int32(1)
    return least


@cute.jit
def _fill_absent_scales(tile: cutlass.Constexpr[Tile], thread, shared, data):
    """Ones where only one of keys and values has a scale per token; nothing else is ever written there."""
    for i in cutlass.range_constexpr((tile.stages * STEP + tile.math_threads - 1) // tile.math_threads):
        at = shared + (thread + i * tile.math_threads) * 4
        if thread + i * tile.math_threads < tile.stages * STEP:
            if data.keys_by_token == 0:
                ptx.shared_store(at + tile.places.key_scales, [1.0], Float32)
            if data.values_by_token == 0:
                ptx.shared_store(at + tile.places.value_scales, [1.0], Float32)


@cute.jit
def _token_scales(tile: cutlass.Constexpr[Tile], stage, group, warp, lane, shared):
    """Of this thread's tokens: scales of keys; logarithms, signs and reciprocals of those of values."""
    key_scales, logs, signs, reciprocals = [], [], [], []
    if cutlass.const_expr(tile.token_scales):
        keys_at = shared + tile.places.key_scales + stage * (STEP * 4)
        values_at = shared + tile.places.value_scales + stage * (STEP * 4)
        for i in cutlass.range_constexpr(2 * tile.halves):
            token = first_token(tile, group, warp, lane) + 8 * (i >> 1) + 16 * (i & 1)
            key_scales.append(ptx.shared_load(keys_at + token * 4, Float32))
            scale = ptx.shared_load(values_at + token * 4, Float32)
            size = ptx.maximum(ptx.magnitude(scale), Float32(LEAST_SCALE))
            logs.append(ptx.log2(size) * Float32(1 / LOG2E))
            # A smaller scale than the least is what it is beside that.
            is_small = Int32(0)
            if ptx.magnitude(scale) < Float32(LEAST_SCALE):
                is_small = Int32(1)
            signs.append(ptx.select(is_small, scale * Float32(1 / LEAST_SCALE), ptx.sign(scale)))
            reciprocals.append(ptx.reciprocal(size))
    return key_scales, logs, signs, reciprocals
