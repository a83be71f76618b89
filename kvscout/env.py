"""Every environment variable that kvscout reads. Nothing else in the package touches ``os.environ``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ON, OFF = ("1", "true", "on", "yes"), ("0", "false", "off", "no", "")


class WrongVariable(ValueError):
    """An environment variable has a value that means nothing; the message names it and says what was expected."""


@dataclass(frozen=True)
class Setting:
    """One environment variable: its name, what an unset value means, and what it does."""

    name: str
    default: str
    meaning: str


SETTINGS = (
    Setting(
        "KVSCOUT_<OP>_VARIANT",
        "auto",
        "variant of the calls of one op that leave variant='auto': KVSCOUT_MQA_LOGITS_VARIANT, ...",
    ),
    Setting(
        "KVSCOUT_CACHE_DIR",
        "~/.cache/kvscout",
        "folder of the compiled CuTe DSL kernels, where they are looked for, and written; also of Triton kernels that "
        "were compiled ahead of time",
    ),
    Setting(
        "KVSCOUT_AOT_ONLY",
        "0",
        "1 makes a CuTe DSL kernel that is not in that folder an error: none is compiled; all does so with Triton "
        "kernels too",
    ),
    Setting(
        "KVSCOUT_PA_CLUSTER_MERGE",
        "1",
        "0 keeps the tile kernels of pa_decode from merging partial results themselves, where they would: cute_wgmma "
        "does for plans of few partitions, triton_tile for plans of one slot a sequence; a second kernel merges them "
        "then as it does elsewhere",
    ),
    Setting(
        "KVSCOUT_TUNED_DIR",
        "none",
        "folder of tuned tables of one's own ('kvscout tune'), which win over the package's",
    ),
    Setting(
        "KVSCOUT_TUNED", "1", "0 leaves every tuned table alone: calls get the variant and config that the rule gives"
    ),
    Setting("XDG_CACHE_HOME", "~/.cache", "folder that kvscout's lies in where KVSCOUT_CACHE_DIR is not set"),
    Setting("CC", "cc, gcc or clang", "C compiler that links CuTe DSL kernels"),
    Setting(
        "TRITON_INTERPRET", "0", "Triton's own switch: 1 lets its variants run on CPU tensors, interpreted: for tests"
    ),
)


def variant_override(op: str) -> str:
    """Variant named by ``KVSCOUT_<OP>_VARIANT`` for this op, or ``"auto"``."""
    return os.environ.get(variant_variable(op), "auto") or "auto"


def variant_variable(op: str) -> str:
    """Name of the variable that names an op's variant."""
    return f"KVSCOUT_{op.upper()}_VARIANT"


def triton_interpret() -> bool:
    """Whether Triton was asked to interpret its kernels, which is what lets them take CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")


def cache_dir() -> Path:
    """The folder of compiled kernels. It need not exist.

    Raises:
        WrongVariable: the home folder that it is to lie in is not known.
    """
    name = cache_variable()
    named = os.environ.get(name, "") if name != "HOME" else "~/.cache"
    try:
        folder = Path(named).expanduser().absolute()
    except RuntimeError as error:
        said = "is not set and the system knows no home folder" if name == "HOME" else f"{named!r} has no home folder"
        raise WrongVariable(f"{name}: {said}; set KVSCOUT_CACHE_DIR to a folder") from error
    return folder if name == "KVSCOUT_CACHE_DIR" else folder / "kvscout"


def cache_variable() -> str:
    """The variable that says where :func:`cache_dir` lies."""
    return next((name for name in ("KVSCOUT_CACHE_DIR", "XDG_CACHE_HOME") if os.environ.get(name)), "HOME")


def aot_only() -> bool:
    """Whether CuTe DSL kernels must have been compiled ahead of time.

    Raises:
        WrongVariable: the variable says neither yes nor no, nor "all".
    """
    return triton_aot_only() or _switch("KVSCOUT_AOT_ONLY", "0", "all")


def triton_aot_only() -> bool:
    """Whether Triton kernels must have been, too."""
    return os.environ.get("KVSCOUT_AOT_ONLY", "").lower() == "all"


def tuned_dir() -> Path | None:
    """The folder of the user's own tuned tables, None where none is named. It need not exist.

    Raises:
        WrongVariable: it is to lie in a home folder that is not known.
    """
    named = os.environ.get("KVSCOUT_TUNED_DIR", "")
    try:
        return Path(named).expanduser().absolute() if named else None
    except RuntimeError as error:
        raise WrongVariable(f"KVSCOUT_TUNED_DIR: {named!r} has no home folder") from error


def use_tuned() -> bool:
    """Whether tuned tables are used at all.

    Raises:
        WrongVariable: the variable says neither yes nor no.
    """
    return _switch("KVSCOUT_TUNED", "1")


def pa_cluster_merge() -> bool:
    """Whether tile kernels of ``pa_decode`` may merge partial results themselves.

    Raises:
        WrongVariable: the variable says neither yes nor no.
    """
    return _switch("KVSCOUT_PA_CLUSTER_MERGE", "1")


def _switch(name: str, default: str, *others: str) -> bool:
    value = os.environ.get(name, default)
    if value.lower() not in (*ON, *OFF):
        words = ("0", "1", "true", "false", "on", "off", "yes", "no", *others)
        raise WrongVariable(f"{name}: expected {', '.join(words[:-1])} or {words[-1]}, got {value!r}")
    return value.lower() in ON


def c_compiler() -> list[str]:
    """The words of ``CC``: a command and its first arguments; none where it is unset.

    Raises:
        WrongVariable: it is not words as a shell has them.
    """
    value = os.environ.get("CC", "")
    try:
        return shlex.split(value)
    except ValueError as error:
        raise WrongVariable(f"CC: expected a command as in a shell, got {value!r}: {error}") from error


def wrong() -> dict[str, str]:
    """Every variable that is set to a value that means nothing, with the sentence that says so."""
    found = {}
    for read in (cache_dir, aot_only, pa_cluster_merge, tuned_dir, use_tuned, c_compiler):
        try:
            read()
        except WrongVariable as error:
            name, _, sentence = str(error).partition(": ")
            found[name] = sentence
    return {name: sentence for name, sentence in found.items() if name in os.environ}


def current(ops: Iterable[str]) -> dict[str, str | None]:
    """Value of every variable, None where it is unset; ``<OP>`` is spelt out for each of ``ops``."""
    words = [op.upper() for op in ops]
    names = [n for setting in SETTINGS for n in dict.fromkeys(setting.name.replace("<OP>", word) for word in words)]
    return {name: os.environ.get(name) for name in names}


def unread(ops: Iterable[str]) -> dict[str, str]:
    """Every variable that begins with ``KVSCOUT_`` and is none of those, so a misspelling, with its value."""
    known = current(ops)
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith("KVSCOUT_") and name not in known}
