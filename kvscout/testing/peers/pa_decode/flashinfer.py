"""FlashInfer's FA2 kernels (https://github.com/flashinfer-ai/flashinfer): decode on tensor cores; prefill for QL > 1.

Timed: ``run``, into an output made beforehand. With FP8 caches queries and probabilities keep their 16 bits. A scale of
the values is multiplied into the output by a second kernel.
Outside: building the kernels, ``plan`` for these very lengths (its users plan again at every step), and the copies that
:mod:`kvscout.testing.peers.pa_decode` names.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from ....ops.pa_decode.api import Problem
from ...case import Prepared
from .. import Launch, Peer, import_failure
from . import ROUNDED_PARTS, Inputs, deliver, inputs, one_scale, refusal

HEAD_DIMS = (64, 128, 256)
# Partial results of a prefill tile of 64 rows on every SM twice are more than the 128 MiB that its documentation names.
WORKSPACE_BYTES = 512 << 20
OLDEST = 80


def _unavailable(arch: str) -> str | None:
    kind, _, number = arch.partition("_")
    if kind != "sm" or int(number) < OLDEST:
        return f"has kernels for sm_{OLDEST} and later; this is {arch}"
    return import_failure("flashinfer")


def _refuses(problem: Problem) -> str | None:
    if problem.has_sinks:
        return "takes no sinks"
    if problem.window and not problem.causal and problem.query_length > 1:
        return "has no window to the right of a query"
    return refusal(problem, HEAD_DIMS)


def _prepare(prepared: Prepared) -> Launch:
    problem, args, given = prepared.problem, prepared.args, inputs(prepared)
    numbers: dict[str, Any] = {
        "sm_scale": args.softmax_scale * one_scale(args.key_scale, args.key_factor),
        "window_left": problem.window - 1,
        "q_data_type": problem.dtype,
        "kv_data_type": problem.cache_dtype,
    }
    shape = (problem.num_heads, problem.num_kv_heads, problem.head_dim, problem.page)
    library = importlib.import_module("flashinfer")
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=given.query.device)
    if problem.query_length == 1:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, backend="fa2")
        wrapper.plan(*_pages(given, problem.page), *shape, **numbers)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        first_rows = _starts(torch.full_like(given.lengths, problem.query_length))
        wrapper.plan(first_rows, *_pages(given, problem.page), *shape, causal=problem.causal, **numbers)
    value_scale = one_scale(args.value_scale, args.value_factor)
    return functools.partial(
        wrapper.run,
        given.query,
        (given.keys, given.values),
        v_scale=None if value_scale == 1 else value_scale,
        out=torch.empty_like(given.query),
    )


def _starts(counts: Tensor) -> Tensor:
    """int32 ``[B + 1]``: where each sequence's share begins, and where the last one's ends."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


def _pages(given: Inputs, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where each sequence's pages start in the list of all pages, that list, and how full each one's last page is."""
    column = torch.arange(given.block_tables.shape[1], device=given.block_tables.device)
    listed = given.block_tables[column < given.num_pages[:, None]]
    filled = given.lengths - (given.num_pages - 1).clamp(min=0) * page
    return _starts(given.num_pages), listed, filled


PEER = Peer(
    unavailable=_unavailable,
    refuses=_refuses,
    prepare=_prepare,
    deliver=deliver,
    tolerance=lambda problem: ROUNDED_PARTS,
    distributions=("flashinfer-python",),
    module="flashinfer",
)
