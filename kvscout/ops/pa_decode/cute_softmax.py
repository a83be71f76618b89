"""Softmax, relative to tops that put a step's probabilities where few bits tell them apart.

A probability is ``exp(score - top)``, and ``top`` is so much below the step's largest score of the row that none is
above 2^8, which e4m3 holds. The largest scores take an exchange between all of a warpgroup's threads. So a step first
expects the top of one before, which is lower, to leave room; only if what probabilities add up to shows that these are
too large, or so small that e4m3 loses bits, does it find a top of its own. Values that have a scale each are multiplied
by it in the probabilities, so the logarithm of the scale is part of the score, and the sums take it out again: there,
each step has its own top. Sums and outputs are relative to the row's ``reference``, the ``top`` of its first step,
which is raised if floats would overflow. Differences are taken before they are scaled to base 2, unless both are small:
large logits do not overflow.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...kernels.cute import ptx
from .cute_tile import CORE, Tile

LOG2E = math.log2(math.e)
NOTHING = -3.4028234663852886e38
"""The reference of a row that has seen no token: the least float."""
BELOW = 8
"""What e4m3 holds, 448 being the most, has room for no more than half a power of two above."""
SPARE = 0.5
FAR = 32 / LOG2E
"""How far a step's top may be above the row's reference."""
LOW = 2.0**-2
"""Probabilities that sums of two e4m3 numbers have fewer than 8 bits of: the sum of a thread's, of 2 or 4 tokens."""

EXPECTED_LOW = 2.0**-4
"""What ``LOW`` is for later steps: each of four tokens with 8 bits."""
MOST, MOST_16_BIT = 448.0, 60000.0
"""What the probabilities of a thread's tokens may add up to then: e4m3 and float16 hold no more."""
LARGE = 1024 / LOG2E
"""A logit above which a float has too few bits for its fraction."""

GROUP_BARRIER = 1
"""The first of the warpgroups' named barriers."""


def expected_below(tile: Tile) -> int:
    """Powers of two by which tops that are to serve later steps are below the largest score of their own."""
    return 4 if tile.is_e4m3 else 9


def fold(four: Sequence[Any], together: Callable[[Any, Any], Any], lane: Any) -> Any:
    """Four columns over the eight lanes that share them; a lane gets column :func:`folded_column`."""
    odd, odd_pair = (lane >> 2) & 1, (lane >> 3) & 1
    kept = [ptx.select(odd, four[2 + e], four[e]) for e in range(2)]
    got = [ptx.exchange(ptx.select(odd, four[e], four[2 + e]), 4) for e in range(2)]
    x, y = (together(k, g) for k, g in zip(kept, got, strict=True))
    x = together(ptx.select(odd_pair, y, x), ptx.exchange(ptx.select(odd_pair, x, y), 8))
    return together(x, ptx.exchange(x, 16))


def folded_column(lane: Any) -> Any:
    """Which of four columns :func:`fold` gives a lane."""
    return ((lane >> 2) & 1) * 2 + ((lane >> 3) & 1)


def columns_at(quad: int, lane: Any) -> Any:
    """Offset of a lane's four columns ``4 quad, ...`` among the values that a warp keeps of each row."""
    return quad * 64 + (lane & 3) * 16


@cute.jit
def find_largest(tile: cutlass.Constexpr[Tile], scores, row_scales, largest, group, warp, lane, shared):
    """The step's largest score of each of this thread's columns; ``row_scales`` are still to multiply them, if any."""
    own, per_warp = tile.own_columns, 4 * tile.rows
    at = shared + tile.places.maxima + group * (4 * per_warp)
    for quad in cutlass.range_constexpr(own // 4):
        of_thread = []
        for c in cutlass.range_constexpr(4):
            column = [scores[i * own + 4 * quad + c] for i in range(2 * tile.halves)]
            most = functools.reduce(ptx.maximum, column)
            if cutlass.const_expr(row_scales is not None):
                most = most * row_scales[4 * quad + c]
            of_thread.append(most)
        most = fold(of_thread, ptx.maximum, lane)
        if lane < 16:
            to = at + warp * per_warp + columns_at(quad, lane) + folded_column(lane) * 4
            ptx.shared_store(to, [most], Float32)
    ptx.sync(GROUP_BARRIER + group, 128)
    for quad in cutlass.range_constexpr(own // 4):
        found = [ptx.shared_load(at + i * per_warp + columns_at(quad, lane), Float32, 4) for i in range(4)]
        for c in cutlass.range_constexpr(4):
            most = ptx.maximum(ptx.maximum(found[0][c], found[1][c]), ptx.maximum(found[2][c], found[3][c]))
            largest[4 * quad + c] = most


@cute.jit
def find_tops(tile: cutlass.Constexpr[Tile], scores, tops, group, warp, lane, shared):
    """The step's top of each of this thread's columns."""
    find_largest(tile, scores, None, tops, group, warp, lane, shared)
    for column in cutlass.range_constexpr(tile.own_columns):
        tops[column] = below(ptx.maximum(tops[column], Float32(NOTHING)), BELOW)


@cute.jit
def below(most, bits: cutlass.Constexpr[float]):
    """A top for a largest score: ``bits`` powers of two less, or none less where floats are too far apart for that."""
    top = most - Float32(bits / LOG2E)
    is_far = Int32(0)
    if most - top > Float32((bits + SPARE) / LOG2E):
        is_far = Int32(1)
    return ptx.select(is_far, most, top)


@cute.jit
def raise_references(tile: cutlass.Constexpr[Tile], tops, references, sums, outputs):
    """Raise this thread's references where the step is too far above; all threads of a column do the same."""
    own = tile.own_columns
    over = tops[0] - references[0]
    for column in cutlass.range_constexpr(1, own):
        over = ptx.maximum(over, tops[column] - references[column])
    if over > Float32(FAR):
        for column in cutlass.range_constexpr(own):
            new = ptx.maximum(references[column], tops[column])
            factor = ptx.exp2((references[column] - new) * Float32(LOG2E))
            references[column] = new
            sums[column] = sums[column] * factor
            for k in cutlass.range_constexpr(tile.own_elements):
                outputs[k * own + column] = outputs[k * own + column] * factor


@cute.jit
def expect_tops(tile: cutlass.Constexpr[Tile], tops, raised_by: cutlass.Constexpr[float]):
    """Raise what are tops of a step, by a power of two, to those that later steps expect; whether these can serve.

    Scores are not rounded before the tops are subtracted from them: it may only matter little.
    """
    is_small = Int32(1)
    for column in cutlass.range_constexpr(tile.own_columns):
        tops[column] = tops[column] + Float32(raised_by / LOG2E)
        if not ptx.magnitude(tops[column]) <= Float32(LARGE):
            is_small = Int32(0)
    # All warps have the same rows.
    serve = Int32(0)
    if ptx.ballot(is_small) == Int32(-1):
        serve = Int32(1)
    return serve


@cute.jit
def expect_probabilities(
    tile: cutlass.Constexpr[Tile], scores, row_scales, tops, probabilities, found, least, lane
):  # fmt: skip
    """``probabilities`` of scores by tops of a step before, ``found`` to add up to so much; whether they don't serve.

    No thread knows another's scores: that their sum is neither too large nor too small shows that they do.
    """
    own = tile.own_columns
    found.fill(0.0)
    scales = [row_scales[column] * Float32(LOG2E) for column in range(own)]
    powers = [tops[column] * Float32(LOG2E) for column in range(own)]
    for i in cutlass.range_constexpr(2 * tile.halves):
        for column in cutlass.range_constexpr(own):
            place = i * own + column
            probabilities[place] = ptx.exp2(ptx.multiply_add(scores[place], scales[column], -powers[column]))
            found[column] = found[column] + probabilities[place]
    is_surprise = Int32(1)
    most = MOST if tile.is_e4m3 else MOST_16_BIT
    if functools.reduce(ptx.maximum, [found[column] for column in range(own)]) <= Float32(most):
        is_surprise = Int32(0)
    if cutlass.const_expr(tile.is_e4m3):
        is_surprise = is_surprise | are_few([found[column] for column in range(own)], EXPECTED_LOW, least, lane)
    return is_surprise


@cute.jit
def are_few(weights, low: cutlass.Constexpr[float], least, lane):
    """Whether few tokens outweigh a warp's others in some row: those of at least so many lanes weigh less than ``low``.

    A row's tokens are eight lanes'. Where a row may see fewer, one lane is enough; of a whole step four are asked for.
    """
    is_low = Int32(0)
    for weight in weights:
        # Nothing at all is what tokens give that a row does not see.
        if weight < Float32(low) and weight > Float32(0.0):
            is_low = Int32(1)
    lanes_of_columns = Int32(0x11111111) << (lane & 3)
    are_few = Int32(0)
    if ptx.count_bits(ptx.ballot(is_low) & lanes_of_columns) >= least:
        are_few = Int32(1)
    return are_few


@cute.jit
def find_factors(tile: cutlass.Constexpr[Tile], tops, references, factors):
    """What a step's sums and outputs are to be multiplied by, to be relative to the references."""
    for column in cutlass.range_constexpr(tile.own_columns):
        factors[column] = ptx.exp2((tops[column] - references[column]) * Float32(LOG2E))


@cute.jit
def add_probabilities(
    tile: cutlass.Constexpr[Tile], scores, per_value_scale, tops, factors, sums, least, lane
):  # fmt: skip
    """Turn scores into probabilities, and add them up; whether e4m3 needs finer terms of them.

    That is where few tokens outweigh all others: then what the others have in common is worth keeping, as the few may
    be sinks, whose values are about 0.
    """
    own = tile.own_columns
    found = [Float32(0.0)] * own
    weights = [Float32(0.0)] * own
    for i in cutlass.range_constexpr(2 * tile.halves):
        for column in cutlass.range_constexpr(own):
            place = i * own + column
            probability = ptx.exp2((scores[place] - tops[column]) * Float32(LOG2E))
            scores[place] = probability
            if cutlass.const_expr(tile.token_scales):
                found[column] = ptx.multiply_add(probability, per_value_scale[i], found[column])
                weights[column] = weights[column] + probability
            else:
                found[column] = found[column] + probability
    for column in cutlass.range_constexpr(own):
        sums[column] = ptx.multiply_add(found[column], factors[column], sums[column])
    needs_finer = Int32(0)
    if cutlass.const_expr(tile.is_e4m3):
        needs_finer = are_few(weights if cutlass.const_expr(tile.token_scales) else found, LOW, least, lane)
    return needs_finer


@cute.jit
def store_probabilities(
    tile: cutlass.Constexpr[Tile], probabilities, value_signs, finer: cutlass.Constexpr[bool], group, warp, lane, shared
):  # fmt: skip
    """Store probabilities in shared memory as the B operand of the outputs, or ``finer`` terms of e4m3 sums of them."""
    own, pitch, places = tile.own_columns, tile.probability_pitch, tile.places
    at = shared + (places.finer if finer else places.own) + group * tile.own_bytes + warp * (2 * pitch)
    if cutlass.const_expr(tile.is_e4m3):
        # After the transpose a lane holds four tokens of one column.
        which = (lane >> 2) & 3
        to = at + ((which >> 1) * 8 + (lane & 3) * 2 + (which & 1)) * 16 + (lane >> 4) * 4
        first = ptx.select(which & 1, 0x3715, 0x6240, Int32)
        second = ptx.select(which >> 1, 0x3276, 0x5410, Int32)
    else:
        # The matrices of eight tokens and eight rows that these lanes' addresses are of.
        to = at + (lane >> 4) * pitch + (lane & 15) * 16
    for half in cutlass.range_constexpr(tile.halves):
        for quad in cutlass.range_constexpr(own // 4):
            words = []
            for i in cutlass.range_constexpr(2):
                token = half * 2 + i
                four = [probabilities[token * own + 4 * quad + c] for c in range(4)]
                if cutlass.const_expr(tile.token_scales):
                    four = [probability * value_signs[token] for probability in four]
                if cutlass.const_expr(tile.is_e4m3):
                    for part, word in enumerate(ptx.split(four, (4, 6, 6) if finer else (4,), 2)):
                        turned = ptx.permute_bytes(word, ptx.exchange(word, 4, Int32), first)
                        turned = ptx.permute_bytes(turned, ptx.exchange(turned, 8, Int32), second)
                        place = i * pitch + half * 8 + part * (tile.rows * 16) + quad * (2 * CORE)
                        ptx.shared_store(to + place, [turned])
                else:
                    pack = ptx.pack_bfloat16 if cutlass.const_expr(tile.cache == "bf16") else ptx.pack_float16
                    words += [pack(four[0], four[1]), pack(four[2], four[3])]
            if cutlass.const_expr(not tile.is_e4m3):
                ptx.store_matrices_transposed(to + quad * (2 * CORE), words)
