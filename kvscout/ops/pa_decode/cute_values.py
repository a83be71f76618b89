"""Outputs: values times probabilities, added up in float32."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...kernels.cute import ptx
from .cute_tile import CORE, STEP, Tile


@cute.jit
def clear_values(tile: cutlass.Constexpr[Tile], stage, first_token, group, thread, lowest, highest, shared):
    """Zeros where values are those of no token in question, or where none were loaded: they may be NaN.

    Tokens from ``highest`` on are cleared one by one, those before ``lowest`` by pieces that hold no other.
    """
    # With few elements several threads share one, with many a thread has several.
    sharing = max(1, 128 // tile.dim)
    first_piece = thread // tile.dim
    at = shared + tile.places.values + stage * tile.stage_bytes
    at = at + thread % tile.dim * 16 + first_piece * tile.value_leading
    start = first_token + first_piece * 16
    if cutlass.const_expr(not tile.alternate):
        at = at + group * (tile.dim * 16)
        start = start + group * tile.tokens_of_piece
    # Of the piece's tokens and those after it, how many come before ``highest``, and how many of these are seen.
    limit = highest - start
    seen = highest - lowest
    of_word = tile.tokens_of_piece // 4
    spacing = tile.tokens_of_piece * (1 if tile.alternate else tile.warpgroups)
    parts = max(1, tile.dim // 128)
    pieces = STEP * tile.dim // (spacing * 128 * parts)
    # A loop, as few steps come here: code that they jump over takes time to fetch. 64 rows with scales per token leave
    # it too few registers.
    for _ in cutlass.range(pieces, unroll=pieces if tile.token_scales and tile.rows > 32 else 1):
        kept = limit
        if limit - seen >= tile.tokens_of_piece:
            kept = Int32(0)
        if kept < tile.tokens_of_piece:
            for part in cutlass.range_constexpr(parts):
                to = at + part * (128 * 16)
                words = ptx.shared_load(to, Int32, 4)
                cleared = []
                for i in cutlass.range_constexpr(4):
                    count = cutlass.min(cutlass.max(kept - i * of_word, 0), of_word)
                    cleared.append(ptx.low_bits(words[i], count * (32 // of_word)))
                ptx.shared_store(to, cleared)
        at = at + sharing * tile.value_leading
        limit = limit - sharing * spacing


@cute.jit
def add_outputs(tile: cutlass.Constexpr[Tile], outputs, factors, finer: cutlass.Constexpr[bool], stage, group, shared):
    """``outputs[(64-row half of D, second, column)] += factor * values of a stage times probabilities``.

    The probabilities, or their ``finer`` terms, are the warpgroup's, the factor is the column's. Every step goes to
    float32: wgmma adds up e4m3 products in less precision.
    """
    places = tile.places
    leading, stride = tile.value_leading, CORE
    if cutlass.const_expr(tile.are_values_turned):
        leading, stride = tile.value_part, tile.value_leading
    values = ptx.descriptor(shared + places.values, leading) + stage * (tile.stage_bytes >> 4)
    if cutlass.const_expr(not tile.alternate):
        values = values + group * (tile.value_parity >> 4)
    stored = shared + (places.finer if finer else places.own)
    probabilities = ptx.descriptor(stored + group * tile.own_bytes, tile.probability_pitch)
    high, low = (2.0**-10, 2.0**-16) if finer else (1.0, 2.0**-4)
    pieces = 2  # of 16 bytes, of one product's K
    tokens = STEP if tile.alternate else STEP // tile.warpgroups
    own, per_product = tile.own_columns, tile.columns // 2
    chains = min(tile.chains, tile.dim // 64)
    for begin in cutlass.range_constexpr(0, tile.dim // 64, chains):
        found = ptx.multiply(
            tile.kind, tile.columns, values, probabilities, (stride, CORE),
            [
                [
                    (part * tile.value_part + i * tile.value_leading, i * tile.probability_pitch)
                    for i in range(0, tokens // tile.tokens_of_piece, pieces)
                ]
                for part in range(begin, begin + chains)
            ],
            turned=tile.are_values_turned,
            swizzled=tile.are_values_turned,
        )  # fmt: skip
        for chain in cutlass.range_constexpr(chains):
            for k in cutlass.range_constexpr(2 * own):
                column = (k >> 2) * 2 + (k & 1)
                place = ((begin + chain) * 2 + ((k >> 1) & 1)) * own + column
                product = found[chain * per_product + k]
                if cutlass.const_expr(tile.is_e4m3):
                    if cutlass.const_expr(finer):
                        product = product * Float32(high)
                    product = ptx.multiply_add(found[chain * per_product + 2 * own + k], Float32(low), product)
                outputs[place] = ptx.multiply_add(product, factors[column], outputs[place])
