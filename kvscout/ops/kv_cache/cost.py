"""What a call must do at least: the yardstick of ``bench`` and of a roofline."""

from __future__ import annotations

from ...roofline import Cost


def cost(
    num_written: int, num_kv_heads: int, head_dim: int, input_bytes: int, cache_bytes: int, scales_per_token: int
) -> Cost:
    """Cost of writing ``num_written`` tokens, keys and values.

    FLOPs count one division an element. Bytes count every element read and stored once, an int64 slot a token and
    ``scales_per_token`` computed float32 scales; skipped tokens cost nothing.
    """
    elements = 2 * num_written * num_kv_heads * head_dim
    scales = num_written * num_kv_heads * scales_per_token * 4
    return Cost(flops=elements, bytes=elements * (input_bytes + cache_bytes) + 8 * num_written + scales, fp8=False)
