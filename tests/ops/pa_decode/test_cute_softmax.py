"""Which steps need finer probabilities, and what they are relative to: device code of ``cute_wgmma``, run as Python."""

import math

import numpy as np
import pytest

from kvscout.ops.pa_decode.variants.cute_wgmma import VARIANT
from tests.ops.mqa_logits import lanes
from tests.ops.mqa_logits.lanes import Int32
from tests.ops.pa_decode.device import Float32, Memory, code_of

TILES = {
    tile.by_rows: tile
    for tile in (program.spec for program in VARIANT.programs())
    if tile.is_e4m3 and tile.in_bulk and tile.dim == 128 and not tile.token_scales and tile.rows in (16, 64)
}
ROOM = 256.0
"""The largest probability."""


def instructions():
    ptx = Memory(1 << 16, []).ptx
    ptx.ballot = lambda flag: Int32(np.uint32(sum(1 << i for i, f in enumerate(lanes._warp(flag)) if f)).view(np.int32))
    ptx.count_bits = lambda word: bin(int(word) & 0xFFFFFFFF).count("1")
    return ptx


def asks_for_finer(logits, by_rows):
    """Whether any thread of a warpgroup does, for a step of these logits in every row."""
    tile = TILES[by_rows]
    code = code_of("cute_rows" if by_rows else "cute_softmax", instructions())
    top = Float32(logits.max() - math.log(ROOM))

    def of_rows(lane):
        scores = [Float32(0)] * 64
        for half in range(2):
            for pair in range(8):
                for row in range(2):
                    for e in range(2):
                        token = 16 * pair + 8 * half + 2 * (lane % 4) + e
                        scores[code._place(half, pair, row, e)] = Float32(logits[token])
        return code._add_probabilities(tile, scores, [top] * 2, [Float32(1)] * 2, [Float32(0)] * 2)

    def of_columns(warp, lane):
        own = tile.own_columns
        tokens = [32 * warp + lane // 4 + 8 * (i >> 1) + 16 * (i & 1) for i in range(4)]
        scores = [Float32(logits[token]) for token in tokens for _ in range(own)]
        ones = [Float32(1)] * own
        return code.add_probabilities(tile, scores, None, [top] * own, ones, [Float32(0)] * own, lane)

    def thread(warp, lane):
        return of_rows(int(lane)) if by_rows else of_columns(int(warp), int(lane))

    return any(map(int, lanes.run(thread, 128, 0, 1)))


def step(sinks, gap, visible=128, spread=0.5):
    """Logits of a step's tokens: normal ones, ``gap`` below those of the ``sinks``."""
    logits = np.full(128, -np.inf)
    logits[:visible] = np.random.default_rng(0).normal(size=visible).clip(-2, 2) * spread - gap
    logits[list(sinks)] = 0
    return logits


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("sinks", [(0,), (0, 1), (0, 2), (0, 1, 2, 3), (0, 2, 4, 6), (127,)])
@pytest.mark.parametrize("gap", [10, 13, 20])
def test_tokens_beside_few_that_outweigh_them_get_finer_terms(by_rows, sinks, gap):
    assert asks_for_finer(step(sinks, gap), by_rows)


@pytest.mark.parametrize("by_rows", [False, True])
def test_few_tokens_beside_sinks_get_them_too(by_rows):
    assert asks_for_finer(step((0, 1, 2, 3), 13, visible=32), by_rows)


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("visible", [128, 100, 32, 1])
def test_an_ordinary_step_does_not_need_them(by_rows, visible):
    assert not asks_for_finer(step((), 0, visible, spread=1.5), by_rows)


@pytest.mark.parametrize("largest", [0.0, -3.0, 700.0, 6e7, 7e7, 1e8, 1.3e8, 1.4e8, 3e38, -1e8, -3.4028234663852886e38])
def test_no_probability_is_more_than_two_e4m3_numbers_hold(largest):
    below = code_of("cute_softmax", instructions()).below
    largest = Float32(largest)
    top = below(largest)
    assert top <= largest
    assert math.exp(float(largest) - float(top)) <= 448
