"""Which kernels the calls of a model ask for on a GPU that is not here: the public functions, called without memory.

Everything from the checks to the launch is what a real call goes through. Only tensors have no memory (torch's "meta"
device, which stands for the GPU), and what asks for a kernel is noted instead of served.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import kvscout

from .. import fp8, paging, selection
from ..device import StandIn, stand_in
from ..kernels import triton_store
from ..kernels.cute import runtime
from ..kernels.cute.program import Program
from ..kernels.triton_store import Kernel
from .models import Attend, Model, Score, Select, WrongModel

META = "meta"
"""Where tensors lie that have no memory."""

NUMBER = 0.5
"""A scale: which one makes no difference to kernels."""


def kernels_of(models: Mapping[str, Model], gpu: StandIn) -> list[Program | Kernel]:
    """What every call of these models asks for on this GPU: each once, CuTe DSL's, then Triton's.

    For a process that does nothing else, and in which Triton does not interpret its kernels.

    Raises:
        WrongModel: a call is not legal; the message names the model, and the argument as the function does.
        UnsupportedProblem: no variant serves a call.
    """
    with stand_in(gpu), runtime.recording() as programs, triton_store.recording(gpu.arch) as kernels:
        for name, model in models.items():
            try:
                _call(model, gpu.arch)
            except (TypeError, ValueError) as error:
                raise WrongModel(f"{name}: {error}") from error
        return [*programs, *kernels.values()]


def _call(model: Model, arch: str) -> None:
    """Every call of a model."""
    e4m3 = fp8.FNUZ if arch == "gfx942" else fp8.FN
    if model.score is not None:
        _score(model.score, e4m3)
    if model.select is not None:
        _select(model.select)
    if model.attend is not None:
        _write(model.attend, e4m3)
        _attend(model.attend, model.select, e4m3)


def _score(score: Score, e4m3: torch.dtype) -> None:
    for rows, keys, clean, with_scale in itertools.product(score.rows, score.keys, score.clean_logits, score.q_scale):
        q = torch.empty(rows, score.heads, score.head_dim, dtype=e4m3, device=META)
        k = torch.empty(keys, score.head_dim, dtype=e4m3, device=META)
        k_scale = torch.empty(keys, device=META)
        weights = torch.empty(rows, score.heads, device=META)
        window = _int32(rows), _int32(rows)
        q_scale = torch.empty_like(weights) if with_scale else None
        kvscout.fp8_mqa_logits(q, (k, k_scale), weights, *window, clean, q_scale=q_scale)


def _select(select: Select) -> None:
    for rows, keys, is_sorted in itertools.product(select.rows, select.keys, select.sorted):
        logits = torch.empty(rows, keys, device=META)
        starts, ends = _int32(rows), _int32(rows)
        kvscout.topk_indices(logits, select.k, starts=starts, ends=ends, sorted=is_sorted)


class _Caches(NamedTuple):
    """A cache of keys, one of values, and what scales both."""

    layout: str
    page: int
    keys: Tensor
    values: Tensor
    scale: Tensor | float | None


def _caches(attend: Attend, e4m3: torch.dtype) -> Iterator[_Caches]:
    for layout, page, kind, pool in itertools.product(attend.layouts, attend.pages, attend.caches, attend.pool):
        if kind not in ("e4m3", attend.dtype):
            continue
        dtype = e4m3 if kind == "e4m3" else getattr(torch, kind)
        keys, values = paging.new_caches(layout, pool, attend.kv_heads, page, attend.head_dim, dtype, META)
        for scales in attend.scales if kind == "e4m3" else ("none",):
            yield _Caches(layout, page, keys, values, _scale(scales, attend.kv_heads, pool, page))


def _scale(kind: str, kv_heads: int, pool: int, page: int) -> Tensor | float | None:
    if kind == "none":
        return None
    if kind == "number":
        return NUMBER
    shapes: dict[str, Sequence[int]] = {"tensor": (1,), "head": (kv_heads,), "token": (pool, kv_heads, page)}
    return torch.empty(*shapes[kind], device=META)


def _write(attend: Attend, e4m3: torch.dtype) -> None:
    for caches, tokens in itertools.product(_caches(attend, e4m3), attend.written_tokens):
        shape = (tokens, attend.kv_heads, attend.head_dim)
        k, v = (torch.empty(shape, dtype=getattr(torch, attend.dtype), device=META) for _ in "kv")
        slots = torch.empty(tokens, dtype=getattr(torch, attend.slot_dtype), device=META)
        kvscout.write_kv_cache(
            k, v, caches.keys, caches.values, slots,
            k_scale=caches.scale, v_scale=caches.scale, kv_layout=caches.layout,
        )  # fmt: skip


def _attend(attend: Attend, select: Select | None, e4m3: torch.dtype) -> None:
    sizes = itertools.product(attend.batches, attend.query_lengths, attend.max_blocks)
    for caches, (batch, query_length, blocks) in itertools.product(_caches(attend, e4m3), sizes):
        lengths, tables = _int32(batch), _int32(batch, blocks)
        _decode(attend, caches, lengths, tables, query_length)
        if select is None:
            continue
        selected = _int32(batch * query_length, select.k)
        if select.block_size == 1:
            found = selection.gather_tokens(
                selected, caches.keys, caches.values, attend.kv_heads, tables, lengths,
                key_scale=caches.scale, value_scale=caches.scale, kv_layout=caches.layout,
            )  # fmt: skip
            copies = caches._replace(keys=found.key_cache, values=found.value_cache, scale=found.key_scale)
            _decode(attend, copies, found.context_lengths, found.block_tables, 1)
        else:
            pages = selection.tables_of_blocks(selected, tables, lengths, select.block_size, caches.page)
            _decode(attend, caches, pages.context_lengths, pages.block_tables, 1)


def _decode(attend: Attend, caches: _Caches, lengths: Tensor, tables: Tensor, query_length: int) -> None:
    plan = kvscout.plan_pa_decode(
        lengths, attend.kv_heads, max_partitions=attend.max_partitions, workgroup_budget=attend.workgroup_budget,
        sliding_window=attend.sliding_window, query_length=query_length, tile=attend.tile,
        batch_invariant=attend.batch_invariant,
    )  # fmt: skip
    shape = (lengths.shape[0] * query_length, attend.query_heads, attend.head_dim)
    query = torch.empty(shape, dtype=getattr(torch, attend.dtype), device=META)
    sinks = torch.empty(attend.query_heads, device=META) if attend.sinks else None
    for with_lse, most in itertools.product(attend.lse, attend.max_context_length):
        kvscout.pa_decode(
            torch.empty_like(query), query, caches.keys, caches.values, lengths, tables, NUMBER, query_length,
            work_plan=plan, key_scale=caches.scale, value_scale=caches.scale, sinks=sinks,
            sliding_window=attend.sliding_window, causal=attend.causal,
            lse=torch.empty(shape[:2], device=META) if with_lse else None,
            max_context_length=most, kv_layout=caches.layout,
        )  # fmt: skip


def _int32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)
