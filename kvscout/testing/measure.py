"""Timing variants on a case, each only after it gave the right result on the very inputs that are timed."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..device import gpu_of
from ..roofline import Cost
from ..variants import AUTO, Choice
from . import timing
from .case import Case, Prepared, family
from .sweep import FAILED, INPUTS, PASSED, ContextLost, attempt, free, standing
from .timing import Timing
from .verify import verify

INPUT_SETS = 4
"""Distinct inputs that cold launches take in turn."""
INPUT_SETS_BYTES = 2 << 30
"""Larger inputs are made once: they do not stay in L2 whatever one does."""


@dataclass(frozen=True)
class Measurement:
    """Times of one variant on one case.

    Attributes:
        status: ``"passed"``, or what kept the variant from being timed (see :class:`~kvscout.testing.sweep.Outcome`).
        message: why it was not timed.
        max_rel: the largest relative error of the check.
        hot: times with the inputs in the cache, where asked for.
        cold: times with an empty L2, where asked for; GPUs only.
        cost: what the call must do at least.
        floor_us: how long that takes at the GPU's measured ceilings, where they are known.
        baseline: whether other variants' speed-ups are relative to this one.
    """

    op: str
    case: str
    variant: str
    status: str
    config: str = ""
    message: str = ""
    max_rel: float = 0.0
    hot: Timing | None = None
    cold: Timing | None = None
    cost: Cost | None = None
    floor_us: float | None = None
    baseline: bool = False

    @property
    def judged(self) -> Timing | None:
        """The times that rates and speed-ups are made of: cold ones where there are any."""
        return self.cold or self.hot

    @property
    def tflops(self) -> float | None:
        """10^12 operations a second."""
        return None if self.judged is None or self.cost is None else self.cost.flops / self.judged.median_us / 1e6

    @property
    def tbytes_per_s(self) -> float | None:
        """10^12 bytes a second, counting only those that must move."""
        return None if self.judged is None or self.cost is None else self.cost.bytes / self.judged.median_us / 1e6

    @property
    def roof(self) -> float | None:
        """Part of the measured ceiling that was reached."""
        return None if self.judged is None or self.floor_us is None else self.floor_us / self.judged.median_us


def measure_case(
    case: Case,
    device: torch.device,
    names: Sequence[str] | None = None,
    *,
    baseline: str | None = None,
    seed: int = 0,
    hot: bool = True,
    cold: bool = True,
) -> Iterator[Measurement]:
    """Check and time variants on a case, the baseline first.

    Args:
        case: the case.
        device: where to run it.
        names: variants to time beside the baseline. None: every one on a GPU, the one a call would get on the CPU.
        baseline: the variant that others are compared with. None: the torch variant with the highest rank.
        seed: of the inputs.
        hot: time with the inputs in the cache.
        cold: time with an empty L2; GPUs only.

    Raises:
        ContextLost: after the measurement of the variant that broke the GPU's context.
    """
    name = INPUTS
    try:
        sets, error = attempt(device, _input_sets, case, device, seed, cold)
        if sets is None:
            yield Measurement(case.op, case.name, name, FAILED, message=f"cannot be prepared: {error}")
            return
        plan, error = attempt(device, _plan, case, sets[0], device, names, baseline)
        if plan is None:
            yield Measurement(case.op, case.name, name, FAILED, message=error)
            return
        for name in plan.names:
            found = _measure(case, sets, device, name, hot, cold)
            yield replace(found, baseline=name == plan.baseline)
    except ContextLost as lost:
        yield Measurement(case.op, case.name, name, FAILED, message=str(lost))
        raise
    del sets
    free(device)


class _Plan(NamedTuple):
    names: Sequence[str]
    baseline: str | None


def _plan(
    case: Case, prepared: Prepared, device: torch.device, names: Sequence[str] | None, baseline: str | None
) -> _Plan:
    """Which variants to time and which of them is the baseline, None where that one does not run."""
    ops = family(case.op)
    if names is None:
        names = ops.names if device.type != "cpu" else [ops.choose(prepared.problem, AUTO).variant.name]
    if baseline is None:
        torch_variants = [v for v in ops.serving(prepared.problem) if v.name.startswith("torch_")]
        baseline = max(torch_variants, key=lambda v: v.rank(prepared.problem)).name if torch_variants else None
    if baseline is None or standing(case, prepared, baseline, device)[0]:
        return _Plan(names, None)
    return _Plan([baseline, *(name for name in names if name != baseline)], baseline)


def _input_sets(case: Case, device: torch.device, seed: int, cold: bool) -> list[Prepared]:
    """The case's inputs, several times over where cold launches are timed and memory is no matter."""
    before = torch.cuda.memory_allocated(device) if cold else 0
    sets = [case.prepare(device, seed)]
    if cold and torch.cuda.memory_allocated(device) - before < INPUT_SETS_BYTES:
        sets += [case.prepare(device, seed + i) for i in range(1, INPUT_SETS)]
    return sets


def _measure(
    case: Case, sets: Sequence[Prepared], device: torch.device, name: str, hot: bool, cold: bool
) -> Measurement:
    """Check one variant on every set of inputs, then time it on them."""
    nothing = Measurement(case.op, case.name, name, FAILED, cost=sets[0].cost, floor_us=_floor_us(sets[0], device))
    found, error = attempt(device, standing, case, sets[0], name, device)
    status, message = found or (FAILED, error)
    if status:
        return replace(nothing, status=status, message=message)
    choice, error = attempt(device, family(case.op).choose, sets[0].problem, name)
    if choice is None:
        return replace(nothing, message=error)
    nothing = replace(nothing, config=str(choice.config))
    max_rel = 0.0
    for prepared in sets:
        result, error = attempt(device, verify, case, choice, prepared, 1, device.type == "cuda")
        if result is None or not result.ok:
            return replace(nothing, message=error if result is None else result.message)
        max_rel = max(max_rel, result.max_rel)
    times, error = attempt(device, _time, sets, device, choice, hot, cold)
    if times is None:
        return replace(nothing, message=error)
    return replace(nothing, status=PASSED, max_rel=max_rel, hot=times[0], cold=times[1])


def _floor_us(prepared: Prepared, device: torch.device) -> float | None:
    gpu = gpu_of(device)
    return None if prepared.cost is None or gpu is None else prepared.cost.floor_s(gpu) * 1e6


def _time(
    sets: Sequence[Prepared], device: torch.device, choice: Choice, hot: bool, cold: bool
) -> tuple[Timing | None, Timing | None]:
    launches = [functools.partial(choice.launch, prepared.problem, prepared.args) for prepared in sets]
    return (
        timing.hot(launches[0], device) if hot else None,
        timing.cold(launches, device) if cold else None,
    )
