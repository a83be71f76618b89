"""Which cases ``bench`` times and ``tune`` tunes for: groups of built-in ones, or those of a file of shapes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from ..testing import limits, shapes_csv
from ..testing.case import BENCH, Case, groups
from .arguments import UsageError, file_name
from .selection import Work, device, select

PRESETS = {
    "squares": "scores of as many rows as keys",
    "few-rows": "scores of few rows over many keys",
    "model-shapes": "scores of whole prompts, one to four of them, with and without cleaned logits",
    "long-context": "scores of a chunk of rows after a long cached prefix",
    "packed-shapes": "scores of many sequences in one call",
    "unaligned": "scores of sizes that no tile divides",
    "decode": "paged decode of a few sequences over all of their tokens",
    "verify-mtp": "paged decode of four tokens a sequence",
    "sparse": "paged decode of few rows over 2048 selected tokens each",
    "sparse-prefill": "paged decode of a prompt's rows over 2048 selected tokens each",
}
"""Groups of cases that have an option, and what is in them."""


def add_cases(parser: argparse.ArgumentParser) -> None:
    """Arguments that say which cases, beside those of :func:`~kvscout.cli.selection.add_selection`."""
    presets = parser.add_argument_group("cases", "which of a GPU's cases to time (default: all); several add up")
    for name, meaning in PRESETS.items():
        presets.add_argument(f"--{name}", dest="presets", action="append_const", const=name, help=meaning)
    presets.add_argument(
        "--shapes-csv", metavar="FILE", type=file_name, help="time the cases of this file instead; on the CPU too"
    )


def timed_device(args: argparse.Namespace) -> torch.device:
    """Where to run.

    Raises:
        UsageError: ``--cold`` is asked for on the CPU.
    """
    where = device(args)
    if args.cold and where.type == "cpu":
        raise UsageError("--cold: only a GPU's cache can be flushed; leave the option out on the CPU")
    return where


def select_timed(args: argparse.Namespace, where: torch.device, stand_ins: Sequence[str] = ()) -> list[Work]:
    """Every selected case, with variants as in :func:`~kvscout.cli.selection.select`.

    Raises:
        UsageError: something is asked for that is not there, or asked for twice.
    """
    levels = limits.bench_levels(where)
    work = select(args, levels, stand_ins=stand_ins, given=_given(args))
    return of_presets(work, args.presets, levels)


def _given(args: argparse.Namespace) -> list[Case] | None:
    """The cases of the file of shapes, where there is one.

    Raises:
        UsageError: it cannot be read, or a preset is asked for beside it.
    """
    if args.shapes_csv is None:
        return None
    if args.presets:
        raise UsageError(f"--{args.presets[0]}: --shapes-csv says which cases to time; leave one of the two out")
    try:
        return shapes_csv.read(args.shapes_csv)
    except shapes_csv.ShapesError as error:
        raise UsageError(f"--shapes-csv: {error}") from error


def of_presets(work: list[Work], presets: Sequence[str] | None, levels: Sequence[str]) -> list[Work]:
    """The work on cases of any of the presets; all of it without one."""
    if not presets:
        return work
    if BENCH not in levels:
        raise UsageError(f"--{presets[0]}: these cases are timed on a GPU; leave the option out on the CPU")
    wanted = {op: [groups(op).get(name, frozenset()) for name in presets] for op in {item.case.op for item in work}}
    chosen = [item for item in work if any(item.case.name in names for names in wanted[item.case.op])]
    if not chosen:
        raise UsageError(f"--{' --'.join(presets)}: none of these cases is among those that are selected otherwise")
    return chosen
