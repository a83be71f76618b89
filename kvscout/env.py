"""Every environment variable that kvscout reads. Nothing else in the package touches ``os.environ``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


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
        "folder of the compiled CuTe DSL kernels: where they are looked for, and written",
    ),
    Setting(
        "KVSCOUT_AOT_ONLY", "0", "1 makes a CuTe DSL kernel that is not in that folder an error: nothing is compiled"
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
    return _is_on("TRITON_INTERPRET")


def cache_dir() -> Path:
    """The folder of compiled kernels. It need not exist."""
    own = os.environ.get("KVSCOUT_CACHE_DIR")
    if own:
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "kvscout"


def aot_only() -> bool:
    """Whether kernels must have been compiled ahead of time."""
    return _is_on("KVSCOUT_AOT_ONLY")


def c_compiler() -> list[str]:
    """The words of ``CC``: a command and its first arguments; none where it is unset."""
    return shlex.split(os.environ.get("CC", ""))


def _is_on(name: str) -> bool:
    return os.environ.get(name, "0").lower() in ("1", "true", "on")


def current(ops: Iterable[str]) -> dict[str, str | None]:
    """Value of every variable, None where it is unset; ``<OP>`` is spelt out for each of ``ops``."""
    words = [op.upper() for op in ops]
    names = [n for setting in SETTINGS for n in dict.fromkeys(setting.name.replace("<OP>", word) for word in words)]
    return {name: os.environ.get(name) for name in names}


def unread(ops: Iterable[str]) -> dict[str, str]:
    """Every variable that begins with ``KVSCOUT_`` and is none of those, so a misspelling, with its value."""
    known = current(ops)
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith("KVSCOUT_") and name not in known}
