"""torch's ``scaled_dot_product_attention``, which is what there is without a kernel for pages.

It takes no pages and no FP8, so its users copy, at every step and in every layer, each sequence's pages into dense keys
and values as long as the longest context, and convert and scale e4m3 ones: all of that is timed. Query heads that share
a KV head are passed as rows of one head, so that nothing is repeated.
Outside: the block tables and the mask, which all layers of a step share; there is no mask where every query sees every
token. Copies of the caches that :mod:`kvscout.testing.peers.pa_decode` names are outside too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .... import fp8
from ....ops.pa_decode.api import HEAD_DIMS, NONE, Problem
from ....ops.pa_decode.variants.torch_reference import visible
from ...case import Prepared
from ...compare import Budget
from .. import Launch, Peer
from . import HEAD_SCALES, ROUNDED_PARTS, deliver, inputs, refusal


def _refuses(problem: Problem) -> str | None:
    return "takes no sinks" if problem.has_sinks else refusal(problem, HEAD_DIMS, HEAD_SCALES)


def _prepare(prepared: Prepared) -> Launch:
    problem, args, given = prepared.problem, prepared.args, inputs(prepared)
    blocks = given.block_tables.flatten()
    shape = (problem.num_sequences, -1, problem.num_kv_heads, problem.head_dim)
    mask = _mask(problem, given.lengths, given.block_tables.shape[1] * problem.page)
    split = (problem.num_sequences, problem.query_length, problem.num_kv_heads, problem.group, problem.head_dim)

    def dense(cache: Tensor, scale: Tensor | None, factor: float) -> Tensor:
        """``[B, Hkv, T, D]`` in the query's dtype."""
        # Not every build of torch can index FP8.
        tokens = cache.view(torch.uint8)[blocks].view(cache.dtype) if cache.dtype in fp8.E4M3 else cache[blocks]
        if scale is not None:
            tokens = tokens.float() * (scale * factor).view(-1, 1)
        elif factor != 1:
            tokens = tokens.float() * factor
        tokens = tokens.to(problem.dtype)
        return tokens.view(shape).transpose(1, 2)

    def launch() -> Tensor:
        rows = given.query.view(split).transpose(1, 2).flatten(2, 3)
        keys = dense(given.keys, args.key_scale, args.key_factor)
        values = dense(given.values, args.value_scale, args.value_factor)
        output = scaled_dot_product_attention(rows, keys, values, mask, scale=args.softmax_scale)
        by_token: Tensor = output.unflatten(2, split[1::2]).transpose(1, 2)
        return by_token.contiguous()

    return launch


def _mask(problem: Problem, lengths: Tensor, columns: int) -> Tensor | None:
    """What each row does not see, as -inf ``[B, 1, QL * G, T]`` in the query's dtype; None where it sees everything."""
    low, high = visible(lengths, problem.query_length, problem.window, problem.causal)
    token = torch.arange(columns, device=lengths.device)
    seen = (token >= low[..., None]) & (token < high[..., None])
    if seen.all():
        return None
    mask = torch.zeros(seen.shape, dtype=problem.dtype, device=lengths.device).masked_fill(~seen, float("-inf"))
    return mask.repeat_interleave(problem.group, 1)[:, None]


def _tolerance(problem: Problem) -> Budget | None:
    """Keys and values are rounded to 16 bits once they are scaled."""
    return None if problem.key_scale == problem.value_scale == NONE else ROUNDED_PARTS


PEER = Peer(
    unavailable=lambda arch: None,
    refuses=_refuses,
    prepare=_prepare,
    deliver=deliver,
    tolerance=_tolerance,
    distributions=("torch",),
)
