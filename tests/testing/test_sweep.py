"""Variants on a case: each gets its outcome, whatever the one before it did."""

import pytest
import torch

from kvscout.roofline import Cost
from kvscout.testing import limits, sweep
from kvscout.testing.sweep import FAILED, PASSED, REFUSED, SKIPPED, ContextLost, attempt, verify_case

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def raises(problem, config, args):
    raise ArithmeticError("the kernel gave up")


def wrong(problem, config, args):
    x, out = args
    out.copy_(3 * x)


def partial(problem, config, args):
    x, out = args
    out[:-1] = 2 * x[:-1]


def stray(problem, config, args):
    x, out = args
    out.copy_(2 * x)
    out.as_strided((1,), (1,), out.storage_offset() + 8).zero_()


def fickle():
    """Adds a bit in its third launch."""
    launches = []

    def launch(problem, config, args):
        x, out = args
        launches.append(0)
        out.copy_(2 * x)
        if len(launches) == 3:
            out.view(torch.int32)[5] ^= 1

    return launch


def outcomes(doubling, **options):
    case = options.pop("case", None) or doubling.case()
    return {(o.variant, o.config): o for o in verify_case(case, CPU, sweep.family("doubling").names, **options)}


def test_every_variant_gets_its_own_outcome(doubling):
    doubling(
        torch_raises=doubling.variant(raises),
        torch_refuses=doubling.variant(refuses=lambda problem: "wants more than eight"),
        torch_right=doubling.variant(),
        torch_wrong=doubling.variant(wrong),
    )
    found = {variant: (o.status, o.message) for (variant, _), o in outcomes(doubling).items()}
    assert found["torch_raises"] == (FAILED, "ArithmeticError: the kernel gave up")
    assert found["torch_refuses"] == (REFUSED, "wants more than eight")
    assert found["torch_right"] == (PASSED, "")
    assert found["torch_wrong"][0] == FAILED
    assert found["torch_wrong"][1].startswith("out: largest relative difference 5.00e-01")


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (partial, "out: NaN positions differ in 1 of 8 places"),
        (stray, "guards of output 0: 1 of 136 differ"),
        (fickle(), "out repeated: 1 of 8 differ, first at (5,)"),
    ],
)
def test_less_obvious_faults_fail(doubling, launch, message):
    doubling(torch_faulty=doubling.variant(launch))
    (found,) = outcomes(doubling).values()
    assert found.status == FAILED
    assert message in found.message


def test_a_variant_whose_refusal_raises_fails_alone(doubling):
    doubling(torch_bad=doubling.variant(refuses=lambda problem: problem.no_such_field), torch_right=doubling.variant())
    bad, right = outcomes(doubling).values()
    assert (bad.status, right.status) == (FAILED, PASSED)
    assert "no_such_field" in bad.message


def test_every_config_is_run_once_when_asked_for(doubling):
    doubling(torch_tuned=doubling.variant(space=lambda problem: ["a", "default", "b"]))
    assert [config for _, config in outcomes(doubling)] == ["default"]
    assert [config for _, config in outcomes(doubling, every_config=True)] == ["default", "a", "b"]


def test_a_failing_config_does_not_hide_the_next(doubling):
    def launch(problem, config, args):
        (raises if config == "a" else doubling.double)(problem, config, args)

    doubling(torch_tuned=doubling.variant(launch, space=lambda problem: ["a", "b"]))
    assert [o.status for o in outcomes(doubling, every_config=True).values()] == [PASSED, FAILED, PASSED]


def test_inputs_that_do_not_fit_fail_the_case_with_a_sentence(doubling):
    doubling(torch_right=doubling.variant())
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.\nand much advice")
    (found,) = outcomes(doubling, case=doubling.case(prepare_raises=error)).values()
    assert (found.variant, found.status) == (sweep.INPUTS, FAILED)
    assert found.message == "cannot be prepared: not enough GPU memory: CUDA out of memory. Tried to allocate 1 TiB."


def test_large_cases_spare_torch_variants_alone(doubling, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    doubling(torch_right=doubling.variant(), triton_right=doubling.variant())
    for cost in (Cost(flops=10**15, bytes=1), Cost(flops=1, bytes=10**12)):
        found = [(o.status, o.message) for o in outcomes(doubling, case=doubling.case(cost=cost)).values()]
        assert found == [(SKIPPED, limits.too_large("torch_right", cost, "cpu")), (PASSED, "")]
    small = doubling.case(cost=Cost(flops=1, bytes=1))
    assert [o.status for o in outcomes(doubling, case=small).values()] == [PASSED, PASSED]


def test_the_seed_reaches_the_inputs(doubling):
    doubling(torch_right=doubling.variant())
    case = doubling.case()
    outcomes(doubling, case=case, seed=7)
    assert case.seeds == [7]


def test_ctrl_c_is_nobodys_failure(doubling):
    def interrupted(problem, config, args):
        raise KeyboardInterrupt

    doubling(torch_slow=doubling.variant(interrupted))
    with pytest.raises(KeyboardInterrupt):
        outcomes(doubling)


def test_an_exception_that_leaves_the_gpu_broken_is_told_from_one_that_does_not(monkeypatch):
    def raise_value_error():
        raise ValueError("no")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert attempt(CUDA, raise_value_error) == (None, "ValueError: no")

    def broken(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(ContextLost, match="ValueError: no"):
        attempt(CUDA, raise_value_error)


def test_what_caused_an_exception_comes_first():
    def compile_kernel():
        try:
            raise TypeError("no such type")
        except TypeError as cause:
            raise ValueError("at line 3") from cause

    assert attempt(CPU, compile_kernel) == (None, "TypeError: no such type; it caused ValueError: at line 3")


def test_the_variant_that_broke_the_gpu_is_named_before_the_run_stops(doubling, monkeypatch):
    doubling(torch_breaks=doubling.variant(raises), torch_right=doubling.variant())

    def lost(device, action, *args):
        if action is sweep.verify:
            raise ContextLost("illegal address")
        return attempt(device, action, *args)

    monkeypatch.setattr(sweep, "attempt", lost)
    run = verify_case(doubling.case(), CPU, ("torch_breaks", "torch_right"))
    found = next(run)
    assert (found.variant, found.status, found.message) == ("torch_breaks", FAILED, "illegal address")
    with pytest.raises(ContextLost):
        next(run)


def test_levels_grow_with_full():
    for device in (CPU, CUDA):
        assert set(limits.levels(device, full=False)) < set(limits.levels(device, full=True))
    assert limits.levels(CPU, full=False) == ("suite",)
    assert set(limits.levels(CUDA, full=True)) == {"suite", "verify", "full", "bench"}
