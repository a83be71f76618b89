"""``torch.library`` schemas, fakes and lazy implementations: what makes the public functions compilable.

Each public function is one node that fills tensors its caller allocated; its fake is therefore a no-op. Only traced
calls come through here. Eager calls go straight to the op's ``run`` and save the dispatcher's microseconds.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

SCHEMAS = {
    "mqa_logits": (
        "(Tensor q, Tensor k, Tensor k_scale, Tensor weights, Tensor cu_seq_len_k_start, Tensor cu_seq_len_k_end, "
        "Tensor? q_scale, Tensor(a!) out, bool clean_logits, str variant) -> ()"
    ),
}


def traced(op: str) -> Any:
    """The node of an op, for calls under ``torch.compile``; takes what the op's ``run`` takes."""
    return getattr(torch.ops.kvscout, op)


def _register(op: str, schema: str) -> None:
    def implementation(*args: Any, **kwargs: Any) -> None:
        importlib.import_module(f".ops.{op}.api", __package__).run(*args, **kwargs)

    def fake(*args: Any, **kwargs: Any) -> None:
        return None

    name = f"kvscout::{op}"
    torch.library.define(name, schema)
    torch.library.impl(name, ("cpu", "cuda"))(implementation)
    torch.library.register_fake(name)(fake)


for _op, _schema in SCHEMAS.items():
    _register(_op, _schema)
