"""Find the fastest variant and config for each bucket of problems, and write them into a table that calls then use.

What each variant that a call may get takes by itself goes through the case's own check and a quick timing; so do the
other configs of those variants that come near the fastest. The three fastest and what the rule would take are then
timed in turn, and the rule's choice stays where nothing is faster beyond noise. Times are of a GPU's hot L2 unless told
otherwise. A GPU's kernels are compiled first, in several processes. The table is that of this machine's device;
KVSCOUT_TUNED_DIR names the folder that calls look for it in. An existing table keeps its other buckets.
docs/tuning.md says how to tune for shapes of one's own.
Exit code: 0 all right, 1 something failed its check or an entry no longer holds, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import env, tuning
from ..device import name_of
from ..kernels.cute import store
from ..testing import provenance, tune, tuned_table
from ..testing.case import Case, family, ops
from ..testing.retime import Retimed, retime
from ..testing.scout import Scouted
from ..testing.sweep import FAILED, INPUTS, PASSED, REFUSED, SKIPPED, ContextLost
from ..testing.tune import Tuned
from ..testing.tuned_table import Kept
from ..tuning import Bucket, WrongTable
from . import arguments, console
from .arguments import UsageError, write_json
from .selection import GPU_LOST, add_selection
from .timed_cases import add_cases, select_timed, timed_device
from .tune_stages import Limit, OutOfTime, Stopped, Work, compiler, failure, scouted, search

MOST_JOBS = 16
"""Processes that compile at a time unless told otherwise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``tune``."""
    add_selection(parser, by_variant=False)
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
    parser.add_argument("--cold", action="store_true", help="time with an empty L2 (GPU)")
    parser.add_argument(
        "--within",
        metavar="F",
        type=_factor,
        default=tune.WITHIN,
        help="try other configs of a variant too if its own choice takes at most F times the fastest variant's time; "
        f"inf: of every variant (default: {tune.WITHIN:g})",
    )
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=_seconds,
        help="time of the whole run after which no further bucket is begun (default: none)",
    )
    parser.add_argument(
        "--seconds-per-case",
        metavar="S",
        type=_seconds,
        help="time after which no further config of a case is tried (default: none)",
    )
    arguments.add_jobs(parser, MOST_JOBS, "processes that compile a GPU's kernels first")
    add_cases(parser)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return number


def _factor(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number >= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1, or inf, got {text!r}")
    return number


def run(args: argparse.Namespace) -> int:
    """Tune for what was selected and write the table, or check one."""
    where = timed_device(args)
    if args.check is not None:
        return _check(args, where)
    selected = [item.case for item in select_timed(args, where)]
    model = name_of(where)
    file = args.output or (env.tuned_dir() or Path("tuned")) / tuning.file_name(model)
    _try(file, model)
    limit, gathered = Limit(args.seconds), Gathered()
    found: list[Tuned] = []
    with _ending() as end:
        _gather(selected, where, args, limit, gathered)
        search(
            gathered.work, where, tune.clock(where, args.cold), found, limit, _jobs(args, where),
            seed=args.seed, within=args.within, seconds_per_case=args.seconds_per_case,
        )  # fmt: skip
    settled = [*gathered.unprepared, *gathered.without, *(case for tuned in found for case in tuned.cases)]
    not_reached = [(case.op, case.name) for case in selected if case not in settled]
    record = provenance.record(where, args.command_line) | {"seed": args.seed}
    content = record | {"stopped": end.reason, "buckets": [_described(tuned) for tuned in found]}
    content["not_reached"] = [{"op": op, "case": case} for op, case in not_reached]
    written = write_json(args.json, content)
    _summarise(found)
    if not_reached:
        console.table("not reached", ("op", "case"), not_reached)
    if found:
        written = _write(file, model, record, found) and written
    if end.reason is not None:
        console.error(end.reason)
    statuses = {trial.status for tuned in found for trial in tuned.trials}
    failed = len(gathered.unprepared) > 0 or FAILED in statuses or PASSED not in statuses
    return end.code or int(not written or failed)


@dataclass
class _End:
    """How a run ended: its exit code, where that does not depend on what was found, and why it ended early."""

    code: int = 0
    reason: str | None = None


@contextlib.contextmanager
def _ending() -> Iterator[_End]:
    """Take note of what ends the block early."""
    end = _End()
    try:
        yield end
    except KeyboardInterrupt:
        end.code, end.reason = 130, "interrupted"
    except ContextLost:
        end.code, end.reason = 1, GPU_LOST
    except OutOfTime as over:
        end.reason = str(over)
    except Stopped as stopped:
        end.code, end.reason = 1, str(stopped)


def _try(file: Path, model: str) -> None:
    """Say before the work begins that a table cannot be added to.

    Raises:
        UsageError: it is of another device, is no table, or cannot be written.
    """
    try:
        _old(file, model)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except WrongTable as error:
        raise UsageError(f"--output: {str(file)!r} {error}; name another file, or move this one away") from error
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--output: cannot write {str(file)!r}: {getattr(error, 'strerror', None) or error}"
        ) from error


def _old(file: Path, model: str) -> dict[str, Any] | None:
    """The table that is to be added to, None where there is none."""
    if not file.exists():
        return None
    if not (file.is_file() or file.is_dir()):
        raise WrongTable("is no regular file")
    content = tuning.read(file, model)
    tuned_table.kept(content)
    return content


def _say_what_went(old: dict[str, Any] | None, found: Sequence[Tuned]) -> None:
    for op in dict.fromkeys(tuned.op for tuned in found):
        section = (old or {"ops": {}})["ops"].get(op)
        if section is not None and section["fingerprint"] != tuning.fingerprint(family(op).package):
            number = len(section["entries"])
            console.out(f"left out, as they are of other kernels: {number} older entries of {op}")


def _write(file: Path, model: str, record: dict[str, Any], found: Sequence[Tuned]) -> bool:
    """Add what was found to the table as it is by now; another run may have added to it. It is replaced whole."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with store.locked(file.parent):
            old = _old(file, model)
            table = tuned_table.merged(old, model, record, found)
            if not old and not table["ops"]:
                return True
            temporary.write_text(provenance.dumps(table) + "\n")
            temporary.replace(file)
    except (OSError, WrongTable) as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        console.error(f"--output: cannot write {str(file)!r}: {getattr(error, 'strerror', None) or error}")
        return False
    _say_what_went(old, found)
    entries = sum(len(section["entries"]) for section in table["ops"].values())
    console.out(f"{file}: {entries} {'entry' if entries == 1 else 'entries'}")
    return True


def _jobs(args: argparse.Namespace, where: torch.device) -> int:
    """Processes that compile; one alone where there is no GPU, or no Triton that compiles, to compile for."""
    is_here = where.type == "cuda" and importlib.util.find_spec("triton") is not None and not env.triton_interpret()
    return int(args.jobs) if is_here else 1


@dataclass
class Gathered:
    """The selected cases: by bucket, those whose inputs cannot be made, and those that get no variant from a table."""

    work: list[Work] = field(default_factory=list)
    unprepared: list[Case] = field(default_factory=list)
    without: list[Case] = field(default_factory=list)


def _gather(
    selected: Sequence[Case], where: torch.device, args: argparse.Namespace, limit: Limit, gathered: Gathered
) -> None:
    """Find out the bucket of each case, and which kernels it needs."""
    buckets: dict[tuple[str, Bucket], Work] = {}
    with console.Progress(len(selected), "prepare") as progress:
        for case, known in scouted(selected, where, args.seed, _jobs(args, where)):
            if isinstance(known, str):
                gathered.unprepared.append(case)
                console.error(console.failure(case.op, case.name, INPUTS, "", known))
            elif known.bucket is None:
                gathered.without.append(case)
            else:
                item = buckets.setdefault((case.op, known.bucket), Work(case.op, known.bucket))
                item.cases.append(case)
                item.scouted.append(known)
            progress.advance()
            limit.check()
    gathered.work += buckets.values()
    if gathered.without:
        console.out(f"{console.count(len(gathered.without), 'case')} of problems that get no variant from a table")


def _described(tuned: Tuned) -> dict[str, Any]:
    return {
        "op": tuned.op,
        "bucket": dict(sorted(tuned.bucket)),
        "cases": [case.name for case in tuned.cases],
        "winner": tuned_table.entry_of(tuned),
        "message": tuned.message,
        "trials": [asdict(trial) for trial in tuned.trials],
    }


def _summarise(found: Sequence[Tuned]) -> None:
    """A line per bucket, what was not timed and why, and the failures last."""
    rows: list[Sequence[object]] = []
    for tuned in found:
        first, *more = (case.name for case in tuned.cases)
        cases, w = f"{first} and {len(more)} more" if more else first, tuned.winner
        if w is None:
            rows.append((tuned.op, cases, *[None] * 4, tuned.message))
            continue
        us = statistics.geometric_mean(times.us for times in w.cases.values())
        taken = (w.key.variant, f"{us:.2f}", _more(w.over_default), _more(w.margin), w.key.config)
        rows.append((tuned.op, cases, *taken))
    columns = ("op", "case", "variant", "us", "rule", "second", "config")
    console.table("fastest, and how much more time the rule's choice and the second take", columns, rows)
    trials = [trial for tuned in found for trial in tuned.trials]
    tried = sum(trial.status != REFUSED for trial in trials)
    console.out(f"{console.count(sum(len(t.cases) for t in found), 'case')}, {tried} variants and configs on them")
    why = Counter((t.op, t.variant, t.message) for t in trials if t.status in (SKIPPED, REFUSED))
    if why:
        reasons = [(op, variant, number, message) for (op, variant, message), number in why.most_common()]
        console.table("not timed", ("op", "variant", "times", "reason"), reasons)
    failures = [trial for trial in trials if trial.status == FAILED]
    if failures:
        console.out(f"\n{len(failures)} failed")
    for trial in failures:
        console.out(failure(trial))


def _more(part: float | None) -> str | None:
    return None if part is None else f"{part:.1%}"


def _check(args: argparse.Namespace, where: torch.device) -> int:
    """Time a table's entries again; exit code 1 where one no longer holds."""
    if args.presets or args.shapes_csv:
        raise UsageError("--check: the table says which cases are timed; leave presets and --shapes-csv out")
    arguments.check_overrides()
    arguments.check_json(args.json)
    try:
        content = tuning.read(args.check, name_of(where))
        entries = tuned_table.kept(content)
        if unknown := sorted({*content["ops"]} - {*ops()}):
            raise WrongTable(f"has entries of what is no operation here: {', '.join(unknown)}")
    except WrongTable as error:
        raise UsageError(f"--check: {str(args.check)!r} {error}") from error
    chosen = [kept for kept in entries if _is_selected(kept, args)]
    if not chosen:
        raise UsageError(f"--check: none of the {len(entries)} entries of {args.check} is selected")
    for op in dict.fromkeys(kept.op for kept in chosen):
        if content["ops"][op]["fingerprint"] != tuning.fingerprint(family(op).package):
            console.out(f"{args.check}: {tuning.stale(op)}")
    found: list[Retimed] = []
    with _ending() as end:
        _retime(chosen, where, args, found)
    record = provenance.record(where, args.command_line) | {"seed": args.seed, "stopped": end.reason}
    written = write_json(args.json, record | {"retimed": [asdict(row) for row in found]})
    rows = [
        (r.op, r.case, r.key.variant, _us(r.then_us), _us(r.now_us), _us(r.runner_up_us), r.flag or None) for r in found
    ]
    console.table(str(args.check), ("op", "case", "variant", "us then", "us now", "second now", "flag"), rows)
    flagged = sum(bool(row.flag) for row in found)
    console.out(f"{flagged} of {console.count(len(found), 'case')} flagged")
    reached = {(row.op, row.case) for row in found}
    missed = [f"{kept.op} {name}" for kept in chosen for name in kept.cases if (kept.op, name) not in reached]
    if missed:
        console.out(f"not reached: {', '.join(missed)}")
    if end.reason is not None:
        console.error(end.reason)
    return end.code or int(not written or flagged > 0 or bool(missed))


def _is_selected(kept: Kept, args: argparse.Namespace) -> bool:
    return (not args.ops or kept.op in args.ops) and any(args.case in name for name in kept.cases)


def _retime(chosen: Sequence[Kept], where: torch.device, args: argparse.Namespace, found: list[Retimed]) -> None:
    limit = Limit(args.seconds)
    keys = {
        case: [key for key in (kept.winner.key, kept.winner.runner_up) if key is not None]
        for kept in chosen
        for case in kept.cases.values()
        if case is not None
    }
    jobs = _jobs(args, where)
    with console.Progress(len(chosen), "tune --check") as progress, compiler(jobs, limit, progress) as compile:
        if jobs > 1:
            known = scouted(list(keys), where, args.seed, jobs)
            compile.make(kernel for case, of in known if isinstance(of, Scouted) for kernel in of.needs(keys[case]))
        for op, winner, of_entry in chosen:
            limit.check()
            progress.show(f"{op} {next(iter(of_entry))}")
            found += retime(op, winner, of_entry, where, tune.clock(where, winner.cold), args.seed)
            progress.advance()


def _us(time: float | None) -> str | None:
    return None if time is None else f"{time:.2f}"
