"""Which steps need finer probabilities, and what they are relative to: device code of ``cute_wgmma``, run as Python."""

import math

import numpy as np
import pytest

from kvscout.ops.pa_decode.variants.cute_wgmma import VARIANT
from tests.ops.mqa_logits import lanes
from tests.ops.pa_decode.device import Float32, Memory, code_of

TILE = next(
    tile
    for tile in (program.spec for program in VARIANT.programs())
    if tile.is_e4m3 and tile.in_bulk and tile.dim == 128 and not tile.token_scales and tile.rows == 16
)
ROOM = 256.0
"""The largest probability."""


def instructions():
    ptx = Memory(1 << 16, []).ptx
    ptx.count_bits = lambda word: bin(int(word) & 0xFFFFFFFF).count("1")
    return ptx


def asks_for_finer(logits):
    """Whether any thread of a warpgroup does, for a step of these logits in every row."""
    code = code_of("cute_softmax", instructions())
    top = Float32(logits.max() - math.log(ROOM))
    own = TILE.own_columns

    def thread(warp, lane):
        tokens = [32 * int(warp) + int(lane) // 4 + 8 * (i >> 1) + 16 * (i & 1) for i in range(4)]
        scores = [Float32(logits[token]) for token in tokens for _ in range(own)]
        ones = [Float32(1)] * own
        return code.add_probabilities(TILE, scores, None, [top] * own, ones, [Float32(0)] * own, int(lane))

    return any(map(int, lanes.run(thread, 128, 0, 1)))


def step(sinks, gap, visible=128, spread=0.5):
    """Logits of a step's tokens: normal ones, ``gap`` below those of the ``sinks``."""
    logits = np.full(128, -np.inf)
    logits[:visible] = np.random.default_rng(0).normal(size=visible).clip(-2, 2) * spread - gap
    logits[list(sinks)] = 0
    return logits


@pytest.mark.parametrize("sinks", [(0,), (0, 1), (0, 2), (0, 1, 2, 3), (0, 2, 4, 6), (127,)])
@pytest.mark.parametrize("gap", [10, 13, 20])
def test_tokens_beside_few_that_outweigh_them_get_finer_terms(sinks, gap):
    assert asks_for_finer(step(sinks, gap))


def test_few_tokens_beside_sinks_get_them_too():
    assert asks_for_finer(step((0, 1, 2, 3), 13, visible=32))


@pytest.mark.parametrize("visible", [128, 100, 32, 1])
def test_an_ordinary_step_does_not_need_them(visible):
    assert not asks_for_finer(step((), 0, visible, spread=1.5))


@pytest.mark.parametrize("largest", [0.0, -3.0, 700.0, 6e7, 7e7, 1e8, 1.3e8, 1.4e8, 3e38, -1e8, -3.4028234663852886e38])
def test_no_probability_is_more_than_two_e4m3_numbers_hold(largest):
    below = code_of("cute_softmax", instructions()).below
    largest = Float32(largest)
    top = below(largest, 8)
    assert top <= largest
    assert math.exp(float(largest) - float(top)) <= 448
