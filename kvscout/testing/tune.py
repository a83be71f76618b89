"""Finding the fastest variant and config of a bucket, in two stages and a final.

The first stage checks and quickly times what each variant takes by itself. The second does so with the other configs of
the variants that come near the fastest then: a config makes less of a difference than a variant, and each costs the
compilation of kernels. The best of both go into the final. The rule's choice is always in it, and stays where nothing
is faster beyond noise.

A bucket may have several cases, as contexts of several lengths are one problem to a variant: then their geometric mean
decides.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..kernels.cute.program import KernelUnavailable
from ..tuning import Bucket
from ..variants import Choice
from . import limits, timing
from .case import Case, Prepared, family
from .sweep import FAILED, INPUTS, PASSED, REFUSED, SKIPPED, attempt, free
from .verify import Result, verify

FINALISTS = 3

QUICK_S, FINAL_S = 0.01, 0.1
"""Time that the samples of a quick timing, and those of a final, take."""
QUICK_ROUNDS, FINAL_ROUNDS = 3, 10
"""Samples of each launch, at least."""

NOISE, MOST_ROUNDS = 0.02, 0.75
"""One is faster than another if it takes that much less time, and wins that part of the rounds."""

WITHIN = 1.5
"""A variant whose own choice takes more than so many times the fastest variant's is tried with no other config."""

NO_INPUTS = "the inputs cannot be made"

HOPELESS, HOPELESS_S = 10.0, 0.02
"""What takes so many times the fastest's time, and that much more, is neither checked nor timed any further."""
IS_HOPELESS = f"takes more than {HOPELESS:g} times as long as another"


class Key(NamedTuple):
    """A variant, and a config as ``str`` gives it."""

    variant: str
    config: str


Samples = list[list[float]]
"""Microseconds of one launch in each round, for each case of a bucket."""


class Clock(NamedTuple):
    """How launches are timed; the only place where time is measured.

    ``time(launches, target_s, least)`` gives each one's samples, taken in turn; ``rough(launch)`` is about how many
    seconds one takes. ``cold`` is what a table says of its times.
    """

    time: Callable[[Sequence[timing.Launch], float, int], list[list[float]]]
    rough: Callable[[timing.Launch], float]
    cold: bool = False


def clock(device: torch.device, cold: bool = False) -> Clock:
    """The clock of a device."""

    def time_of(launches: Sequence[timing.Launch], target_s: float, least: int) -> list[list[float]]:
        return timing.interleaved(launches, device, target_s, least, cold)

    return Clock(time_of, timing.rough_seconds, cold)


@dataclass(frozen=True)
class Trial:
    """What became of one variant and config on one case.

    Attributes:
        status: :data:`PASSED`, :data:`FAILED` (it raised or gave a wrong result), :data:`REFUSED` (the whole variant
            does not serve the problem), or :data:`SKIPPED` (its kernel is not there, it would take too long, its
            variant is too slow, or no time was left).
        message: why it is not passed.
        us: median of a quick timing.
    """

    op: str
    case: str
    variant: str
    config: str = ""
    status: str = FAILED
    message: str = ""
    max_rel: float = 0.0
    us: float | None = None

    @property
    def key(self) -> Key:
        """What was tried."""
        return Key(self.variant, self.config)


@dataclass(frozen=True)
class CaseTimes:
    """Medians of a final on one case, in microseconds; None for what was not in it."""

    us: float
    runner_up_us: float | None
    default_us: float | None


@dataclass(frozen=True)
class Winner:
    """An entry of a table.

    Attributes:
        bucket: what it is for.
        key: the fastest, or the rule's choice where nothing is faster.
        runner_up: the fastest other, None where there was none.
        margin: how much more time that one takes, as a part of the winner's.
        over_default: how much more time the rule's choice takes, likewise; None where it did not run.
        cold: whether the times are with an empty L2.
        cases: times by case.
    """

    bucket: Bucket
    key: Key
    runner_up: Key | None
    margin: float | None
    over_default: float | None
    cold: bool
    cases: dict[str, CaseTimes]


@dataclass(frozen=True)
class Tuned:
    """What came of a bucket: a winner, or why there is none; and every trial."""

    op: str
    bucket: Bucket
    cases: list[Case]
    winner: Winner | None = None
    message: str = ""
    trials: list[Trial] = field(default_factory=list)


@dataclass(frozen=True)
class Begun:
    """A bucket after the first stage.

    Attributes:
        trials: for each case, what each variant takes by itself, the rule's choice first.
        left_out: variants whose other configs are not tried, each with the reason.
        unprepared: of a case whose inputs cannot be made, after which nothing else is tried.
    """

    op: str
    bucket: Bucket
    cases: list[Case]
    trials: list[list[Trial]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    unprepared: Trial | None = None

    def wants(self, case: int, key: Key) -> bool:
        """Whether the second stage tries this on a case, which is given by its number."""
        if self.unprepared is not None or key.variant in self.left_out:
            return False
        return all(trial.key != key for trial in self.trials[case])


def choices(case: Case, prepared: Prepared) -> list[Choice]:
    """All that a table may have for a case, the rule's choice first."""
    variants = family(case.op).candidates(prepared.problem)
    return [Choice(variant, config) for variant in variants for config in variant.configs(prepared.problem)]


def own_choices(case: Case, prepared: Prepared) -> list[Choice]:
    """What each variant takes by itself for a case, the rule's choice first."""
    variants = family(case.op).candidates(prepared.problem)
    return [Choice(variant, variant.default_config(prepared.problem)) for variant in variants]


def key_of(choice: Choice) -> Key:
    """What stands in a table for a choice."""
    return Key(choice.variant.name, str(choice.config))


def begin(
    bucket: Bucket, cases: Sequence[Case], device: torch.device, by: Clock, *, seed: int = 0, within: float = WITHIN
) -> Begun:
    """The first stage: check and quickly time what each variant takes by itself.

    Args:
        bucket: the bucket of each case's problem.
        cases: at least one.
        device: where to run them.
        by: how launches are timed.
        seed: of the inputs.
        within: how many times the fastest variant's time another may take whose other configs are still tried.

    Raises:
        ContextLost: a kernel broke the GPU's context.
    """
    begun = Begun(cases[0].op, bucket, list(cases))
    for case in cases:
        prepared, error = attempt(device, case.prepare, device, seed)
        if prepared is None:
            return replace(begun, unprepared=_unprepared(case, error))
        begun.trials.append(list(_try_all(case, prepared, own_choices(case, prepared), device, by)))
        prepared = None
        free(device)
    return replace(begun, left_out=_left_out(begun.trials, within))


def _unprepared(case: Case, error: str) -> Trial:
    return Trial(case.op, case.name, INPUTS, message=f"cannot be prepared: {error}")


def _left_out(trials: Sequence[Sequence[Trial]], within: float) -> dict[str, str]:
    """Variants that are too slow by themselves, and why. Nothing is said of one that could not be timed."""
    us = [{t.variant: t.us for t in of_case if t.us is not None} for of_case in trials]
    means = {
        variant: statistics.geometric_mean(of_case[variant] for of_case in us)
        for variant in us[0]
        if all(variant in of_case for of_case in us)
    }
    fastest = min(means, key=lambda variant: means[variant], default="")
    slow = f"its own choice takes more than {within:g} times as long as that of {fastest}"
    found = {variant: slow for variant, mean in means.items() if mean > within * means[fastest]}
    hopeless = {t.variant for of_case in trials for t in of_case if t.message == IS_HOPELESS}
    return found | dict.fromkeys(hopeless, f"its own choice {IS_HOPELESS}")


def finish(
    begun: Begun, device: torch.device, by: Clock, *, seed: int = 0, seconds_per_case: float | None = None
) -> Tuned:
    """The second stage, and the final.

    Args:
        begun: what the first stage found.
        device: where it ran.
        by: how launches are timed.
        seed: of the inputs.
        seconds_per_case: time after which no further config of a case is tried.

    Raises:
        ContextLost: a kernel broke the GPU's context.
    """
    cases, trials = begun.cases, [trial for of_case in begun.trials for trial in of_case]
    nothing = Tuned(begun.op, begun.bucket, cases)
    if begun.unprepared is not None:
        return replace(nothing, message=NO_INPUTS, trials=[*trials, begun.unprepared])
    of_case: list[list[Trial]] = []
    ready: list[Prepared] = []
    for number, case in enumerate(cases):
        prepared, error = attempt(device, case.prepare, device, seed)
        if prepared is None:
            return replace(nothing, message=NO_INPUTS, trials=[*trials, _unprepared(case, error)])
        more = list(_second_trials(number, prepared, begun, device, by, seconds_per_case))
        of_case.append([*begun.trials[number], *more])
        trials += more
        # The inputs of one case are kept for its final; those of several might not fit.
        ready = [prepared] if len(cases) == 1 else []
        prepared = None
        free(device)
    quick = [{t.key: t.us for t in found if t.us is not None} for found in of_case]
    rules = [found[0].key if found and found[0].us is not None else None for found in of_case]
    finalists = _finalists(quick)
    if not finalists:
        return replace(nothing, message="nothing that a table may have ran to a right result", trials=trials)
    times: list[dict[Key, list[float]]] = []
    for number, case in enumerate(cases):
        rule = rules[number]
        keys = [*finalists, *([rule] if rule is not None and rule not in finalists else [])]
        samples, error = attempt(device, _final, case, ready[number] if ready else None, keys, device, by, seed)
        free(device)
        if samples is None:
            trials.append(Trial(begun.op, case.name, "(final)", message=error))
            return replace(nothing, message="the final failed", trials=trials)
        times.append(samples)
    winner = _decide(begun.bucket, [case.name for case in cases], times, rules, finalists, by.cold)
    message = "" if winner is not None else "no one config is faster than what the rule takes for each case"
    return replace(nothing, winner=winner, message=message, trials=trials)


def _second_trials(
    number: int, prepared: Prepared, begun: Begun, device: torch.device, by: Clock, seconds: float | None
) -> Iterator[Trial]:
    """What the second stage finds on a case: trials, what is left out, and who refuses."""
    case, first = begun.cases[number], begun.trials[number]
    every = choices(case, prepared)
    fastest = min((trial.us for trial in first if trial.us is not None), default=None)
    yield from _try_all(
        case, prepared, [c for c in every if begun.wants(number, key_of(c))], device, by, fastest, seconds
    )
    for choice in every:
        reason = begun.left_out.get(choice.variant.name)
        if reason is not None and all(trial.key != key_of(choice) for trial in first):
            yield _trial(case, choice, SKIPPED, reason)
    for name in family(case.op).names:
        if (reason := family(case.op).refusal(name, prepared.problem)) is not None:
            yield Trial(case.op, case.name, name, "", REFUSED, reason)


def _try_all(
    case: Case,
    prepared: Prepared,
    wanted: Sequence[Choice],
    device: torch.device,
    by: Clock,
    fastest: float | None = None,
    seconds: float | None = None,
) -> Iterator[Trial]:
    """Check and quickly time one after another, for so many seconds."""
    started = time.monotonic()
    for choice in wanted:
        if seconds is not None and time.monotonic() - started > seconds:
            yield _trial(case, choice, SKIPPED, f"the {seconds:g} s for the case were over")
            continue
        found = try_one(case, prepared, choice, device, by, fastest)
        if found.us is not None:
            fastest = found.us if fastest is None else min(fastest, found.us)
        yield found


def _trial(case: Case, choice: Choice, status: str, message: str = "", **more: Any) -> Trial:
    return Trial(case.op, case.name, *key_of(choice), status, message, **more)


def try_one(
    case: Case, prepared: Prepared, choice: Choice, device: torch.device, by: Clock, fastest_us: float | None = None
) -> Trial:
    """Check and quickly time one variant and config, unless it is hopeless beside the fastest so far."""
    if (reason := limits.too_large(choice.variant.name, prepared.cost, device.type)) is not None:
        return _trial(case, choice, SKIPPED, reason)
    found, error = attempt(device, _checked_and_timed, case, prepared, choice, by, fastest_us)
    if found is None:
        return _trial(case, choice, FAILED, error)
    if isinstance(found, str):
        return _trial(case, choice, SKIPPED, found)
    result, samples = found
    if not result.ok:
        return _trial(case, choice, FAILED, result.message)
    return _trial(case, choice, PASSED, max_rel=result.max_rel, us=statistics.median(samples))


def _checked_and_timed(
    case: Case, prepared: Prepared, choice: Choice, by: Clock, fastest_us: float | None
) -> tuple[Result, list[float]] | str:
    """The check, and samples where it held; or why neither was done."""
    launch = functools.partial(choice.launch, prepared.problem, prepared.args)
    try:
        if choice.variant.load is not None:
            choice.variant.load(prepared.problem, choice.config)
        if fastest_us is not None and by.rough(launch) > HOPELESS * fastest_us * 1e-6 + HOPELESS_S:
            return IS_HOPELESS
        result = verify(case, choice, prepared, 1, False)
        return result, by.time([launch], QUICK_S, QUICK_ROUNDS)[0] if result.ok else []
    except KernelUnavailable as missing:
        return str(missing)


def _finalists(quick: Sequence[Mapping[Key, float]]) -> list[Key]:
    """The best of those that were timed on every case, in the order in which they were tried."""
    keys = [key for key in quick[0] if all(key in times for times in quick)]
    best = [min(times.values(), default=1.0) for times in quick]

    def slowness(key: Key) -> float:
        return statistics.geometric_mean(times[key] / least for times, least in zip(quick, best, strict=True))

    chosen = sorted(keys, key=slowness)[:FINALISTS]
    return [key for key in keys if key in chosen]


def _final(
    case: Case,
    prepared: Prepared | None,
    keys: Sequence[Key],
    device: torch.device,
    by: Clock,
    seed: int,
) -> dict[Key, list[float]]:
    if prepared is None:
        prepared = case.prepare(device, seed)
    found = {key_of(choice): choice for choice in choices(case, prepared)}
    launches = [functools.partial(found[key].launch, prepared.problem, prepared.args) for key in keys]
    return dict(zip(keys, by.time(launches, FINAL_S, FINAL_ROUNDS), strict=True))


def mean_us(samples: Samples) -> float:
    """Geometric mean over the cases of their medians."""
    return statistics.geometric_mean(map(statistics.median, samples))


def is_faster(this: Samples, other: Samples) -> bool:
    """Whether one launch is faster than another beyond noise, by samples of the same rounds."""
    pairs = [list(zip(mine, theirs, strict=True)) for mine, theirs in zip(this, other, strict=True)]
    # A short case has more rounds than a long one; those that all cases have count.
    rounds = list(zip(*pairs, strict=False))
    won = sum(statistics.geometric_mean(mine / theirs for mine, theirs in of_cases) < 1 for of_cases in rounds)
    return mean_us(this) < (1 - NOISE) * mean_us(other) and won >= MOST_ROUNDS * len(rounds)


def _decide(
    bucket: Bucket,
    names: Sequence[str],
    times: Sequence[Mapping[Key, list[float]]],
    rules: Sequence[Key | None],
    finalists: Sequence[Key],
    cold: bool,
) -> Winner | None:
    """The winner of a final: the first that the fastest does not beat beyond noise.

    The rule comes first. Where it chooses differently from case to case, no entry says what it does: None where nothing
    is faster than that.
    """
    by_key = {key: [of_case[key] for of_case in times] for key in finalists}
    chosen = [rule for rule in rules if rule is not None]
    by_rule = None
    if len(chosen) == len(times):
        by_rule = [of_case[rule] for of_case, rule in zip(times, chosen, strict=True)]
        if len(set(chosen)) == 1:
            by_key = {chosen[0]: by_rule} | by_key
    fastest = min(by_key.values(), key=mean_us)
    if by_rule is not None and len(set(chosen)) > 1 and not is_faster(fastest, by_rule):
        return None
    winner = next(key for key, samples in by_key.items() if not is_faster(fastest, samples))
    others = {key: samples for key, samples in by_key.items() if key != winner}
    runner_up = min(others, key=lambda key: mean_us(others[key]), default=None)
    cases = {
        name: CaseTimes(
            _median(of_case[winner]),
            None if runner_up is None else _median(of_case[runner_up]),
            None if by_rule is None else _median(by_rule[number]),
        )
        for number, (name, of_case) in enumerate(zip(names, times, strict=True))
    }
    mine = by_key[winner]
    margin = None if runner_up is None else more_time(others[runner_up], mine)
    over_default = None if by_rule is None else more_time(by_rule, mine)
    return Winner(bucket, winner, runner_up, margin, over_default, cold, cases)


def _median(samples: Sequence[float]) -> float:
    return round(statistics.median(samples), 3)


def more_time(other: Samples, mine: Samples) -> float:
    """How much more time another takes than mine, as a part of mine."""
    return round(mean_us(other) / mean_us(mine) - 1, 4)
