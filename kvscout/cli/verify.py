"""Check every variant on every case against float64 references.

Outputs are poisoned before each launch and compared with a float64 reference on the same inputs; further launches,
and on a GPU the replays of a CUDA graph, must give the same bits. A variant may refuse a case with a reason.
Exit code: 0 all right, 1 something failed or nothing could run, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import torch

from ..testing import limits, provenance
from ..testing.sweep import FAILED, PASSED, REFUSED, SKIPPED, ContextLost, Outcome, verify_case
from . import console
from .selection import GPU_LOST, Work, add_selection, device, select

REASONS_SHOWN = 3
"""Most frequent reasons for refusing that the summary lists per variant."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``verify``."""
    add_selection(parser)
    parser.add_argument(
        "--full",
        action="store_true",
        help="every config of each variant, and more cases: all levels on a GPU, also those of 'verify' on the CPU",
    )


def run(args: argparse.Namespace) -> int:
    """Verify what was selected, print a summary."""
    where = device(args)
    work = select(args, limits.levels(where, args.full))
    outcomes: list[Outcome] = []
    code, stopped = 0, None
    try:
        _sweep(work, where, args, outcomes)
    except KeyboardInterrupt:
        code, stopped = 130, "interrupted"
    except ContextLost:
        code, stopped = 1, GPU_LOST
    _summarise(outcomes)
    if stopped is not None:
        seen = len({(outcome.op, outcome.case) for outcome in outcomes})
        console.error(f"{stopped}; {len(work) - seen} of {len(work)} cases were not reached")
    elif not any(outcome.status == PASSED for outcome in outcomes):
        code = 1
        console.error("nothing passed: no selected variant ran to a right result on any selected case")
    if args.json is not None:
        content = provenance.record(where, args.command_line) | {"seed": args.seed, "stopped": stopped}
        args.json.write_text(provenance.dumps(content | {"outcomes": [asdict(outcome) for outcome in outcomes]}) + "\n")
    return code or int(any(outcome.status == FAILED for outcome in outcomes))


def _sweep(work: Sequence[Work], where: torch.device, args: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """Run everything; outcomes are appended as they come, so that an interrupted run keeps them."""
    with console.Progress(len(work), "verify") as progress:
        for case, names in work:
            progress.show(f"{case.op} {case.name}")
            for outcome in verify_case(case, where, names, seed=args.seed, every_config=args.full):
                outcomes.append(outcome)
                if outcome.status == FAILED:
                    console.error(_failure(outcome))
            progress.advance()


def _failure(o: Outcome) -> str:
    return console.failure(o.op, o.case, o.variant, o.config, o.message)


def _summarise(outcomes: Sequence[Outcome]) -> None:
    """Counts per variant, why cases were left out, and the failures last."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.op, outcome.variant), []).append(outcome)
    counts, reasons = [], []
    for (op, variant), group in sorted(groups.items()):
        by_status = Counter(outcome.status for outcome in group)
        worst = max((outcome.max_rel for outcome in group if outcome.status == PASSED), default=None)
        shown = None if worst is None else f"{worst:.1e}"
        counts.append([op, variant, *(by_status[s] for s in (PASSED, REFUSED, SKIPPED, FAILED)), shown])
        why = Counter((o.status, o.message) for o in group if o.status in (REFUSED, SKIPPED)).most_common()
        reasons += [(op, variant, number, f"{status}: {message}") for (status, message), number in why[:REASONS_SHOWN]]
        if len(why) > REASONS_SHOWN:
            left = sum(number for _, number in why[REASONS_SHOWN:])
            reasons.append((op, variant, left, f"for {len(why) - REASONS_SHOWN} other reasons"))
    console.table("verify", ("op", "variant", PASSED, REFUSED, SKIPPED, FAILED, "worst error"), counts)
    if reasons:
        console.table("not run", ("op", "variant", "cases", "reason"), reasons)
    failures = [outcome for outcome in outcomes if outcome.status == FAILED]
    if failures:
        console.out(f"\n{len(failures)} failed")
    for outcome in failures:
        console.out(_failure(outcome))
