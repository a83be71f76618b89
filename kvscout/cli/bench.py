"""Time every variant, each after a check on the inputs that are timed.

On a GPU, hot times are of ten calls in a CUDA graph on the same buffers; cold times are of single calls over several
inputs in turn, with L2 flushed in between. min, spread, rates and speed-up are of the cold times where there are any;
"roof" is the part of the GPU's measured ceiling that was reached. On the CPU the default variants are timed, on small
cases. A variant that fails its check gets no figure.
Exit code: 0 all right, 1 something failed its check, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import torch

from ..testing import limits, provenance
from ..testing.case import family
from ..testing.measure import Measurement, measure_case
from ..testing.sweep import FAILED, PASSED, SKIPPED, ContextLost
from . import console
from .arguments import UsageError, write_json
from .selection import GPU_LOST, Work, add_selection, device, select

COLUMNS = (
    "case", "variant", "us hot", "us cold", "min", "spread", "TFLOPS", "TB/s", "roof", "error", "speed-up",
)  # fmt: skip

WIDE_SPREAD = 0.5
"""A CPU whose times are spread wider than this was doing something else too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``bench``."""
    add_selection(parser)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--hot", action="store_true", help="only with the inputs in the cache")
    only.add_argument("--cold", action="store_true", help="only with an empty L2 (GPU)")
    parser.add_argument(
        "--baseline", metavar="NAME", help="variant that speed-ups are relative to (default: the best-ranked torch one)"
    )


def run(args: argparse.Namespace) -> int:
    """Time what was selected, print a table per op and the geometric means."""
    where = device(args)
    if args.cold and where.type == "cpu":
        raise UsageError("--cold: only a GPU's cache can be flushed; leave the option out on the CPU")
    work = select(args, limits.bench_levels(where))
    selected = {item.case.op for item in work}
    if args.baseline is not None and not any(args.baseline in family(op).names for op in selected):
        existing = "; ".join(f"{op} has {', '.join(family(op).names)}" for op in sorted(selected))
        raise UsageError(f"--baseline: there is no {args.baseline!r}; {existing}")
    found: list[Measurement] = []
    code, stopped = 0, None
    try:
        _time(work, where, args, found)
    except KeyboardInterrupt:
        code, stopped = 130, "interrupted"
    except ContextLost:
        code, stopped = 1, GPU_LOST
    content = provenance.record(where, args.command_line) | {"seed": args.seed, "stopped": stopped}
    written = write_json(args.json, content | {"measurements": _records(found)})
    for op, of_op in groupby(found, lambda measurement: measurement.op):
        _table(op, list(of_op), where)
    _means(found)
    failures = [measurement for measurement in found if measurement.status == FAILED]
    for failure in failures:
        console.out(_failure(failure))
    if stopped is not None:
        console.error(stopped)
    return code or int(not written or bool(failures) or not any(measurement.status == PASSED for measurement in found))


def _time(work: Sequence[Work], where: torch.device, args: argparse.Namespace, found: list[Measurement]) -> None:
    with console.Progress(len(work), "bench") as progress:
        for case, names in work:
            progress.show(f"{case.op} {case.name}")
            # On the CPU the one variant that a call would get is timed, unless others are asked for.
            every = where.type == "cuda" or args.variant is not None
            for measurement in measure_case(
                case,
                where,
                names if every else None,
                baseline=args.baseline,
                seed=args.seed,
                hot=not args.cold,
                cold=where.type == "cuda" and not args.hot,
            ):
                found.append(measurement)
                if measurement.status == FAILED:
                    console.error(_failure(measurement))
            progress.advance()


def _failure(m: Measurement) -> str:
    return console.failure(m.op, m.case, m.variant, m.config, m.message)


def _speedups(found: Sequence[Measurement]) -> list[float | None]:
    """How many times faster than its case's baseline each measurement is, None where either has no figure."""
    baselines = {(m.op, m.case): m.judged.median_us for m in found if m.baseline and m.judged}
    speedups = []
    for m in found:
        baseline = baselines.get((m.op, m.case))
        speedups.append(None if baseline is None or m.judged is None else baseline / m.judged.median_us)
    return speedups


def _table(op: str, found: Sequence[Measurement], where: torch.device) -> None:
    rows = []
    for m, speedup in zip(found, _speedups(found), strict=True):
        if m.status in (PASSED, FAILED):
            rows.append([m.case, m.variant, *_figures(m), _cell(speedup, "{:.2f}x")])
    console.table(op, COLUMNS, rows)
    if where.type == "cpu" and any(m.judged is not None and m.judged.spread > WIDE_SPREAD for m in found):
        console.out(f"the machine was busy: where the spread is over {WIDE_SPREAD:.0%}, the median is unreliable")
    for name in dict.fromkeys(m.variant for m in found if m.status == SKIPPED):
        skipped = [m for m in found if m.variant == name and m.status == SKIPPED]
        console.out(f"{name} is not timed on {console.count(len(skipped), 'case')}, {skipped[0].message}")


def _figures(m: Measurement) -> list[str]:
    """Cells from "us hot" to "error"."""
    if m.judged is None:
        return ["failed", *["-"] * 7]
    return [
        _cell(m.hot.median_us if m.hot else None, "{:.2f}"),
        _cell(m.cold.median_us if m.cold else None, "{:.2f}"),
        f"{m.judged.min_us:.2f}",
        f"{m.judged.spread:.0%}",
        _cell(m.tflops, "{:.3g}"),
        _cell(m.tbytes_per_s, "{:.3g}"),
        _cell(m.roof, "{:.0%}"),
        f"{m.max_rel:.1e}",
    ]


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _means(found: Sequence[Measurement]) -> None:
    """Geometric means over the cases, per variant."""
    groups: dict[tuple[str, str], list[tuple[float | None, float | None]]] = {}
    for m, speedup in zip(found, _speedups(found), strict=True):
        if m.status == PASSED:
            groups.setdefault((m.op, m.variant), []).append((speedup, m.roof))
    rows = []
    for (op, variant), pairs in groups.items():
        speedups, roofs = ([value for value in values if value] for values in zip(*pairs, strict=True))
        mean, roof = _cell(_geomean(speedups), "{:.2f}x"), _cell(_geomean(roofs), "{:.0%}")
        rows.append((op, variant, len(pairs), mean, len(speedups), roof))
    console.table("geometric means", ("op", "variant", "cases", "speed-up", "over cases", "roof"), rows)


def _geomean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def _records(found: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Everything measured, with the rates and speed-ups made of it."""
    return [
        asdict(m) | {"tflops": m.tflops, "tbytes_per_s": m.tbytes_per_s, "roof": m.roof, "speedup": speedup}
        for m, speedup in zip(found, _speedups(found), strict=True)
    ]
