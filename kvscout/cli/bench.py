"""Time every variant, each after a check on the inputs that are timed.

On a GPU, hot times are of ten calls in a CUDA graph on the same buffers; cold times are of single calls, over several
inputs in turn where these are small, with L2 flushed in between. min, spread, rates and speed-up are of the cold times
where there are any; "roof" is the part of the GPU's measured ceiling that was reached. On the CPU the default variants
are timed, on small cases; "--variant auto" and "--baseline auto" ask for what a call would get. Peers are other
libraries' kernels, and "torch", the best torch variant: they are checked and timed like variants, on the same inputs in
the same run. What fails its check gets no figure. docs/shapes-csv.md says what a file of shapes looks like.
Exit code: 0 all right, 1 something failed its check, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import torch

from ..device import arch_of
from ..testing import peers, provenance, shapes_csv
from ..testing.case import Case, family, groups
from ..testing.measure import TORCH, Measurement, Wanted, measure_case
from ..testing.peers import Peer
from ..testing.summary import Over, means, speedups
from ..testing.sweep import FAILED, PASSED, REFUSED, SKIPPED, ContextLost
from ..variants import AUTO
from . import console
from .arguments import UsageError, write_json
from .selection import GPU_LOST, Work, add_selection
from .timed_cases import add_cases, select_timed, timed_device

COLUMNS = (
    "case", "variant", "us hot", "us cold", "min", "spread", "TFLOPS", "TB/s", "roof", "error", "speed-up",
)  # fmt: skip
SUSTAINED_COLUMNS = ("us sustained", "MHz", "W")

WIDE_SPREAD = 0.5
"""A CPU whose times are spread wider than this was doing something else too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``bench``."""
    add_selection(parser)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--hot", action="store_true", help="only with the inputs in the cache")
    only.add_argument("--cold", action="store_true", help="only with an empty L2 (GPU)")
    parser.add_argument(
        "--sustained", action="store_true", help="also back to back for a second each, with the GPU's clock and power"
    )
    parser.add_argument(
        "--against",
        metavar="PEER[,PEER...]",
        type=_list,
        default=[],
        help="also time these other libraries' kernels, or torch; one that is not there is named and left out",
    )
    parser.add_argument(
        "--baseline",
        metavar="NAME",
        help="variant, peer or auto, to compare with (default: the first peer, or else the best torch variant)",
    )
    add_cases(parser)


def _list(text: str) -> list[str]:
    names = list(dict.fromkeys(name for name in text.split(",") if name))
    if not names:
        raise argparse.ArgumentTypeError(f"expected the names of peers, got {text!r}")
    return names


def run(args: argparse.Namespace) -> int:
    """Time what was selected, print a table per op and the geometric means."""
    where = timed_device(args)
    work = select_timed(args, where, stand_ins=(AUTO,))
    opponents, missing = _opponents(dict.fromkeys(item.case.op for item in work), args, where)
    for sentence in missing.values():
        console.error(sentence)
    found: list[Measurement] = []
    code, stopped = 0, None
    try:
        _time(work, where, args, opponents, found)
    except KeyboardInterrupt:
        code, stopped = 130, "interrupted"
    except ContextLost:
        code, stopped = 1, GPU_LOST
    failures = [measurement for measurement in found if measurement.status == FAILED]
    content = _content(args, where, opponents, missing, found) | {"stopped": stopped}
    written = write_json(args.json, content | {"cases": _rows(item.case for item in work)})
    for op, of_op in groupby(found, lambda measurement: measurement.op):
        _table(op, list(of_op), where, args)
    _means(found)
    for line in (*missing.values(), *map(_failure, failures)):
        console.out(line)
    if stopped is not None:
        console.error(stopped)
    return code or int(not written or bool(failures) or not any(measurement.status == PASSED for measurement in found))


def _opponents(
    ops: Iterable[str], args: argparse.Namespace, where: torch.device
) -> tuple[dict[str, dict[str, Peer | None]], dict[str, str]]:
    """The peers to time on each op, and a sentence for each that cannot run here and each op without the baseline.

    They are there by name; "torch" has no :class:`Peer`.

    Raises:
        UsageError: a peer or baseline that does not exist.
    """
    existing = {op: (*peers.names(op), TORCH) for op in ops}
    every_peer = {name for names in existing.values() for name in names}
    every_variant = {name for op in existing for name in family(op).names}
    for name in args.against:
        if name not in every_peer:
            known = "; ".join(f"{op} has {', '.join(names) or 'none'}" for op, names in existing.items())
            raise UsageError(f"--against: there is no peer {name!r}; {known}")
    if args.baseline is not None and args.baseline not in every_variant | every_peer | {AUTO}:
        known = "; ".join(f"{op} has {', '.join((*family(op).names, *names))}" for op, names in existing.items())
        raise UsageError(f"--baseline: there is no {args.baseline!r}; {known}, and 'auto' is what a call would get")
    asked = dict.fromkeys([*([args.baseline] if args.baseline in every_peer else []), *args.against])
    opponents: dict[str, dict[str, Peer | None]] = {op: {} for op in existing}
    missing = {}
    for op, names in existing.items():
        for name in (name for name in asked if name in names):
            peer = None if name == TORCH else peers.load(op, name)
            reason = peer and peer.unavailable(arch_of(where))
            if reason is None:
                opponents[op][name] = peer
            else:
                missing[f"{op} {name}"] = f"{name} is not timed on {op}: {reason}"
        if args.baseline not in (None, AUTO, *family(op).names, *names):
            missing[f"{op} {args.baseline}"] = f"{args.baseline} is no baseline on {op}, which has nothing of that name"
    return opponents, missing


def _time(
    work: Sequence[Work],
    where: torch.device,
    args: argparse.Namespace,
    opponents: dict[str, dict[str, Peer | None]],
    found: list[Measurement],
) -> None:
    wanted = Wanted(hot=not args.cold, cold=where.type == "cuda" and not args.hot, sustained=args.sustained)
    with console.Progress(len(work), "bench") as progress:
        for case, names in work:
            progress.show(f"{case.op} {case.name}")
            against = opponents[case.op]
            # On the CPU the one variant that a call would get is timed, unless others are asked for.
            every = where.type == "cuda" or args.variant is not None
            for measurement in measure_case(
                case,
                where,
                names if every else None,
                peers=[peer for peer in against.values() if peer is not None],
                against_torch=TORCH in against,
                baseline=args.baseline or next(iter(against), None),
                seed=args.seed,
                wanted=wanted,
            ):
                found.append(measurement)
                if measurement.status == FAILED:
                    console.error(_failure(measurement))
            progress.advance()


def _failure(m: Measurement) -> str:
    return console.failure(m.op, m.case, m.variant, m.config, m.message)


def _table(op: str, found: Sequence[Measurement], where: torch.device, args: argparse.Namespace) -> None:
    rows = []
    for m, speedup in zip(found, speedups(found), strict=True):
        if m.status in (PASSED, FAILED):
            variant = f"{m.variant} ({m.chosen})" if m.chosen else m.variant
            rows.append([m.case, variant, *_figures(m), _cell(speedup, "{:.2f}x"), *_sustained(m) * args.sustained])
    console.table(op, (*COLUMNS, *SUSTAINED_COLUMNS * args.sustained), rows)
    if baselines := dict.fromkeys(m.variant for m in found if m.baseline):
        console.out(f"speed-ups are over {', '.join(baselines)}")
    passed = [m for m in found if m.status == PASSED]
    if alone := {m.case for m in passed} - {m.case for m in passed if m.baseline}:
        console.out(f"{console.count(len(alone), 'case')} without a speed-up: the baseline has no figure there")
    if where.type == "cpu" and any(m.judged is not None and m.judged.spread > WIDE_SPREAD for m in found):
        console.out(f"the machine was busy: where the spread is over {WIDE_SPREAD:.0%}, the median is unreliable")
    excused = [m for m in found if m.status in (PASSED, FAILED) and m.tolerance is not None]
    for name in dict.fromkeys(m.variant for m in excused):
        cases = [m for m in excused if m.variant == name]
        bounds = ", ".join(dict.fromkeys(f"{m.tolerance.max_rel:.1e}" for m in cases if m.tolerance))
        console.out(f"{name} has a bound of its own on {console.count(len(cases), 'case')}: an error of {bounds}")
    left_out = [
        m for m in found if m.status == SKIPPED or (m.status == REFUSED and (m.peer or m.variant == args.baseline))
    ]
    for name in dict.fromkeys(m.variant for m in left_out):
        skipped = [m for m in left_out if m.variant == name]
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


def _sustained(m: Measurement) -> list[str]:
    """Cells of back-to-back launches."""
    s = m.sustained
    if s is None:
        return ["-"] * len(SUSTAINED_COLUMNS)
    return [f"{s.us:.2f}", _cell(s.sm_clock_mhz, "{:.0f}"), _cell(s.power_w, "{:.0f}")]


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _means(found: Sequence[Measurement]) -> None:
    """Geometric means over the cases, per group of cases and variant."""
    made = means(found, _groups(found))
    references = list(dict.fromkeys(peer for mean in made for peer in mean.over))
    # The baseline's own column speaks for it.
    baselines = {m.variant for m in found if m.baseline}
    references = [peer for peer in references if baselines != {peer}]
    rows = []
    for mean in made:
        over = [cell for peer in references for cell in _over(mean.over.get(peer))]
        rows.append(
            [mean.op, mean.group, mean.variant, mean.cases, *_over(mean.speedup), *over, _cell(mean.roof, "{:.0%}")]
        )
    columns = ("op", "cases of", "variant", "cases", "speed-up", "least", "over cases")
    extra = [column for peer in references for column in (f"over {peer}", "least", "over cases")]
    console.table("geometric means", (*columns, *extra, "roof"), rows)


def _over(over: Over | None) -> list[str]:
    return ["-", "-", "0"] if over is None else [f"{over.mean:.2f}x", f"{over.least:.2f}x", str(over.cases)]


def _groups(found: Sequence[Measurement]) -> dict[str, dict[str, frozenset[str]]]:
    return {op: groups(op) for op in dict.fromkeys(m.op for m in found)}


def _rows(cases: Iterable[Case]) -> dict[str, dict[str, dict[str, str]]]:
    """What a file of shapes says of each case, by op and name: whoever reads a result knows what was timed."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for case in cases:
        found.setdefault(case.op, {})[case.name] = shapes_csv.row_of(case)
    return found


def _content(
    args: argparse.Namespace,
    where: torch.device,
    opponents: dict[str, dict[str, Peer | None]],
    missing: dict[str, str],
    found: Sequence[Measurement],
) -> dict[str, Any]:
    """Everything measured, with the rates, speed-ups and means made of it, and where it comes from."""
    every = [peer for of_op in opponents.values() for peer in of_op.values() if peer is not None]
    libraries = {peer.name: peer.distributions for peer in every}
    modules = {peer.name: peer.module for peer in every}
    return provenance.record(where, args.command_line, libraries, modules) | {
        "seed": args.seed,
        "peers_missing": missing,
        "measurements": [
            asdict(m) | {"tflops": m.tflops, "tbytes_per_s": m.tbytes_per_s, "roof": m.roof, "speedup": speedup}
            for m, speedup in zip(found, speedups(found), strict=True)
        ],
        "means": [asdict(mean) for mean in means(found, _groups(found))],
    }
