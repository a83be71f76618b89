"""Every environment variable that kvscout reads. Nothing else in the package touches ``os.environ``."""

from __future__ import annotations

import os
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
        "variant used by calls that leave variant='auto', per op: KVSCOUT_MQA_LOGITS_VARIANT, KVSCOUT_PA_DECODE_VARIANT, ...",
    ),
    Setting("TRITON_INTERPRET", "0", "Triton's own switch: 1 runs the Triton variants on CPU tensors, for tests (slow)"),
)


def variant_override(op: str) -> str:
    """Variant named by ``KVSCOUT_<OP>_VARIANT`` for this op, or ``"auto"``."""
    return os.environ.get(f"KVSCOUT_{op.upper()}_VARIANT", "auto") or "auto"


def triton_interpret() -> bool:
    """Whether Triton was asked to interpret its kernels, which is what lets them take CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
