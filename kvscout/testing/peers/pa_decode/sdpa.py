"""torch's ``scaled_dot_product_attention``, which is what there is without a kernel for pages.

It takes no pages and no FP8, so its users copy, at every step and in every layer, each sequence's pages into dense keys
and values as long as the longest context, and convert and scale e4m3 ones: all of that is timed. KV heads are shared by
its ``enable_gqa``.
Outside: the block tables and the mask, which all layers of a step share. There is no mask where every query sees every
token, and none in memory where the last tokens of sequences of one length are causal. The copies of the caches that
:mod:`kvscout.testing.peers.pa_decode` names are outside too.
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
    blocks, longest = given.block_tables.flatten(), max(int(given.lengths.max()), 1)
    mask = _mask(problem, given.lengths, longest)
    queries = given.query.unflatten(0, (problem.num_sequences, problem.query_length)).transpose(1, 2)

    def dense(cache: Tensor, scale: Tensor | None, factor: float) -> Tensor:
        """``[B, Hkv, T, D]`` in the query's dtype."""
        # Not every build of torch can index FP8.
        tokens = cache.view(torch.uint8)[blocks].view(cache.dtype) if cache.dtype in fp8.E4M3 else cache[blocks]
        if scale is not None:
            tokens = tokens.float() * (scale * factor).view(-1, 1)
        elif factor != 1:
            tokens = tokens.float() * factor
        tokens = tokens.to(problem.dtype).view(problem.num_sequences, -1, problem.num_kv_heads, problem.head_dim)
        return tokens[:, :longest].transpose(1, 2)

    def launch() -> Tensor:
        keys = dense(given.keys, args.key_scale, args.key_factor)
        values = dense(given.values, args.value_scale, args.value_factor)
        output: Tensor = scaled_dot_product_attention(
            queries, keys, values, mask, scale=args.softmax_scale, enable_gqa=problem.group > 1
        )
        return output.transpose(1, 2).contiguous()

    return launch


def _mask(problem: Problem, lengths: Tensor, longest: int) -> Tensor | None:
    """What each query does not see, as -inf ``[B, 1, QL, T]`` in the query's dtype, or something that says the same."""
    low, high = visible(lengths, problem.query_length, problem.window, problem.causal)
    token = torch.arange(longest, device=lengths.device)
    seen = (token >= low[..., None]) & (token < high[..., None])
    if seen.all():
        return None
    if problem.causal and not problem.window and problem.query_length <= longest and (lengths == longest).all():
        # This loads torch's compiler, which takes seconds.
        from torch.nn.attention.bias import causal_lower_right

        bias: Tensor = causal_lower_right(problem.query_length, longest)
        return bias
    mask = torch.zeros(seen.shape, dtype=problem.dtype, device=lengths.device)
    return mask.masked_fill(~seen, float("-inf"))[:, None]


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
