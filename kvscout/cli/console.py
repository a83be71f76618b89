"""All that the commands print: tables to stdout; progress and errors to stderr.

On a terminal where rich is installed, tables and progress are rich's. Elsewhere they are plain lines of text, which
files, pipes and logs take well.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self, TextIO

LINE_EVERY_S = 10.0
"""Seconds between two lines of plain progress."""

NUMBER = re.compile(r"-|[+-]?[\d.,]+(e[+-]?\d+)?[%x]?")
"""What a cell of a column of numbers looks like; a dash stands for none."""

MESSAGE_SHOWN = 600
"""Characters of a failure's message that are printed; a result file has all of it."""

PROSE_WIDTH = 24
"""Characters that a column of sentences needs at least."""


class OutputError(Exception):
    """What a command prints cannot be written; the message says why."""


@contextlib.contextmanager
def _printing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write to the standard output: {error.strerror}") from error


def out(text: str) -> None:
    """A line to stdout."""
    with _printing():
        sys.stdout.write(text + "\n")


def flush() -> None:
    """Have everything that was printed written."""
    with _printing():
        sys.stdout.flush()


def give_up() -> None:
    """Drop what cannot be written to stdout: Python would complain again when it closes it."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def error(text: str) -> None:
    """A line to stderr, where there is one: Python has None for a stream that the shell closed."""
    if sys.stderr is not None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def count(number: int, noun: str) -> str:
    """A number of things: "1 case", "2 cases"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def failure(op: str, case: str, variant: str, config: str, message: str) -> str:
    """The line that says what failed; a long message is cut."""
    if len(message) > MESSAGE_SHOWN:
        message = message[:MESSAGE_SHOWN] + " ..."
    return f"FAILED {' '.join(filter(None, (op, case, variant, config)))}: {message}"


def _rich(stream: TextIO | None) -> Any:
    """A rich console for a terminal, or None."""
    if stream is None or not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, highlight=False)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; columns of numbers are aligned to the right, None shows as a dash."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    right = [bool(cells) and all(NUMBER.fullmatch(row[i]) for row in cells) for i in range(len(columns))]
    terminal = _rich(sys.stdout)
    # Only prose is broken into lines. What then does not fit is left to the terminal, which loses no character.
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    prose = [any(" " in row[i] for row in cells) for i in range(len(columns))]
    needed = sum(2 + (min(width, PROSE_WIDTH) if long else width) for width, long in zip(widths, prose, strict=True))
    if terminal is None or needed > terminal.width:
        out(_plain(title, columns, cells, right))
        return
    from rich import box, table
    from rich.text import Text

    drawn = table.Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column, is_right, is_prose in zip(columns, right, prose, strict=True):
        drawn.add_column(column, justify="right" if is_right else "left", no_wrap=not is_prose)
    for row in cells:
        drawn.add_row(*map(Text, row))
    terminal.print(drawn)


def _plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        parts = zip(cells, widths, right, strict=True)
        return "  ".join(c.rjust(w) if is_right else c.ljust(w) for c, w, is_right in parts).rstrip()

    return "\n".join(["", title, line(columns), line(["-" * width for width in widths]), *map(line, rows)])


class Progress:
    """How far a long job is: ``with Progress(total, label) as progress: ... progress.advance()``.

    A bar on a terminal with rich. Elsewhere a line now and then, and none for a job that ends soon.
    """

    def __init__(self, total: int, label: str) -> None:
        self.total, self.label, self.detail, self.done = total, label, "", 0
        self._line_at = time.monotonic() + LINE_EVERY_S
        self._bar = _bar(total, label)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, detail: str) -> None:
        """Say what is being done now."""
        self.detail = detail
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], detail=detail)

    def advance(self, amount: int = 1) -> None:
        """Count ``amount`` more of ``total`` as done."""
        self.done += amount
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], amount)
        elif time.monotonic() >= self._line_at:
            self._line_at = time.monotonic() + LINE_EVERY_S
            error(f"{self.label}: {self.done} of {self.total} {self.detail}".rstrip())


def _bar(total: int, label: str) -> Any:
    """A rich progress bar on stderr that vanishes when done, or None."""
    terminal = _rich(sys.stderr)
    if terminal is None:
        return None
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[detail]}", markup=False),
    )
    # What is printed meanwhile appears above the bar; a file or pipe gets its lines as always.
    bar = progress.Progress(*columns, console=terminal, transient=True, redirect_stdout=sys.stdout.isatty())
    bar.add_task(label, total=total, detail="")
    return bar
