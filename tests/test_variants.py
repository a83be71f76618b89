"""How a family finds its variants and picks one, on toy families written to disk."""

import itertools
import sys
from dataclasses import dataclass

import pytest
import torch

import kvscout
from kvscout.kernels.cute.program import KernelUnavailable
from kvscout.variants import Choice, Family, Variant, observe

FILE = '''"""{summary}

Wins: nowhere.
"""
from kvscout.variants import Variant

VARIANT = Variant(
    launch=lambda problem, config, args: args[1].append(("{name}", config)),
    default_config=lambda problem: ("default", problem.size),
    rank=lambda problem: {rank},
    refuses=lambda problem: {refuses},
    space=lambda problem: [("default", problem.size), ("other", 1)],
)
'''


@dataclass(frozen=True)
class Problem:
    size: int = 1
    arch: str = "cpu"


packages = (f"toy_op_{number}" for number in itertools.count())


@pytest.fixture
def make_family(tmp_path, monkeypatch):
    """``make_family(name=source)``: a family whose variants folder holds these files."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(**sources):
        package = next(packages)
        folder = tmp_path / package / "variants"
        folder.mkdir(parents=True)
        for init in (folder.parent / "__init__.py", folder / "__init__.py"):
            init.write_text("")
        for name, source in sources.items():
            (folder / f"{name}.py").write_text(source)
        return Family("toy", package)

    yield make
    for name in [name for name in sys.modules if name.startswith("toy_op_")]:
        del sys.modules[name]


def file(name, rank=10, refuses=None, summary="Does it."):
    return FILE.format(name=name, rank=rank, refuses=refuses, summary=summary)


@pytest.fixture
def family(make_family):
    return make_family(
        torch_big=file("torch_big", rank="20 if problem.size > 100 else 5"),
        torch_plain=file("torch_plain", rank=10),
        torch_never=file("torch_never", rank=0),
        torch_small=file("torch_small", rank=30, refuses="'sizes below 4 only' if problem.size >= 4 else None"),
    )


class TestNames:
    def test_backends_in_order_then_names(self, make_family):
        names = ("cute_a", "triton_b", "torch_z", "triton_a", "torch_a", "helper")
        assert make_family(**dict.fromkeys(names, "raise SystemExit")).names == (
            "torch_a", "torch_z", "triton_a", "triton_b", "cute_a",
        )  # fmt: skip

    def test_name_and_summary_are_filled_in(self, make_family):
        variant = make_family(torch_a=file("torch_a", summary="One pass.")).load("torch_a")
        assert isinstance(variant, Variant)
        assert (variant.name, variant.summary) == ("torch_a", "One pass.")

    def test_unknown_name_lists_the_known_ones(self, family):
        known = "torch_big, torch_never, torch_plain, torch_small, and 'auto'"
        expected = f"variant: toy has no variant 'torch_fast'; it has {known}"
        with pytest.raises(ValueError, match=f"^{expected}$"):
            family.choose(Problem(), "torch_fast")


class TestChoose:
    @pytest.mark.parametrize(("size", "expected"), [(1, "torch_small"), (4, "torch_plain"), (101, "torch_big")])
    def test_auto_takes_the_highest_rank_that_serves(self, family, size, expected):
        assert family.choose(Problem(size)).variant.name == expected

    def test_choice_carries_the_default_config_and_launches(self, family):
        calls = []
        family.choose(Problem(7)).launch(Problem(7), (torch.empty(1), calls))
        assert calls == [("torch_plain", ("default", 7))]

    @pytest.mark.parametrize("records", [True, False])
    def test_gradients_are_off_where_they_would_be_recorded(self, records):
        seen = []
        variant = Variant(
            launch=lambda *_: seen.append(torch.is_grad_enabled()),
            default_config=lambda _: None,
            rank=lambda _: 1,
            records_grad=records,
        )
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                Choice(variant, None).launch(Problem(), (torch.empty(1),))
                assert torch.is_grad_enabled() is enabled
        assert seen == [not records, False]

    def test_explicit_runs_what_auto_never_takes(self, family):
        assert family.choose(Problem(), "torch_never").variant.name == "torch_never"

    def test_explicit_never_falls_back(self, family):
        with pytest.raises(kvscout.UnsupportedProblem) as caught:
            family.choose(Problem(4), "torch_small")
        assert caught.value.requested == "torch_small"
        assert caught.value.reasons == {"torch_small": "sizes below 4 only"}

    def test_auto_that_fails_lists_every_variant(self, make_family):
        family = make_family(
            torch_a=file("torch_a", refuses="f'size {problem.size} is odd'"),
            torch_b=file("torch_b", rank=0),
            triton_c="import a_package_that_nobody_has",
            cute_d=file("cute_d"),
        )
        with pytest.raises(kvscout.UnsupportedProblem) as caught:
            family.choose(Problem(3, arch="sm_80"))
        assert caught.value.reasons == {
            "torch_a": "size 3 is odd",
            "torch_b": "runs only when asked for by name",
            "triton_c": "needs the Python package 'a_package_that_nobody_has', which is not installed",
            "cute_d": "CuTe DSL kernels are written for sm_90 (H100, H200); this is sm_80",
        }
        assert list(caught.value.reasons) == list(family.names)
        assert all(f"  {name}: {sentence}" in str(caught.value) for name, sentence in caught.value.reasons.items())

    def test_auto_leaves_interpreted_triton_alone(self, make_family, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        family = make_family(
            torch_a=file("torch_a", refuses="'too small' if problem.size < 4 else None"),
            triton_b=file("triton_b", rank=90),
        )
        assert family.choose(Problem(4)).variant.name == "torch_a"
        assert family.choose(Problem(4), "triton_b").variant.name == "triton_b"
        with pytest.raises(kvscout.UnsupportedProblem) as caught:
            family.choose(Problem(1))
        assert caught.value.reasons == {"torch_a": "too small", "triton_b": "runs only when asked for by name"}

    def test_choices_can_be_observed(self, family):
        family.choose(Problem(5))
        with observe() as outer:
            family.choose(Problem(5))
            with observe() as inner:
                family.choose(Problem(6), "torch_never")
                family.choose(Problem(5))
        family.choose(Problem(5))
        assert inner == {("toy", "torch_never"): 1, ("toy", "torch_plain"): 1}
        assert outer == {("toy", "torch_never"): 1, ("toy", "torch_plain"): 2}

    def test_choice_is_memoised(self, family):
        assert family.choose(Problem(5)) is family.choose(Problem(5))
        assert family.choose(Problem(5)) is not family.choose(Problem(6))


NEEDS_A_KERNEL = """'Does it.'
from kvscout.kernels.cute.program import KernelUnavailable
from kvscout.variants import Required, Variant

MISSING = {}

def load(problem, config):
    if problem.size > 100:
        MISSING[problem.size] = KIND("no kernel of " + str(problem.size))
    if problem.size > 10:
        raise KernelUnavailable("nothing compiles")

VARIANT = Variant(
    launch=print, default_config=lambda _: None, rank=lambda _: 90, load=load,
    refuses=lambda problem: MISSING.get(problem.size), lacks=lambda: "no kernel at all" if MISSING else None,
)
"""


class TestKernels:
    """A variant that loads sizes up to 10, and says from 101 on that it could not."""

    @pytest.fixture
    def make(self, make_family):
        return lambda kind: make_family(torch_a=file("torch_a"), torch_k=NEEDS_A_KERNEL.replace("KIND", kind))

    def test_auto_takes_another_and_says_so_once(self, make):
        family = make("str")
        with pytest.warns(UserWarning, match="^toy: 'auto' does without torch_k: nothing compiles$") as said:
            assert family.choose(Problem(101)).variant.name == "torch_a"
            assert family.choose(Problem(101)).variant.name == "torch_a"
        assert len(said) == 1
        assert family.choose(Problem(10)).variant.name == "torch_k"

    def test_what_was_asked_for_by_name_is_left_to_the_launch(self, make):
        assert make("str").choose(Problem(101), "torch_k").variant.name == "torch_k"

    def test_a_failure_that_is_not_remembered_is_raised(self, make):
        with pytest.raises(KernelUnavailable, match="nothing compiles"):
            make("str").choose(Problem(11))

    def test_a_required_one_is_not_passed_over(self, make):
        family = make("Required")
        for _ in range(2):
            with pytest.raises(kvscout.UnsupportedProblem) as caught:
                family.choose(Problem(101))
            assert caught.value.reasons == {"torch_k": "no kernel of 101"}
        assert family.choose(Problem(101), "torch_a").variant.name == "torch_a"

    def test_one_of_a_lower_rank_is(self, make_family):
        family = make_family(
            torch_a=file("torch_a", rank=20),
            torch_b=file("torch_b", rank=10, refuses="__import__('kvscout').variants.Required('gone')"),
        )
        assert family.choose(Problem()).variant.name == "torch_a"

    def test_what_an_installation_lacks_is_unavailable(self, make):
        family = make("str")
        assert family.unavailable("torch_k", "cpu") is None
        with pytest.warns(UserWarning):
            family.choose(Problem(101))
        assert family.unavailable("torch_k", "cpu") == "no kernel at all"


class TestEnvironment:
    def test_names_the_variant_of_auto_calls(self, family, monkeypatch):
        assert family.choose(Problem()).variant.name == "torch_small"
        monkeypatch.setenv("KVSCOUT_TOY_VARIANT", "torch_never")
        assert family.choose(Problem()).variant.name == "torch_never"
        monkeypatch.delenv("KVSCOUT_TOY_VARIANT")
        assert family.choose(Problem()).variant.name == "torch_small"

    def test_loses_against_the_argument(self, family, monkeypatch):
        monkeypatch.setenv("KVSCOUT_TOY_VARIANT", "torch_never")
        assert family.choose(Problem(), "torch_plain").variant.name == "torch_plain"

    def test_never_falls_back(self, family, monkeypatch):
        monkeypatch.setenv("KVSCOUT_TOY_VARIANT", "torch_small")
        with pytest.raises(kvscout.UnsupportedProblem, match="sizes below 4 only"):
            family.choose(Problem(4))

    def test_unknown_name_is_an_error(self, family, monkeypatch):
        monkeypatch.setenv("KVSCOUT_TOY_VARIANT", "torch_fast")
        with pytest.raises(ValueError, match="toy has no variant 'torch_fast'"):
            family.choose(Problem())


class TestUnavailable:
    def test_missing_package_is_a_reason(self, make_family):
        family = make_family(torch_a=file("torch_a"), torch_b="import a_package_that_nobody_has.part")
        reason = "needs the Python package 'a_package_that_nobody_has', which is not installed"
        assert family.unavailable("torch_b", "cpu") == reason
        assert family.unavailable("torch_a", "cpu") is None
        assert [variant.name for variant in family.serving(Problem())] == ["torch_a"]

    @pytest.mark.parametrize("source", ["import kvscout.no_such_module", "from kvscout import no_such_name", "1 / 0"])
    def test_own_defect_is_raised(self, make_family, source):
        with pytest.raises((ImportError, ZeroDivisionError)):
            make_family(torch_a=source).unavailable("torch_a", "cpu")

    def test_triton_on_a_cpu_needs_the_interpreter(self, make_family, monkeypatch):
        family = make_family(triton_a=file("triton_a"))
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        assert family.unavailable("triton_a", "cpu").startswith("Triton kernels need a GPU")
        assert family.unavailable("triton_a", "sm_80") is None
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert family.unavailable("triton_a", "cpu") is None

    @pytest.mark.parametrize("arch", ["cpu", "sm_80", "sm_100", "gfx942"])
    def test_cute_is_for_hopper(self, make_family, arch):
        family = make_family(cute_a=file("cute_a"))
        assert family.unavailable("cute_a", arch) == (
            f"CuTe DSL kernels are written for sm_90 (H100, H200); this is {arch}"
        )
        assert family.unavailable("cute_a", "sm_90") is None

    def test_a_backend_that_cannot_run_is_not_imported(self, make_family):
        family = make_family(cute_a="raise AssertionError")
        assert family.unavailable("cute_a", "cpu") is not None


class TestConfigs:
    def test_default_first_and_once(self, family):
        assert family.load("torch_plain").configs(Problem(7)) == [("default", 7), ("other", 1)]

    def test_without_a_space(self):
        variant = Variant(launch=lambda *_: None, default_config=lambda _: 3, rank=lambda _: 1)
        assert variant.configs(Problem()) == [3]
        assert variant.refuses(Problem()) is None

    def test_choice_is_a_pair(self, family):
        variant, config = family.choose(Problem(7))
        assert Choice(variant, config) == family.choose(Problem(7))
