"""Find the fastest variant and config for each bucket of problems, and write them into a table that calls then use.

Every variant that a call may get runs with each config of its space: first the case's own check, then a quick timing;
the three fastest and what the rule would take are then timed in turn, and the rule's choice stays where nothing is
faster beyond noise. Times are of a GPU's hot L2 unless told otherwise. A GPU's kernels are compiled first, in several
processes. The table is that of this machine's device; KVSCOUT_TUNED_DIR names the folder that calls look for it in.
An existing table keeps its other buckets. docs/tuning.md says how to tune for shapes of one's own.
Exit code: 0 all right, 1 something failed its check or an entry no longer holds, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .. import env, tuning
from ..device import name_of
from ..testing import limits, provenance, tune, tuned_table
from ..testing.case import Case, cases, family
from ..testing.sweep import FAILED, SKIPPED, ContextLost
from ..testing.tune import Retimed, Trial, Tuned
from ..tuning import Bucket, WrongTable
from . import arguments, console, workers
from .arguments import UsageError, write_json
from .bench import PRESETS, _of_presets
from .selection import GPU_LOST, add_device, device, select

MOST_JOBS = 16
"""Processes that compile at a time unless told otherwise."""

REASONS_SHOWN = 3
"""Most frequent reasons for not timing something that the summary lists per variant."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``tune``."""
    parser.add_argument("ops", nargs="*", metavar="OP", help="operations (default: all)")
    parser.add_argument("--case", metavar="SUBSTRING", default="", help="only cases whose name contains this")
    add_device(parser)
    parser.add_argument("--seed", metavar="N", type=arguments.seed, default=0, help="seed of the inputs (default: 0)")
    parser.set_defaults(variant=None)
    files = parser.add_mutually_exclusive_group()
    files.add_argument(
        "--output",
        metavar="FILE",
        type=arguments.file_name,
        help="table to write (default: named after the device, in KVSCOUT_TUNED_DIR or else in the folder 'tuned')",
    )
    files.add_argument(
        "--check",
        metavar="FILE",
        type=arguments.file_name,
        help="write nothing: time the entries of this table again, and flag what no longer holds",
    )
    arguments.add_json(parser)
    parser.add_argument("--cold", action="store_true", help="time with an empty L2 (GPU)")
    parser.add_argument(
        "--seconds-per-case",
        metavar="S",
        type=_seconds,
        help="time after which no further config of a case is tried (default: none)",
    )
    cores = min(MOST_JOBS, os.cpu_count() or 1)
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=arguments.whole_number(1),
        default=cores,
        help=f"processes that compile a GPU's kernels first (default: the cores, at most {MOST_JOBS}: {cores} here)",
    )
    presets = parser.add_argument_group("cases", "which of a GPU's cases to tune for (default: all); several add up")
    for name, meaning in PRESETS.items():
        presets.add_argument(f"--{name}", dest="presets", action="append_const", const=name, help=meaning)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return number


def run(args: argparse.Namespace) -> int:
    """Tune for what was selected and write the table, or check one."""
    where = device(args)
    if args.cold and where.type == "cpu":
        raise UsageError("--cold: only a GPU's cache can be flushed; leave the option out on the CPU")
    levels = limits.bench_levels(where)
    selected = [item.case for item in _of_presets(select(args, levels), args.presets, levels)]
    if args.check is not None:
        return _check(args, where, selected)
    model = name_of(where)
    file = args.output or (env.tuned_dir() or Path("tuned")) / tuning.file_name(model)
    old = _old(file, model)
    found: list[Tuned] = []
    code, stopped, unprepared = 0, None, 0
    try:
        buckets, unprepared = _buckets(selected, where, args)
        _tune(buckets, where, args, found)
    except KeyboardInterrupt:
        code, stopped = 130, "interrupted"
    except ContextLost:
        code, stopped = 1, GPU_LOST
    record = provenance.record(where, args.command_line) | {"seed": args.seed}
    content = record | {"stopped": stopped, "buckets": [_described(tuned) for tuned in found]}
    written = write_json(args.json, content)
    _summarise(found)
    if found:
        written = _write(file, tuned_table.merged(old, model, record, found)) and written
    if stopped is not None:
        console.error(stopped)
    failed = any(trial.status == FAILED for tuned in found for trial in tuned.trials)
    return code or int(not written or failed or unprepared > 0 or not any(tuned.winner for tuned in found))


def _old(file: Path, model: str) -> dict[str, Any] | None:
    """The table that is to be added to, None where there is none; tried before the work begins.

    Raises:
        UsageError: it is of another device, is no table, or cannot be written.
    """
    try:
        content = tuning.read(file, model) if file.exists() else None
        if content is not None:
            tuned_table.winners(content)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab"):
            pass
        if content is None:
            file.unlink()
    except WrongTable as error:
        raise UsageError(f"--output: {error}; name another file, or move this one away") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"--output: cannot write {str(file)!r}: {getattr(error, 'strerror', None) or error}") from error
    return content


def _write(file: Path, table: dict[str, Any]) -> bool:
    try:
        file.write_text(provenance.dumps(table) + "\n")
    except OSError as error:
        console.error(f"--output: cannot write {str(file)!r}: {error.strerror}")
        return False
    entries = sum(len(section["entries"]) for section in table["ops"].values())
    console.out(f"{file}: {entries} {'entry' if entries == 1 else 'entries'}")
    return True


Scouted = Bucket | str | None
"""What :func:`kvscout.testing.tune.bucket_of` says of a case."""


def _buckets(
    selected: Sequence[Case], where: torch.device, args: argparse.Namespace
) -> tuple[dict[tuple[str, Bucket], list[Case]], int]:
    """The cases of each op and bucket, and how many cases could not be prepared; a GPU's kernels are compiled."""
    buckets: dict[tuple[str, Bucket], list[Case]] = {}
    unprepared, without = 0, 0
    with console.Progress(len(selected), "compile" if where.type == "cuda" else "prepare") as progress:
        for case, bucket in _scouted([(case, None) for case in selected], where, args):
            if isinstance(bucket, str):
                unprepared += 1
                console.error(console.failure(case.op, case.name, INPUTS, "", bucket))
            elif bucket is None:
                without += 1
            else:
                buckets.setdefault((case.op, bucket), []).append(case)
            progress.advance()
    if without:
        console.out(f"{console.count(without, 'case')} of problems that get no variant from a table")
    return buckets, unprepared


def _scouted(
    wanted: Sequence[tuple[Case, Collection[Key] | None]], where: torch.device, args: argparse.Namespace
) -> Iterator[tuple[Case, Scouted]]:
    """The bucket of each case, in order. On a GPU in several processes, which compile what is to be timed."""
    jobs = min(args.jobs, len(wanted)) if where.type == "cuda" else 1
    if jobs == 1:
        yield from ((case, tune.bucket_of(case, where, args.seed)) for case, _ in wanted)
        return
    with workers.pool(jobs, functools.partial(torch.set_num_threads, 1)) as pool:
        futures = [
            pool.submit(tune.bucket_of, case, where, args.seed, turn, only) for turn, (case, only) in enumerate(wanted)
        ]
        for (case, _), future in zip(wanted, futures, strict=True):
            try:
                yield case, future.result()
            except BrokenProcessPool as broken:
                raise ContextLost(str(broken)) from broken


def _tune(
    buckets: dict[tuple[str, Bucket], list[Case]], where: torch.device, args: argparse.Namespace, found: list[Tuned]
) -> None:
    """Tune bucket after bucket; results are added as they come, so that an interrupted run keeps them."""
    by = tune.clock(where, args.cold)
    with console.Progress(len(buckets), "tune") as progress:
        for (op, bucket), members in buckets.items():
            progress.show(f"{op} {members[0].name}")
            tuned = tune.tune(bucket, members, where, by, seed=args.seed, seconds_per_case=args.seconds_per_case)
            found.append(tuned)
            for trial in tuned.trials:
                if trial.status == FAILED:
                    console.error(_failure(trial))
            progress.advance()


def _failure(t: Trial) -> str:
    return console.failure(t.op, t.case, t.variant, t.config, t.message)


def _described(tuned: Tuned) -> dict[str, Any]:
    return asdict(tuned) | {
        "bucket": dict(sorted(tuned.bucket)),
        "winner": None if tuned.winner is None else tuned_table.entry_of(tuned.winner),
    }


def _summarise(found: Sequence[Tuned]) -> None:
    """A line per bucket, what was not timed and why, and the failures last."""
    rows = []
    for tuned in found:
        cases = tuned.cases[0] if len(tuned.cases) == 1 else f"{tuned.cases[0]} and {len(tuned.cases) - 1} more"
        if (w := tuned.winner) is None:
            rows.append((tuned.op, cases, "-", "-", "-", "-", "-", tuned.message))
            continue
        us = statistics.geometric_mean(times.us for times in w.cases.values())
        second = "-" if w.runner_up is None else " ".join(w.runner_up)
        rows.append((tuned.op, cases, w.key.variant, f"{us:.2f}", _more(w.over_default), _more(w.margin), second, w.key.config))
    columns = ("op", "case", "variant", "us", "rule", "second", "second is", "config")
    console.table("fastest; how much more time the rule's choice and the second take", columns, rows)
    trials = [trial for tuned in found for trial in tuned.trials]
    console.out(f"{len(trials)} variants and configs on {console.count(sum(len(t.cases) for t in found), 'case')}")
    why = Counter((t.op, t.variant, t.message) for t in trials if t.status == SKIPPED)
    if why:
        reasons = [(op, variant, number, message) for (op, variant, message), number in why.most_common()]
        console.table("not timed", ("op", "variant", "configs", "reason"), reasons)
    failures = [trial for trial in trials if trial.status == FAILED]
    if failures:
        console.out(f"\n{len(failures)} failed")
    for trial in failures:
        console.out(_failure(trial))


def _more(part: float | None) -> str:
    return "-" if part is None else f"{part:.1%}"


def _check(args: argparse.Namespace, where: torch.device, selected: Sequence[Case]) -> int:
    """Time a table's entries again; exit code 1 where one no longer holds."""
    try:
        content = tuning.read(args.check, name_of(where))
        winners = tuned_table.winners(content)
    except WrongTable as error:
        raise UsageError(f"--check: {error}") from error
    ...
