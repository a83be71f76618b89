"""What a call must do at least: the yardstick of ``bench`` and of a roofline."""

from __future__ import annotations

from ...roofline import Cost


def cost(num_rows: int, k: int, pages: int) -> Cost:
    """Cost of the tables of ``num_rows`` rows of k entries, of which ``pages`` pages are found in all.

    FLOPs count one comparison an entry, which no matrix unit helps with. Bytes count every entry read and every entry
    of the tables of sequences read once for each page found, as many written, and a length read and written a row.
    """
    return Cost(flops=num_rows * k, bytes=4 * (num_rows * k + 2 * pages + 2 * num_rows), fp8=False)
