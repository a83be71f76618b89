"""Timing the entries of a tuned table again: does each still hold?"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from .case import Case
from .sweep import PASSED, attempt, free
from .tune import FINAL_ROUNDS, FINAL_S, Clock, Key, Winner, choices, is_faster, key_of, more_time, try_one

DRIFT = 0.1
"""A time that is that much off what a table has is flagged."""


@dataclass(frozen=True)
class Retimed:
    """Times of a table's entry on one of its cases, then and now, and what is wrong with it, or an empty string."""

    op: str
    case: str
    key: Key
    then_us: float
    now_us: float | None = None
    runner_up_us: float | None = None
    flag: str = ""


def retime(
    op: str, winner: Winner, cases: Mapping[str, Case | None], device: torch.device, by: Clock, seed: int = 0
) -> list[Retimed]:
    """Check and time a table's entry and its runner-up again.

    Args:
        op: the entry's op.
        winner: the entry.
        cases: its cases by name, None for one that cannot be made any more.
        device: where to run.
        by: how launches are timed.
        seed: of the inputs.

    Raises:
        ContextLost: a kernel broke the GPU's context.
    """
    rows, mine, others = [], [], []
    for name, then in winner.cases.items():
        row = Retimed(op, name, winner.key, then.us)
        samples, error = attempt(device, _again, cases.get(name), winner, device, by, seed)
        free(device)
        if samples is None or isinstance(samples, str):
            rows.append(replace(row, flag=samples or error))
            continue
        now, *other = map(statistics.median, samples)
        mine.append(samples[0])
        others += samples[1:]
        drift = now / then.us - 1
        flag = f"takes {abs(drift):.0%} {'more' if drift > 0 else 'less'} than it did" if abs(drift) > DRIFT else ""
        rows.append(replace(row, now_us=now, runner_up_us=other[0] if other else None, flag=flag))
    if winner.runner_up is not None and len(others) == len(mine) > 0 and is_faster(others, mine):
        lost = f"{' with '.join(winner.runner_up)} is faster now: the winner takes {more_time(mine, others):.0%} more"
        rows = [replace(row, flag="; ".join(filter(None, (row.flag, lost)))) for row in rows]
    return rows


def _again(case: Case | None, winner: Winner, device: torch.device, by: Clock, seed: int) -> list[list[float]] | str:
    """Samples of a winner and, where it can still run, its runner-up; or what keeps the winner from being timed."""
    if case is None:
        return "the case cannot be made any more"
    prepared = case.prepare(device, seed)
    if prepared.problem.bucket() != winner.bucket:
        return "the case is of another bucket now"
    found = {key_of(choice): choice for choice in choices(case, prepared)}
    if winner.key not in found:
        return f"{' with '.join(winner.key)} is nothing that a call could get"
    keys = [key for key in (winner.key, winner.runner_up) if key in found]
    trials = [try_one(case, prepared, found[key], device, by) for key in keys]
    if trials[0].status != PASSED:
        return f"{trials[0].status}: {trials[0].message}"
    right = [found[trial.key] for trial in trials if trial.status == PASSED]
    launches = [functools.partial(choice.launch, prepared.problem, prepared.args) for choice in right]
    return by.time(launches, FINAL_S, FINAL_ROUNDS)
