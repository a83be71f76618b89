"""How the Triton variant reads a step's keys and values from pages of any layout.

A step is ``BLOCK_TOKENS`` tokens, aligned to as many. Tiles are shaped so that, while a warp copies, its threads lie
along memory, and so that shared memory holds them as memory does, which matrix instructions can read without
conflicts of banks. Two kinds of tiles do: *runs*, the dense parts of a chunked cache, and matrices of tokens and
elements, whose swizzle Triton sees to.

Strides that end in ``_stride`` count vectors of ``VECTOR`` elements, those of neighbours in memory elements.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def step_pages(
    table, first, end, lowest,
    PAGE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PER_PAGE: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Blocks of the pages that hold tokens ``[first, first + BLOCK_TOKENS)``; 0 where nothing is to be read.

    A number where the step lies in one page; else one for each page, or, unless ``PER_PAGE``, for each token.
    """
    if PAGE >= BLOCK_TOKENS:
        return tl.load(table + first // PAGE, mask=first < end, other=0)
    else:
        SHARE: tl.constexpr = PAGE if PER_PAGE else 1
        start = first + tl.arange(0, BLOCK_TOKENS // SHARE) * SHARE
        page = start // PAGE
        needed = page * PAGE < end
        if HAS_WINDOW:
            # Pages that lie before every window may have been given away.
            needed = needed & (page * PAGE + PAGE > lowest)
        return tl.load(table + page, mask=needed, other=0)


@triton.jit
def _in_page(first, PAGE: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Tokens of its page before token ``first``, a multiple of ``BLOCK_TOKENS``."""
    if PAGE > BLOCK_TOKENS:
        return first // BLOCK_TOKENS % (PAGE // BLOCK_TOKENS) * BLOCK_TOKENS
    else:
        return 0


@triton.jit
def _pages_of_runs(page, PAGE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PER_PAGE: tl.constexpr):
    """Blocks of a step's pages, int64 ``[pages]``."""
    if PAGE >= BLOCK_TOKENS:
        return tl.full((1,), 0, tl.int64) + page
    elif PER_PAGE:
        return page.to(tl.int64)
    else:
        return tl.max(tl.reshape(page, (BLOCK_TOKENS // PAGE, PAGE)), 1).to(tl.int64)


@triton.jit
def pages_of_tokens(page, PAGE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PER_PAGE: tl.constexpr):
    """Blocks of a step's tokens, int64: one for all, or ``[tokens]``."""
    if PAGE >= BLOCK_TOKENS or not PER_PAGE:
        return page.to(tl.int64)
    else:
        return tl.reshape(tl.broadcast_to(page[:, None], (BLOCK_TOKENS // PAGE, PAGE)), (BLOCK_TOKENS,)).to(tl.int64)


@triton.jit
def load_keys(
    keys, page, first, block_stride, token_stride, chunk_stride,
    RUNS: tl.constexpr, PER_PAGE: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PAGE: tl.constexpr, X: tl.constexpr, VECTOR: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """The keys of a step, ``[tokens, PADDED_DIM]``; anything for tokens past the end, which no score survives."""
    SHARE: tl.constexpr = min(PAGE, BLOCK_TOKENS)  # tokens of the step in one page
    skipped = _in_page(first, PAGE, BLOCK_TOKENS)
    if RUNS:
        blocks = _pages_of_runs(page, PAGE, BLOCK_TOKENS, PER_PAGE) * block_stride * VECTOR
        chunk = tl.arange(0, PADDED_DIM // X)
        at = (chunk.to(tl.int64) * chunk_stride * VECTOR)[:, None, None] + blocks[None, :, None]
        at += (skipped * X + tl.arange(0, SHARE * X))[None, None, :]
        if DIM == PADDED_DIM:
            runs = tl.load(keys + at)
        else:
            runs = tl.load(keys + at, mask=(chunk * X < DIM)[:, None, None], other=0.0)
        tile = tl.permute(tl.reshape(runs, (PADDED_DIM // X, BLOCK_TOKENS, X)), (1, 0, 2))
        return tl.reshape(tile, (BLOCK_TOKENS, PADDED_DIM))
    else:
        dim = tl.arange(0, PADDED_DIM)
        place = skipped + tl.arange(0, BLOCK_TOKENS) % SHARE
        at = pages_of_tokens(page, PAGE, BLOCK_TOKENS, PER_PAGE) * block_stride * VECTOR
        at += place.to(tl.int64) * token_stride * VECTOR
        at = at[:, None] + ((dim // X).to(tl.int64) * chunk_stride * VECTOR + dim % X)[None, :]
        if DIM == PADDED_DIM:
            return tl.load(keys + at)
        else:
            return tl.load(keys + at, mask=(dim < DIM)[None, :], other=0.0)


@triton.jit
def load_values(
    values, page, first, end, lowest, block_stride, chunk_stride, token_stride, dim_stride,
    RUNS: tl.constexpr, PER_PAGE: tl.constexpr, TOKENS_INNER: tl.constexpr, HAS_WINDOW: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PAGE: tl.constexpr, X: tl.constexpr, VECTOR: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """The values of a step, ``[tokens, PADDED_DIM]``; zeros from token ``end`` on and in pages before ``lowest``.

    With ``TOKENS_INNER``, ``end`` is a multiple of 16, so that whole vectors are read or not.
    """
    SHARE: tl.constexpr = min(PAGE, BLOCK_TOKENS)
    skipped = _in_page(first, PAGE, BLOCK_TOKENS)
    if RUNS:
        blocks = _pages_of_runs(page, PAGE, BLOCK_TOKENS, PER_PAGE) * block_stride * VECTOR
        chunk = tl.arange(0, SHARE // X)
        element = tl.arange(0, PADDED_DIM * X)
        at = blocks[:, None, None] + ((skipped // X + chunk).to(tl.int64) * chunk_stride * VECTOR)[None, :, None]
        at += element[None, None, :]
        place = (tl.arange(0, BLOCK_TOKENS // SHARE) * SHARE)[:, None, None]
        is_read = place + (chunk * X)[None, :, None] < end - first
        if HAS_WINDOW and PAGE < BLOCK_TOKENS:
            is_read = is_read & (place + PAGE > lowest - first)
        if DIM != PADDED_DIM:
            is_read = is_read & (element < DIM * X)[None, None, :]
        runs = tl.load(values + at, mask=is_read, other=0.0)
        tile = tl.permute(tl.reshape(runs, (BLOCK_TOKENS // X, PADDED_DIM, X)), (0, 2, 1))
        return tl.reshape(tile, (BLOCK_TOKENS, PADDED_DIM))
    else:
        CHUNKS: tl.constexpr = PAGE // X
        TOKEN_VECTOR: tl.constexpr = 1 if TOKENS_INNER else VECTOR
        DIM_VECTOR: tl.constexpr = VECTOR if TOKENS_INNER else 1
        dim = tl.arange(0, PADDED_DIM)
        step = tl.arange(0, BLOCK_TOKENS)
        blocks = pages_of_tokens(page, PAGE, BLOCK_TOKENS, PER_PAGE)
        if PAGE < BLOCK_TOKENS and TOKENS_INNER:
            blocks = tl.max_constancy(blocks, 16)
        at = blocks * block_stride * VECTOR
        if X <= 16:
            at += (skipped // X).to(tl.int64) * chunk_stride * VECTOR
        else:
            at += skipped.to(tl.int64) * token_stride * TOKEN_VECTOR
        at += (step // X % CHUNKS).to(tl.int64) * chunk_stride * VECTOR
        at += (step % X).to(tl.int64) * token_stride * TOKEN_VECTOR
        at = at[:, None] + (dim.to(tl.int64) * dim_stride * DIM_VECTOR)[None, :]
        # Judged by vectors of 16 where tokens are neighbours, or vectors would be read element by element.
        is_read = (step // 16 * 16 if TOKENS_INNER else step) < end - first
        if HAS_WINDOW and PAGE < BLOCK_TOKENS:
            is_read = is_read & (step // PAGE * PAGE + PAGE > lowest - first)
        if DIM == PADDED_DIM:
            return tl.load(values + at, mask=is_read[:, None], other=0.0)
        else:
            return tl.load(values + at, mask=is_read[:, None] & (dim < DIM)[None, :], other=0.0)
