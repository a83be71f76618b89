"""What a call must do at least: the yardstick of ``bench`` and of a roofline."""

from __future__ import annotations

from ...roofline import Cost
from .api import Problem


def cost(problem: Problem, num_pairs: int, num_tokens: int) -> Cost:
    """Cost of a decode.

    Args:
        problem: shapes and types.
        num_pairs: (query row, token) pairs where the row sees the token, over all sequences.
        num_tokens: tokens of the caches that some row sees, each token of a shared page once.

    FLOPs count both products for every query head. Bytes count the keys and values that are seen, and the scales of
    those tokens, once for every KV head; queries, outputs, lengths and the table entries of the tokens seen.
    """
    flops = 4 * num_pairs * problem.num_heads * problem.head_dim
    scales = sum(4 for kind in (problem.key_scale, problem.value_scale) if kind == "token")
    per_token = 2 * problem.head_dim * problem.cache_dtype.itemsize + scales
    rows = problem.num_sequences * problem.query_length * problem.num_heads
    results = rows * (2 * problem.head_dim * problem.dtype.itemsize + 4 * problem.has_lse)
    tables = 4 * (problem.num_sequences + -(-num_tokens // problem.page))
    # Queries and probabilities have 16 bits, so the products run at the 16-bit rate whatever the caches hold.
    return Cost(flops=flops, bytes=num_tokens * problem.num_kv_heads * per_token + results + tables, fp8=False)
