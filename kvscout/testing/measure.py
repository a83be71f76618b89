"""Timing variants and peers on a case, each only after it gave the right result on the very inputs that are timed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..device import gpu_of
from ..roofline import Cost
from ..variants import AUTO, Family
from . import timing
from .case import Case, Prepared, family
from .compare import Budget
from .peers import Peer, verify_peer
from .sustained import Sustained, sustained
from .sweep import FAILED, INPUTS, PASSED, REFUSED, ContextLost, attempt, free, standing
from .timing import Timing
from .verify import Result, verify

TORCH = "torch"
"""Stands for the torch variant that suits a problem best, as "auto" does for the best of all."""

INPUT_SETS = 4
"""Distinct inputs that cold launches take in turn."""
INPUT_SETS_BYTES = 128 << 20
"""Larger inputs and outputs are made once: they do not stay in L2 whatever one does, and every set costs a check."""


@dataclass(frozen=True)
class Wanted:
    """Which times to take: with the inputs in the cache, with an empty L2 (GPUs only), back to back for a second."""

    hot: bool = True
    cold: bool = True
    sustained: bool = False


@dataclass(frozen=True)
class Measurement:
    """Times of one variant, or of a peer, on one case.

    Attributes:
        variant: the variant's name, "auto" for what a call would get, "torch" for the best torch variant, or the peer's
            name.
        status: ``"passed"``, or what kept the variant from being timed (see :class:`~kvscout.testing.sweep.Outcome`).
        message: why it was not timed.
        max_rel: the largest relative error of the check.
        hot: times with the inputs in the cache, where asked for.
        cold: times with an empty L2, where asked for; GPUs only.
        sustained: back to back for a second, where asked for.
        cost: what the call must do at least.
        floor_us: how long that takes at the GPU's measured ceilings, where they are known.
        baseline: whether others' speed-ups are relative to this one; never where it is refused or skipped.
        chosen: the variant that "auto" or "torch" stands for.
        peer: whether others are compared with this: another library's kernel, or "torch".
        tolerance: the peer's own budget, where it was not judged by our variants'.
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
    sustained: Sustained | None = None
    cost: Cost | None = None
    floor_us: float | None = None
    baseline: bool = False
    chosen: str = ""
    peer: bool = False
    tolerance: Budget | None = None

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
    peers: Sequence[Peer] = (),
    against_torch: bool = False,
    baseline: str | None = None,
    seed: int = 0,
    wanted: Wanted,
) -> Iterator[Measurement]:
    """Check and time variants and peers on a case, the baseline first.

    Args:
        case: the case.
        device: where to run it.
        names: variants to time beside the baseline, "auto" for the one that a call would get. None: every one on a GPU,
            that one on the CPU.
        peers: other libraries' kernels to time, each available on this device.
        against_torch: also time the best torch variant under the name "torch", as peers are.
        baseline: the variant or peer that others are compared with, or "auto", or "torch" if that is timed. None: the
            best torch variant. One that is neither a variant of this op nor among ``peers`` is left out.
        seed: of the inputs.
        wanted: which times to take.

    Raises:
        ContextLost: after the measurement of the variant that broke the GPU's context.
    """
    name = INPUTS
    try:
        sets, error = attempt(device, _input_sets, case, device, seed, wanted.cold)
        if sets is None:
            yield Measurement(case.op, case.name, name, FAILED, message=f"cannot be prepared: {error}")
            return
        beside = [*[TORCH] * against_torch, *(peer.name for peer in peers)]
        plan, error = attempt(device, _plan, case, sets[0], device, names, beside, baseline)
        if plan is None:
            yield Measurement(case.op, case.name, name, FAILED, message=error)
            return
        names, baseline = plan
        for name in names:
            peer = next((peer for peer in peers if peer.name == name), None)
            if peer is None:
                found = _measure_variant(case, sets, device, name, wanted)
            else:
                found = _measure_peer(case, sets, device, peer, wanted)
            yield replace(found, baseline=name == baseline and found.status in (PASSED, FAILED))
    except ContextLost as lost:
        yield Measurement(case.op, case.name, name, FAILED, message=str(lost))
        raise
    del sets
    free(device)


def _plan(
    case: Case,
    prepared: Prepared,
    device: torch.device,
    names: Sequence[str] | None,
    beside: Sequence[str],
    baseline: str | None,
) -> tuple[Sequence[str], str | None]:
    """What to time in which order, and which of it is the baseline, None where the op has no such variant or peer."""
    ops = family(case.op)
    if names is None:
        names = ops.names if device.type != "cpu" else [ops.choose(prepared.problem, AUTO).variant.name]
    names = [*names, *beside]
    if baseline is None:
        baseline = _best_torch_variant(ops, prepared)
    if baseline is None or baseline not in (AUTO, *ops.names, *beside):
        return names, None
    return [baseline, *(name for name in names if name != baseline)], baseline


def _best_torch_variant(ops: Family, prepared: Prepared) -> str | None:
    """The torch variant with the highest rank, None where none serves the problem."""
    found = [v for v in ops.serving(prepared.problem) if v.name.startswith("torch_")]
    return max(found, key=lambda v: v.rank(prepared.problem)).name if found else None


def _input_sets(case: Case, device: torch.device, seed: int, cold: bool) -> list[Prepared]:
    """The case's inputs, several times over where cold launches are timed and all of them would fit into L2."""
    before = torch.cuda.memory_allocated(device) if cold else 0
    sets = [case.prepare(device, seed)]
    if cold and torch.cuda.memory_allocated(device) - before < INPUT_SETS_BYTES:
        sets += [case.prepare(device, seed + i) for i in range(1, INPUT_SETS)]
    return sets


def _measure_variant(
    case: Case, sets: Sequence[Prepared], device: torch.device, name: str, wanted: Wanted
) -> Measurement:
    nothing = Measurement(case.op, case.name, name, FAILED, cost=sets[0].cost, floor_us=_floor_us(sets[0], device))
    ops, problem = family(case.op), sets[0].problem
    choice = None
    if name == AUTO:
        choice, error = attempt(device, ops.choose, problem, AUTO)
        if choice is None:
            return replace(nothing, message=error)
        name = choice.variant.name
        nothing = replace(nothing, chosen=name)
    if name == TORCH:
        nothing = replace(nothing, peer=True)
        best, error = attempt(device, _best_torch_variant, ops, sets[0])
        if best is None:
            return replace(nothing, status=FAILED if error else REFUSED, message=error or "no torch variant serves it")
        name = best
        nothing = replace(nothing, chosen=name)
    standing_found, error = attempt(device, standing, case, sets[0], name, device)
    status, message = standing_found or (FAILED, error)
    if status:
        return replace(nothing, status=status, message=message)
    if choice is None:
        choice, error = attempt(device, ops.choose, problem, name)
    if choice is None:
        return replace(nothing, message=error)
    launches = [functools.partial(choice.launch, prepared.problem, prepared.args) for prepared in sets]
    checks = [functools.partial(verify, case, choice, prepared, 1, device.type == "cuda") for prepared in sets]
    return _check_and_time(replace(nothing, config=str(choice.config)), launches, checks, device, wanted)


def _measure_peer(
    case: Case, sets: Sequence[Prepared], device: torch.device, peer: Peer, wanted: Wanted
) -> Measurement:
    floor_us = _floor_us(sets[0], device)
    nothing = Measurement(case.op, case.name, peer.name, FAILED, cost=sets[0].cost, floor_us=floor_us, peer=True)
    nothing = replace(nothing, tolerance=peer.tolerance(sets[0].problem))
    if (refusal := peer.refuses(sets[0].problem)) is not None:
        return replace(nothing, status=REFUSED, message=refusal)
    launches, error = attempt(device, lambda: [peer.prepare(prepared) for prepared in sets])
    if launches is None:
        return replace(nothing, message=error)
    checks = [functools.partial(verify_peer, case, peer, *pair) for pair in zip(sets, launches, strict=True)]
    return _check_and_time(nothing, launches, checks, device, wanted)


def _check_and_time(
    nothing: Measurement,
    launches: Sequence[timing.Launch],
    checks: Sequence[Callable[[], Result]],
    device: torch.device,
    wanted: Wanted,
) -> Measurement:
    """Check one variant on every set of inputs, then time it on them; ``nothing`` is what a failure is noted in."""
    max_rel = 0.0
    for check in checks:
        result, error = attempt(device, check)
        if result is None or not result.ok:
            return replace(nothing, message=error if result is None else result.message)
        max_rel = max(max_rel, result.max_rel)
    times, error = attempt(device, _time, launches, device, wanted)
    if times is None:
        return replace(nothing, message=error)
    hot, cold, back_to_back = times
    return replace(nothing, status=PASSED, max_rel=max_rel, hot=hot, cold=cold, sustained=back_to_back)


def _floor_us(prepared: Prepared, device: torch.device) -> float | None:
    gpu = gpu_of(device)
    return None if prepared.cost is None or gpu is None else prepared.cost.floor_s(gpu) * 1e6


def _time(
    launches: Sequence[timing.Launch], device: torch.device, wanted: Wanted
) -> tuple[Timing | None, Timing | None, Sustained | None]:
    return (
        timing.hot(launches[0], device) if wanted.hot else None,
        timing.cold(launches, device) if wanted.cold else None,
        sustained(launches[0], device) if wanted.sustained else None,
    )
