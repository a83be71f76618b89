"""Which steps need finer probabilities, and what they are relative to: device code of ``cute_wgmma``, run as Python."""

import math
from types import SimpleNamespace

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


def asks_for_finer(logits, least=4):
    """Whether any thread of a warpgroup does, for a step of these logits in every row."""
    code = code_of("cute_softmax", instructions())
    top = Float32(logits.max() - math.log(ROOM))
    own = TILE.own_columns

    def thread(warp, lane):
        tokens = [32 * int(warp) + int(lane) // 4 + 8 * (i >> 1) + 16 * (i & 1) for i in range(4)]
        scores = [Float32(logits[token]) for token in tokens for _ in range(own)]
        ones = [Float32(1)] * own
        return code.add_probabilities(TILE, scores, None, [top] * own, ones, [Float32(0)] * own, least, int(lane))

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


def meets_surprise(logits, top, row_scale=1.0, tile=TILE, least=4):
    """Whether any thread of a warpgroup finds that ``top``, of a step before, does not serve these logits."""
    code = code_of("cute_softmax", instructions())
    own = tile.own_columns

    def thread(warp, lane):
        tokens = [32 * int(warp) + int(lane) // 4 + 8 * (i >> 1) + 16 * (i & 1) for i in range(2 * tile.halves)]
        scores = [Float32(logits[token] / row_scale) for token in tokens for _ in range(own)]
        probabilities, found = np.zeros(len(scores), np.float32), np.zeros(own, np.float32)
        scales, tops = [Float32(row_scale)] * own, [Float32(top)] * own
        is_surprise = code.expect_probabilities(tile, scores, scales, tops, probabilities, found, least, int(lane))
        if not is_surprise and tile.is_e4m3:
            assert (probabilities <= 448).all()
            wanted = np.exp(np.float64(logits[np.repeat(tokens, own)]) - top)
            np.testing.assert_allclose(probabilities, wanted, rtol=1e-4)
            np.testing.assert_allclose(found, wanted.reshape(-1, own).sum(0), rtol=1e-4)
        return is_surprise

    return any(map(int, lanes.run(thread, 128, 0, 1)))


def top_of(logits, tile=TILE):
    """What later steps expect after one of these logits."""
    code = code_of("cute_softmax", instructions())
    tops = np.array([logits.max()] * tile.own_columns, np.float32)

    def thread(warp, lane):
        return code.expect_tops(tile, tops if lane == 0 and warp == 0 else tops.copy(), -code.expected_below(tile))

    serves = {int(serve) for serve in lanes.run(thread, 128, 0, 1)}
    assert len(serves) == 1
    return logits.max() - math.log(2) * code.expected_below(tile), serves.pop()


@pytest.mark.parametrize("scale", [1.0, -0.25, 0.003])
def test_tops_of_a_step_before_serve_an_ordinary_one(scale):
    rng = np.random.default_rng(0)
    top, serves = top_of(rng.normal(size=128))
    assert serves == 1
    for _ in range(4):
        assert not meets_surprise(rng.normal(size=128), top, scale)


@pytest.mark.parametrize(("token", "more"), [(0, 2.0), (127, 2.0), (64, 3.0)])
def test_they_serve_what_is_somewhat_larger_or_smaller(token, more):
    logits = np.random.default_rng(1).normal(size=128)
    top, _ = top_of(logits)
    larger = logits.copy()
    larger[token] = logits.max() + more
    assert not meets_surprise(larger, top)
    assert not meets_surprise(logits - more, top)


@pytest.mark.parametrize("token", [0, 37, 127])
def test_what_e4m3_does_not_hold_is_a_surprise(token):
    logits = np.random.default_rng(2).normal(size=128)
    top, _ = top_of(logits)
    logits[token] = top + math.log(449)
    assert meets_surprise(logits, top)
    logits[token] = np.inf
    assert meets_surprise(logits, top)


def test_a_step_far_below_is_a_surprise_and_one_that_is_not_seen_is_none():
    logits = np.random.default_rng(3).normal(size=128)
    top, _ = top_of(logits)
    assert meets_surprise(logits - 12, top)
    one_warp = logits.copy()
    one_warp[32:64] -= 12
    assert meets_surprise(one_warp, top)
    assert not meets_surprise(np.full(128, -np.inf), top)


@pytest.mark.parametrize("largest", [720.0, -1e9, 3e38, -np.inf])
def test_large_logits_are_not_expected(largest):
    assert top_of(np.full(128, largest))[1] == 0


@pytest.mark.parametrize("visible", [1, 2, 3, 4, 5])
def test_few_visible_tokens_far_below_are_a_surprise(visible):
    top, _ = top_of(np.random.default_rng(4).normal(size=128))
    logits = np.full(128, -np.inf)
    logits[:visible] = -9.0
    assert meets_surprise(logits, top, least=1)
    logits[:visible] = 0.0
    assert not meets_surprise(logits, top, least=1)


@pytest.mark.parametrize("visible", [2, 3, 4, 5])
def test_few_visible_tokens_beside_a_sink_get_finer_terms(visible):
    assert asks_for_finer(step((0,), 14, visible), least=1)


@pytest.mark.parametrize(("token", "least"), [(0, 1), (128, 4), (256, 4), (384, 1), (512, 1)])
def test_one_lane_is_enough_where_some_row_does_not_see_a_whole_step(token, least):
    code = code_of("cute_math", instructions())
    work = SimpleNamespace(all_low=1, all_high=387)
    assert code._least(token, work) == least
