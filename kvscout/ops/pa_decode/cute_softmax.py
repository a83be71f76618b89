"""Softmax: a reference per row that is raised late, and probabilities on their way to shared memory.

A probability is ``exp(score - reference)``. The reference is the largest score so far less ``BELOW``, and stays as it
is until a score exceeds it by more than ``ABOVE``: so most steps need no exchange between threads, and no probability
is above 2^8, which e4m3 holds. Differences are taken before they are scaled to base 2: large logits do not overflow.
"""

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
BELOW = 4 / LOG2E
ABOVE = 8 / LOG2E

# Named barriers of each warpgroup.
ANY_BARRIER = 1
GROUP_BARRIER = 3


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
def update_references(
    tile: cutlass.Constexpr[Tile], scores, is_first, references, sums, outputs, group, warp, lane, shared
):  # fmt: skip
    """Raise the warpgroup's references if a score asks for it, and bring sums and outputs in line."""
    own = tile.own_columns
    largest = []
    for column in cutlass.range_constexpr(own):
        most = scores[column]
        for i in cutlass.range_constexpr(1, 2 * tile.halves):
            most = ptx.maximum(most, scores[i * own + column])
        largest.append(most)
    raised = Int32(1)
    if is_first == 0:
        over = largest[0] - references[0]
        for column in cutlass.range_constexpr(1, own):
            over = ptx.maximum(over, largest[column] - references[column])
        wanted = Int32(0)
        if over > Float32(ABOVE):
            wanted = Int32(1)
        raised = ptx.sync_any(ANY_BARRIER + group, 128, wanted)
    if raised != 0:
        _raise(tile, largest, references, sums, outputs, group, warp, lane, shared)


@cute.jit
def _raise(tile: cutlass.Constexpr[Tile], largest, references, sums, outputs, group, warp, lane, shared):
    own, per_warp = tile.own_columns, 4 * tile.rows
    at = shared + tile.places.maxima + group * (4 * per_warp)
    for quad in cutlass.range_constexpr(own // 4):
        most = fold(largest[4 * quad : 4 * quad + 4], ptx.maximum, lane)
        if lane < 16:
            to = at + warp * per_warp + columns_at(quad, lane) + folded_column(lane) * 4
            ptx.shared_store(to, [most], Float32)
    ptx.sync(GROUP_BARRIER + group, 128)
    for quad in cutlass.range_constexpr(own // 4):
        tops = [ptx.shared_load(at + i * per_warp + columns_at(quad, lane), Float32, 4) for i in range(4)]
        for c in cutlass.range_constexpr(4):
            column = 4 * quad + c
            top = ptx.maximum(ptx.maximum(tops[0][c], tops[1][c]), ptx.maximum(tops[2][c], tops[3][c]))
            new = ptx.maximum(references[column], top - Float32(BELOW))
            factor = ptx.exp2((references[column] - new) * Float32(LOG2E))
            references[column] = new
            sums[column] = sums[column] * factor
            for k in cutlass.range_constexpr(4):
                outputs[k * own + column] = outputs[k * own + column] * factor


@cute.jit
def store_probabilities(
    tile: cutlass.Constexpr[Tile], scores, value_scales, references, sums, group, warp, lane, shared
):  # fmt: skip
    """Turn scores into probabilities in shared memory, the B operand of the outputs, and add them up."""
    own, pitch = tile.own_columns, tile.query_pitch
    at = shared + tile.places.probabilities + group * tile.probability_bytes + warp * (2 * pitch)
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
                four = []
                for c in cutlass.range_constexpr(4):
                    column = 4 * quad + c
                    difference = scores[(half * 2 + i) * own + column] - references[column]
                    probability = ptx.exp2(difference * Float32(LOG2E))
                    sums[column] = sums[column] + probability
                    if cutlass.const_expr(tile.token_scales):
                        probability = probability * value_scales[half * 2 + i]
                    four.append(probability)
                if cutlass.const_expr(tile.is_e4m3):
                    for part, word in enumerate(ptx.split_probabilities(four)):
                        turned = ptx.permute_bytes(word, ptx.exchange(word, 4, Int32), first)
                        turned = ptx.permute_bytes(turned, ptx.exchange(turned, 8, Int32), second)
                        place = i * pitch + half * 8 + part * (tile.rows * 16) + quad * (2 * CORE)
                        ptx.shared_store(to + place, [turned])
                else:
                    pack = ptx.pack_bfloat16 if cutlass.const_expr(tile.cache == "bf16") else ptx.pack_float16
                    words += [pack(four[0], four[1]), pack(four[2], four[3])]
            if cutlass.const_expr(not tile.is_e4m3):
                ptx.store_matrices_transposed(to + quad * (2 * CORE), words)
