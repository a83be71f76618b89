"""Every environment variable that kvscout reads. Nothing else in the package touches ``os.environ``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass


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


def current(ops: Iterable[str]) -> dict[str, str | None]:
    """Value of every variable, None where it is unset; ``<OP>`` is spelt out for each of ``ops``."""
    words = [op.upper() for op in ops]
    names = [n for setting in SETTINGS for n in dict.fromkeys(setting.name.replace("<OP>", word) for word in words)]
    return {name: os.environ.get(name) for name in names}


def unread(ops: Iterable[str]) -> dict[str, str]:
    """Every variable that begins with ``KVSCOUT_`` and is none of those, so a misspelling, with its value."""
    known = current(ops)
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith("KVSCOUT_") and name not in known}
