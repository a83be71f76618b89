"""Check every variant on every case against float64 references.

Outputs are poisoned before each launch and compared with a float64 reference on the same inputs; further launches,
and on a GPU the replays of a CUDA graph, must give the same bits. A variant may refuse a case with a reason.
Exit code: 0 all right, 1 something failed or nothing could run, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict

import torch

from ..testing import limits, provenance
from ..testing.sweep import FAILED, INPUTS, PASSED, REFUSED, SKIPPED, ContextLost, Outcome, verify_case
from . import console, workers
from .arguments import UsageError, write_json
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
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        default=1,
        help="cases run at a time, each in a process; most of a first run is compiling kernels (default: 1)",
    )


def run(args: argparse.Namespace) -> int:
    """Verify what was selected, print a summary."""
    where = device(args)
    if args.jobs < 1:
        raise UsageError(f"--jobs: expected at least 1, got {args.jobs}")
    work = select(args, limits.levels(where, args.full))
    outcomes: list[Outcome] = []
    code, stopped = 0, None
    try:
        _sweep(work, where, args, outcomes)
    except KeyboardInterrupt:
        code, stopped = 130, "interrupted"
    except ContextLost:
        code, stopped = 1, GPU_LOST
    content = provenance.record(where, args.command_line) | {"seed": args.seed, "stopped": stopped}
    written = write_json(args.json, content | {"outcomes": [asdict(outcome) for outcome in outcomes]})
    _summarise(outcomes)
    if stopped is not None:
        seen = len({(outcome.op, outcome.case) for outcome in outcomes})
        console.error(f"{stopped}; {len(work) - seen} of {len(work)} cases were not reached")
    elif not any(outcome.status == PASSED for outcome in outcomes):
        code = 1
        console.error("nothing passed: no selected variant ran to a right result on any selected case")
    return code or int(not written or any(outcome.status == FAILED for outcome in outcomes))


def _sweep(work: Sequence[Work], where: torch.device, args: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """Run everything; outcomes are appended as they come, so that an interrupted run keeps them."""
    with console.Progress(len(work), "verify") as progress:
        for found, lost in _results(work, where, args):
            outcomes += found
            for outcome in found:
                if outcome.status == FAILED:
                    console.error(_failure(outcome))
            if lost is not None:
                raise lost
            progress.show(f"{found[0].op} {found[0].case}" if found else "")
            progress.advance()


Found = tuple[list[Outcome], ContextLost | None]
"""The outcomes of a case, and what broke the GPU's context during it."""


def _results(work: Sequence[Work], where: torch.device, args: argparse.Namespace) -> Iterator[Found]:
    """What came of each case, in order: one case after the other, or several at a time in processes of their own."""
    jobs = min(args.jobs, len(work))
    if jobs == 1:
        yield from (_verify(item, where, args.seed, args.full) for item in work)
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with workers.pool(jobs, functools.partial(torch.set_num_threads, threads)) as pool:
        futures = [pool.submit(_verify, item, where, args.seed, args.full) for item in work]
        for item, future in zip(work, futures, strict=True):
            try:
                yield future.result()
            except BrokenProcessPool as broken:
                died = Outcome(item.case.op, item.case.name, INPUTS, FAILED, message=f"or a case beside it: {broken}")
                yield [died], ContextLost(str(broken))


def _verify(item: Work, where: torch.device, seed: int, every_config: bool) -> Found:
    found: list[Outcome] = []
    try:
        for outcome in verify_case(item.case, where, item.names, seed=seed, every_config=every_config):
            found.append(outcome)
    except ContextLost as lost:
        return found, lost
    return found, None


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
            reasons.append((op, variant, left, "for " + console.count(len(why) - REASONS_SHOWN, "other reason")))
    console.table("verify", ("op", "variant", PASSED, REFUSED, SKIPPED, FAILED, "worst error"), counts)
    if reasons:
        console.table("not run", ("op", "variant", "cases", "reason"), reasons)
    failures = [outcome for outcome in outcomes if outcome.status == FAILED]
    if failures:
        console.out(f"\n{len(failures)} failed")
    for outcome in failures:
        console.out(_failure(outcome))
