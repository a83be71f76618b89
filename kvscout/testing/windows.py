"""Windows that rows look at, kind by kind: what the scores and the selection are both tested with."""

from __future__ import annotations

import torch

KINDS = ("causal", "full", "cp", "misaligned", "empty", "past_end", "extreme", "packed")


def windows(kind: str, rows: int, keys: int, sequences: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 starts and ends of a kind.

    "causal" (ends at i + keys - rows + 1), "full", "cp" (context-parallel halves: rows of two distant chunks),
    "misaligned" (both ends off every tile), "empty" (every third row sees nothing, inverted), "past_end" (negative
    starts and ends past the last key), "extreme" (the limits of int32, every other row inverted), "packed"
    (``sequences`` independent causal sequences).
    """
    row = torch.arange(rows)
    zero = torch.zeros_like(row)
    if kind == "full":
        pair = zero, zero + keys
    elif kind == "cp":
        half = rows // 2
        position = torch.where(row < half, row + keys // 4, keys - rows + row)
        pair = zero, position + 1
    elif kind == "misaligned":
        pair = (row * 7) % (keys // 2 + 1), keys - (row * 13) % (keys // 3 + 1)
    elif kind == "empty":
        pair = torch.where(row % 3 == 0, keys, row % 5), torch.where(row % 3 == 0, 0, keys - row % 7)
    elif kind == "past_end":
        pair = zero - 5 - row, zero + keys + 1000 + row
    elif kind == "extreme":
        limits = torch.iinfo(torch.int32)
        lowest, highest = zero + limits.min, zero + limits.max
        pair = torch.where(row % 2 == 0, lowest, highest), torch.where(row % 2 == 0, highest, lowest)
    elif kind == "packed":
        per_rows, per_keys = -(-rows // sequences), -(-keys // sequences)
        start = row // per_rows * per_keys
        pair = start, start + per_keys - per_rows + row % per_rows + 1
    elif kind == "causal":
        pair = zero, row + keys - rows + 1
    else:
        raise ValueError(f"kind: there are no windows called {kind!r}")
    return pair[0].int(), pair[1].int()
