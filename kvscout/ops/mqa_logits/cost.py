"""What a call must do at least: the yardstick of ``bench`` and of a roofline."""

from __future__ import annotations

from ...roofline import Cost


def cost(num_scored: int, num_rows: int, num_keys: int, num_heads: int, head_dim: int, clean_logits: bool) -> Cost:
    """Cost of scoring ``num_scored`` (row, key) pairs.

    FLOPs count the dot products and the weighted sum over heads. Bytes count q, k, scales, weights and windows once,
    and every logit that is written once (all of them where the rest is cleaned).
    """
    flops = 2 * num_scored * num_heads * head_dim + 2 * num_scored * num_heads
    inputs = num_rows * num_heads * (head_dim + 4) + num_keys * (head_dim + 4) + 8 * num_rows
    outputs = 4 * (num_rows * num_keys if clean_logits else num_scored)
    return Cost(flops=flops, bytes=inputs + outputs)
