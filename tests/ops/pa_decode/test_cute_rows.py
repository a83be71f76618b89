"""Where query rows are the rows of products: softmax and widened values of ``cute_wgmma``, run as Python."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvscout.ops.pa_decode.cute_tile import STEP
from kvscout.ops.pa_decode.variants.cute_wgmma import VARIANT
from tests.ops.mqa_logits import lanes
from tests.ops.mqa_logits.lanes import Int32
from tests.ops.pa_decode.device import Float32, Memory, Registers, code_of

TILE = next(program.spec for program in VARIANT.programs() if program.spec.widens)
ROWS = 16
"""Rows of a warp."""


class Contracted(np.float32):
    """A float whose products are subtracted from before they are rounded, as a compiler may."""

    def __mul__(self, other):
        return Product(float(self), float(other))


class Product(np.float32):
    """A product that remembers its factors."""

    def __new__(cls, x, y):
        with np.errstate(over="ignore"):
            self = super().__new__(cls, np.float32(x) * np.float32(y))
        self.exact = x * y
        return self

    def __sub__(self, other):
        return np.float32(self.exact - float(other))


class Warp:
    """One warp's softmax over some steps, whose dots are ``[steps, ROWS, STEP]``; values are ones."""

    def __init__(self, dots, row_scales):
        self.dots, self.row_scales, self.searches = dots, row_scales, 0
        ptx = Memory(1 << 16, []).ptx
        # An instruction's result is rounded.
        ptx.maximum = lambda x, y: Float32(max(x, y))
        code = code_of("cute_rows", ptx)
        every = code._find_probabilities.__globals__
        find_tops = every["_find_tops"]

        def counted(*arguments):
            self.searches += lanes._lane.thread == 0
            return find_tops(*arguments)

        every["_find_tops"] = counted
        found = lanes.run(lambda warp, lane: self.of_lane(code, int(lane)), 32, 0, 1)
        # Of a row, four lanes have the same reference, and a part of a sum and of an output each.
        by_row = [[found[4 * (row % 8) + part] for part in range(4)] for row in range(ROWS)]
        of_row = [[[float(lane[k][row // 8]) for lane in by_row[row]] for row in range(ROWS)] for k in range(3)]
        assert all(len(set(references)) == 1 for references in of_row[0])
        self.references = np.array(of_row[0])[:, 0]
        self.sums, self.outputs = (np.array(parts).sum(1) for parts in of_row[1:])

    def of_lane(self, code, lane):
        rows = [lane // 4, lane // 4 + 8]
        references, sums = [Float32(-3.4028234663852886e38)] * 2, [Float32(0)] * 2
        outputs, operands = [Float32(0)] * 64, Registers((32,), Int32)
        row_scales = [Float32(self.row_scales[row]) for row in rows]
        for number, step in enumerate(self.dots):
            scores = [Float32(0)] * 64
            for half in range(2):
                for pair in range(8):
                    for row in range(2):
                        for e in range(2):
                            token = 16 * pair + 8 * half + lane % 4 * 2 + e
                            scores[code._place(TILE, half, pair, row, e)] = Contracted(step[rows[row], token])
            with np.errstate(over="ignore", invalid="ignore"):
                code._find_probabilities(
                    TILE, scores, row_scales, references, sums, outputs, operands, number > 0
                )  # fmt: skip
            words = np.array([int(word) for word in operands], np.int32).view(np.float16).reshape(8, 2, 2, 2)
            assert np.isfinite(words).all()
            for k in range(64):
                # Each element gets what a value of 1 makes of the row's probabilities.
                outputs[k] = Float32(outputs[k] + words[:, :, (k >> 1) & 1].astype(np.float64).sum())
        assert len(set(outputs[0::4])) == len(set(outputs[2::4])) == 1
        return references, sums, [outputs[0], outputs[2]]


def check(dots, row_scales):
    """Compare sums and outputs with those of float64."""
    warp = Warp(dots, row_scales)
    logits = np.moveaxis(dots, 0, 1).reshape(ROWS, -1).astype(np.float64) * row_scales.astype(np.float64)[:, None]
    for row in range(ROWS):
        seen = logits[row][np.isfinite(logits[row])]
        if not seen.size:
            assert warp.sums[row] == warp.outputs[row] == 0
            continue
        most = seen.max()
        wanted = np.log(np.exp(seen - most).sum())
        # A scaled dot is rounded.
        tolerance = 1e-4 + (0 if row_scales[row] == 1 else 1e-6 * abs(most))
        for total in (warp.sums[row], warp.outputs[row]):
            assert abs(np.log(total) + (warp.references[row] - most) - wanted) <= tolerance
    return warp


def normal(steps, spread=1.0):
    return np.random.default_rng(steps).normal(size=(steps, ROWS, STEP)).astype(np.float32) * np.float32(spread)


ONES = np.ones(ROWS, np.float32)


def test_ordinary_steps_find_maxima_once():
    assert check(normal(6), ONES).searches == 1
    assert check(np.full((4, ROWS, STEP), 3.0, np.float32), ONES).searches == 1


@pytest.mark.parametrize("growth", [5.0, 30.0, 1e3, -30.0, -1e3])
def test_steps_of_growing_and_shrinking_logits(growth):
    dots = normal(4) + np.arange(4, dtype=np.float32)[:, None, None] * np.float32(growth)
    assert check(dots, ONES).searches == (4 if growth > 0 else 1)


@pytest.mark.parametrize("row", [3, 11])
def test_one_row_that_grows_is_enough(row):
    dots = normal(3)
    dots[1:, row] += np.float32(15.0)
    assert check(dots, ONES).searches == 2


@pytest.mark.parametrize("offset", [2e3, 1e5, -1e6])
def test_far_from_zero_logits_keep_their_bits(offset):
    check(normal(3) + np.float32(offset), ONES)


def test_rows_are_scaled_each_by_its_own():
    check(normal(3, 100.0), np.geomspace(1e-30, 0.3, ROWS).astype(np.float32))
    check(normal(3), np.full(ROWS, 2.0**-125, np.float32))


@pytest.mark.parametrize("size", [3e3, 1e5, 6e7, 1e30, 2.9e38])
def test_large_logits(size):
    dots = np.sign(normal(3)) * np.float32(size)
    dots[0, :, 0] = dots[2, :, 5] = np.float32(size)
    check(dots, ONES)
    check(dots * np.float32(2.0**-20), ONES * np.float32(2.0**20))
    # Products that are rounded.
    check(dots / np.float32(4.7), ONES * np.float32(4.7))
    check(dots / np.float32(1e7), ONES * np.float32(1e7))


def test_rows_that_see_little_or_nothing():
    dots = normal(3)
    dots[0, 3] = -np.inf
    dots[:, 5] = -np.inf
    dots[1, 7, 1:] = -np.inf
    dots[:2, 9] = -np.inf
    warp = check(dots, ONES)
    assert warp.references[5] == np.float32(-3.4028234663852886e38)


def test_a_token_that_outweighs_all_others_leaves_them_their_bits():
    dots = normal(4)
    dots[0, :, 0] = 14.0
    check(dots, ONES)
    rest = dots.copy()
    rest[0, :, 0] = -np.inf
    warp, others = Warp(dots, ONES), Warp(rest, ONES)
    beside = warp.outputs * np.exp(warp.references - 14.0) - 1
    alone = others.outputs * np.exp(others.references - 14.0)
    # The first token's own probability is exact: what is left is what the others are without it.
    assert np.allclose(beside, alone, rtol=1e-3)


def test_values_are_widened_in_the_places_of_16_bit_ones():
    first_step, steps = 1, 3
    lowest, highest = first_step * STEP + 37, (first_step + steps) * STEP - 21
    generator = np.random.default_rng(0)
    memory = Memory(TILE.places.size, [])
    places = TILE.places
    # Every e4m3 number but NaN, of which there are some where no token is.
    values, signs = (generator.integers(0, most, (steps, STEP, TILE.dim)) for most in (127, 2))
    values = (values | signs << 7).astype(np.uint8)
    tokens = first_step * STEP + np.arange(steps * STEP).reshape(steps, STEP)
    values[(tokens < lowest // 16 * 16) | (tokens >= highest)] = 0x7F
    for step in range(steps):
        # Pieces of 16 tokens, of each element one after the other.
        piece = values[step].reshape(STEP // 16, 16, TILE.dim).transpose(0, 2, 1)
        at = places.values + step * TILE.stage_bytes
        memory.shared[at : at + TILE.stage_bytes] = piece.reshape(-1)
    work = SimpleNamespace(
        first_step=Int32(first_step), steps=steps, lowest=Int32(lowest), highest=Int32(highest)
    )  # fmt: skip
    code = code_of("cute_widening", memory.ptx)
    lanes.run(lambda warp, lane: code.widen_values(TILE, warp, lane, Int32(0), work), 128, 0, 1)
    for step, group in ((1, 1), (2, 0)):
        at = places.own + group * TILE.own_bytes
        wide = memory.shared[at : at + STEP * TILE.dim * 2].view(np.float16).reshape(STEP // 8, TILE.dim, 8)
        found = wide.transpose(0, 2, 1).reshape(STEP, TILE.dim)
        wanted = torch.from_numpy(values[step]).view(torch.float8_e4m3fn).to(torch.float16).numpy().copy()
        wanted[tokens[step] >= highest] = 0
        assert (found == wanted).all()
    full = {places.full_wide + 8 * group: 4 * sum(step % 2 == group for step in range(steps)) for group in range(2)}
    empty = {places.empty_values + 8 * step: 4 for step in range(steps)}
    assert memory.arrived == full | empty
    # A place is waited for from its second step on.
    assert {(barrier, phase) for _, barrier, phase in memory.waits} == {
        *((places.full_values + 8 * step, 0) for step in range(steps)), (places.empty_wide, 0),
    }  # fmt: skip
