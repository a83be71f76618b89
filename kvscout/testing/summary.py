"""What measurements come to: speed-ups over a baseline and over peers, and geometric means of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .measure import Measurement
from .sweep import PASSED

EVERY_CASE = "all"
"""The group of every case that was run."""


@dataclass(frozen=True)
class Over:
    """Speed-ups over one reference: their geometric mean, the least of them, and of how many cases."""

    mean: float
    least: float
    cases: int


@dataclass(frozen=True)
class Mean:
    """What one variant or peer comes to over a group of cases.

    Attributes:
        op: the op that the cases are of.
        group: the group's name, :data:`EVERY_CASE` for all that was run.
        cases: how many of the group's cases it was timed on.
        roof: geometric mean of the part of the measured ceiling that was reached.
        speedup: over the baselines of its cases.
        over: over each peer.
    """

    op: str
    group: str
    variant: str
    cases: int
    roof: float | None
    speedup: Over | None
    over: Mapping[str, Over]


def speedups(found: Sequence[Measurement], reference: str | None = None) -> list[float | None]:
    """How many times faster than its case's reference each measurement is, None where either has no figure.

    The reference is the measurement of that name, or the case's baseline.
    """
    timed = [m for m in found if m.judged is not None]
    references = {(m.op, m.case): m for m in timed if (m.baseline if reference is None else m.variant == reference)}
    return [_ratio(references.get((m.op, m.case)), m) for m in found]


def _ratio(reference: Measurement | None, m: Measurement) -> float | None:
    if reference is None or reference.judged is None or m.judged is None:
        return None
    return reference.judged.median_us / m.judged.median_us


def means(found: Sequence[Measurement], groups: Mapping[str, Mapping[str, frozenset[str]]]) -> list[Mean]:
    """Geometric means per op, group and variant: over all cases, and over each group of the op that was run whole."""
    made = []
    for op in dict.fromkeys(m.op for m in found):
        of_op = [m for m in found if m.op == op and m.status == PASSED]
        run = frozenset(m.case for m in found if m.op == op)
        members = {name: cases for name, cases in groups.get(op, {}).items() if cases <= run}
        if run not in members.values():
            members = {EVERY_CASE: run} | members
        for group, cases in members.items():
            of_group = [m for m in of_op if m.case in cases]
            made += [_mean(group, variant, of_group) for variant in dict.fromkeys(m.variant for m in of_group)]
    return made


def _mean(group: str, variant: str, of_group: Sequence[Measurement]) -> Mean:
    own = [m for m in of_group if m.variant == variant]
    roof = geomean([m.roof for m in own if m.roof])
    peers = dict.fromkeys(m.variant for m in of_group if m.peer and m.variant != variant)
    over = {peer: _over(of_group, variant, peer) for peer in peers}
    return Mean(
        op=own[0].op,
        group=group,
        variant=variant,
        cases=len(own),
        roof=roof,
        speedup=_over(of_group, variant, None),
        over={peer: speedup for peer, speedup in over.items() if speedup is not None},
    )


def _over(of_group: Sequence[Measurement], variant: str, reference: str | None) -> Over | None:
    ratios = zip(of_group, speedups(of_group, reference), strict=True)
    own = [ratio for m, ratio in ratios if m.variant == variant and ratio]
    mean = geomean(own)
    return None if mean is None else Over(mean, min(own), len(own))


def geomean(values: Sequence[float]) -> float | None:
    """Geometric mean, None of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None
