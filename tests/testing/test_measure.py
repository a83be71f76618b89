"""Timing of variants: right ones get figures, wrong ones a reason."""

from dataclasses import replace

import pytest
import torch

from kvscout import tuning
from kvscout.device import GPUS
from kvscout.roofline import Cost
from kvscout.testing import measure, sustained, timing
from kvscout.testing.compare import Budget
from kvscout.testing.measure import Measurement, Wanted, measure_case
from kvscout.testing.peers import Peer
from kvscout.testing.sweep import FAILED, PASSED, REFUSED, SKIPPED
from kvscout.testing.timing import Timing

CPU = torch.device("cpu")
COST = Cost(flops=4_000_000, bytes=8_000_000)
HOT = Wanted(cold=False)


def wrong(problem, config, args):
    args[1].fill_(1)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(timing, "TARGET_S", 1e-4)


def measured(doubling, names=None, **options):
    return list(measure_case(doubling.case(cost=COST), CPU, names, wanted=HOT, **options))


def test_the_cpu_times_what_a_call_would_get(doubling):
    low, high, never = (doubling.variant(rank=rank) for rank in (1, 20, 0))
    doubling(torch_low=low, torch_high=high, torch_never=never)
    (found,) = measured(doubling)
    assert (found.variant, found.status, found.baseline) == ("torch_high", PASSED, True)
    assert found.hot.median_us > 0
    assert found.cold is None
    assert found.max_rel < 1e-6


def test_the_baseline_is_timed_first_and_marked(doubling):
    doubling(torch_a=doubling.variant(rank=1), torch_b=doubling.variant(rank=20))
    found = [(m.variant, m.baseline) for m in measured(doubling, ("torch_b",), baseline="torch_a")]
    assert found == [("torch_a", True), ("torch_b", False)]


def test_a_wrong_variant_gets_no_figure(doubling):
    doubling(torch_right=doubling.variant(rank=20), torch_wrong=doubling.variant(wrong))
    right, bad = measured(doubling, ("torch_right", "torch_wrong"))
    assert (right.status, bad.status) == (PASSED, FAILED)
    assert "largest relative difference" in bad.message
    assert (bad.hot, bad.cold, bad.judged, bad.tflops, bad.tbytes_per_s, bad.roof) == (None,) * 6


def test_a_wrong_result_on_any_of_the_inputs_is_seen(doubling, monkeypatch):
    """The second of two sets is the one that the variant gets wrong."""
    doubling(torch_late=doubling.variant(lambda problem, config, args: args[1].copy_(2 * args[0] + bad(args))))
    sets = [doubling.case().prepare(CPU, seed) for seed in (0, 1)]
    bad = lambda args: args[0] is sets[1].args[0]  # noqa: E731
    monkeypatch.setattr(measure, "_input_sets", lambda *args: sets)
    (found,) = measured(doubling)
    assert found.status == FAILED


def test_auto_is_what_a_call_would_get(doubling):
    doubling(torch_low=doubling.variant(rank=1), torch_high=doubling.variant(rank=20))
    baseline, auto = measured(doubling, ("auto",), baseline="torch_low")
    assert (baseline.variant, baseline.chosen) == ("torch_low", "")
    assert (auto.variant, auto.chosen, auto.config, auto.status) == ("auto", "torch_high", "default", PASSED)


def test_auto_is_timed_with_its_tuned_config(doubling, monkeypatch):
    doubling(torch_a=doubling.variant(space=lambda problem: ["other"]))
    monkeypatch.setattr(tuning, "entry", lambda op, package, problem: tuning.Entry("torch_a", "other"))
    auto, named = measured(doubling, ("auto", "torch_a"), baseline="auto")
    assert (auto.config, named.config) == ("other", "default")


def test_auto_without_a_variant_says_so(doubling):
    doubling(torch_refuses=doubling.variant(refuses=lambda problem: "wants more"))
    (found,) = measured(doubling, ("auto",))
    assert (found.variant, found.status) == ("auto", FAILED)
    assert "no variant of doubling serves" in found.message


def test_auto_as_baseline_is_what_a_call_would_get(doubling):
    doubling(torch_low=doubling.variant(rank=1), torch_high=doubling.variant(rank=20))
    auto, low = measured(doubling, ("torch_low",), baseline="auto")
    assert (auto.variant, auto.chosen, auto.baseline, auto.status) == ("auto", "torch_high", True, PASSED)
    assert (low.variant, low.baseline, low.status) == ("torch_low", False, PASSED)


def test_torch_is_the_best_torch_variant_beside_the_others(doubling):
    doubling(torch_low=doubling.variant(rank=1), torch_high=doubling.variant(rank=20), other=doubling.variant(rank=90))
    found = measured(doubling, ("other",), against_torch=True, peers=[peer()], baseline="torch")
    assert [(m.variant, m.chosen, m.status, m.peer, m.baseline) for m in found] == [
        ("torch", "torch_high", PASSED, True, True),
        ("other", "", PASSED, False, False),
        ("rival", "", PASSED, True, False),
    ]
    assert found[0].config == "default"


def test_torch_that_is_not_asked_for_is_no_baseline(doubling):
    doubling(torch_a=doubling.variant())
    assert [(m.variant, m.baseline) for m in measured(doubling, baseline="torch")] == [("torch_a", False)]


def test_torch_refuses_where_no_torch_variant_serves(doubling):
    picky = doubling.variant(refuses=lambda problem: "wants more")
    doubling(torch_picky=picky, other=doubling.variant())
    right, refused = measured(doubling, ("other",), against_torch=True)
    assert (right.variant, right.status) == ("other", PASSED)
    assert (refused.variant, refused.status, refused.message) == ("torch", REFUSED, "no torch variant serves it")


def test_torch_is_spared_what_is_too_large(doubling):
    doubling(torch_a=doubling.variant(), other=doubling.variant(rank=90))
    large = doubling.case(cost=Cost(flops=10**13, bytes=8))
    found = list(measure_case(large, CPU, ("other",), against_torch=True, wanted=HOT))
    assert [(m.variant, m.status) for m in found if m.variant != "torch_a"] == [("other", PASSED), ("torch", SKIPPED)]


def test_a_baseline_of_another_op_is_left_out(doubling):
    doubling(torch_right=doubling.variant())
    found = measured(doubling, ("torch_right",), peers=[peer()], baseline="elsewhere")
    assert [(m.variant, m.status, m.baseline) for m in found] == [
        ("torch_right", PASSED, False),
        ("rival", PASSED, False),
    ]


def test_a_variant_that_refuses_is_no_baseline_and_says_why(doubling):
    picky = doubling.variant(refuses=lambda problem: "wants more")
    doubling(torch_right=doubling.variant(), torch_picky=picky)
    found = measured(doubling, ("torch_right",), baseline="torch_picky")
    assert [(m.variant, m.status, m.message, m.baseline) for m in found] == [
        ("torch_picky", REFUSED, "wants more", False),
        ("torch_right", PASSED, "", False),
    ]


def test_back_to_back_times_are_taken_where_asked_for(doubling, monkeypatch):
    monkeypatch.setattr(sustained, "SUSTAINED_S", 1e-4)
    doubling(torch_right=doubling.variant())
    (found,) = measure_case(doubling.case(), CPU, wanted=Wanted(cold=False, sustained=True))
    assert found.sustained.us > 0
    (found,) = measured(doubling)
    assert found.sustained is None


def peer(name="rival", launch=lambda x: 2 * x, refuses=lambda problem: None, prepare=None):
    """A peer of the doubling op with an output of its own."""
    return Peer(
        unavailable=lambda arch: None,
        refuses=refuses,
        prepare=prepare or (lambda prepared: lambda: launch(prepared.args[0])),
        deliver=lambda prepared, returned: prepared.args[1].copy_(returned),
        name=name,
    )


def test_a_peer_is_checked_and_timed_after_the_variants(doubling):
    doubling(torch_right=doubling.variant())
    ours, theirs = measured(doubling, ("torch_right",), peers=[peer()])
    assert (ours.variant, ours.peer, ours.baseline) == ("torch_right", False, True)
    assert (theirs.variant, theirs.peer, theirs.baseline, theirs.status) == ("rival", True, False, PASSED)
    assert theirs.hot.median_us > 0
    assert theirs.cost == COST


def test_a_peer_as_baseline_is_timed_first(doubling):
    doubling(torch_right=doubling.variant())
    found = measured(doubling, ("torch_right",), peers=[peer("other"), peer()], baseline="rival")
    assert [(m.variant, m.baseline) for m in found] == [("rival", True), ("torch_right", False), ("other", False)]


def test_a_wrong_peer_gets_no_figure_and_the_next_one_is_timed(doubling):
    doubling(torch_right=doubling.variant())
    _, wrong_one, right_one = measured(doubling, peers=[peer("wrong", lambda x: 2 * x + 1), peer()])
    assert (wrong_one.status, wrong_one.judged, wrong_one.peer) == (FAILED, None, True)
    assert "largest relative difference" in wrong_one.message
    assert right_one.status == PASSED


def test_a_peer_may_have_a_budget_of_its_own(doubling):
    doubling(torch_right=doubling.variant())
    coarse = peer("coarse", lambda x: 2.01 * x)
    own = Budget(max_rel=0.02, cosine=1e-3)
    excusable = replace(coarse, name="excusable", tolerance=lambda problem: own)
    ours, strict, excused = measured(doubling, peers=[coarse, excusable])
    assert (ours.tolerance, strict.tolerance, excused.tolerance) == (None, None, own)
    assert (strict.status, excused.status) == (FAILED, PASSED)
    assert 0.001 < excused.max_rel < 0.02


def test_a_budget_of_its_own_excuses_no_nan(doubling):
    doubling(torch_right=doubling.variant())
    hollow = replace(peer("hollow", lambda x: x / 0 * 0), tolerance=lambda problem: Budget(9, 9))
    _, found = measured(doubling, peers=[hollow])
    assert "NaN positions differ" in found.message


def test_a_peer_that_writes_nothing_does_not_pass_on_what_a_variant_left(doubling):
    doubling(torch_right=doubling.variant())
    silent = Peer(lambda arch: None, lambda problem: None, lambda prepared: int, lambda prepared, returned: None)
    _, found = measured(doubling, peers=[silent])
    assert found.status == FAILED
    assert "NaN positions differ" in found.message


def raises(*_):
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize("where", [{"prepare": raises}, {"launch": raises}])
def test_a_peer_that_raises_says_why(doubling, where):
    doubling(torch_right=doubling.variant())
    ours, theirs = measured(doubling, peers=[peer(**where)])
    assert (ours.status, theirs.status, theirs.message) == (PASSED, FAILED, "RuntimeError: no such kernel")


def test_a_peer_may_refuse_and_then_there_is_no_baseline(doubling):
    doubling(torch_right=doubling.variant())
    found = measured(doubling, peers=[peer(refuses=lambda problem: "wants less")], baseline="rival")
    assert [(m.variant, m.status, m.message, m.baseline) for m in found] == [
        ("rival", REFUSED, "wants less", False),
        ("torch_right", PASSED, "", False),
    ]


def test_what_cannot_be_timed_says_why(doubling):
    doubling(
        torch_refuses=doubling.variant(refuses=lambda problem: "wants more"),
        torch_right=doubling.variant(),
    )
    case = doubling.case(cost=Cost(flops=10**15, bytes=1))
    found = list(measure_case(case, CPU, ("torch_refuses", "torch_right"), wanted=HOT))
    assert [(m.status, m.baseline) for m in found] == [(SKIPPED, False), (REFUSED, False)]
    assert found[1].message == "wants more"


def test_inputs_that_cannot_be_made(doubling):
    doubling(torch_right=doubling.variant())
    (found,) = measure_case(doubling.case(prepare_raises=ValueError("no")), CPU, wanted=HOT)
    assert (found.status, found.message) == (FAILED, "cannot be prepared: ValueError: no")


def test_no_variant_at_all(doubling):
    doubling(torch_refuses=doubling.variant(refuses=lambda problem: "wants more"))
    (found,) = measured(doubling)
    assert found.status == FAILED
    assert "no variant of doubling serves" in found.message


def test_rates_come_from_cold_times_where_there_are_any():
    hot, cold = Timing(1.0, 2.0, 0.0, 5), Timing(3.0, 4.0, 0.0, 5)
    found = Measurement("op", "case", "v", PASSED, hot=hot, cold=cold, cost=COST, floor_us=1.0)
    assert (found.judged, found.tflops, found.tbytes_per_s, found.roof) == (cold, 1.0, 2.0, 0.25)
    found = Measurement("op", "case", "v", PASSED, hot=hot, cost=COST)
    assert (found.judged, found.tflops, found.tbytes_per_s, found.roof) == (hot, 2.0, 4.0, None)


def test_the_floor_is_the_larger_of_arithmetic_and_memory():
    gpu = GPUS["NVIDIA H200"]
    assert Cost(flops=10**12, bytes=1).floor_s(gpu) == 10**12 / gpu.fp8_flops_per_s
    assert Cost(flops=10**12, bytes=1, fp8=False).floor_s(gpu) == 10**12 / gpu.bf16_flops_per_s
    assert Cost(flops=1, bytes=10**9).floor_s(gpu) == 10**9 / gpu.hbm_bytes_per_s
