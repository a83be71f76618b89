"""A run of ``kvscout bench``, read back from its result file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..roofline import Cost
from ..testing import shapes_csv
from ..testing.case import Case, cases, ops
from ..testing.compare import Budget
from ..testing.measure import Measurement
from ..testing.sustained import Sustained
from ..testing.timing import Timing

PARTS: dict[str, type[Any]] = {
    "hot": Timing,
    "cold": Timing,
    "sustained": Sustained,
    "cost": Cost,
    "tolerance": Budget,
}
"""Fields of a measurement that are records themselves."""


class ResultsError(ValueError):
    """A file that is no result of ``kvscout bench``; the message says why."""


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        file: where it was read from.
        time: when it began to write, as ISO 8601 has it.
        command: the command line.
        commit: the checkout's commit, None where there was none.
        device: the GPU's name, or the CPU's.
        versions: of Python and packages; None for one that says nothing of its version.
        missing: a sentence for each peer that was asked for and not there.
        measurements: what was measured, in order.
        cases: the cases that were timed, by op and name, as far as they are known.
    """

    file: Path
    time: str
    command: str
    commit: str | None
    device: str
    versions: Mapping[str, str | None]
    missing: tuple[str, ...]
    measurements: tuple[Measurement, ...]
    cases: Mapping[tuple[str, str], Case]

    @property
    def date(self) -> str:
        """The day of the run."""
        return self.time[:10]

    @property
    def name(self) -> str:
        """The file's name without what all of them have in common; it begins the names of its figures."""
        return self.file.stem.removeprefix("bench-")

    @property
    def origin(self) -> str:
        """Where its figures come from, in one line."""
        commit = f" at {self.commit[:12]}" if self.commit else ""
        return f"{self.device}, {self.date}, kvscout {self.versions.get('kvscout')}{commit}"


def read(file: Path) -> Run:
    """Read a result file.

    Raises:
        ResultsError: the message begins with the file's name.
    """
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text, parse_float=_float, parse_int=_int, parse_constant=_float)
    except json.JSONDecodeError as error:
        raise ResultsError(f"{file}: expected JSON: {error}") from error
    # A name with a null byte, and text that is not UTF-8, are ValueErrors; nesting without end is a RecursionError.
    except (OSError, ValueError, RecursionError) as error:
        raise ResultsError(f"{file}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(content, dict) or "measurements" not in content:
        raise ResultsError(f"{file}: expected what 'kvscout bench --json' writes, but there are no measurements in it")
    try:
        measurements = tuple(map(_measurement, content["measurements"]))
        return Run(
            file=file,
            time=str(content["time"]),
            command=str(content["command"]),
            commit=content["commit"],
            device=str(content["machine"]["device"]),
            versions=dict(content["versions"]),
            missing=tuple(content.get("peers_missing", {}).values()),
            measurements=measurements,
            cases=_cases(measurements, content.get("cases")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else error
        raise ResultsError(f"{file}: expected what 'kvscout bench --json' writes, but {reason}") from error


def _float(text: str) -> float:
    """A number of a file: bench writes none that is infinite or NaN, and none of them can be drawn."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"expected finite numbers, got {text:.24}")
    return value


def _int(text: str) -> int:
    _float(text)
    return int(text)


def _measurement(record: Mapping[str, Any]) -> Measurement:
    """A measurement from its record, which also has what was computed from it."""
    known = {field.name for field in fields(Measurement)}
    given = {name: value for name, value in record.items() if name in known}
    for name, part in PARTS.items():
        if given.get(name) is not None:
            given[name] = part(**given[name])
    found = Measurement(**given)
    if found.judged is not None and not found.judged.median_us > 0:
        raise ValueError(f"{found.variant} takes {found.judged.median_us} us on {found.case}")
    return found


def _cases(measurements: tuple[Measurement, ...], rows: Any) -> dict[tuple[str, str], Case]:
    """The cases by op and name: as the file has them, or else the built-in ones of those names."""
    if rows is not None:
        return {(op, name): shapes_csv.case_of(row) for op, named in rows.items() for name, row in named.items()}
    timed = {m.op for m in measurements}
    return {(op, case.name): case for op in ops() if op in timed for case in cases(op)}
