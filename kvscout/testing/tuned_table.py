"""A tuned table as its file has it: what ``kvscout tune`` puts into one, and reads back to check it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from .. import tuning
from . import shapes_csv
from .case import Case, family
from .tune import CaseTimes, Key, Tuned, Winner


def merged(old: dict[str, Any] | None, model: str, run: dict[str, Any], found: Sequence[Tuned]) -> dict[str, Any]:
    """A table with what was found, and with what an older one has of other buckets and the same kernels.

    Args:
        old: the older table, as :func:`kvscout.tuning.read` gives it.
        model: the device's.
        run: where the new figures come from; each entry names its run by number.
        found: what came of each bucket. One without a winner has no entry, also where it had one.
    """
    runs = [*([] if old is None else old["runs"]), run]
    ops: dict[str, Any] = {}
    for op in dict.fromkeys([*([] if old is None else old["ops"]), *(tuned.op for tuned in found)]):
        section = {"entries": []} if old is None else old["ops"].get(op, {"entries": []})
        tuned_now = [tuned for tuned in found if tuned.op == op]
        # Entries of other kernels stay only while nothing is known of these.
        if tuned_now and section.get("fingerprint") != (made_of := tuning.fingerprint(family(op).package)):
            section = {"fingerprint": made_of, "entries": []}
        again = [tuned.bucket for tuned in tuned_now]
        others = [entry for entry in section["entries"] if frozenset(entry["bucket"].items()) not in again]
        new = [entry | {"run": len(runs) - 1} for entry in map(entry_of, tuned_now) if entry is not None]
        entries = sorted([*others, *new], key=lambda entry: json.dumps(entry["bucket"]))
        if entries:
            ops[op] = {"fingerprint": section["fingerprint"], "entries": entries}
    used = sorted({entry["run"] for section in ops.values() for entry in section["entries"]})
    for section in ops.values():
        section["entries"] = [entry | {"run": used.index(entry["run"])} for entry in section["entries"]]
    return {"format": tuning.FORMAT, "device": model, "runs": [runs[number] for number in used], "ops": ops}


def entry_of(tuned: Tuned) -> dict[str, Any] | None:
    """The entry of a bucket, with what makes its cases again, but for the number of its run; None without a winner."""
    winner = tuned.winner
    if winner is None:
        return None
    return {
        "bucket": dict(sorted(winner.bucket)),
        **winner.key._asdict(),
        "runner_up": None if winner.runner_up is None else winner.runner_up._asdict(),
        "margin": winner.margin,
        "over_default": winner.over_default,
        "cold": winner.cold,
        "cases": {
            case.name: asdict(winner.cases[case.name]) | {"shape": shapes_csv.row_of(case)} for case in tuned.cases
        },
    }


class Kept(NamedTuple):
    """An entry of a table, and its cases by name, None for one that cannot be made any more."""

    op: str
    winner: Winner
    cases: dict[str, Case | None]


def kept(content: dict[str, Any]) -> list[Kept]:
    """The entries of a table that :func:`kvscout.tuning.read` has read.

    Raises:
        WrongTable: what only ``tune`` reads of it is not there.
    """
    try:
        entries = [(op, entry) for op, section in content["ops"].items() for entry in section["entries"]]
        for _, entry in entries:
            content["runs"][entry["run"]]
        return [_kept(op, entry) for op, entry in entries]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise tuning.WrongTable(f"is no whole table ({type(error).__name__}: {error})") from error


def _kept(op: str, entry: dict[str, Any]) -> Kept:
    runner_up, times, cases = entry["runner_up"], {}, {}
    for name, of_case in entry["cases"].items():
        times[name] = CaseTimes(float(of_case["us"]), of_case["runner_up_us"], of_case["default_us"])
        if not times[name].us > 0:
            raise ValueError(f"{name}: a time of {times[name].us} us")
        cases[name] = _case(of_case["shape"])
    winner = Winner(
        bucket=frozenset(entry["bucket"].items()),
        key=Key(str(entry["variant"]), str(entry["config"])),
        runner_up=None if runner_up is None else Key(str(runner_up["variant"]), str(runner_up["config"])),
        margin=entry["margin"],
        over_default=entry["over_default"],
        cold=bool(entry["cold"]),
        cases=times,
    )
    return Kept(op, winner, cases)


def _case(shape: dict[str, str]) -> Case | None:
    try:
        return shapes_csv.case_of(shape)
    except ValueError:
        return None
