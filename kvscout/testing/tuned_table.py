"""A tuned table as its file has it: what ``kvscout tune`` puts into one, and reads back to check it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .. import tuning
from .case import family
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
        kept = [entry for entry in section["entries"] if frozenset(entry["bucket"].items()) not in again]
        new = [_entry(tuned.winner, len(runs) - 1) for tuned in tuned_now if tuned.winner is not None]
        entries = sorted([*kept, *new], key=lambda entry: json.dumps(entry["bucket"]))
        if entries:
            ops[op] = {"fingerprint": section["fingerprint"], "entries": entries}
    used = sorted({entry["run"] for section in ops.values() for entry in section["entries"]})
    for section in ops.values():
        section["entries"] = [entry | {"run": used.index(entry["run"])} for entry in section["entries"]]
    return {"format": tuning.FORMAT, "device": model, "runs": [runs[number] for number in used], "ops": ops}


def _entry(winner: Winner, run: int) -> dict[str, Any]:
    return {
        "bucket": dict(sorted(winner.bucket)),
        **winner.key._asdict(),
        "runner_up": None if winner.runner_up is None else winner.runner_up._asdict(),
        "margin": winner.margin,
        "over_default": winner.over_default,
        "cold": winner.cold,
        "cases": {name: asdict(times) for name, times in winner.cases.items()},
        "run": run,
    }


def winners(content: dict[str, Any]) -> dict[str, list[Winner]]:
    """The entries of a table that :func:`kvscout.tuning.read` has read, by op.

    Raises:
        WrongTable: what only ``tune`` reads of it is not there.
    """
    try:
        return {op: [_winner(entry) for entry in section["entries"]] for op, section in content["ops"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise tuning.WrongTable(f"is no whole table ({type(error).__name__}: {error})") from error


def _winner(entry: dict[str, Any]) -> Winner:
    runner_up = entry["runner_up"]
    return Winner(
        bucket=frozenset(entry["bucket"].items()),
        key=Key(entry["variant"], entry["config"]),
        runner_up=None if runner_up is None else Key(**runner_up),
        margin=entry["margin"],
        over_default=entry["over_default"],
        cold=entry["cold"],
        cases={name: CaseTimes(**times) for name, times in entry["cases"].items()},
    )
