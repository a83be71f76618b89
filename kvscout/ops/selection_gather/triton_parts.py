"""Copies tokens found by their slots: what the second launch of ``triton_copy`` does."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _copy_runs(source, to, live, block, place, page, at, head,
               from_b, from_h, from_p, from_c, to_b, to_h, to_p, to_c,
               CHUNKS: tl.constexpr, RUN: tl.constexpr, VECTOR: tl.constexpr):  # fmt: skip
    """Copy tokens of which each chunk is one run of words; strides are counted in vectors."""
    # Tokens before runs: in a chunked cache, neighbours in memory are the same chunks of neighbouring tokens.
    chunk = tl.arange(0, triton.next_power_of_2(CHUNKS))[:, None, None]
    word = tl.arange(0, triton.next_power_of_2(RUN))[None, None, :]
    inside = (chunk < CHUNKS) & (word < RUN)
    chunk = chunk.to(tl.int64)
    there = (block * from_b + place * from_p)[None, :, None] + head * from_h + chunk * from_c
    x = tl.load(source + there * VECTOR + word, mask=inside & live[None, :, None], other=0)
    here = page * to_b + head * to_h + (at * to_p)[None, :, None] + chunk * to_c
    tl.store(to + here * VECTOR + word, x, mask=inside)


@triton.jit
def _copy_strewn(source, to, live, block, place, page, at, head,
                 from_b, from_h, from_c, from_d, to_b, to_h, to_c, to_d,
                 D: tl.constexpr, CHUNK: tl.constexpr, VECTOR: tl.constexpr):  # fmt: skip
    """Copy tokens that are neighbours in memory within a chunk; what is written has strides counted in vectors."""
    d = tl.arange(0, triton.next_power_of_2(D))[:, None]
    inside = d < D
    d = d.to(tl.int64)
    there = (block * from_b + place // CHUNK * from_c + place % CHUNK)[None, :] + head * from_h + d * from_d
    x = tl.load(source + there, mask=inside & live[None, :], other=0)
    here = page * to_b + head * to_h + (at // CHUNK * to_c)[None, :] + d * to_d
    tl.store(to + here * VECTOR + (at % CHUNK)[None, :], x, mask=inside)


@triton.jit
def _copy_scales(source, to, live, block, place, page, at, head, from_b, from_h, from_p, to_b, to_h, to_p):
    if source is not None:
        x = tl.load(source + block * from_b + head * from_h + place * from_p, mask=live, other=0.0)
        tl.store(to + page * to_b + head * to_h + at * to_p, x)


@triton.jit
def copy(slots, keys, values, key_scale, value_scale, to_keys, to_values, to_key_scale, to_value_scale,
         k_from_b, k_from_h, k_from_p, k_from_c, k_to_b, k_to_h, k_to_p, k_to_c,
         v_from_b, v_from_h, v_from_i, v_from_j, v_to_b, v_to_h, v_to_i, v_to_j,
         ks_from_b, ks_from_h, ks_from_p, ks_to_b, ks_to_h, ks_to_p,
         vs_from_b, vs_from_h, vs_from_p, vs_to_b, vs_to_h, vs_to_p,
         PAGE: tl.constexpr, TOKENS: tl.constexpr, STREWN: tl.constexpr,
         K_CHUNKS: tl.constexpr, K_RUN: tl.constexpr, K_VECTOR: tl.constexpr,
         V_CHUNKS: tl.constexpr, V_RUN: tl.constexpr, V_VECTOR: tl.constexpr):  # fmt: skip
    """A tile of a page of one head: keys, or values, and their scales; what lies behind a row's tokens becomes zeros.

    Strewn values have ``V_CHUNKS`` tokens a chunk, and ``V_RUN`` elements a token.
    """
    TILES: tl.constexpr = PAGE // TOKENS
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    page = tile // TILES
    at = tile % TILES * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + page * PAGE + at)
    live = slot >= 0
    slot = tl.where(live, slot, 0)
    block, place = slot // PAGE, slot % PAGE
    if tl.program_id(2) == 0:
        _copy_runs(
            keys, to_keys, live, block, place, page, at, head,
            k_from_b, k_from_h, k_from_p, k_from_c, k_to_b, k_to_h, k_to_p, k_to_c,
            K_CHUNKS, K_RUN, K_VECTOR,
        )  # fmt: skip
        _copy_scales(
            key_scale, to_key_scale, live, block, place, page, at, head,
            ks_from_b, ks_from_h, ks_from_p, ks_to_b, ks_to_h, ks_to_p,
        )  # fmt: skip
    else:
        if STREWN:
            _copy_strewn(
                values, to_values, live, block, place, page, at, head,
                v_from_b, v_from_h, v_from_i, v_from_j, v_to_b, v_to_h, v_to_i, v_to_j,
                V_RUN, V_CHUNKS, V_VECTOR,
            )  # fmt: skip
        else:
            _copy_runs(
                values, to_values, live, block, place, page, at, head,
                v_from_b, v_from_h, v_from_i, v_from_j, v_to_b, v_to_h, v_to_i, v_to_j,
                V_CHUNKS, V_RUN, V_VECTOR,
            )  # fmt: skip
        _copy_scales(
            value_scale, to_value_scale, live, block, place, page, at, head,
            vs_from_b, vs_from_h, vs_from_p, vs_to_b, vs_to_h, vs_to_p,
        )  # fmt: skip
