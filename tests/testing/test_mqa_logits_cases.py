"""The cases of the scores: what their check sees, and the groups that ``bench`` selects by."""

import pytest
import torch

from kvscout.ops.mqa_logits.variants.torch_reference import reference
from kvscout.testing.case import BENCH, groups
from kvscout.testing.cases import mqa_logits
from kvscout.testing.cases.mqa_logits import CASES, GROUPS, MqaLogitsCase

CPU = torch.device("cpu")
ROWS, KEYS = 11, 60


@pytest.fixture(params=[1, KEYS * 4, 1 << 20], ids=["row by row", "four rows at a time", "at once"])
def block(request, monkeypatch):
    monkeypatch.setattr(mqa_logits, "BLOCK_LOGITS", request.param)
    return request.param


def message(clean=True, values="normal", spoil=lambda out: None):
    """What the check says of the right logits after ``spoil`` changed them."""
    prepared = MqaLogitsCase(ROWS, KEYS, 8, 32, clean, "misaligned", values).prepare(CPU)
    logits = reference(*prepared.args[:-1], dtype=torch.float32)
    prepared.args.out.copy_(logits if clean else torch.where(logits.isneginf(), prepared.args.out, logits))
    spoil(prepared.args.out)
    return "; ".join(comparison.message for comparison in prepared.check("triton_any"))


@pytest.mark.parametrize("values", ["normal", "nan"])
@pytest.mark.parametrize("clean", [True, False])
def test_right_logits_pass(block, clean, values):
    assert message(clean, values) == ""


@pytest.mark.parametrize("row", [0, 5, ROWS - 1])
@pytest.mark.parametrize(
    ("clean", "value", "words"),
    [
        (True, float("nan"), "NaN positions differ in 1 of"),
        (True, float("-inf"), "-inf positions differ in 1 of"),
        (False, float("inf"), "inf positions differ in 1 of"),
        (False, 1e6, "largest relative difference"),
    ],
)
def test_one_wrong_logit_inside_a_window_is_seen(block, row, clean, value, words):
    def spoil(out):
        out[row, 2 * KEYS // 3 - 20] = value

    assert words in message(clean, spoil=spoil)


@pytest.mark.parametrize(("clean", "words"), [(True, "-inf positions differ"), (False, "NaN positions differ")])
def test_one_logit_outside_the_windows_is_seen(block, clean, words):
    """The last row's window starts at 3 and more."""

    def spoil(out):
        out[ROWS - 1, 0] = 0.0

    assert words in message(clean, spoil=spoil)


def test_a_nan_that_is_lost_is_seen(block):
    assert "NaN positions differ" in message(values="nan", spoil=lambda out: out.nan_to_num_(0.0, neginf=-torch.inf))


def test_the_model_shapes_are_24():
    assert len(GROUPS["model-shapes"]) == 24
    assert {case.clean for case in GROUPS["model-shapes"]} == {True, False}


def test_every_bench_case_is_in_a_group_and_the_other_way_round():
    grouped = frozenset().union(*groups("mqa_logits").values())
    assert grouped == {case.name for case in CASES if case.level == BENCH}
    assert {"squares", "few-rows", "long-context", "model-shapes", "packed-shapes", "unaligned"} == set(GROUPS)


def test_no_case_is_named_twice():
    assert len({case.name for case in CASES}) == len(CASES)


def sample_of(rows, keys, spread):
    """The sample of a case whose heads' terms are +1 and -1, and whose logits are ``spread`` of their sum."""
    case = MqaLogitsCase(rows, keys, 8, 32, True, "full")
    args = case.prepare(CPU).args
    args.q.copy_(torch.ones(args.q.shape).to(args.q.dtype))
    args.k.copy_(torch.ones(args.k.shape).to(args.k.dtype))
    args.weights.copy_(torch.tensor([1.0 + spread, -1.0 + spread] * 4))
    return case._sample(args)


def test_the_bound_follows_the_terms_of_a_few_logits_alone():
    assert sample_of(1, 1, 0.125).cancelled == pytest.approx(8)
    assert sample_of(1, 1, 1.0).cancelled == pytest.approx(1)
    assert sample_of(1, 1, 0.0).cancelled == 1
    assert sample_of(3, 20, 0.125).cancelled == 1
