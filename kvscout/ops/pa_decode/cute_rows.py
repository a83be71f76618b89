"""The multiplying warpgroups for many query rows, which are the 64 rows of ``S = Q K^T`` and of ``O += P V``.

Each warpgroup takes alternate steps. A thread has two rows, ``16 warp + lane / 4 + 8 i`` (i < 2), and of each what four
lanes share: tokens ``16 g + 8 h + 2 (lane % 4) + e`` of a step, elements ``8 j + 2 (lane % 4) + e`` of an output. So no
row is more than a few lanes' matter, and probabilities are operands from the registers that they are computed in. What
:mod:`.cute_softmax` says of references holds here too. Probabilities have 16 bits, whatever the cache has, and values
of e4m3 are widened for them.
"""

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...kernels.cute import ptx
from .cute_outputs import MERGE_BARRIER, partial_of, result_of, store_two
from .cute_queries import load_queries, span_of
from .cute_softmax import GROUP_BARRIER, LARGE, LOG2E, MOST_16_BIT, NOTHING, below
from .cute_tile import CORE, MATH_BARRIER, MATH_THREADS, MEANS, ROWS_DIM, STEP, WARPGROUPS, Tile
from .cute_values import clear_values
from .cute_work import is_seen_in_part, partitions_of, value_scale

GROUPS = STEP // 16
"""Groups of 16 tokens of a step."""
PIECE = 8
"""Tokens of 16 bytes of 16-bit values."""
TURN_BARRIER = 4
"""The first of the warpgroups' named barriers where they wait for their turn to multiply."""
BELOW = 9
"""Powers of two by which the top is below the largest score: sums stay below ``MOST_16_BIT`` if all are as large."""
LEAST_TOTAL = 1e-30
"""A row that sees nothing has a smaller sum of probabilities, and zeros."""
CHAINS = 4
"""Chains in which they are added up, so that none waits long for itself."""


@cute.jit
def consume_rows(tile: cutlass.Constexpr[Tile], thread, warp, lane, shared, data, work):
    """Attend to a task's tokens, and store the result or a partial one."""
    places = tile.places
    group, warp = warp >> 2, warp & 3
    in_group = thread & 127
    # What is needed last is asked for first.
    _, partitions = partitions_of(data, work.sequence)
    load_queries(tile, thread, shared, data, work)
    scale_of_values = Float32(1.0)
    if cutlass.const_expr(tile.is_e4m3):
        scale_of_values = value_scale(data, work.kv_head)
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
    operands = cute.make_rmem_tensor((STEP // 4,), Int32)
    full_keys, full_values = shared + places.full_keys, shared + places.full_values
    empty_keys, empty_values = shared + places.empty_keys, shared + places.empty_values
    full_wide, empty_wide = shared + places.full_wide + 8 * group, shared + places.empty_wide + 8 * group
    i = group
    stage, phase = group, Int32(0)
    wide_phase = Int32(0)
    # Where each warpgroup has a step at most, both multiply at once.
    turns = work.steps > WARPGROUPS
    if turns:
        if group != 0:
            # The first turn is the other's.
            ptx.arrive(TURN_BARRIER, MATH_THREADS)
        ptx.sync(TURN_BARRIER + group, MATH_THREADS)
    if i < work.steps:
        ptx.barrier_wait(full_keys + 8 * stage, phase)
        _score(tile, scores, stage, shared)
        if lane == 0:
            ptx.barrier_arrive(empty_keys + 8 * stage)
    if turns:
        _pass_turn(work.steps - i, group)
    while i < work.steps:
        token = (work.first_step + i) * STEP
        if is_seen_in_part(token, work):
            _mask(tile, scores, first_row, token + 2 * (lane & 3), shared)
        _find_probabilities(tile, scores, row_scales, references, sums, outputs, operands, i >= WARPGROUPS)
        values, used = shared + places.own + group * tile.own_bytes, empty_wide
        if cutlass.const_expr(tile.widens):
            ptx.barrier_wait(full_wide, wide_phase)
            wide_phase = wide_phase ^ 1
        else:
            values, used = shared + places.values + stage * tile.stage_bytes, empty_values + 8 * stage
            ptx.barrier_wait(full_values + 8 * stage, phase)
            if is_seen_in_part(token, work):
                lowest, highest = span_of(tile, shared)
                if token < lowest or token + STEP > highest:
                    clear_values(tile, stage, token, group, in_group, lowest, highest, shared)
                    ptx.fence_async_shared()
                    ptx.sync(GROUP_BARRIER + group, 128)
        if turns:
            ptx.sync(TURN_BARRIER + group, MATH_THREADS)
        _start_outputs(tile, outputs, operands, values)
        i = i + WARPGROUPS
        stage = stage + WARPGROUPS
        if stage >= tile.stages:
            stage = stage - tile.stages
            phase = phase ^ 1
        if i < work.steps:
            ptx.barrier_wait(full_keys + 8 * stage, phase)
            _score(tile, scores, stage, shared)
            ptx.arrive(TURN_BARRIER + 1 - group, MATH_THREADS)
            if lane == 0:
                ptx.barrier_arrive(used)
                ptx.barrier_arrive(empty_keys + 8 * stage)
        else:
            ptx.multiply_wait()
            if lane == 0:
                ptx.barrier_arrive(used)
            if turns:
                _pass_turn(work.steps - i, group)
            # Or the old ones would take registers meanwhile.
            scores.fill(0.0)
    # Not before the last tile has been read: blocks of the next kernel would take its bandwidth.
    cute.arch.griddepcontrol_launch_dependents()
    factor = data.value_factor * scale_of_values
    _merge_warpgroups(
        tile, references, sums, outputs, factor, partitions, group, first_row, in_group, lane, shared, data, work
    )  # fmt: skip


@cute.jit
def _pass_turn(left, group):
    """Let the other warpgroup multiply, while this one does softmax, unless that was the last turn of all.

    A warpgroup has one turn for its first scores, and then one for the outputs of each of its steps and the scores of
    its next one. ``left`` is how many steps there are from that next one on: less than none after the last turn.
    """
    if left >= 0:
        ptx.arrive(TURN_BARRIER + 1 - group, MATH_THREADS)


def _halves(tile: Tile) -> int:
    """Products of a step's keys: one that has its tokens in order, unless these lie page by page."""
    return 2 if tile.by_page else 1


def _place(tile: Tile, half: int, pair: int, row: int, e: int) -> int:
    """Where a thread keeps a score: ``half`` h and ``pair`` g of its token, ``row`` i."""
    eight = half * GROUPS + pair if tile.by_page else 2 * pair + half
    return 4 * eight + 2 * row + e


@cute.jit
def _score(tile: cutlass.Constexpr[Tile], scores, stage, shared):
    """``scores`` of this thread: queries times the keys of a stage. All other products are waited for, too."""
    places = tile.places
    queries = ptx.descriptor(shared + places.queries, tile.query_pitch)
    keys = ptx.descriptor(shared + places.keys, tile.key_leading) + stage * (tile.stage_bytes >> 4)
    halves = [
        [
            (part * (tile.rows * 16) + chunk * tile.query_pitch, half * CORE + chunk * tile.key_leading)
            # The small sum first: products are added up with few bits, relative to what is there.
            for part in reversed(range(2 if tile.is_e4m3 else 1))
            for chunk in range(0, tile.chunks, 2)
        ]
        for half in range(_halves(tile))
    ]
    stride = tile.key_stride if tile.by_page else tile.key_eight
    found = ptx.multiply(tile.kind, STEP // _halves(tile), queries, keys, (CORE, stride), halves)
    for k in cutlass.range_constexpr(STEP // 2):
        scores[k] = found[k]


@cute.jit
def _mask(tile: cutlass.Constexpr[Tile], scores, first_row, token, shared):
    """Scores of -inf where a row does not see a token; ``token`` and ``first_row`` are this thread's first ones."""
    at = shared + tile.places.bounds + first_row * 8
    bounds = [ptx.shared_load(at + 64 * row, Int32, 2) for row in range(2)]
    for half in cutlass.range_constexpr(2):
        for pair in cutlass.range_constexpr(GROUPS):
            for e in cutlass.range_constexpr(2):
                at = token + (16 * pair + 8 * half + e)
                for row in cutlass.range_constexpr(2):
                    is_hidden = Int32(0)
                    if at < bounds[row][0] or at >= bounds[row][1]:
                        is_hidden = Int32(1)
                    place = _place(tile, half, pair, row, e)
                    scores[place] = ptx.select(is_hidden, -Float32.inf, scores[place])


def _places(tile: Tile, row: int) -> list[list[int]]:
    """Where a thread keeps a row's scores, in ``CHAINS`` lists."""
    every = [_place(tile, half, pair, row, e) for half in range(2) for pair in range(GROUPS) for e in range(2)]
    return [every[chain::CHAINS] for chain in range(CHAINS)]


@cute.jit
def _find_probabilities(
    tile: cutlass.Constexpr[Tile], scores, row_scales, references, sums, outputs, operands, has_references
):  # fmt: skip
    """Probabilities of a step as operands of the outputs, four words for each product; they are added to ``sums``.

    Most steps need no maxima: what probabilities add up to shows that none is too large beside the rows' references.
    """
    if not has_references:
        tops = _find_tops(tile, scores, row_scales)
        references[0], references[1] = tops[0], tops[1]
    found = cute.make_rmem_tensor((2,), Float32)
    scales = [row_scales[row] * Float32(LOG2E) for row in range(2)]
    powers = [references[row] * Float32(LOG2E) for row in range(2)]
    _add_up(tile, scores, scales, powers, found, operands)
    largest = ptx.maximum(ptx.magnitude(powers[0]), ptx.magnitude(powers[1]))
    are_right = Int32(0)
    if largest <= Float32(LARGE * LOG2E) and found[0] <= Float32(MOST_16_BIT) and found[1] <= Float32(MOST_16_BIT):
        are_right = Int32(1)
    if ptx.ballot(are_right) != Int32(-1):
        for half in cutlass.range_constexpr(2):
            for pair in cutlass.range_constexpr(GROUPS):
                for row in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(2):
                        place = _place(tile, half, pair, row, e)
                        # Rounded, as the reference will be: a compiler would subtract it from the exact product.
                        scores[place] = ptx.multiply_add(scores[place], row_scales[row], Float32(0.0))
        _raise_references(_find_tops(tile, scores, None), references, sums, outputs)
        for half in cutlass.range_constexpr(2):
            for pair in cutlass.range_constexpr(GROUPS):
                for row in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(2):
                        place = _place(tile, half, pair, row, e)
                        # In this order neither does a logit become infinite, nor a power get rounded to another.
                        scores[place] = (scores[place] - references[row]) * Float32(LOG2E)
        _add_up(tile, scores, [Float32(1.0)] * 2, [Float32(0.0)] * 2, found, operands)
    for row in cutlass.range_constexpr(2):
        sums[row] = sums[row] + found[row]


@cute.jit
def _add_up(tile: cutlass.Constexpr[Tile], scores, scales, powers, found, operands):
    """What all ``2 ** (score * scale - power)`` of each row are ``found`` to add up to, and they as operands."""
    pack = ptx.pack_bfloat16 if cutlass.const_expr(tile.cache == "bf16") else ptx.pack_float16
    for row in cutlass.range_constexpr(2):
        chains = [Float32(0.0)] * CHAINS
        for pair in cutlass.range_constexpr(GROUPS):
            for half in cutlass.range_constexpr(2):
                two = []
                for e in cutlass.range_constexpr(2):
                    power = ptx.multiply_add(scores[_place(tile, half, pair, row, e)], scales[row], -powers[row])
                    two.append(ptx.exp2(power))
                    chain = (2 * half + e) % CHAINS
                    chains[chain] = chains[chain] + two[e]
                operands[4 * pair + 2 * half + row] = pack(two[0], two[1])
        found[row] = (chains[0] + chains[1]) + (chains[2] + chains[3])


@cute.jit
def _find_tops(tile: cutlass.Constexpr[Tile], scores, row_scales):
    """The step's top of each of this thread's rows, of scores that ``row_scales`` are still to multiply, if any."""
    tops = []
    for row in cutlass.range_constexpr(2):
        chains = [[scores[place] for place in chain] for chain in _places(tile, row)]
        most = functools.reduce(ptx.maximum, [functools.reduce(ptx.maximum, chain) for chain in chains])
        if cutlass.const_expr(row_scales is not None):
            most = most * row_scales[row]
        for distance in cutlass.range_constexpr(2):
            most = ptx.maximum(most, ptx.exchange(most, 1 << distance))
        tops.append(below(ptx.maximum(most, Float32(NOTHING)), BELOW))
    return tops


@cute.jit
def _raise_references(tops, references, sums, outputs):
    """Raise this thread's references to the step's tops; the lanes of a row do the same."""
    for row in cutlass.range_constexpr(2):
        new = ptx.maximum(references[row], tops[row])
        factor = ptx.exp2((references[row] - new) * Float32(LOG2E))
        references[row] = new
        sums[row] = sums[row] * factor
        for j in cutlass.range_constexpr(ROWS_DIM // 8):
            for e in cutlass.range_constexpr(2):
                outputs[4 * j + 2 * row + e] = outputs[4 * j + 2 * row + e] * factor


@cute.jit
def _start_outputs(tile: cutlass.Constexpr[Tile], outputs, operands, at):
    """Start ``outputs += probabilities times values``, which lie at ``at``."""
    values = ptx.descriptor(at, ROWS_DIM * 16)
    products = [(0, piece * (ROWS_DIM * 16)) for piece in range(0, STEP // PIECE, 2)]
    before = [outputs[k] for k in range(ROWS_DIM // 2)]
    words = [operands[k] for k in range(STEP // 4)]
    found = ptx.multiply(
        tile.value_kind, ROWS_DIM, words, values, (0, CORE), [products], added_to=before, is_waited_for=False
    )  # fmt: skip
    for k in cutlass.range_constexpr(ROWS_DIM // 2):
        outputs[k] = found[k]


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
    if cutlass.const_expr(tile.widens):
        # All of the warpgroup's warps have multiplied the values that lie there.
        ptx.sync(GROUP_BARRIER + group, 128)
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
    merged = [ptx.multiply_add(others[k], weights[1], mine[k] * weights[0]) for k in range(in_row)]
    _store_row(tile, merged, factor, top, total, work.first_row + (first_row + 8 * group), lane, partitions, data, work)


@cute.jit
def _store_row(tile: cutlass.Constexpr[Tile], merged, factor, top, total, row, lane, partitions, data, work):
    """Store a row that four lanes share, ``factor`` still to multiply it, as a result or as a partial one."""
    if row < data.query_length * data.group:
        quarter = lane & 3
        if partitions > 1 and data.partial_out != 0:
            to, stats = partial_of(tile, data, work, row)
            if cutlass.const_expr(tile.widens):
                # The merge multiplies by the factor, of which means are independent.
                to_mean = ptx.reciprocal(ptx.maximum(total, Float32(LEAST_TOTAL))) * Float32(MEANS)
                for k in cutlass.range_constexpr(0, ROWS_DIM // 4, 8):
                    means = [x * to_mean for x in merged[k : k + 8]]
                    words = [ptx.pack_float16(means[i], means[i + 1]) for i in range(0, 8, 2)]
                    ptx.store(to + (k * 8 + quarter * 16), words, Int32, ".cg")
            else:
                for k in cutlass.range_constexpr(0, ROWS_DIM // 4, 4):
                    sums = [x * factor for x in merged[k : k + 4]]
                    ptx.store(to + (k * 16 + quarter * 16), sums, Float32, ".cg")
            if quarter == 0:
                ptx.store(stats, [top, total])
        else:
            at, lse_at, normaliser, lse = result_of(top, total, row, partitions, data, work)
            for j in cutlass.range_constexpr(ROWS_DIM // 8):
                two = [x * factor * normaliser for x in merged[2 * j : 2 * j + 2]]
                store_two(at + Int64(quarter) * 4 + 16 * j, two, data)
            if data.lse != 0 and quarter == 0:
                ptx.store(lse_at, [lse])
