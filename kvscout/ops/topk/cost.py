"""What a call must do at least: the yardstick of ``bench`` and of a roofline."""

from __future__ import annotations

from ...roofline import Cost


def cost(num_seen: int, num_rows: int, k: int, logit_bytes: int, windowed: bool) -> Cost:
    """Cost of selecting among ``num_seen`` (row, column) pairs that lie in the windows.

    FLOPs count one comparison a pair; no matrix unit helps with it, so the bytes decide: every logit of the windows and
    the windows themselves are read once, every index is written once.
    """
    windows = 8 * num_rows if windowed else 0
    return Cost(flops=num_seen, bytes=num_seen * logit_bytes + windows + 4 * num_rows * k, fp8=False)
