"""Tuned tables: which variant and config were fastest on a GPU, by bucket of the problem.

A table is a JSON file that ``kvscout tune`` writes, of one model of GPU and named after it: ``nvidia_h200.json``. Those
of the package lie in ``kvscout/tuned``, a user's own in the folder that KVSCOUT_TUNED_DIR names, and win. A *bucket* is
what a table tells apart: each op's ``Problem.bucket`` says which sizes count by power of two, and what does not count.

A table is read once a process. One that cannot be used (not readable, of another GPU, or tuned with other kernels than
these) is left alone with a line in the log, and so is an entry that names what is not there: then the rule decides.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import env
from .device import model_of

LOG = logging.getLogger("kvscout")

FORMAT = 1
"""Of the files; another one is not read."""

PACKAGED = Path(__file__).parent / "tuned"

MOST_QUOTED = 64
"""Characters of a name in a table that are shown."""

Bucket = frozenset[tuple[str, str | int | bool]]
"""Names and values of what a table tells apart."""

# What says nothing to a machine: comments on lines of their own, docstrings, and empty lines. A kernel whose docstring
# is given the figures of a table must not make that table stale.
UNREAD = re.compile(r'^[ ]*(#.*|[rR]?"""(?:(?!""")[\s\S])*""")?[ ]*\n', re.MULTILINE)


class Entry(NamedTuple):
    """The fastest variant of a bucket, and its config as ``str`` gives it."""

    variant: str
    config: str


class Section(NamedTuple):
    """Where a table says other than the rule of an op, and the fingerprint of the op's sources when it was tuned."""

    fingerprint: str
    entries: dict[Bucket, Entry]


@dataclass(frozen=True)
class Table:
    """A file that can be used on this machine."""

    file: Path
    ops: dict[str, Section]


class WrongTable(ValueError):
    """A file is no table, or not one for this machine; the message says why, in words that follow the file's name."""


@functools.cache
def warn(sentence: str) -> None:
    """Log a sentence, once a process."""
    LOG.warning(sentence)


def size_class(n: int) -> int:
    """The least power of two from ``n`` on, which stands for every size above the one before it; 0 for 0."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def bucket(problem: Any, classes: Collection[str], without: Collection[str] = ()) -> Bucket:
    """A problem's fields, those of ``classes`` by :func:`size_class`, all others but ``without`` as they are.

    The architecture is left out: a table is of one GPU.
    """
    return frozenset(
        (name, size_class(value) if name in classes else str(value) if isinstance(value, torch.dtype) else value)
        for name, value in vars(problem).items()
        if name != "arch" and name not in without
    )


def file_name(model: str) -> str:
    """Name of the file of a model: ``"NVIDIA H200"`` has ``nvidia_h200.json``."""
    return re.sub(r"[^a-z0-9]+", "_", model.lower()).strip("_") + ".json"


def entry(op: str, package: str, problem: Any) -> Entry | None:
    """What the tables of this machine say of a problem, or None."""
    known = entries(problem.arch, op, package)
    # A problem without a bucket is one whose choice must not depend on a table.
    found = problem.bucket() if known else None
    return None if found is None else known.get(found)


@functools.cache
def entries(arch: str, op: str, package: str) -> Mapping[Bucket, Entry]:
    """All that the usable tables of this machine say of an op; a user's own words count."""
    known: dict[Bucket, Entry] = {}
    for table in reversed(_tables(arch)):
        section = table.ops.get(op)
        if section is None:
            continue
        if section.fingerprint == fingerprint(package):
            known |= section.entries
        else:
            warn(f"{table.file}: {stale(op)}")
    return known


def stale(op: str) -> str:
    """The sentence on a section whose kernels are not those of this package."""
    return f"was tuned with other kernels of {op} than these, so its entries for {op} are not used; run 'kvscout tune'"


@functools.cache
def _tables(arch: str) -> list[Table]:
    """The usable tables of the machine's device of an architecture, the user's own first."""
    model = model_of(arch)
    if model is None or not env.use_tuned():
        return []
    try:
        tables = look(model)
    except env.WrongVariable as error:
        warn(str(error))
        return []
    for file, found in tables.items():
        if isinstance(found, WrongTable):
            warn(f"{file}: {found}")
        elif found is None and file.parent != PACKAGED:
            warn(f"KVSCOUT_TUNED_DIR: there is no {file}, so no table of one's own is used")
    return [found for found in tables.values() if isinstance(found, Table)]


def look(model: str) -> dict[Path, Table | WrongTable | None]:
    """Where tables of a model may be, the user's own first: a table, why what is there cannot be used, or nothing.

    Raises:
        WrongVariable: KVSCOUT_TUNED_DIR names no folder.
    """
    return {file: _found(file, model) for file in (folder / file_name(model) for folder in _folders())}


def _folders() -> list[Path]:
    return [folder for folder in (env.tuned_dir(), PACKAGED) if folder is not None]


def models(arch: str, num_sms: int) -> list[str]:
    """GPUs of an architecture, with so many multiprocessors, whose calls would look into a table that is here.

    The runs in a table say what they were made on. A table that cannot be read, or does not say it, is left alone with
    a line in the log.

    Raises:
        WrongVariable: KVSCOUT_TUNED_DIR or KVSCOUT_TUNED means nothing.
    """
    if not env.use_tuned():
        return []
    found: dict[str, None] = {}
    for file in (file for folder in _folders() for file in sorted(folder.glob("*.json"))):
        try:
            model, machines = _tuned_on(file)
        except WrongTable as error:
            warn(f"{file}: {error}")
            continue
        # No call would look into a file of another name.
        if file_name(model) == file.name and any(
            machine.get("arch") == arch and machine.get("sms", num_sms) == num_sms for machine in machines
        ):
            found[model] = None
    return list(found)


def _tuned_on(file: Path) -> tuple[str, list[dict[str, Any]]]:
    """The model that a table is of, and the machines that it was tuned on.

    Raises:
        WrongTable: it cannot be read, is no table, or does not say.
    """
    content = _content(file)
    try:
        machines = [dict(run["machine"]) for run in content["runs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise WrongTable(f"is no whole table ({type(error).__name__}: {error})") from error
    if not any("arch" in machine for machine in machines):
        raise WrongTable("does not say on which architecture it was tuned")
    return str(content.get("device")), machines


def _found(file: Path, model: str) -> Table | WrongTable | None:
    try:
        return Table(file, _sections(read(file, model))) if file.exists() else None
    except WrongTable as error:
        return error
    except OSError as error:
        return WrongTable(f"cannot be read ({error.strerror})")


def read(file: Path, model: str) -> dict[str, Any]:
    """Everything in a table of a model.

    Raises:
        WrongTable: it cannot be read, is no table, or is one of another model. The message does not name the file.
    """
    content = _content(file)
    if content.get("device") != model:
        raise WrongTable(f"was tuned on {_quoted(content.get('device'))}, and this is {model}")
    try:
        _sections(content)
    except (KeyError, TypeError, AttributeError) as error:
        raise WrongTable(f"is no whole table ({type(error).__name__}: {error})") from error
    return content


def _quoted(name: object) -> str:
    """A name of a file's, which may be anything, for a line of a log."""
    text = str(name)
    return repr(text if len(text) <= MOST_QUOTED else f"{text[:MOST_QUOTED]}...")


def _content(file: Path) -> dict[str, Any]:
    """What a table holds, of whichever model."""
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise WrongTable(f"cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise WrongTable(f"is not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise WrongTable(f"is no tuned table of format {FORMAT}")
    return content


def _sections(content: dict[str, Any]) -> dict[str, Section]:
    return {
        op: Section(
            section["fingerprint"],
            {
                frozenset(made["bucket"].items()): Entry(str(made["variant"]), str(made["config"]))
                for made in section["entries"]
                # Where the rule's own choice won, the rule stays: it may tell apart what is one bucket.
                if made.get("over_default") != 0
            },
        )
        for op, section in content["ops"].items()
    }


@functools.cache
def fingerprint(package: str) -> str:
    """Sixteen hex digits that change with the sources of an op, and of the device code that ops share.

    ``package`` is the op's. What says nothing to a machine does not count: :data:`UNREAD`.
    """
    folders = [*map(Path, importlib.import_module(package).__path__), Path(__file__).parent / "kernels"]
    digest = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{file.relative_to(folder).as_posix()}\n".encode())
            digest.update(UNREAD.sub("", file.read_text()).encode())
    return digest.hexdigest()[:16]
