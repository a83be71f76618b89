"""FlashAttention-3 (https://github.com/Dao-AILab/flash-attention, directory hopper): ``flash_attn_with_kvcache``.

Timed: the call, which makes its own output. With FP8 caches it rounds probabilities to e4m3 and gives bfloat16.
Outside: the scheduler's metadata for these very lengths; with FP8 caches the queries in e4m3, scaled to its largest
value per sequence and KV head; and the copies that :mod:`kvscout.testing.peers.pa_decode` names.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from .... import fp8
from ....ops.pa_decode.api import Problem
from ...case import Prepared
from .. import Launch, Peer, import_failure
from . import HEAD_SCALES, deliver, inputs, refusal, single_e4m3

MODULE = "flash_attn_interface"
HEAD_DIMS = (64, 128, 192, 256)


def _unavailable(arch: str) -> str | None:
    if arch != "sm_90":
        return f"has kernels for sm_90; this is {arch}"
    return import_failure(MODULE)


def _refuses(problem: Problem) -> str | None:
    if problem.has_sinks:
        return "is timed without sinks alone, whose type it does not document"
    return refusal(problem, HEAD_DIMS, HEAD_SCALES)


def _prepare(prepared: Prepared) -> Launch:
    problem, args, given = prepared.problem, prepared.args, inputs(prepared)
    batch, kv_heads = problem.num_sequences, problem.num_kv_heads
    query = given.query.unflatten(0, (batch, problem.query_length))
    options: dict[str, Any] = {}
    if problem.cache_dtype in fp8.E4M3:
        query, options["q_descale"] = _quantised(query, kv_heads)
        options["k_descale"] = _per_head(args.key_scale, args.key_factor, query, kv_heads)
        options["v_descale"] = _per_head(args.value_scale, args.value_factor, query, kv_heads)
    shared: dict[str, Any] = {"causal": problem.causal, "window_size": _window(problem)}
    library = importlib.import_module(MODULE)
    metadata = library.get_scheduler_metadata(
        batch,
        problem.query_length,
        given.block_tables.shape[1] * problem.page,
        problem.num_heads,
        kv_heads,
        problem.head_dim,
        given.lengths,
        qkv_dtype=problem.cache_dtype,
        page_size=problem.page,
        **shared,
    )
    return functools.partial(
        library.flash_attn_with_kvcache,
        query,
        given.keys,
        given.values,
        cache_seqlens=given.lengths,
        page_table=given.block_tables,
        softmax_scale=args.softmax_scale,
        scheduler_metadata=metadata,
        **shared,
        **options,
    )


def _window(problem: Problem) -> tuple[int, int]:
    """Tokens seen to the left and to the right of a query's own; -1 is all of them."""
    if not problem.window:
        return -1, -1
    return problem.window - 1, 0 if problem.causal else problem.window - 1


def _quantised(query: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Queries ``[B, QL, Hq, D]`` in e4m3, and float32 ``[B, Hkv]`` that they are to be multiplied by."""
    grouped = query.float().unflatten(2, (kv_heads, -1))
    limit = fp8.max_value(fp8.FN)
    scale = (grouped.abs().amax((1, 3, 4)) / limit).clamp(min=torch.finfo(torch.float32).tiny)
    quantised = (grouped / scale[:, None, :, None, None]).clamp(-limit, limit).to(fp8.FN)
    return quantised.flatten(2, 3), scale


def _per_head(scale: Tensor | None, factor: float, query: Tensor, kv_heads: int) -> Tensor:
    """A cache's scales as float32 ``[B, Hkv]``."""
    ones = torch.ones(len(query), kv_heads, device=query.device)
    return ones * factor if scale is None else ones * scale * factor


PEER = Peer(
    unavailable=_unavailable,
    refuses=_refuses,
    prepare=_prepare,
    deliver=deliver,
    tolerance=single_e4m3,
    distributions=("tokenspeed-fa3", "flash-attn-3"),
    module=MODULE,
)
