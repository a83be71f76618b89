"""What ``verify`` and ``bench`` work on: the arguments they share, and what those select."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..testing.case import Case, cases, family, ops
from . import arguments
from .arguments import UsageError

GPU_LOST = "stopped: the last failure broke the GPU's context, and nothing runs on it any more in this process"


class Work(NamedTuple):
    """A case and the variants to run on it."""

    case: Case
    names: Sequence[str]


def add_selection(parser: argparse.ArgumentParser, by_variant: bool = True) -> None:
    """Arguments of the commands that run cases; one that is of all variants has none ``by_variant``."""
    parser.add_argument("ops", nargs="*", metavar="OP", help="operations (default: all)")
    parser.add_argument("--case", metavar="SUBSTRING", default="", help="only cases whose name contains this")
    if by_variant:
        parser.add_argument("--variant", metavar="NAME", action="append", help="only this variant; may be repeated")
    else:
        parser.set_defaults(variant=None)
    add_device(parser)
    parser.add_argument("--seed", metavar="N", type=arguments.seed, default=0, help="seed of the inputs (default: 0)")
    arguments.add_json(parser)


def add_device(parser: argparse.ArgumentParser) -> None:
    """The argument that says where to run."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where to run (default: cuda where there is a GPU)")


def device(args: argparse.Namespace) -> torch.device:
    """The device asked for."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device: torch sees no GPU here; leave the option out to run on the CPU")
    return torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def select(
    args: argparse.Namespace,
    levels: Sequence[str],
    stand_ins: Sequence[str] = (),
    given: Sequence[Case] | None = None,
) -> list[Work]:
    """Every selected case, with the selected variants of its op.

    Args:
        args: those of :func:`add_selection`.
        levels: the levels of the cases to select from.
        stand_ins: names that may be asked for in place of a variant, of every op.
        given: select from these cases instead, whatever their level.

    Raises:
        UsageError: an op, variant or case that does not exist, or a result file that cannot be written.
    """
    arguments.check_overrides()
    arguments.check_json(args.json)
    known = ops()
    for op in args.ops:
        if op not in known:
            raise UsageError(f"OP: there is no op {op!r}; there are {', '.join(known)}")
    held = known if given is None else [op for op in known if any(case.op == op for case in given)]
    selected = [op for op in held if not args.ops or op in args.ops]
    if not selected:
        raise UsageError(f"OP: none of the given cases is of {' or '.join(args.ops)}; they are of {', '.join(held)}")
    asked: Sequence[str] | None = args.variant
    choices = {op: (*stand_ins, *family(op).names) for op in selected}
    for name in asked or ():
        if not any(name in names for names in choices.values()):
            existing = "; ".join(f"{op} has {', '.join(family(op).names)}" for op in selected)
            raise UsageError(f"--variant: there is no {name!r}; {existing}")
    names = {op: [n for n in choices[op] if n in asked] if asked else family(op).names for op in selected}
    having = [op for op in selected if names[op]]
    source = {op: cases(op, levels) if given is None else [case for case in given if case.op == op] for op in having}
    work = [Work(case, names[op]) for op in having for case in source[op] if args.case in case.name]
    if not work:
        origin = f"at level {' or '.join(levels)}" if given is None else "of those that are given"
        raise UsageError(f"--case: no case of {', '.join(having)} {origin} has {args.case!r} in its name")
    return work
