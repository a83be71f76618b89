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
    "pa_plan": (
        "(Tensor context_lengths, Tensor(a!) work_info, Tensor(b!) reduce_info, SymInt max_partitions, "
        "SymInt sliding_window, SymInt query_length, SymInt tile, SymInt tiles_per_partition, str variant) -> ()"
    ),
    "topk": ("(Tensor logits, Tensor? starts, Tensor? ends, Tensor(a!) out, SymInt k, bool sorted, str variant) -> ()"),
    "selection_tables": (
        "(Tensor selected, Tensor block_tables, Tensor context_lengths, Tensor? sequences, Tensor? ends, "
        "Tensor(a!) out_tables, Tensor(b!) out_lengths, SymInt block_size, SymInt page, str variant) -> ()"
    ),
    "selection_gather": (
        "(Tensor selected, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor context_lengths, "
        "Tensor? sequences, Tensor? ends, Tensor? key_scale, Tensor? value_scale, Tensor(a!) out_key_cache, "
        "Tensor(b!) out_value_cache, Tensor(c!) out_tables, Tensor(d!) out_lengths, Tensor(e!)? out_key_scale, "
        "Tensor(f!)? out_value_scale, SymInt num_kv_heads, str kv_layout, str variant) -> ()"
    ),
    "kv_cache": (
        "(Tensor k, Tensor v, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, Tensor(c!)? k_scale, "
        "Tensor(d!)? v_scale, float? k_factor, float? v_factor, str kv_layout, str variant) -> ()"
    ),
    # The counters are as they were when the op is done, so nothing is said of their being written.
    "pa_decode": (
        "(Tensor(a!) output, Tensor query, Tensor key_cache, Tensor value_cache, Tensor context_lengths, "
        "Tensor block_tables, float softmax_scale, SymInt query_length, Tensor work_info, Tensor reduce_info, "
        "Tensor arrival_counters, SymInt[] plan_numbers, Tensor? key_scale, Tensor? value_scale, float? key_factor, "
        "float? value_factor, Tensor? sinks, SymInt sliding_window, bool causal, Tensor(b!)? lse, str kv_layout, "
        "str variant, SymInt? max_context_length) -> ()"
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
