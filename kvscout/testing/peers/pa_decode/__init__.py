"""Peers of ``pa_decode``, and the inputs as all of them take them.

Every peer gets copies that are made outside the timed region: contiguous queries, keys and values as ``[blocks, page,
Hkv, D]`` whatever the case's layout, and block tables without a column to spare. What no sequence owns is 0 there,
where the case has NaN and garbage, since no peer promises to leave that alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .... import fp8
from ....ops.pa_decode.api import HEAD, NONE, SCALAR, Args, Problem
from ...case import Prepared
from ...compare import Budget, bits

ONE_SCALE = (NONE, SCALAR)
HEAD_SCALES = (*ONE_SCALE, HEAD)
"""Kinds of scales that a peer may take."""

SINGLE_E4M3 = Budget(max_rel=1e-1, cosine=8e-2**2 / 2)
"""Of peers that round queries and probabilities to one e4m3 number each, which errs by up to 2^-4: twice what that
comes to on random inputs, 4e-2 in the Frobenius norm."""

ROUNDED_PARTS = Budget(max_rel=2e-2, cosine=5e-3**2 / 2)
"""Of peers that also round partial results to 16 bits before they merge or scale them: 3e-3 in the Frobenius norm."""


class Inputs(NamedTuple):
    """A case's inputs as peers take them.

    Attributes:
        query: ``[B * QL, Hq, D]``, contiguous.
        keys: ``[blocks, page, Hkv, D]``, contiguous; finite everywhere.
        values: likewise.
        lengths: int32 ``[B]``, none of them negative.
        num_pages: int32 ``[B]``: how many pages each sequence has.
        block_tables: int32 ``[B, pages of the longest]``, contiguous; 0 past a sequence's last page.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    lengths: Tensor
    num_pages: Tensor
    block_tables: Tensor


def inputs(prepared: Prepared) -> Inputs:
    """Copy a case's inputs into the form that peers take."""
    args: Args = prepared.args
    page = args.kv.page
    lengths = args.context_lengths.clamp(min=0)
    num_pages = (lengths + page - 1) // page
    column = torch.arange(max(int(num_pages.max()), 1), device=lengths.device)
    block_tables = args.block_tables[:, : len(column)]
    return Inputs(
        query=args.query.contiguous(),
        keys=_token_by_token(args.kv.keys.flatten(3)),
        values=_token_by_token(args.kv.values.flatten(2, 3)),
        lengths=lengths,
        num_pages=num_pages,
        block_tables=torch.where(column < num_pages[:, None], block_tables, 0),
    )


def _token_by_token(cache: Tensor) -> Tensor:
    """``[blocks, page, Hkv, D]`` of ``[blocks, Hkv, page, D]``, with zeros in the place of NaN; a copy."""
    copy = cache.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    bits(copy).masked_fill_(copy.float().isnan(), 0)
    return copy


def one_scale(scale: Tensor | None, factor: float) -> float:
    """A cache's only scale, on the host."""
    return factor if scale is None else factor * float(scale)


def refusal(problem: Problem, head_dims: Sequence[int], scales: Sequence[str] = ONE_SCALE) -> str | None:
    """A sentence why a peer with these dimensions and kinds of scales does not serve a problem, or None."""
    if problem.head_dim not in head_dims:
        return f"serves head dimensions {', '.join(map(str, head_dims))}, not {problem.head_dim}"
    if problem.cache_dtype == fp8.FNUZ:
        return "takes e4m3fn alone"
    if problem.cache_dtype not in fp8.E4M3 and problem.cache_dtype != problem.dtype:
        return f"takes caches of the query's type or e4m3, not {problem.cache_dtype} with {problem.dtype}"
    for kind in (problem.key_scale, problem.value_scale):
        if kind not in scales:
            return f"takes no scale per {kind}"
    return "is timed without lse alone" if problem.has_lse else None


def single_e4m3(problem: Problem) -> Budget | None:
    """The budget of a peer whose arithmetic with FP8 caches is FP8 throughout."""
    return SINGLE_E4M3 if problem.cache_dtype in fp8.E4M3 else None


def deliver(prepared: Prepared, output: Tensor) -> None:
    """Copy a peer's output, of any shape that holds the rows in order, to where the case looks for it."""
    prepared.args.output.copy_(output.view(prepared.args.output.shape))
