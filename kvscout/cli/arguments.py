"""What the commands share in reading arguments: numbers, files, and the variables that name variants."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import env
from ..testing import provenance
from ..testing.case import family, ops
from ..variants import AUTO
from . import console

HIGHEST = 2**31 - 1


class UsageError(Exception):
    """The command line asks for something that is not there; the message says what is."""


def whole_number(lowest: int, highest: int = HIGHEST) -> Callable[[str], int]:
    """Reads a whole number within bounds."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = lowest - 1
        if not lowest <= number <= highest:
            raise argparse.ArgumentTypeError(f"expected a whole number from {lowest} to {highest}, got {text!r}")
        return number

    return read


def add_jobs(parser: argparse.ArgumentParser, most: int, meaning: str) -> None:
    """Argument ``--jobs``: processes at a time, as many as there are cores unless that is more than ``most``."""
    cores = min(most, os.cpu_count() or 1)
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=whole_number(1),
        default=cores,
        help=f"{meaning} (default: the cores, at most {most}: {cores} here)",
    )


seed = whole_number(0, 2**63 - 1)
"""Reads a seed."""


def file_name(text: str) -> Path:
    """Reads the name of a file. Python takes an empty one for the folder that it is in."""
    if not text:
        raise argparse.ArgumentTypeError("expected the name of a file, got an empty one")
    return Path(text)


def add_json(parser: argparse.ArgumentParser) -> None:
    """The argument that names a result file."""
    parser.add_argument(
        "--json", metavar="FILE", type=file_name, help="also write every result and its provenance here"
    )


def check_json(file: Path | None) -> None:
    """Try a result file before the work begins: what it holds stays, and one that is not there is not left behind.

    Raises:
        UsageError: it cannot be written.
    """
    if file is None:
        return
    try:
        # Opening a pipe waits for its reader, and closing it again would tell the reader that this was all.
        if file.is_fifo():
            return
        if not file.resolve().parent.is_dir():
            raise UsageError(f"--json: there is no folder {file.resolve().parent}")
        existed = file.exists()
        with file.open("ab"):
            pass
        if not existed:
            os.unlink(os.path.realpath(file))
    # A name with a null byte is a ValueError, one that links to itself a RuntimeError.
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"--json: cannot write {str(file)!r}: {_reason(error)}") from error


def write_json(file: Path | None, content: Any) -> bool:
    """Write a result file, where one was asked for; say so and return False where that fails."""
    if file is None:
        return True
    try:
        file.write_text(provenance.dumps(content) + "\n")
    except OSError as error:
        console.error(f"--json: cannot write {str(file)!r}: {_reason(error)}")
        return False
    return True


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def wrong_overrides() -> dict[str, str]:
    """The variables that name a variant which does not exist, each with a sentence that says which do."""
    found = {}
    for op in ops():
        name, names = env.variant_override(op), family(op).names
        if name not in (AUTO, *names):
            found[env.variant_variable(op)] = f"{op} has no variant {name!r}; it has {', '.join(names)}, and 'auto'"
    return found


def check_overrides() -> None:
    """Look at the environment variables before anything runs.

    Raises:
        UsageError: one names a variant that does not exist, or has a value that means nothing.
    """
    if wrong := wrong_overrides() | env.wrong():
        raise UsageError("; ".join(f"{variable}: {sentence}" for variable, sentence in wrong.items()))
