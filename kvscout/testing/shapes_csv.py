"""Cases in CSV files: the shapes that ``bench`` times and ``tune`` tunes for, where they are not the built-in ones.

The first line names the columns: ``op``, and fields of the cases of whatever ops the file holds. Each further line is a
case. A blank cell, and a column that is not there, is the field's default. Lines that begin with ``#`` are comments.
Several numbers or words in one cell are set apart by spaces; ``32x8192`` is thirty-two times 8192, and ``1..64`` every
number from 1 to 64.
"""

from __future__ import annotations

import csv
import functools
import itertools
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import torch

from .. import fp8
from .case import BENCH, Case, cases, ops

OP = "op"
COMMENT = "#"

NOT_COLUMNS = (OP, "level")
"""Fields of a case that are the same for all of an op that a file holds."""

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": fp8.FN,
    "fnuz": fp8.FNUZ,
}
FLAGS = {"yes": True, "no": False, "true": True, "false": False}

NUMBERS = re.compile(r"(?:(\d+)x)?(-?\d+)|(\d+)\.\.(\d+)", re.ASCII)
"""A whole number and how many times it stands there, or the ends of a range."""
MOST_DIGITS, MOST_DIGITS_OF_COUNTS = 18, 6
"""Of a number, and of how many times it stands there or the ends of a range."""
LEAST_RANGE = 3
"""Numbers that are written as a range."""


class ShapesError(ValueError):
    """A file that cannot be read as shapes; the message says where and why."""


@functools.cache
def case_class(op: str) -> type[Any]:
    """The class of an op's cases."""
    return type(cases(op)[0])


@functools.cache
def _types(op: str) -> dict[str, Any]:
    return typing.get_type_hints(case_class(op))


def columns(op: str) -> dict[str, Field[Any]]:
    """The fields that a row of an op may give, by name."""
    return {field.name: field for field in fields(case_class(op)) if field.name not in NOT_COLUMNS}


def read(path: Path) -> list[Case]:
    """The cases of a file, in order, all of level "bench".

    Raises:
        ShapesError: the file or a row cannot be read, a cell has a value that its field cannot have, or two rows have
            the same name. The message begins with the file and, where there is one, the line; it names the column.
    """
    found: dict[tuple[str, str], tuple[int, Case]] = {}
    for line, cells in _rows(path):
        try:
            case = case_of(cells)
        except ValueError as error:
            raise ShapesError(f"{path}:{line}: {error}") from error
        first, before = found.setdefault((case.op, case.name), (line, case))
        if before != case:
            advice = "; give one of them a label" if "label" in columns(case.op) else ""
            raise ShapesError(f"{path}:{line}: {case.op} {case.name} is also the name of line {first}{advice}")
        if first != line:
            raise ShapesError(f"{path}:{line}: {case.op} {case.name} is there already, in line {first}")
    if not found:
        raise ShapesError(f"{path}: expected a line of column names and a line for each case, found no case")
    return [case for _, case in found.values()]


def case_of(cells: dict[str, str]) -> Case:
    """The case of a row, from its cells by column; blank ones count as not there.

    Raises:
        ValueError: the message names the column.
    """
    given = {name: cell for name, cell in cells.items() if cell}
    op = given.pop(OP, None)
    if op not in ops():
        raise ValueError(f"column {OP!r}: expected one of {', '.join(ops())}, got {op!r}")
    known, made, types = columns(op), case_class(op), _types(op)
    values = {}
    for name, cell in given.items():
        if name not in known:
            raise ValueError(f"column {name!r}: {op} has none of that name, so expected a blank cell, got {cell!r}")
        try:
            values[name] = _value(types[name], made.ACCEPTED.get(name, ()), cell)
        except ValueError as error:
            raise ValueError(f"column {name!r}: {error}, got {cell!r}") from error
    for name, field in known.items():
        if field.default is MISSING and name not in values:
            raise ValueError(f"column {name!r}: {op} needs it, and it has no default")
    try:
        case: Case = made(**values, level=BENCH)
    except ValueError as error:
        # It begins with the name of the field.
        name, _, sentence = str(error).partition(": ")
        raise ValueError(f"column {name!r}: {sentence}") from error
    return case


def row_of(case: Case) -> dict[str, str]:
    """The row that :func:`case_of` makes such a case of: its cells, without those that are the default."""
    given = {name: (getattr(case, name), field.default) for name, field in columns(case.op).items()}
    return {OP: case.op} | {name: cell(value) for name, (value, default) in given.items() if value != default}


def cell(value: object) -> str:
    """A field's value as a cell has it."""
    if isinstance(value, tuple):
        return " ".join(_runs(value) if value and isinstance(value[0], int) else value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return next((name for name, dtype in DTYPES.items() if dtype is value), str(value))


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    """Numbers as a cell has them: few words for batches of equal and of rising lengths."""
    runs = [(number, len(list(run))) for number, run in itertools.groupby(numbers)]
    place = 0
    while place < len(runs):
        (number, count), rising = runs[place], _rising(runs, place)
        if rising >= LEAST_RANGE:
            yield f"{number}..{number + rising - 1}"
            place += rising
        else:
            yield f"{count}x{number}" if count > 1 else str(number)
            place += 1


def _rising(runs: Sequence[tuple[int, int]], place: int) -> int:
    """How many numbers from a place on stand there once, each one more than the one before; 0 of negative ones."""
    first, end = runs[place][0], place
    while first >= 0 and end < len(runs) and runs[end] == (first + end - place, 1):
        end += 1
    return end - place


def takes(op: str, name: str) -> str:
    """What a column takes, in words."""
    made, kind = case_class(op), _types(op)[name]
    accepted = [cell(value) for value in made.ACCEPTED.get(name, ())]
    several = typing.get_origin(kind) is tuple
    if kind is bool:
        return "yes or no"
    if accepted:
        return f"{'any' if several else 'one'} of {', '.join(filter(None, accepted))}"
    if kind is str:
        return "text"
    least = f", at least {made.LEAST[name]}" * (name in made.LEAST)
    return f"{_wanted(_count(kind))}{least}"


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and cells by column of every case."""
    header: list[str] | None = None
    for line, row in _lines(path):
        if header is None:
            header = row
            _check_header(f"{path}:{line}", header)
        elif len(row) > len(header):
            raise ShapesError(f"{path}:{line}: {len(row)} cells, but there are {len(header)} columns")
        else:
            yield line, dict(zip(header, row, strict=False))


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number and stripped cells of every line that is neither blank nor a comment."""
    line = 0
    try:
        # Spreadsheets put a byte order mark first.
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            for row in reader:
                line = reader.line_num
                cells = [text.strip() for text in row]
                if any(cells) and not cells[0].startswith(COMMENT):
                    yield line, cells
    except csv.Error as error:
        raise ShapesError(f"{path}:{line + 1}: {error}") from error
    except UnicodeDecodeError as error:
        raise ShapesError(f"{path}: expected text in UTF-8, got a byte {error.object[error.start]:#04x}") from error
    # A name with a null byte is a ValueError.
    except (OSError, ValueError) as error:
        raise ShapesError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _check_header(place: str, header: Sequence[str]) -> None:
    known = dict.fromkeys([OP, *(name for op in ops() for name in columns(op))])
    for name in header:
        if name not in known:
            raise ShapesError(f"{place}: column {name!r}: no op has that; there are {', '.join(known)}")
        if header.count(name) > 1:
            raise ShapesError(f"{place}: column {name!r} is there twice")
    if OP not in header:
        raise ShapesError(f"{place}: expected a column {OP!r}, got {', '.join(header)}")


def _value(kind: Any, accepted: Sequence[Any], text: str) -> Any:
    """What a cell says, for a field of a type; the field's class looks at the value.

    Raises:
        ValueError: it cannot be read.
    """
    if kind is str:
        return text
    if kind is int:
        return _integers(text, 1)[0]
    if kind is bool:
        return _one_of(FLAGS, text.lower())
    if kind is torch.dtype:
        return _one_of({name: dtype for name, dtype in DTYPES.items() if dtype in accepted}, text)
    if typing.get_args(kind)[0] is str:
        return tuple(text.split())
    return _integers(text, _count(kind))


def _numbers(word: str) -> Sequence[int]:
    """What a word of a cell stands for, nothing where it is no number.

    Raises:
        ValueError: it is one with too many digits.
    """
    found = NUMBERS.fullmatch(word)
    if found is None:
        return ()
    count, number, low, high = found.groups(default="")
    if len(number.lstrip("-")) > MOST_DIGITS or max(map(len, (count, low, high))) > MOST_DIGITS_OF_COUNTS:
        raise ValueError(
            f"too large: expected at most {MOST_DIGITS} digits, {MOST_DIGITS_OF_COUNTS} in a count or a range"
        )
    return range(int(low), int(high) + 1) if low else (int(number),) * int(count or 1)


def _count(kind: Any) -> int | None:
    """How many elements a type has, None where there may be any number of them."""
    elements = typing.get_args(kind) or (kind,)
    return None if ... in elements else len(elements)


def _wanted(count: int | None) -> str:
    return "whole numbers" if count is None else "a whole number" if count == 1 else f"{count} whole numbers"


def _one_of(values: dict[str, Any], text: str) -> Any:
    if text not in values:
        raise ValueError(f"expected one of {', '.join(values)}")
    return values[text]


def _integers(text: str, count: int | None) -> tuple[int, ...]:
    """Whole numbers, so many of them or any number."""
    found = [_numbers(word) for word in text.split()]
    numbers = tuple(itertools.chain.from_iterable(found))
    if not all(found) or count not in (None, len(numbers)):
        raise ValueError(f"expected {_wanted(count)}")
    return numbers
