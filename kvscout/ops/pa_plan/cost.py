"""What a call must do at least: the yardstick of ``bench``."""

from __future__ import annotations

from ...roofline import Cost


def cost(num_sequences: int, capacity: int) -> Cost:
    """Cost of a plan: lengths read, every slot and every sequence's record written. The time is all latency."""
    return Cost(flops=0, bytes=4 * num_sequences + 16 * capacity + 8 * num_sequences)
