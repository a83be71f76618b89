"""DeepGEMM's published test of its scores, re-expressed: its grid of sizes, windows, dtypes and layouts, and its gates.

On a GPU the grid has its published sizes; without one it has a sixty-fourth of them.
"""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

from kvscout import fp8
from kvscout.integrations import deep_gemm
from kvscout.ops.mqa_logits.variants.torch_reference import reference, window

UNQUANTISED_GATE = 1e-3
QUANTISED_GATE = 5e-6
REPEATS = 20
REDUCED = 64
"""What sizes are divided by where there is no GPU."""

REFERENCE_DOTS = 1 << 27
"""Most dot products that the float64 reference holds at once."""


@dataclass(frozen=True)
class Case:
    rows: int
    keys: int
    context_parallel: bool
    compressed: bool
    dtype: torch.dtype
    heads: int = 64
    dim: int = 128

    def __str__(self):
        words = ["cp"] * self.context_parallel + ["compressed"] * self.compressed
        return "-".join([f"{self.rows}x{self.keys}", str(self.dtype).removeprefix("torch."), *words])

    def windows(self):
        """Starts and ends. With context parallelism a rank has two chunks of rows, one from each half of the sequence.

        The sequence is cut into two chunks per rank; rank r has chunk r and the r-th from the end. The rank taken is
        the one a third of the way, and a row's window ends before its own position.
        """
        row = torch.arange(self.rows)
        if not self.context_parallel:
            return torch.zeros_like(row).int(), (row + self.keys - self.rows).int()
        chunk, ranks = self.rows // 2, self.keys // self.rows
        rank = ranks // 3
        first = torch.where(row < chunk, rank, 2 * ranks - 1 - rank)
        return torch.zeros_like(row).int(), (first * chunk + row % chunk).int()


CASES = [
    Case(rows, keys, context_parallel, compressed, dtype)
    for dtype, compressed, rows, keys, context_parallel in product(
        (torch.float32, torch.bfloat16), (False, True), (2048, 4096), (4096, 8192), (True, False)
    )
]


def by_definition(q, k, k_scale, weights, ks, ke):
    """The float64 reference, a block of rows at a time."""
    block = max(1, REFERENCE_DOTS // (q.shape[1] * k.shape[0]))
    parts = [slice(first, first + block) for first in range(0, q.shape[0], block)]
    return torch.cat([reference(q[p], k, k_scale, weights[p], ks[p], ke[p]) for p in parts])


def spread(logits, ks, ke, keys):
    """A compressed result with a column for every key, -inf outside the windows."""
    inside = window(ks, ke, keys)
    places = (torch.arange(keys, device=ks.device) - ks[:, None]).clamp(0, logits.shape[1] - 1)
    return logits.float().gather(1, places).masked_fill(~inside, float("-inf"))


def dissimilarity(found, expected):
    """One minus twice the product of two results over the sum of their squares."""
    found, expected = found.double(), expected.double()
    return float(1 - 2 * (found * expected).sum() / (found.square() + expected.square()).sum())


def check(case, device, repeats):
    generator = torch.Generator(device).manual_seed(case.rows + case.keys)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device)

    q, k = normal(case.rows, case.heads, case.dim).bfloat16(), normal(case.keys, case.dim).bfloat16()
    weights = normal(case.rows, case.heads)
    ks, ke = (bound.to(device) for bound in case.windows())
    quantised_q = q.to(torch.float8_e4m3fn)
    k_scale = k.float().abs().amax(1).clamp(min=1e-4) / fp8.max_value(torch.float8_e4m3fn)
    quantised_k = fp8.quantize(k, k_scale[:, None])
    width = int((ke - ks).max()) if case.compressed else 0
    call = (quantised_q, None), (quantised_k, k_scale), weights, ks, ke, not case.compressed, width, case.dtype
    inside = window(ks, ke, case.keys)

    def scores(logits):
        assert logits.dtype == case.dtype
        assert logits.shape == (case.rows, width or case.keys)
        return spread(logits, ks, ke, case.keys) if case.compressed else logits.float()

    found = scores(deep_gemm.fp8_fp4_mqa_logits(*call))
    assert torch.equal(found.isneginf(), ~inside)
    assert found[inside].isfinite().all()
    found = found.masked_fill(~inside, 0)
    exact = by_definition(q, k, torch.ones_like(k_scale), weights, ks, ke).masked_fill(~inside, 0)
    assert dissimilarity(found, exact) < UNQUANTISED_GATE
    exact = by_definition(quantised_q, quantised_k, k_scale, weights, ks, ke).masked_fill(~inside, 0)
    assert dissimilarity(found, exact) < QUANTISED_GATE
    for _ in range(repeats):
        assert torch.equal(scores(deep_gemm.fp8_fp4_mqa_logits(*call)).masked_fill(~inside, 0), found)
    if case.dtype == torch.float32:
        (values, _), *rest = call
        assert torch.equal(scores(deep_gemm.fp8_mqa_logits(values, *rest[:-1])).masked_fill(~inside, 0), found)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_published_grid(case):
    check(case, torch.device("cuda"), REPEATS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_grid_at_a_fraction_of_its_size(case):
    check(replace(case, rows=case.rows // REDUCED, keys=case.keys // REDUCED), torch.device("cpu"), 1)


def test_the_windows_are_the_published_ones():
    """Worked out by hand: 4 rows and 12 keys are 3 ranks, of which the second has chunks 1 and 4 of 2 rows."""
    case = Case(4, 12, context_parallel=True, compressed=False, dtype=torch.float32)
    assert [bound.tolist() for bound in case.windows()] == [[0] * 4, [2, 3, 8, 9]]
    case = replace(case, context_parallel=False)
    assert [bound.tolist() for bound in case.windows()] == [[0] * 4, [8, 9, 10, 11]]
