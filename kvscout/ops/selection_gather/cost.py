"""What a call must do at least: the yardstick of ``bench`` and of a roofline."""

from __future__ import annotations

from ...roofline import Cost
from .api import Problem


def cost(problem: Problem, num_tokens: int) -> Cost:
    """Cost of copying ``num_tokens`` tokens, keys and values, over all rows.

    FLOPs count one comparison an entry, which no matrix unit helps with. Bytes count every element and per-token scale
    copied as read and written once, every entry of the selection and a table entry a token as read, and the tables and
    lengths of the result as written; what lies behind a row's last token costs nothing.
    """
    scales = 4 * (problem.has_key_scale + problem.has_value_scale)
    per_token = problem.num_kv_heads * (2 * problem.head_dim * problem.dtype.itemsize + scales)
    words = problem.num_rows * (problem.k + problem.pages_per_row + 2) + num_tokens
    return Cost(flops=problem.num_rows * problem.k, bytes=2 * num_tokens * per_token + 4 * words, fp8=False)
