"""Device code of the selections: what a row belongs to and sees, and its entries in order, each once."""

from __future__ import annotations

import triton
import triton.language as tl

MAX_ENTRIES = 4096
"""Entries of a row that one program sorts: of 8192, looking them up needs more registers than there are."""

NOTHING = tl.constexpr(2**31 - 1)

# A warp for so many entries: fewer warps exchange more of them within a thread, and keep fewer lanes busy.
ENTRIES_PER_WARP = 128
MAX_WARPS = 16


def block_of(k: int) -> int:
    """Entries of a row as a block that can be sorted."""
    return max(int(triton.next_power_of_2(k)), 16)


def sorting_warps(block: int) -> int:
    """Warps of a program that sorts a block."""
    return min(max(block // ENTRIES_PER_WARP, 1), MAX_WARPS)


def refuses(k: int) -> str | None:
    """Why rows of k entries are not sorted by a program, or None where they are."""
    return f"a program sorts at most {MAX_ENTRIES} entries of a row, not {k}" if k > MAX_ENTRIES else None


@triton.jit
def owner_and_end(row, context_lengths, lengths_s, sequences, sequences_s, ends, ends_s,
                  num_sequences, rows_per_sequence, max_tokens):  # fmt: skip
    """A row's sequence (0 if it has none) and one past the last token that it sees: int64 twice."""
    if sequences is not None:
        owner = tl.load(sequences + row * sequences_s).to(tl.int64)
    else:
        owner = row // rows_per_sequence
    known = (owner >= 0) & (owner < num_sequences)
    owner = tl.where(known, owner, 0)
    end = tl.load(context_lengths + owner * lengths_s, mask=known, other=0).to(tl.int64)
    end = tl.minimum(end, max_tokens)
    if ends is not None:
        end = tl.minimum(end, tl.load(ends + row * ends_s).to(tl.int64))
    return owner, end


@triton.jit
def distinct(entries, stride, k, bound, BLOCK: tl.constexpr):
    """A row's entries of ``[0, bound)``, ascending, then NOTHING; which of them count; the places of those; how many.

    An entry counts where it is the first of its equals. ``bound`` is int64, and no more than NOTHING.
    """
    i = tl.arange(0, BLOCK)
    entry = tl.load(entries + i.to(tl.int64) * stride, mask=i < k, other=NOTHING)
    entry = tl.sort(tl.where((entry >= 0) & (entry < bound), entry, NOTHING))
    before = tl.gather(entry, tl.maximum(i - 1, 0), 0)
    counts = (entry < NOTHING) & ((entry != before) | (i == 0))
    count = tl.sum(counts.to(tl.int32), 0)
    return entry, counts, tl.cumsum(counts.to(tl.int32), 0) - 1, count
