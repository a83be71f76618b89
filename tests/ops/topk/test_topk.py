"""``topk_indices``: its rule, its checks, and the judge that its cases use."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvscout import topk_indices
from kvscout.ops.topk.cost import cost
from kvscout.testing.cases.topk import oracle, proof

INF, NAN = math.inf, math.nan
VARIANTS = pytest.mark.parametrize("variant", ["torch_reference", "torch_packed"])


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@VARIANTS
@pytest.mark.parametrize("sorted", [False, True])
def test_stated_rule(variant, sorted):
    logits = torch.tensor(
        [
            [1.0, 3.0, 3.0, 2.0, 3.0],
            [NAN, -INF, NAN, -INF, -NAN],
            [-0.0, 0.0, -0.0, -1.0, 0.0],
            [INF, -INF, 5.0, NAN, INF],
        ]
    )
    found = topk_indices(logits, 3, sorted=sorted, variant=variant)
    expected = [[1, 2, 4], [-1, -1, -1], [0, 1, 2], [0, 4, 2]]
    assert found.dtype == torch.int32
    if not sorted:
        found, expected = found.sort(dim=1).values, [sorted_row(row) for row in expected]
    assert found.tolist() == expected


def sorted_row(row):
    return torch.tensor(row).sort().values.tolist()


@VARIANTS
def test_windows_are_clamped_and_columns_are_absolute(variant):
    limits = torch.iinfo(torch.int32)
    logits = torch.arange(6).float().expand(5, 6)
    starts, ends = ints(2, -7, 4, 5, limits.min), ints(4, 99, 2, 5, limits.max)
    found = topk_indices(logits, 2, starts=starts, ends=ends, sorted=True, variant=variant)
    assert found.tolist() == [[3, 2], [5, 4], [-1, -1], [-1, -1], [5, 4]]


@VARIANTS
def test_one_sided_windows(variant):
    logits = torch.tensor([[9.0, 1.0, 2.0, 8.0]])
    assert topk_indices(logits, 1, starts=ints(1), variant=variant).tolist() == [[3]]
    assert topk_indices(logits, 1, ends=ints(3), variant=variant).tolist() == [[0]]


@VARIANTS
@pytest.mark.parametrize("sorted", [False, True])
def test_missing_columns_come_last(variant, sorted):
    logits = torch.tensor([[NAN, 1.0, -INF, 2.0, NAN, 3.0]])
    found = topk_indices(logits, 9, sorted=sorted, variant=variant)[0].tolist()
    assert found[3:] == [-1] * 6
    assert {*found[:3]} == {1, 3, 5}


@VARIANTS
def test_no_columns_and_no_rows(variant):
    assert topk_indices(torch.empty(2, 0), 3, variant=variant).tolist() == [[-1] * 3] * 2
    assert topk_indices(torch.empty(0, 4), 3, variant=variant).shape == (0, 3)


@VARIANTS
def test_out_with_gaps_between_rows(variant):
    buffer = torch.full((3, 7), -9, dtype=torch.int32)
    out = buffer[:, :4]
    logits = torch.randn(3, 20)
    assert topk_indices(logits, 4, out=out, sorted=True, variant=variant) is out
    assert out.tolist() == logits.sort(dim=1, descending=True).indices[:, :4].tolist()
    assert (buffer[:, 4:] == -9).all()


@st.composite
def problems(draw):
    rows, keys = draw(st.integers(1, 5)), draw(st.integers(0, 40))
    value = st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -1e-45, 3.4e38])
    logits = [draw(st.lists(value, min_size=keys, max_size=keys)) for _ in range(rows)]
    bound = st.integers(-3, keys + 3) | st.sampled_from([-(2**31), 2**31 - 1])
    starts, ends = (draw(st.none() | st.lists(bound, min_size=rows, max_size=rows)) for _ in range(2))
    return logits, draw(st.integers(1, keys + 5)), starts, ends


@VARIANTS
@given(problem=problems(), sorted=st.booleans())
def test_equals_the_oracle(variant, problem, sorted):
    rows, k, starts, ends = problem
    logits = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), -1)
    ks, ke = (None if bound is None else ints(*bound) for bound in (starts, ends))
    found = topk_indices(logits, k, starts=ks, ends=ke, sorted=sorted, variant=variant)
    # As float32, in which the smallest number of the samples is subnormal.
    expected = torch.tensor(oracle(logits.tolist(), k, starts, ends))
    if not sorted:
        count = (expected >= 0).sum(1)
        assert (found >= 0).sum(1).equal(count)
        assert found.eq(-1).equal(expected.eq(-1))
        found, expected = found.sort(dim=1).values, expected.sort(dim=1).values
    assert found.tolist() == expected.tolist()


@VARIANTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value(variant, dtype):
    logits = torch.arange(2**16).sub(2**15).to(torch.int16).view(dtype)[None]
    expected = oracle(logits.tolist(), 2**16, None, None)
    assert topk_indices(logits, 2**16, sorted=True, variant=variant).tolist() == expected


@pytest.mark.parametrize("sorted", [False, True])
def test_compiled_equals_eager(sorted):
    def select(logits, starts, ends, k):
        return topk_indices(logits * 2, k, starts=starts, ends=ends, sorted=sorted) + 1

    compiled = torch.compile(select, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, keys, k in ((3, 50, 7), (5, 80, 90)):
        logits = torch.randn(rows, keys).round()
        starts, ends = torch.arange(rows).int(), torch.arange(rows).int() + keys // 2
        for window in ((starts, ends), (None, ends), (None, None)):
            assert torch.equal(compiled(logits, *window, k), select(logits, *window, k))


LOGITS = torch.zeros(3, 8)
BAD = [
    ({"logits": [1.0]}, TypeError, "logits: expected a torch.Tensor, got list"),
    ({"logits": LOGITS.double()}, TypeError, "logits: expected dtype torch.float32 or .*, got torch.float64"),
    ({"logits": LOGITS[0]}, ValueError, r"logits: expected shape \[S, N\], got \[8\]"),
    ({"logits": torch.zeros(8, 3).T}, ValueError, "logits: expected a contiguous last dimension"),
    ({"k": 0}, ValueError, "k: expected from 1 to 2147483647, got 0"),
    ({"k": 2**62}, ValueError, "k: expected from 1 to 2147483647, got 4611686018427387904"),
    ({"sorted": "no"}, TypeError, "sorted: expected a bool, got str"),
    ({"k": 2.0}, TypeError, "k: expected an int, got float"),
    ({"k": True}, TypeError, "k: expected an int, got bool"),
    ({"starts": torch.zeros(3)}, TypeError, "starts: expected dtype torch.int32, got torch.float32"),
    ({"starts": torch.zeros(3).long()}, TypeError, "starts: expected dtype torch.int32, got torch.int64"),
    ({"ends": ints(1, 2)}, ValueError, r"ends: expected shape \[3\], got \[2\]"),
    ({"ends": ints(1, 2, 3, 4, 5, 6)[::2]}, ValueError, "ends: expected a contiguous last dimension"),
    ({"ends": ints(1, 2, 3).to("meta")}, ValueError, "ends: expected on cpu, like the other tensors, got meta"),
    ({"out": torch.zeros(3, 2)}, TypeError, "out: expected dtype torch.int32"),
    ({"out": torch.zeros(3, 3).int()}, ValueError, r"out: expected shape \[3, 2\], got \[3, 3\]"),
    ({"out": torch.zeros(2, 3).int().T}, ValueError, "out: expected a contiguous last dimension"),
    ({"variant": "fast"}, ValueError, "variant: topk has no variant 'fast'; it has .*torch_packed"),
]


@pytest.mark.parametrize(("changed", "error", "message"), BAD, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_bad_input(changed, error, message):
    arguments = {"logits": LOGITS, "k": 2} | changed
    with pytest.raises(error, match=message):
        topk_indices(arguments.pop("logits"), arguments.pop("k"), **arguments)


def test_columns_past_int32_are_refused():
    logits = torch.empty(1, 2**31, device="meta")
    with pytest.raises(ValueError, match="number of columns N: expected from 0 to 2147483647, got 2147483648"):
        topk_indices(logits, 1)


WRONG = [
    ([[0, 5]], "past the last column"),
    ([[0, -2]], "below -1"),
    ([[-1, 0]], "-1 before a column"),
    ([[0, 0]], "a column twice"),
    ([[0, 3]], "masked or outside"),
    ([[0, 4]], "masked or outside"),
    ([[0, -1]], "another count"),
    ([[0, 2]], "a column although a better one is left"),
    ([[1, 0]], "a worse column before a better one"),
]


@pytest.mark.parametrize(("out", "message"), WRONG)
def test_proof_finds_what_is_wrong(out, message):
    logits, ends = torch.tensor([[7.0, 5.0, 3.0, NAN, 9.0]]), ints(4)
    assert proof(logits, None, ends, ints(0, 1)[None], True).ok
    verdict = proof(logits, None, ends, torch.tensor(out, dtype=torch.int32), True)
    assert message in verdict.message


def test_proof_knows_the_rule_for_ties():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0]])
    assert proof(logits, None, None, ints(2, 1)[None], False).ok
    assert "a worse column before" in proof(logits, None, None, ints(2, 1)[None], True).message
    assert "its equal on the left is left" in proof(logits, None, None, ints(1, 3)[None], True).message


def test_cost():
    assert cost(1000, 10, 20, 4, windowed=True).bytes == 4000 + 80 + 800
    assert cost(1000, 10, 20, 2, windowed=False).bytes == 2000 + 800
