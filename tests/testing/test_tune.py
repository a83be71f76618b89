"""How the fastest of a bucket is found, by times that the tests make up."""

from dataclasses import replace

import pytest
import torch

from kvscout.kernels.cute.program import KernelUnavailable
from kvscout.roofline import Cost
from kvscout.testing import sweep, tune
from kvscout.testing.sweep import FAILED, PASSED, REFUSED, SKIPPED
from kvscout.testing.tune import CaseTimes, Clock, Key

CPU = torch.device("cpu")
BUCKET = frozenset({("size", 8)})


@pytest.fixture
def run(made_times):
    """``run(case, us, ...)``: what came of a bucket, and the clock that was asked."""

    def run(case, us, *more_cases, rough=None, **options):
        made = made_times(us)
        by = made.clock if rough is None else made.clock._replace(rough=rough)
        return both_stages([case, *more_cases], by, **options), made

    return run


def both_stages(cases, by, within=tune.WITHIN, seconds_per_case=None):
    """What came of a bucket with these cases."""
    begun = tune.begin(BUCKET, cases, CPU, by, within=within)
    return tune.finish(begun, CPU, by, seconds_per_case=seconds_per_case)


def variant(doubling, *configs, **more):
    """A variant whose default config is "default", and whose space has these too."""
    return doubling.variant(space=lambda problem: configs, **more)


def statuses(tuned):
    return {trial.config: trial.status for trial in tuned.trials}


class TestFinal:
    def test_the_three_fastest_and_the_rules_choice_are_timed_in_turn(self, run, doubling):
        doubling(torch_a=variant(doubling, "a", "b", "c", "d"))
        found, made = run(doubling.case(), {"default": 50, "a": 40, "b": 10, "c": 30, "d": 20})
        assert made.rounds == [["b", "c", "d", "default"]]
        assert found.winner.key == Key("torch_a", "b")
        assert found.winner.runner_up == Key("torch_a", "d")
        assert (found.winner.margin, found.winner.over_default) == (1.0, 4.0)
        assert found.winner.cases == {"eight": CaseTimes(10, 20, 50)}
        assert [trial.us for trial in found.trials] == [50, 40, 10, 30, 20]

    def test_the_rules_choice_wins_within_noise(self, run, doubling):
        doubling(torch_a=variant(doubling, "a"))
        found, _ = run(doubling.case(), {"default": 100, "a": 98.5})
        assert found.winner.key == Key("torch_a", "default")
        assert (found.winner.runner_up, found.winner.margin) == (Key("torch_a", "a"), -0.015)
        assert found.winner.over_default == 0

    def test_beyond_noise_it_does_not(self, run, doubling):
        doubling(torch_a=variant(doubling, "a"))
        assert run(doubling.case(), {"default": 100, "a": 97.5})[0].winner.key == Key("torch_a", "a")

    def test_of_others_within_noise_the_earlier_wins(self, run, doubling):
        doubling(torch_a=variant(doubling, "a", "b", "c"))
        found, _ = run(doubling.case(), {"default": 100, "a": 81, "b": 90, "c": 80})
        assert (found.winner.key.config, found.winner.runner_up.config) == ("a", "c")

    def test_a_median_alone_does_not_win(self, run, doubling):
        """Faster by a third in the median, and slower in five rounds of ten."""
        doubling(torch_a=variant(doubling, "a"))
        default = [3.0, 1.0] * 5
        found, _ = run(doubling.case(), {"default": default, "a": [2.0, 1.1] * 4 + [0.9, 1.1]})
        assert found.winner.key.config == "default"
        found, _ = run(doubling.case(), {"default": default, "a": [2.0, 0.9] * 5})
        assert found.winner.key.config == "a"

    def test_variants_compete_and_the_highest_rank_is_the_rule(self, run, doubling):
        doubling(
            torch_a=doubling.variant(rank=10),
            torch_b=replace(doubling.variant(rank=20), default_config=lambda problem: "b"),
        )
        for us, expected in (({"default": 10, "b": 10}, "torch_b"), ({"default": 5, "b": 10}, "torch_a")):
            found, _ = run(doubling.case(), us)
            assert found.winner.key.variant == expected
            assert found.winner.over_default == us["b"] / us[found.winner.key.config] - 1

    def test_alone_there_is_no_runner_up(self, run, doubling):
        doubling(torch_a=doubling.variant())
        found, _ = run(doubling.case(), {"default": 7})
        assert (found.winner.runner_up, found.winner.margin) == (None, None)
        assert found.winner.cases == {"eight": CaseTimes(7, None, 7)}

    def test_a_final_that_fails_leaves_no_winner(self, doubling):
        doubling(torch_a=variant(doubling, "a"))

        def clock(launches, target_s, least):
            if len(launches) > 1:
                raise torch.OutOfMemoryError("no room\nat all")
            return [[1.0] * least]

        found = both_stages([doubling.case()], Clock(clock, lambda launch: 0.0))
        assert (found.winner, found.message) == (None, "the final failed")
        assert found.trials[-1].message == "not enough GPU memory: no room"
        assert found.trials[-1].status == FAILED


@pytest.fixture
def pair(doubling):
    """``pair("a", ...)``: ``torch_fast`` is the rule's, ``torch_slow`` has these configs too; by what each takes."""

    def use(*configs, launch=doubling.double):
        doubling(
            torch_fast=replace(doubling.variant(rank=20), default_config=lambda problem: "fast"),
            torch_slow=replace(variant(doubling, *configs, launch=launch), default_config=lambda problem: "slow"),
        )

    return use


class TestStages:
    LEFT_OUT = "its own choice takes more than 1.5 times as long as that of torch_fast"

    @pytest.mark.parametrize(("slow", "tried"), [(14.9, True), (15.1, False)])
    def test_other_configs_are_tried_where_the_variant_itself_comes_near(self, run, doubling, pair, slow, tried):
        pair("a")
        found, made = run(doubling.case(), {"fast": 10, "slow": slow, "a": 9})
        assert statuses(found) == {"fast": PASSED, "slow": PASSED, "a": PASSED if tried else SKIPPED}
        assert [trial.message for trial in found.trials] == ["", "", "" if tried else self.LEFT_OUT]
        assert found.winner.key.config == ("a" if tried else "fast")
        assert made.rounds == [["fast", "slow", *["a"] * tried]]

    def test_how_near_is_said(self, run, doubling, pair):
        pair("a")
        us = {"fast": 10, "slow": 30, "a": 9}
        assert run(doubling.case(), us, within=3.0)[0].winner.key.config == "a"
        assert run(doubling.case(), us, within=float("inf"))[0].winner.key.config == "a"
        (trial,) = [trial for trial in run(doubling.case(), us, within=2.5)[0].trials if trial.config == "a"]
        assert trial.message == "its own choice takes more than 2.5 times as long as that of torch_fast"

    def test_the_rule_s_own_variant_may_be_the_slow_one(self, run, doubling, pair):
        pair("a")
        doubling(
            torch_slow=replace(variant(doubling, "a", rank=90), default_config=lambda problem: "slow"),
            torch_fast=replace(doubling.variant(rank=20), default_config=lambda problem: "fast"),
        )
        found, _ = run(doubling.case(), {"fast": 10, "slow": 40, "a": 9})
        assert (found.winner.key.config, found.winner.over_default) == ("fast", 3.0)
        assert statuses(found)["a"] == SKIPPED

    def test_of_several_cases_the_mean_counts(self, run, doubling, pair, two):
        """Slower by 4 on one, as fast on the other: twice in the mean."""
        pair("a")
        us = {"fast": 10, "slow": {8: 40, 1: 10}, "a": 9}
        assert statuses(run(two[0], us, two[1], within=1.9)[0])["a"] == SKIPPED
        assert statuses(run(two[0], us, two[1], within=2.1)[0])["a"] == PASSED

    def test_a_hopeless_variant_is_left_out_whatever_the_factor(self, doubling, pair, made_times):
        pair("a")
        made = made_times({"fast": 10, "slow": 10_000_000, "a": 9})
        by = made.clock._replace(rough=lambda launch: made.us[launch.func.__self__.config] * 1e-6)
        found = both_stages([doubling.case()], by, within=float("inf"))
        messages = {trial.config: trial.message for trial in found.trials}
        assert messages["slow"] == "takes more than 10 times as long as another"
        assert messages["a"] == "its own choice takes more than 10 times as long as another"

    def test_where_the_own_choice_fails_the_others_are_tried(self, run, doubling, pair):
        def launch(problem, config, args):
            if config == "slow":
                raise RuntimeError("no")
            doubling.double(problem, config, args)

        pair("a", launch=launch)
        assert run(doubling.case(), {"fast": 10, "a": 9})[0].winner.key.config == "a"

    def test_the_first_stage_launches_own_choices_alone(self, doubling, pair, made_times):
        launched = []

        def launch(problem, config, args):
            launched.append(config)
            doubling.double(problem, config, args)

        pair("a", "b", launch=launch)
        by = made_times({"fast": 10, "slow": 11, "a": 12, "b": 13}).clock
        begun = tune.begin(BUCKET, [doubling.case()], CPU, by)
        assert set(launched) == {"slow"}
        keys = [Key("torch_fast", "fast"), *(Key("torch_slow", config) for config in ("slow", "a", "b"))]
        assert [begun.wants(0, key) for key in keys] == [False, False, True, True]
        tune.finish(begun, CPU, by)
        assert launched.count("slow") == 2
        assert launched[2:] == ["a", "a", "b", "b"]


class ShortCase:
    """A case of the same bucket with an input of one element, by which the clock tells it; its result is right."""

    def __init__(self, case):
        self.case, self.op, self.name, self.level = case, case.op, "one", case.level

    def prepare(self, device, seed=0):
        prepared = self.case.prepare(device, seed)
        x, out = prepared.args
        return replace(prepared, args=(x[:1], out), check=lambda variant: [])


@pytest.fixture
def two(doubling):
    """Cases with inputs of 8 elements and of 1: what each config takes depends on the case."""
    return doubling.case(), ShortCase(doubling.case())


class TestSeveralCases:
    def test_their_geometric_mean_decides(self, run, doubling, two):
        doubling(torch_a=variant(doubling, "a", "b"))
        us = {"default": {8: 10, 1: 1000}, "a": {8: 8, 1: 1100}, "b": {8: 9, 1: 900}}
        found, made = run(two[0], us, two[1])
        assert found.winner.key.config == "b"
        assert found.winner.cases == {"eight": CaseTimes(9, 8, 10), "one": CaseTimes(900, 1100, 1000)}
        assert found.winner.margin == pytest.approx((8 * 1100 / 9 / 900) ** 0.5 - 1, abs=1e-4)
        assert made.rounds == [["default", "a", "b"]] * 2

    def test_noise_is_what_differs_from_round_to_round(self, run, doubling, two):
        """Not what differs from case to case: the second is slower on one case in every round."""
        doubling(torch_a=variant(doubling, "a"))
        found, _ = run(two[0], {"default": {8: 10, 1: 100}, "a": {8: 5, 1: 110}}, two[1])
        assert found.winner.key.config == "a"
        noisy = [40.0, 2.0] * 5
        found, _ = run(two[0], {"default": {8: [41.0, 1.9] * 5, 1: 100}, "a": {8: noisy, 1: 97}}, two[1])
        assert found.winner.key.config == "default"

    @pytest.mark.parametrize(("a", "winner"), [(5, "a"), (10, None)])
    def test_a_rule_that_differs_within_the_bucket_needs_no_entry(self, run, doubling, two, a, winner):
        """The rule takes "few" for the first and "many" for the second case."""
        # Asked once for each stage of each case, and once for its final.
        sizes = iter([8, 1, 8, 1, 8, 1])
        doubling(
            torch_a=replace(
                variant(doubling, "few", "many", "a"),
                default_config=lambda problem: "few" if next(sizes) == 8 else "many",
            )
        )
        us = {"few": {8: 10, 1: 30}, "many": {8: 30, 1: 10}, "a": a}
        found, _ = run(two[0], us, two[1])
        assert (found.winner and found.winner.key.config) == winner
        if winner is None:
            assert found.message == "no one config is faster than what the rule takes for each case"
        else:
            assert found.winner.over_default == 1.0


class TestWhatIsNoCandidate:
    def test_a_wrong_one_is_reported_and_never_wins(self, run, doubling):
        def launch(problem, config, args):
            args[1].copy_(2 * args[0] if config != "wrong" else args[0])
            if config == "raising":
                raise RuntimeError("no such instruction")

        doubling(torch_a=doubling.variant(launch, space=lambda problem: ["wrong", "raising", "right"]))
        found, made = run(doubling.case(), {"default": 10, "right": 9, "wrong": 1, "raising": 1})
        assert found.winner.key.config == "right"
        assert made.rounds == [["default", "right"]]
        assert statuses(found) == {"default": PASSED, "wrong": FAILED, "raising": FAILED, "right": PASSED}
        messages = {trial.config: trial.message for trial in found.trials}
        assert "relative difference" in messages["wrong"]
        assert messages["raising"] == "RuntimeError: no such instruction"

    def test_without_a_right_one_there_is_no_entry(self, run, doubling):
        doubling(torch_a=doubling.variant(lambda problem, config, args: None))
        found, _ = run(doubling.case(), {})
        assert (found.winner, found.message) == (None, "nothing that a table may have ran to a right result")

    def test_what_only_runs_by_name_or_refuses_is_not_tried(self, run, doubling):
        doubling(
            torch_a=doubling.variant(),
            torch_named=doubling.variant(rank=0),
            torch_refusing=doubling.variant(rank=90, refuses=lambda problem: "not this"),
            triton_b=doubling.variant(rank=90),
        )
        found, _ = run(doubling.case(), {"default": 10})
        assert [(trial.variant, trial.status, trial.message) for trial in found.trials] == [
            ("torch_a", PASSED, ""),
            ("torch_refusing", REFUSED, "not this"),
        ]

    @pytest.mark.parametrize("when", ["load", "launch"])
    def test_a_missing_kernel_is_skipped_with_its_sentence(self, run, doubling, when):
        def missing(problem, config, args=None):
            if config == "missing":
                raise KernelUnavailable("k: KVSCOUT_AOT_ONLY is set")
            if args is not None:
                doubling.double(problem, config, args)

        doubling(torch_a=replace(variant(doubling, "missing", "a"), **{when: missing}))
        found, _ = run(doubling.case(), {"default": 10, "a": 5})
        assert found.winner.key.config == "a"
        (skipped,) = [trial for trial in found.trials if trial.status == SKIPPED]
        assert (skipped.config, skipped.message) == ("missing", "k: KVSCOUT_AOT_ONLY is set")

    def test_without_the_rules_choice_the_others_compete(self, run, doubling):
        def load(problem, config):
            if config == "default":
                raise KernelUnavailable("gone")

        doubling(torch_a=replace(variant(doubling, "a", "b"), load=load))
        found, _ = run(doubling.case(), {"a": 10, "b": 5})
        assert (found.winner.key.config, found.winner.over_default) == ("b", None)
        assert found.winner.cases == {"eight": CaseTimes(5, 10, None)}

    def test_what_is_too_large_is_skipped(self, run, doubling):
        doubling(torch_a=doubling.variant())
        found, _ = run(doubling.case(Cost(10**12, 1)), {})
        assert found.winner is None
        assert found.trials[0].message.startswith("too large: ")

    @pytest.mark.parametrize(("seconds", "status"), [(0.0301, PASSED), (0.0303, SKIPPED)])
    def test_what_is_hopeless_is_not_checked(self, run, doubling, seconds, status):
        """Ten times 1 ms, and 20 ms that any launch may take."""
        doubling(torch_a=variant(doubling, "slow"))
        seen = []

        def rough(launch):
            seen.append(launch.func.__self__.config)
            return seconds

        found, _ = run(doubling.case(), {"default": 1020, "slow": 30_000}, rough=rough)
        assert statuses(found) == {"default": PASSED, "slow": status}
        assert seen == ["slow"]
        assert found.trials[1].message == ("takes more than 10 times as long as another" if status == SKIPPED else "")

    def test_a_case_has_only_so_much_time(self, run, doubling, monkeypatch):
        now = iter(range(100))
        monkeypatch.setattr(tune.time, "monotonic", lambda: next(now))
        doubling(torch_a=variant(doubling, "a", "b", "c"))
        us = {"default": 10, "a": 9, "b": 1, "c": 1}
        found, _ = run(doubling.case(), us, seconds_per_case=1.5)
        assert statuses(found) == {"default": PASSED, "a": PASSED, "b": SKIPPED, "c": SKIPPED}
        assert found.trials[-1].message == "the 1.5 s for the case were over"
        assert found.winner.key.config == "a"
        now = iter(range(0, 1000, 10))
        found, _ = run(doubling.case(), us, seconds_per_case=1)
        assert found.winner.key.config == "default"

    def test_inputs_that_cannot_be_made(self, run, doubling):
        doubling(torch_a=doubling.variant())
        found, _ = run(doubling.case(prepare_raises=ValueError("no")), {})
        assert (found.winner, found.message) == (None, "the inputs cannot be made")
        assert found.trials[0].message == "cannot be prepared: ValueError: no"

    def test_a_lost_context_ends_everything(self, run, doubling, monkeypatch):
        def attempt(device, action, *args):
            if action is tune._checked_and_timed:
                raise sweep.ContextLost("gone")
            return sweep.attempt(device, action, *args)

        monkeypatch.setattr(tune, "attempt", attempt)
        doubling(torch_a=doubling.variant())
        with pytest.raises(sweep.ContextLost):
            run(doubling.case(), {})


def test_the_clock_of_the_cpu_times_launches_in_turn(doubling):
    calls = []
    launches = [lambda i=i: calls.append(i) for i in range(3)]
    samples = tune.clock(CPU).time(launches, 1e-9, 4)
    assert [len(one) for one in samples] == [4, 4, 4]
    assert all(us > 0 for one in samples for us in one)
    assert calls[-12:] == [0, 1, 2] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("cold", [False, True])
def test_the_clock_of_a_gpu_tells_long_from_short(cold):
    device = torch.device("cuda")
    sizes = [torch.ones(n, device=device) for n in (1 << 10, 1 << 26)]
    short, long = tune.clock(device, cold).time([lambda x=x: x.add_(1) for x in sizes], 1e-3, 5)
    assert len(short) == len(long) >= 5
    assert max(short) < min(long)
