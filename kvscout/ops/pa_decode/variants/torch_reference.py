"""The definition in plain torch: gather every sequence's pages, score, mask, soften, weigh; and the CPU default.

Wins: on the CPU.
Limit: it gathers all columns of the block tables into wider numbers (on the CPU, up to the longest context of a few
sequences), whatever was planned and whatever a window hides.
Measured: 2026-11-30, one CPU core, 64 rows x 2048 tokens, 2 KV heads, D 64, e4m3: 4 MB at a time 0.15 s, 64 MB 0.28 s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .... import fp8, paging
from ....variants import Variant
from ..api import Args, Problem


@dataclass(frozen=True)
class Config:
    """Precision of the arithmetic, and how much may be gathered at a time: at least one sequence."""

    dtype: torch.dtype
    budget_bytes: int


def _default_config(problem: Problem) -> Config:
    # A GPU wants few large launches, a CPU core wants what it gathers to stay in its cache.
    return Config(torch.float32, 4 << 20 if problem.arch == "cpu" else 1 << 30)


def _space(problem: Problem) -> Iterable[Config]:
    yield Config(torch.float64, 1)


def reference(
    query: Tensor,
    kv: paging.Pages,
    lengths: Tensor,
    tables: Tensor,
    softmax_scale: float,
    query_length: int = 1,
    *,
    key_scale: Tensor | float = 1.0,
    value_scale: Tensor | float = 1.0,
    sinks: Tensor | None = None,
    window: int = 0,
    causal: bool = True,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Output ``[B * QL, Hq, D]`` and lse ``[B * QL, Hq]``, both in ``dtype``; scales as in :class:`api.Args`."""
    low, high = visible(lengths, query_length, window, causal)
    token = torch.arange(tables.shape[1] * kv.page, device=tables.device)
    owned = (token >= low.amin(1, keepdim=True)) & (token < high.amax(1, keepdim=True))  # [B, T]
    seen = (token >= low[..., None]) & (token < high[..., None])  # [B, QL, T]
    keys = _gather(kv.keys, kv.head_dim, tables, owned, key_scale, dtype)  # [B, Hkv, T, D]
    values = _gather(kv.values, kv.head_dim, tables, owned, value_scale, dtype)
    queries = query.to(dtype).reshape(*seen.shape[:2], kv.num_kv_heads, -1, kv.head_dim)  # [B, QL, Hkv, G, D]
    logits = softmax_scale * torch.einsum("bqhgd,bhtd->bqhgt", queries, keys)
    logits = logits.masked_fill(~seen[:, :, None, None], float("-inf"))
    sink = torch.full_like(queries[..., :1], float("-inf"))
    if sinks is not None:
        sink = sinks.to(dtype).view(kv.num_kv_heads, -1, 1).expand_as(sink)
    columns = torch.cat((logits, sink), -1)
    nothing = ~seen.any(-1)[:, :, None, None]
    lse = columns.logsumexp(-1).masked_fill(nothing, float("-inf"))
    # softmax knows no infinity; the largest finite sink takes all weight as well.
    weights = columns.clamp(max=torch.finfo(dtype).max).softmax(-1)[..., :-1].masked_fill(nothing[..., None], 0)
    output = torch.einsum("bqhgt,bhtd->bqhgd", weights, values)
    return output.reshape(query.shape), lse.reshape(query.shape[:2])


def visible(lengths: Tensor, query_length: int, window: int, causal: bool) -> tuple[Tensor, Tensor]:
    """The tokens ``[low, high)`` that each query sees: int64 ``[B, QL]`` twice."""
    context = lengths.long()[:, None]
    place = context - query_length + torch.arange(query_length, device=lengths.device)
    low = (place + 1 - window).clamp(min=0) if window else torch.zeros_like(place)
    if causal:
        return low, place + 1
    return low, torch.minimum(place + window, context) if window else context.expand_as(place)


def _gather(
    cache: Tensor, head_dim: int, tables: Tensor, owned: Tensor, scale: Tensor | float, dtype: torch.dtype
) -> Tensor:
    """``[B, Hkv, T, D]`` of a view in :class:`kvscout.paging.Pages`, scaled, and zero where nobody owns the token."""
    num_heads, page = cache.shape[1], cache.shape[2:].numel() // head_dim
    blocks = tables.long().masked_fill(~owned.view(*tables.shape, page).any(-1), 0)

    def by_token(x: Tensor, width: int) -> Tensor:
        return x.movedim(2, 1).reshape(len(owned), num_heads, owned.shape[1], width)

    if cache.dtype in fp8.E4M3:
        # Through bytes and a table of their values, which on the CPU is many times faster than what torch has for FP8.
        value_of = torch.arange(256, dtype=torch.uint8, device=cache.device).view(cache.dtype).to(dtype)
        elements = by_token(cache.view(torch.uint8)[blocks], head_dim).int()
        tokens = value_of.index_select(0, elements.flatten()).view(elements.shape)
    else:
        tokens = by_token(cache[blocks], head_dim).to(dtype)
    if isinstance(scale, Tensor):
        scale = by_token(scale[blocks], 1).to(dtype) if scale.dim() == 3 else scale.to(dtype).view(-1, 1, 1)
        tokens *= scale
    elif scale != 1:
        tokens *= scale
    return tokens.masked_fill_(~owned[:, None, :, None], 0)


def _launch(problem: Problem, config: Config, args: Args) -> None:
    tables = args.block_tables if args.kv.keys.shape[0] else args.block_tables[:, :0]
    columns = _columns(problem, args.context_lengths, tables)
    per_sequence = 2 * problem.num_kv_heads * columns * problem.page * problem.head_dim * config.dtype.itemsize
    step = max(1, config.budget_bytes // max(per_sequence, 1))
    for start in range(0, problem.num_sequences, step):
        sequences = slice(start, start + step)
        rows = slice(start * problem.query_length, (start + step) * problem.query_length)
        lengths = args.context_lengths[sequences]
        output, lse = reference(
            args.query[rows], args.kv, lengths, tables[sequences, : _columns(problem, lengths, tables)],
            args.softmax_scale, problem.query_length,
            key_scale=args.key_factor if args.key_scale is None else args.key_scale,
            value_scale=args.value_factor if args.value_scale is None else args.value_scale,
            sinks=args.sinks, window=problem.window, causal=problem.causal, dtype=config.dtype,
        )  # fmt: skip
        args.output[rows] = output
        if args.lse is not None:
            args.lse[rows] = lse


def _columns(problem: Problem, lengths: Tensor, tables: Tensor) -> int:
    """Columns of the tables that any sequence uses; all of them where looking would stop a GPU."""
    if problem.arch != "cpu":
        return tables.shape[1]
    return min(-(-max(int(lengths.max()), 0) // problem.page), tables.shape[1])


VARIANT = Variant(
    launch=_launch,
    default_config=_default_config,
    space=_space,
    rank=lambda problem: 10,
)
