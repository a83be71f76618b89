"""DeepGEMM's names (https://github.com/deepseek-ai/DeepGEMM): ``fp8_mqa_logits``, and ``fp8_fp4_mqa_logits`` in FP8.

::

    from kvscout.integrations import deep_gemm

    logits = deep_gemm.fp8_mqa_logits(q, (k, k_scale), weights, ks, ke, clean_logits=False)

Names, order and defaults of the arguments are DeepGEMM's, and so are shape, dtype and strides of the results. Both
functions differ from DeepGEMM's in this:

* More is served: any GPU and the CPU; 8, 16, 32, 64 and 128 heads of 32 to 512; strided inputs; e4m3fnuz where the
  hardware has it; negative, inverted and past-the-end windows, which are clamped to the keys.
* ``clean_logits=True`` writes -inf in the launch that scores, and in the N columns alone. DeepGEMM's cleaning may
  fill columns beyond them too, which lie in the same row's memory; here nothing is written there.
* ``clean_logits=False`` writes nothing outside the windows; DeepGEMM writes scores of other keys there. In both it is
  undefined: select within the windows.
* DeepGEMM allocates up to ``128 // H - 1`` rows behind the last, hidden from the caller, which its kernel writes; here
  the rows end with the last.
* A compressed result (``max_seqlen_k > 0``) and one in bfloat16 are made from float32 logits, a block of rows at a
  time, with :data:`SCRATCH_LOGITS` of scratch: some launches more, but no matrix of all logits. A window longer than
  ``max_seqlen_k`` loses its last logits; DeepGEMM writes them behind the row's columns, other rows' memory included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks, fp8
from ..ops.mqa_logits import api
from .naming import renamed

__all__ = ["fp8_fp4_mqa_logits", "fp8_mqa_logits"]

BLOCK_KV = 256
"""Keys of DeepGEMM's tile: its results have room for one more of them, or for a whole number of them if compressed."""

ROW_BYTES = 1024
"""Rows of a result lie a multiple of so many bytes apart."""

SCRATCH_LOGITS = 1 << 25
"""Most float32 logits of the scratch that compressed and bfloat16 results go through, unless one row has more. A
compressed result takes as many int64 indices beside them."""

LOGITS_DTYPES = (torch.float32, torch.bfloat16)
INT32_MAX = 2**31 - 1


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """Score every query row against the keys of its window: :func:`kvscout.fp8_mqa_logits` by DeepGEMM's arguments.

    Args:
        q: e4m3 ``[S, H, D]``.
        kv: ``(k, k_scale)``: e4m3 ``[N, D]`` and float32 ``[N]``; a list will do.
        weights: float32 ``[S, H]``. The 16-bit weights that DeepGEMM takes on Blackwell are refused.
        cu_seq_len_k_start: int32 ``[S]``, first key of each row's window.
        cu_seq_len_k_end: int32 ``[S]``, one past the last key of each row's window.
        clean_logits: True writes -inf outside the windows, False nothing. Must be False with ``max_seqlen_k > 0``.
        max_seqlen_k: 0 gives a column to every key. A positive number compresses: row i starts at its own first key, so
            that column c holds key ``clamp(cu_seq_len_k_start[i], 0, N) + c``; columns behind the window's last key are
            undefined.

    Returns:
        A new float32 ``[S, N]``, rows ``ceil((N + 256) / 256) * 256`` floats apart; or, compressed,
        ``[S, max_seqlen_k]``, rows ``ceil(max_seqlen_k / 256) * 256`` floats apart.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, stride or device, or ``clean_logits`` is
            True where ``max_seqlen_k`` compresses; the message names it.
        UnsupportedProblem: no variant serves this call.

    Strides, devices, numerics, CUDA graphs and ``torch.compile`` are those of :func:`kvscout.fp8_mqa_logits`. The
    module's docstring tells all that differs from DeepGEMM.

    Source: name, arguments and layout of the result are those of DeepGEMM's function.

    Example:
        >>> from kvscout.integrations import deep_gemm
        >>> q, k = torch.ones(2, 8, 64).to(torch.float8_e4m3fn), torch.ones(5, 64).to(torch.float8_e4m3fn)
        >>> k_scale, weights = torch.arange(5.0), torch.ones(2, 8)
        >>> ks, ke = torch.tensor([0, 3]).int(), torch.tensor([2, 5]).int()
        >>> deep_gemm.fp8_mqa_logits(q, (k, k_scale), weights, ks, ke).tolist()
        [[0.0, 512.0, -inf, -inf, -inf], [-inf, -inf, -inf, 1536.0, 2048.0]]
        >>> deep_gemm.fp8_mqa_logits(q, (k, k_scale), weights, ks, ke, False, max_seqlen_k=2).tolist()
        [[0.0, 512.0], [1536.0, 2048.0]]
    """
    pair = _pair("kv", kv)
    bounds = cu_seq_len_k_start, cu_seq_len_k_end
    return _scores(q, pair, weights, *bounds, clean_logits, max_seqlen_k, torch.float32)


def fp8_fp4_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    schedule_meta: Tensor | None = None,
) -> Tensor:
    """:func:`fp8_mqa_logits` by the arguments of DeepGEMM's newer name, in its FP8 form.

    Args:
        q: ``(q, None)``, q as for :func:`fp8_mqa_logits`. A second tensor holds the scales of FP4 or MX values, which
            are refused.
        kv: ``(k, k_scale)`` as for :func:`fp8_mqa_logits`. Packed int32 scales are refused.
        weights: as for :func:`fp8_mqa_logits`.
        cu_seq_len_k_start: as for :func:`fp8_mqa_logits`.
        cu_seq_len_k_end: as for :func:`fp8_mqa_logits`.
        clean_logits: as for :func:`fp8_mqa_logits`.
        max_seqlen_k: as for :func:`fp8_mqa_logits`.
        logits_dtype: float32, or bfloat16: the float32 logits, rounded once.
        schedule_meta: must be None. DeepGEMM makes one on Blackwell alone; here every launch plans its own work.

    Returns:
        As :func:`fp8_mqa_logits`, in ``logits_dtype``; bfloat16 rows lie a multiple of 512 elements apart.

    Raises:
        NotImplementedError: ``q[1]`` or ``schedule_meta`` is given.
        TypeError, ValueError: as :func:`fp8_mqa_logits`; and ``logits_dtype`` is another dtype.
        UnsupportedProblem: no variant serves this call.

    Source: name, arguments and layout of the result are those of DeepGEMM's function.

    Example:
        >>> from kvscout.integrations import deep_gemm
        >>> q, k = torch.ones(1, 8, 64).to(torch.float8_e4m3fn), torch.ones(2, 64).to(torch.float8_e4m3fn)
        >>> call = (k, torch.ones(2)), torch.ones(1, 8), torch.zeros(1).int(), torch.ones(1).int()
        >>> deep_gemm.fp8_fp4_mqa_logits((q, None), *call, logits_dtype=torch.bfloat16)
        tensor([[512., -inf]], dtype=torch.bfloat16)
    """
    values, scales = _pair("q", q)
    pair = _pair("kv", kv)
    if scales is not None:
        raise NotImplementedError("q[1]: expected None, for FP8 queries; FP4 and MX values with scales are not served")
    if schedule_meta is not None:
        raise NotImplementedError("schedule_meta: expected None; every launch plans its own work")
    checks.one_of("logits_dtype", logits_dtype, LOGITS_DTYPES)
    bounds = cu_seq_len_k_start, cu_seq_len_k_end
    try:
        return _scores(values, pair, weights, *bounds, clean_logits, max_seqlen_k, logits_dtype)
    except (TypeError, ValueError) as error:
        raise renamed(error, {"q": "q[0]"}) from None


def _pair(name: str, value: object) -> tuple[Any, Any]:
    """Both of a pair; what they are is for the checks of each."""
    if not isinstance(value, tuple | list):
        raise TypeError(f"{name}: expected a pair, got {type(value).__name__}")
    if len(value) != 2:
        raise TypeError(f"{name}: expected a pair, got {len(value)} of them")
    first, second = value
    return first, second


def _scores(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    clean_logits: bool,
    max_seqlen_k: int,
    dtype: torch.dtype,
) -> Tensor:
    """Make a result with DeepGEMM's strides and fill it."""
    checks.boolean("clean_logits", clean_logits)
    checks.integer("max_seqlen_k", max_seqlen_k, 0, INT32_MAX)
    if clean_logits and max_seqlen_k:
        raise ValueError(f"clean_logits: expected False with max_seqlen_k={max_seqlen_k}, got True")
    checks.tensor("q", q, ("S", "H", "D"), fp8.E4M3)
    checks.tensor("kv[0]", kv[0], ("N", "D"), fp8.E4M3)
    num_rows, num_keys = q.shape[0], kv[0].shape[0]
    if max_seqlen_k:
        logits = _new_logits(q, num_rows, max_seqlen_k, max_seqlen_k, dtype)
    else:
        logits = _new_logits(q, num_rows, num_keys, num_keys + BLOCK_KV, dtype)
    if dtype == torch.float32 and not max_seqlen_k:
        return api.fp8_mqa_logits(q, kv, weights, ks, ke, clean_logits, out=logits)
    # Of these each block takes its rows: that they have as many as q can be seen here alone.
    checks.tensor("weights", weights, q.shape[:2], torch.float32)
    checks.tensor("cu_seq_len_k_start", ks, (num_rows,), torch.int32)
    checks.tensor("cu_seq_len_k_end", ke, (num_rows,), torch.int32)
    columns = torch.arange(max_seqlen_k, device=q.device) if max_seqlen_k else None
    block_rows = max(1, min(num_rows, SCRATCH_LOGITS // max(num_keys, max_seqlen_k, 1)))
    scratch = _new_logits(q, block_rows, num_keys, num_keys, torch.float32)
    # At least one block, so that a call without rows is checked too.
    for first in range(0, max(1, num_rows), block_rows):
        rows = slice(first, min(first + block_rows, num_rows))
        block = scratch[: rows.stop - first]
        api.fp8_mqa_logits(q[rows], kv, weights[rows], ks[rows], ke[rows], clean_logits, out=block)
        if columns is None:
            logits[rows].copy_(block)
        elif num_keys:
            keys = (ks[rows].clamp(0, num_keys)[:, None] + columns).clamp_(max=num_keys - 1)
            logits[rows].copy_(block.gather(1, keys))
    return logits


def _new_logits(q: Tensor, num_rows: int, num_columns: int, room: int, dtype: torch.dtype) -> Tensor:
    """``[num_rows, num_columns]``, not initialised, whose rows have room for so many elements, and are aligned."""
    multiple = ROW_BYTES // dtype.itemsize
    stride = -(-room // BLOCK_KV) * BLOCK_KV
    stride = -(-stride // multiple) * multiple
    return torch.empty(num_rows, stride, dtype=dtype, device=q.device)[:, :num_columns]
