"""The multiplying warpgroups for many query rows, which are the 64 rows of ``S = Q K^T`` and of ``O += P V``.

Each warpgroup takes alternate steps. A thread has two rows, ``16 warp + lane / 4 + 8 i`` (i < 2), and of each what four
lanes share: tokens ``16 g + 8 h + 2 (lane % 4) + e`` of a step, elements ``8 j + 2 (lane % 4) + e`` of an output. So no
row is more than a few lanes' matter, and probabilities are operands from the registers that they are computed in. What
:mod:`.cute_softmax` says of references, and of sums of e4m3 numbers, holds here too, but that the second number has the
scale of the first.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...kernels.cute import ptx
from .cute_outputs import MERGE_BARRIER, partial_of, result_of, store_two
from .cute_queries import load_queries, span_of
from .cute_softmax import FAR, GROUP_BARRIER, LOG2E, NOTHING, below
from .cute_tile import CORE, MATH_BARRIER, MATH_THREADS, ROWS_DIM, STEP, WARPGROUPS, Tile
from .cute_values import clear_values
from .cute_work import partitions_of, value_factor

GROUPS = STEP // 16
"""Groups of 16 tokens of a step."""
LOW = 1.0
"""What 16 probabilities of a thread come to where sums of two e4m3 numbers have too few bits of them."""


@cute.jit
def consume_rows(tile: cutlass.Constexpr[Tile], thread, warp, lane, shared, data, work):
    """Attend to a task's tokens, and store the result or a partial one."""
    places = tile.places
    group, warp = warp >> 2, warp & 3
    in_group = thread & 127
    # What is needed last is asked for first.
    _, partitions = partitions_of(data, work.sequence)
    load_queries(tile, thread, shared, data, work)
    factor = data.value_factor
    if cutlass.const_expr(tile.is_e4m3):
        factor = value_factor(data, work)
    ptx.fence_async_shared()
    ptx.sync(MATH_BARRIER, MATH_THREADS)
    first_row = warp * 16 + (lane >> 2)
    row_scales = [ptx.shared_load(shared + places.row_scales + (first_row + 8 * row) * 4, Float32) for row in range(2)]
    outputs = cute.make_rmem_tensor((ROWS_DIM // 2,), Float32)
    outputs.fill(0.0)
    sums = cute.make_rmem_tensor((2,), Float32)
    sums.fill(0.0)
    references = cute.make_rmem_tensor((2,), Float32)
    references.fill(NOTHING)
    scores = cute.make_rmem_tensor((STEP // 2,), Float32)
    full_keys, full_values = shared + places.full_keys, shared + places.full_values
    empty_keys, empty_values = shared + places.empty_keys, shared + places.empty_values
    i = group
    stage, phase = group, Int32(0)
    while i < work.steps:
        ptx.barrier_wait(full_keys + 8 * stage, phase)
        _score(tile, scores, row_scales, stage, shared)
        if lane == 0:
            ptx.barrier_arrive(empty_keys + 8 * stage)
        token = (work.first_step + i) * STEP
        if token < work.all_low or token + STEP > work.all_high:
            _mask(tile, scores, first_row, token + 2 * (lane & 3), shared)
        tops = _find_tops(scores)
        _raise_references(tops, references, sums, outputs)
        factors = [ptx.exp2((tops[k] - references[k]) * Float32(LOG2E)) for k in range(2)]
        few = _add_probabilities(tile, scores, tops, factors, sums)
        ptx.barrier_wait(full_values + 8 * stage, phase)
        if token < work.all_low or token + STEP > work.all_high:
            lowest, highest = span_of(tile, shared)
            if token < lowest or token + STEP > highest:
                clear_values(tile, stage, token, group, in_group, lowest, highest, shared)
                ptx.fence_async_shared()
                ptx.sync(GROUP_BARRIER + group, 128)
        if cutlass.const_expr(tile.is_e4m3):
            if ptx.sync_any(GROUP_BARRIER + group, 128, few) != 0:
                _add_outputs(tile, outputs, scores, factors, True, stage, lane, shared)
        _add_outputs(tile, outputs, scores, factors, False, stage, lane, shared)
        if lane == 0:
            ptx.barrier_arrive(empty_values + 8 * stage)
        i = i + WARPGROUPS
        stage = stage + WARPGROUPS
        if stage >= tile.stages:
            stage = stage - tile.stages
            phase = phase ^ 1
    # Not before the last tile has been read: blocks of the next kernel would take its bandwidth.
    cute.arch.griddepcontrol_launch_dependents()
    _merge_warpgroups(
        tile, references, sums, outputs, factor, partitions, group, first_row, in_group, lane, shared, data, work
    )  # fmt: skip


def _place(half: int, pair: int, row: int, e: int) -> int:
    """Where a thread keeps a score: ``half`` h and ``pair`` g of its token, ``row`` i."""
    return half * (STEP // 4) + 4 * pair + 2 * row + e


@cute.jit
def _score(tile: cutlass.Constexpr[Tile], scores, row_scales, stage, shared):
    """``scores`` of this thread: queries times the keys of a stage, scaled by row."""
    places = tile.places
    queries = ptx.descriptor(shared + places.queries, tile.query_pitch)
    keys = ptx.descriptor(shared + places.keys, tile.key_leading) + stage * (tile.stage_bytes >> 4)
    parts = 2 if cutlass.const_expr(tile.is_e4m3) else 1
    for half in cutlass.range_constexpr(2):
        products = [
            (part * (tile.rows * 16) + chunk * tile.query_pitch, half * CORE + chunk * tile.key_leading)
            # The small sum first: products are added up with few bits, relative to what is there.
            for part in reversed(range(parts))
            for chunk in range(0, tile.chunks, 2)
        ]
        found = ptx.multiply(tile.kind, STEP // 2, queries, keys, (CORE, tile.key_stride), [products])
        for k in cutlass.range_constexpr(STEP // 4):
            scores[half * (STEP // 4) + k] = found[k] * row_scales[(k >> 1) & 1]


@cute.jit
def _mask(tile: cutlass.Constexpr[Tile], scores, first_row, token, shared):
    """-inf where a row does not see a token; ``token`` and ``first_row`` are this thread's first ones."""
    at = shared + tile.places.bounds + first_row * 8
    bounds = [ptx.shared_load(at + 64 * row, Int32, 2) for row in range(2)]
    for half in cutlass.range_constexpr(2):
        for pair in cutlass.range_constexpr(GROUPS):
            for e in cutlass.range_constexpr(2):
                at = token + (16 * pair + 8 * half + e)
                for row in cutlass.range_constexpr(2):
                    hidden = Int32(0)
                    if at < bounds[row][0] or at >= bounds[row][1]:
                        hidden = Int32(1)
                    place = _place(half, pair, row, e)
                    scores[place] = ptx.select(hidden, -Float32.inf, scores[place])


@cute.jit
def _find_tops(scores):
    """The step's top of each of this thread's rows."""
    tops = []
    for row in cutlass.range_constexpr(2):
        most = Float32(NOTHING)
        for half in cutlass.range_constexpr(2):
            for pair in cutlass.range_constexpr(GROUPS):
                for e in cutlass.range_constexpr(2):
                    most = ptx.maximum(most, scores[_place(half, pair, row, e)])
        for distance in cutlass.range_constexpr(2):
            most = ptx.maximum(most, ptx.exchange(most, 1 << distance))
        tops.append(below(most))
    return tops


@cute.jit
def _raise_references(tops, references, sums, outputs):
    """Raise this thread's references where the step is too far above; the lanes of a row do the same."""
    if ptx.maximum(tops[0] - references[0], tops[1] - references[1]) > Float32(FAR):
        for row in cutlass.range_constexpr(2):
            new = ptx.maximum(references[row], tops[row])
            factor = ptx.exp2((references[row] - new) * Float32(LOG2E))
            references[row] = new
            sums[row] = sums[row] * factor
            for j in cutlass.range_constexpr(ROWS_DIM // 8):
                for e in cutlass.range_constexpr(2):
                    outputs[4 * j + 2 * row + e] = outputs[4 * j + 2 * row + e] * factor


@cute.jit
def _add_probabilities(tile: cutlass.Constexpr[Tile], scores, tops, factors, sums):
    """Turn scores into probabilities, and add them up; whether e4m3 needs a finer term of them.

    That is where few tokens of a step outweigh all others; see :func:`.cute_softmax.add_probabilities`. They may be the
    first of a context, so tokens of the step's first half are told from the others.
    """
    are_few = Int32(0)
    for row in cutlass.range_constexpr(2):
        found = []
        for first in cutlass.range_constexpr(0, GROUPS, GROUPS // 2):
            part = Float32(0.0)
            for half in cutlass.range_constexpr(2):
                for pair in cutlass.range_constexpr(first, first + GROUPS // 2):
                    for e in cutlass.range_constexpr(2):
                        place = _place(half, pair, row, e)
                        scores[place] = ptx.exp2((scores[place] - tops[row]) * Float32(LOG2E))
                        part = part + scores[place]
            found.append(part)
            if cutlass.const_expr(tile.is_e4m3):
                # Nothing at all is what tokens give that a row does not see.
                if part < Float32(LOW) and part > Float32(0.0):
                    are_few = Int32(1)
        sums[row] = ptx.multiply_add(found[0] + found[1], factors[row], sums[row])
    return are_few


def _operands(tile: Tile, probabilities: Any, finer: bool, lane: Any) -> list[Any]:
    """Probabilities as operands of the outputs: four words for each product."""
    if not tile.is_e4m3:
        pack = ptx.pack_bfloat16 if tile.cache == "bf16" else ptx.pack_float16
        return [
            pack(*(probabilities[_place(half, pair, row, e)] for e in range(2)))
            for pair in range(GROUPS)
            for half in range(2)
            for row in range(2)
        ]
    # Lane t of four needs tokens 4 t to 4 t + 3 of 16, which two lanes hold in half of a word each.
    source = (lane & 28) | ((lane & 1) << 1)
    order = ptx.select(lane & 2, 0x7632, 0x5410, Int32)
    shifts, count = ((0, 10, 0), 2) if finer else ((0,), 2)
    terms: list[list[Any]] = [[] for _ in range(count)]
    for pair in range(GROUPS):
        for row in range(2):
            four = [probabilities[_place(half, pair, row, e)] for half in range(2) for e in range(2)]
            found = ptx.split_probabilities(four, shifts, count)
            for term, word in zip(terms, found, strict=True):
                low, high = ptx.from_lane(word, source), ptx.from_lane(word, source + 1)
                term.append(ptx.permute_bytes(low, high, order))
    # The small numbers first, as in the scores.
    return [word for term in reversed(terms) for word in term]


@cute.jit
def _add_outputs(
    tile: cutlass.Constexpr[Tile], outputs, probabilities, factors, finer: cutlass.Constexpr[bool], stage, lane, shared
):  # fmt: skip
    """``outputs += factor * probabilities times values of a stage``, or only what is ``finer`` in e4m3."""
    operands = _operands(tile, probabilities, finer, lane)
    values = ptx.descriptor(shared + tile.places.values, tile.value_leading) + stage * (tile.stage_bytes >> 4)
    pieces = 2  # of 16 bytes, of one product's K
    steps = [(0, i * tile.value_leading) for i in range(0, STEP // tile.tokens_of_piece, pieces)]
    steps = steps * (len(operands) // (4 * len(steps)))
    scale = [factor * Float32(2.0**-10) for factor in factors] if cutlass.const_expr(finer) else factors
    # Where probabilities are still needed, half of the elements at a time for want of registers.
    width = ROWS_DIM // 2 if finer else ROWS_DIM
    for begin in cutlass.range_constexpr(0, ROWS_DIM, width):
        products = [(a, b + begin * 16) for a, b in steps]
        found = ptx.multiply(tile.kind, width, operands, values, (0, CORE), [products])
        for k in cutlass.range_constexpr(width // 2):
            place = begin // 2 + k
            outputs[place] = ptx.multiply_add(found[k], scale[(k >> 1) & 1], outputs[place])


@cute.jit
def _merge_warpgroups(
    tile: cutlass.Constexpr[Tile], references, sums, outputs, factor, partitions, group, first_row, thread, lane,
    shared, data, work,
):  # fmt: skip
    """Add both warpgroups' outputs up: each takes one row of a thread's two; ``factor`` multiplies outputs."""
    in_row = ROWS_DIM // 4
    totals = []
    for row in cutlass.range_constexpr(2):
        total = sums[row]
        for distance in cutlass.range_constexpr(2):
            total = total + ptx.exchange(total, 1 << distance)
        totals.append(total)
    pairs = [(outputs[4 * (k >> 1) + (k & 1)], outputs[4 * (k >> 1) + 2 + (k & 1)]) for k in range(in_row)]
    mine = [ptx.select(group, high, low) for low, high in pairs]
    # Each thread's vectors lie one after the other, and those of its number in the other warpgroup are its own.
    exchange = shared + tile.places.own + thread * 16
    stats = shared + tile.places.references + thread * 8
    for k in cutlass.range_constexpr(0, in_row, 4):
        sent = [ptx.select(group, low, high) for low, high in pairs[k : k + 4]]
        ptx.shared_store(exchange + (group * tile.own_bytes + k * 512), sent, Float32)
    sent = [ptx.select(group, x[0], x[1]) for x in ([references[0], references[1]], totals)]
    ptx.shared_store(stats + group * (8 * 128), sent, Float32)
    ptx.sync(MERGE_BARRIER, MATH_THREADS)
    reference, total = ptx.shared_load(stats + (1 - group) * (8 * 128), Float32, 2)
    others = []
    for k in cutlass.range_constexpr(0, in_row, 4):
        others += ptx.shared_load(exchange + ((1 - group) * tile.own_bytes + k * 512), Float32, 4)
    my_reference, my_total = (ptx.select(group, x[1], x[0]) for x in ([references[0], references[1]], totals))
    top = ptx.maximum(my_reference, reference)
    weights = [ptx.exp2((x - top) * Float32(LOG2E)) for x in (my_reference, reference)]
    total = ptx.multiply_add(total, weights[1], my_total * weights[0])
    merged = [ptx.multiply_add(others[k], weights[1], mine[k] * weights[0]) * factor for k in range(in_row)]
    _store_row(tile, merged, top, total, work.first_row + (first_row + 8 * group), lane, partitions, data, work)


@cute.jit
def _store_row(tile: cutlass.Constexpr[Tile], merged, top, total, row, lane, partitions, data, work):
    """Store a row that four lanes share, as a result or as a partial one."""
    if row < data.query_length * data.group:
        quarter = lane & 3
        if partitions > 1 and data.partial_out != 0:
            to, stats = partial_of(tile, data, work, row)
            for k in cutlass.range_constexpr(0, ROWS_DIM // 4, 4):
                ptx.store(to + (k * 16 + quarter * 16), merged[k : k + 4], Float32, ".cg")
            if quarter == 0:
                ptx.store(stats, [top, total])
        else:
            at, lse_at, factor, lse = result_of(top, total, row, partitions, data, work)
            for j in cutlass.range_constexpr(ROWS_DIM // 8):
                store_two(at + Int64(quarter) * 4 + 16 * j, [x * factor for x in merged[2 * j : 2 * j + 2]], data)
            if data.lse != 0 and quarter == 0:
                ptx.store(lse_at, [lse])
