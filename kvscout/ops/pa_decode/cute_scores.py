"""Scores: keys times queries, masked, and scaled where tokens have scales."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...kernels.cute import ptx
from .cute_tile import CORE, Tile


def first_token(tile: Tile, group: Any, warp: Any, lane: Any) -> Any:
    """The first token of a step that a thread has scores of; the others are 8 ``half`` + 16 ``second`` further."""
    token = warp * 32 + (lane >> 2)
    return token if tile.alternate else token + group * 8


@cute.jit
def score(tile: cutlass.Constexpr[Tile], scores, row_scales, key_scales, stage, group, shared):
    """``scores[(half, second, column)]`` of this thread: keys of a stage times queries.

    Where tokens have scales, scaled by token and by row.
    """
    places = tile.places
    keys = ptx.descriptor(shared + places.keys, tile.key_leading) + stage * (tile.stage_bytes >> 4)
    if cutlass.const_expr(not tile.alternate):
        keys = keys + group * (tile.key_eight >> 4)
    queries = ptx.descriptor(shared + places.queries, tile.query_pitch)
    chunks = 2  # of 16 bytes, of one product's K
    own, per_product = tile.own_columns, tile.columns // 2
    for begin in cutlass.range_constexpr(0, tile.halves, tile.chains):
        found = ptx.multiply(
            tile.kind, tile.columns, keys, queries, (tile.key_stride, CORE),
            [
                [
                    (half * tile.key_eight + tile.key_chunk(i), i * tile.query_pitch)
                    for i in range(0, tile.chunks, chunks)
                ]
                for half in range(begin, min(begin + tile.chains, tile.halves))
            ],
            swizzled=tile.are_keys_swizzled,
        )  # fmt: skip
        for chain in cutlass.range_constexpr(min(tile.chains, tile.halves)):
            for k in cutlass.range_constexpr(2 * own):
                dot = found[chain * per_product + k]
                if cutlass.const_expr(tile.is_e4m3):
                    dot = dot + found[chain * per_product + 2 * own + k]
                token, column = (begin + chain) * 2 + ((k >> 1) & 1), (k >> 2) * 2 + (k & 1)
                # In this order, as a token's scale may be what keeps its score within a float.
                if cutlass.const_expr(tile.token_scales):
                    dot = dot * key_scales[token] * row_scales[column]
                scores[token * own + column] = dot


@cute.jit
def scale_rows(tile: cutlass.Constexpr[Tile], scores, row_scales):
    """Scale scores by row, and round them: a compiler would take the exact product where one is subtracted from."""
    own = tile.own_columns
    for place in cutlass.range_constexpr(2 * tile.halves * own):
        scores[place] = ptx.multiply_add(scores[place], row_scales[place % own], Float32(0.0))


@cute.jit
def mask(tile: cutlass.Constexpr[Tile], scores, token, lane, shared):
    """Scores of -inf where a row does not see a token; ``token`` is this thread's first one."""
    own = tile.own_columns
    for j in cutlass.range_constexpr(tile.rows // 8):
        bounds = ptx.shared_load(shared + tile.places.bounds + (8 * j + 2 * (lane & 3)) * 8, Int32, 4)
        for i in cutlass.range_constexpr(2 * tile.halves):
            at = token + 8 * (i >> 1) + 16 * (i & 1)
            for e in cutlass.range_constexpr(2):
                is_hidden = Int32(0)
                if at < bounds[2 * e] or at >= bounds[2 * e + 1]:
                    is_hidden = Int32(1)
                place = i * own + 2 * j + e
                scores[place] = ptx.select(is_hidden, -Float32.inf, scores[place])
