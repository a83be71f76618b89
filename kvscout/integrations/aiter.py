"""AITER's names (https://github.com/ROCm/aiter): FP8 scores and planned paged-attention decode.

::

    from kvscout.integrations import aiter

    logits = aiter.fp8_mqa_logits(Q, KV, kv_scales, weights, cu_starts, cu_ends, clean_logits=False)

Names, order and defaults of the arguments are AITER's. They run on any GPU and on the CPU; AITER's environment
variables (``FLYDSL_...``) are not read, ``KVSCOUT_MQA_LOGITS_VARIANT`` and ``KVSCOUT_PA_DECODE_VARIANT`` are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks, fp8, paging
from ..ops.mqa_logits import api as mqa_logits
from ..ops.pa_decode import api as decode
from ..ops.pa_plan import api as planning
from ..ops.pa_plan.plan import PADecodePlan
from ..variants import AUTO
from .naming import renamed

__all__ = [
    "PADecodePlan",
    "flydsl_fp8_mqa_logits",
    "fp8_mqa_logits",
    "get_recommended_splits",
    "pa_decode",
    "plan_pa_decode",
]

NAMES = {
    "q": "Q",
    "kv[0]": "KV",
    "kv[1]": "kv_scales",
    "cu_seq_len_k_start": "cu_starts",
    "cu_seq_len_k_end": "cu_ends",
}
"""What the arguments of :func:`kvscout.fp8_mqa_logits` are called in AITER."""

CONTEXT_PARTITION_SIZE = 256
"""Tokens per tile of AITER's plans."""


def fp8_mqa_logits(
    Q: Tensor,
    KV: Tensor,
    kv_scales: Tensor,
    weights: Tensor,
    cu_starts: Tensor,
    cu_ends: Tensor,
    clean_logits: bool = True,
) -> Tensor:
    """Score every query row against the keys of its window: AITER's Triton function of this name.

    Args:
        Q: e4m3 ``[S, H, D]``; last dimension contiguous, rows and heads a multiple of 16 bytes apart.
        KV: e4m3 ``[N, D]``, of the same format as ``Q``: a pair of e4m3fn and e4m3fnuz, which AITER converts on gfx942,
            is refused.
        kv_scales: float32 ``[N]``, not negative, or another shape of as many elements. AITER multiplies before the
            relu and kvscout behind it, which is the same for scales that are not negative.
        weights: float32 ``[S, H]``, or another shape of as many elements.
        cu_starts: int32 ``[S]``, first key of each row's window, or another shape of as many elements.
        cu_ends: int32 ``[S]``, one past the last key, or another shape of as many elements.
        clean_logits: True writes -inf outside the windows, in the launch that scores (AITER fills the whole result
            before it). False writes nothing there, as in AITER.

    Returns:
        A new float32 ``[S, N]`` whose rows lie ``ceil(N / 256) * 256`` floats apart, as in AITER. With
        ``clean_logits=True`` AITER's has -inf up to the next row too; here nothing is written there.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, stride or device; the message has AITER's
            name of it. H is one of 8, 16, 32, 64, 128 and D of 32, 64, 128, 256, 512.
        UnsupportedProblem: no variant serves this call.

    Source: name and arguments are those of AITER's function.

    Example:
        >>> from kvscout.integrations import aiter
        >>> Q, KV = torch.ones(1, 8, 64).to(torch.float8_e4m3fn), torch.ones(3, 64).to(torch.float8_e4m3fn)
        >>> aiter.fp8_mqa_logits(Q, KV, torch.ones(3), torch.ones(1, 8), torch.ones(1).int(), torch.tensor([3]).int())
        tensor([[-inf, 512., 512.]])
    """
    return _scores(Q, KV, kv_scales, weights, cu_starts, cu_ends, clean_logits, None, None)


def flydsl_fp8_mqa_logits(
    Q: Tensor,
    KV: Tensor,
    kv_scales: Tensor,
    weights: Tensor,
    cu_starts: Tensor,
    cu_ends: Tensor,
    clean_logits: bool = True,
    stream: torch.cuda.Stream | None = None,
    variant: str | None = None,
) -> Tensor:
    """:func:`fp8_mqa_logits` by the arguments of AITER's FlyDSL function.

    Args:
        Q: as for :func:`fp8_mqa_logits`.
        KV: as for :func:`fp8_mqa_logits`.
        kv_scales: as for :func:`fp8_mqa_logits`.
        weights: as for :func:`fp8_mqa_logits`.
        cu_starts: as for :func:`fp8_mqa_logits`.
        cu_ends: as for :func:`fp8_mqa_logits`.
        clean_logits: as for :func:`fp8_mqa_logits`.
        stream: where to launch; None is the current stream. As in AITER, the result is allocated on the current stream
            whatever this says, and ordering the two is the caller's.
        variant: a variant of kvscout by name (see ``kvscout info``), or None for ``KVSCOUT_MQA_LOGITS_VARIANT`` or the
            best fit. AITER's tags, such as "mfma_r2_w4", name kernels that are not here, and are refused.

    Returns:
        As :func:`fp8_mqa_logits`.

    Raises:
        TypeError, ValueError: as :func:`fp8_mqa_logits`; and ``stream`` is none of the tensors' device, or ``variant``
            is unknown.
        UnsupportedProblem: no variant, or not the one asked for, serves this call.

    Source: name and arguments are those of AITER's function.

    Example:
        >>> from kvscout.integrations import aiter
        >>> Q, KV = torch.ones(1, 8, 64).to(torch.float8_e4m3fn), torch.ones(3, 64).to(torch.float8_e4m3fn)
        >>> call = Q, KV, torch.ones(3), torch.ones(1, 8), torch.ones(1).int(), torch.tensor([3]).int()
        >>> aiter.flydsl_fp8_mqa_logits(*call, variant="torch_reference")
        tensor([[-inf, 512., 512.]])
    """
    return _scores(Q, KV, kv_scales, weights, cu_starts, cu_ends, clean_logits, stream, variant)


def _scores(
    Q: Tensor,
    KV: Tensor,
    kv_scales: Tensor,
    weights: Tensor,
    cu_starts: Tensor,
    cu_ends: Tensor,
    clean_logits: bool,
    stream: torch.cuda.Stream | None,
    variant: str | None,
) -> Tensor:
    checks.tensor("Q", Q, ("S", "H", "D"), fp8.E4M3)
    checks.tensor("KV", KV, ("N", "D"), fp8.E4M3)
    (num_rows, num_heads, _), num_keys = Q.shape, KV.shape[0]
    kv = KV, _shaped(kv_scales, num_keys)
    bounds = _shaped(cu_starts, num_rows), _shaped(cu_ends, num_rows)
    stride = -(-num_keys // mqa_logits.ROW_MULTIPLE) * mqa_logits.ROW_MULTIPLE
    logits = torch.empty(num_rows, stride, device=Q.device, dtype=torch.float32)[:, :num_keys]
    arguments = Q, kv, _shaped(weights, num_rows, num_heads), *bounds, clean_logits
    choice = AUTO if variant is None else variant
    try:
        if stream is None:
            return mqa_logits.fp8_mqa_logits(*arguments, out=logits, variant=choice)
        _check_stream(stream, Q.device)
        with torch.cuda.stream(stream):
            return mqa_logits.fp8_mqa_logits(*arguments, out=logits, variant=choice)
    except (TypeError, ValueError) as error:
        raise renamed(error, NAMES) from None


def _shaped(value: Tensor, *shape: int) -> Tensor:
    """A tensor in the shape that it has elements for; what has others is for the checks to refuse."""
    if not isinstance(value, Tensor) or value.shape == shape:
        return value
    return value.reshape(shape) if value.numel() == torch.Size(shape).numel() else value


def _check_stream(stream: object, device: torch.device) -> None:
    if not isinstance(stream, torch.cuda.Stream):
        raise TypeError(f"stream: expected a torch.cuda.Stream or None, got {type(stream).__name__}")
    if stream.device != device:
        raise ValueError(f"stream: expected one of {device}, like Q, got one of {stream.device}")


def plan_pa_decode(
    context_lengths: Tensor,
    num_kv_heads: int,
    *,
    max_partitions: int | None = None,
    workgroup_budget: int | None = None,
    sliding_window: int = 0,
    query_length: int = 1,
    plan: PADecodePlan | None = None,
) -> PADecodePlan:
    """Plan a batch's decode, or refresh a plan in place: :func:`kvscout.plan_pa_decode`, whose tasks are AITER's.

    Tiles have AITER's 256 tokens, on every GPU; where batches are small, :func:`kvscout.plan_pa_decode` with its own
    tile may be faster.

    Args:
        context_lengths: int32 ``[B]``, contiguous, on any device; B may be 0, or more than AITER's 4096.
        num_kv_heads: heads in the KV cache.
        max_partitions: most tasks of one sequence; None takes the number of SMs (or the plan's). AITER refuses more
            than that number, which here is legal.
        workgroup_budget: workgroups to fill, over all KV heads; None takes what :func:`kvscout.plan_pa_decode` does, in
            AITER twice the number of SMs. AITER refuses one with ``plan``; here one that gives the plan's capacity is
            legal.
        sliding_window: tokens that a query sees, its own included; 0 and -1 are no window.
        query_length: query tokens per sequence. **It must be that of the decode, also without a window**, where AITER
            does not look at it: :func:`pa_decode` refuses another plan.
        plan: a plan made with the same batch size, heads, window and query length, and with tiles of 256; AITER lets
            the query length differ where there is no window.

    Returns:
        ``plan``, or a new :class:`kvscout.PADecodePlan`: ``work_info`` and ``reduce_info`` hold what AITER's do, for
        the same number of SMs (compute units). It also owns the scratch of its decodes, which AITER takes from the
        caller.

    Raises:
        TypeError, ValueError: an argument is wrong, or not what ``plan`` was made with; the message names it.
        UnsupportedProblem: no variant serves this call.

    Source: name, arguments and split policy are those of AITER's function.

    Example:
        >>> from kvscout.integrations import aiter
        >>> plan = aiter.plan_pa_decode(torch.tensor([1000, 300]).int(), 1, workgroup_budget=4)
        >>> plan.reduce_info.tolist()
        [[0, 2], [2, 2]]
    """
    if isinstance(plan, PADecodePlan) and plan.tile != CONTEXT_PARTITION_SIZE:
        raise ValueError(f"plan: expected tiles of {CONTEXT_PARTITION_SIZE} tokens, AITER's, got {plan.tile}")
    return planning.plan_pa_decode(
        context_lengths,
        num_kv_heads,
        max_partitions=max_partitions,
        workgroup_budget=workgroup_budget,
        sliding_window=sliding_window,
        query_length=query_length,
        tile=CONTEXT_PARTITION_SIZE,
        plan=plan,
    )


def pa_decode(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lengths: Tensor,
    block_tables: Tensor,
    softmax_scale: float,
    query_length: int,
    *,
    context_partition_size: int = CONTEXT_PARTITION_SIZE,
    compute_type: torch.dtype = torch.bfloat16,
    query_scale: Tensor | None = None,
    key_scale: Tensor | float | None = None,
    value_scale: Tensor | float | None = None,
    exp_sums: Tensor | None = None,
    max_logits: Tensor | None = None,
    temporary_output: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    sliding_window: int = 0,
    work_plan: PADecodePlan,
    max_context_length: int | None = None,
) -> None:
    """Attend by a plan to paged caches in AITER's layouts: :func:`kvscout.pa_decode` by AITER's arguments.

    Args:
        output: ``[B * QL, Hq, D]`` to write into; dtype of ``query``.
        query: bfloat16 or float16 ``[B * QL, Hq, D]``, D in 64, 128, 192, 256, 512; G = Hq / Hkv from 1 to 64.
        key_cache: ``[blocks, Hkv, D/x, page, x]``, x of 16 bytes; e4m3, bfloat16 or float16; pages of 16, 32, 64 or 128
            tokens. It need not be contiguous.
        value_cache: ``[blocks, Hkv, D, page]`` or ``[blocks, Hkv, page/x, D, x]``, of as many blocks as ``key_cache``:
            fewer, which AITER takes, are refused.
        context_lengths: int32 ``[B]``: tokens of each sequence, its query tokens included.
        block_tables: int32 ``[B, max_blocks]``, any row stride.
        softmax_scale: multiplies the scores.
        query_length: QL, query tokens per sequence, which see each other causally.
        context_partition_size: must be 256, as in AITER.
        compute_type: dtype of the caches, as AITER demands; for FP8 caches bfloat16, the default, will do too. It is a
            bound from below: queries and weights are not quantised, so FP8 caches are attended to more precisely than
            AITER does.
        query_scale: must be None, as in AITER: quantised queries are not served.
        key_scale: for e4m3 caches: None (1), a number, or float32 of 1 element, ``[Hkv]`` or, per token,
            ``[blocks, Hkv, page]`` or ``[blocks, Hkv, page, 1]``. 16-bit caches take none.
        value_scale: likewise. AITER wants both of one kind, or neither; here they are free.
        exp_sums: must be None: the scratch of a decode belongs to ``work_plan``.
        max_logits: must be None, likewise.
        temporary_output: must be None, likewise.
        alibi_slopes: must be None, as in AITER.
        sinks: ``[Hq]``, contiguous, float32 or dtype of ``query``: a logit per head with a zero value. The other 16-bit
            dtype, which AITER takes, is refused.
        sliding_window: tokens that a query sees, its own included; 0 and -1 are no window.
        work_plan: from :func:`plan_pa_decode` with the same batch size, heads, window and query length.
        max_context_length: a bound on ``context_lengths`` that the host knows. AITER refuses one that ``block_tables``
            does not cover.

    Returns:
        None; the result is in ``output``. Sequences that see nothing give zeros.

    Raises:
        NotImplementedError: an argument that must be None, or 256, is not, or ``compute_type`` does not fit the caches;
            the message names it.
        TypeError, ValueError: another argument is wrong, or not what ``work_plan`` was made with; the message names it.
        UnsupportedProblem: no variant serves this call.

    Two decodes that run at once need two plans, or a plan and its ``fork()``. CUDA graphs, numerics and what memory may
    hold are those of :func:`kvscout.pa_decode`.

    Source: name, arguments and contract are those of AITER's function.

    Example:
        >>> from kvscout import paging
        >>> from kvscout.integrations import aiter
        >>> key_cache, value_cache = paging.new_caches("chunked", 2, 1, 16, 64, torch.bfloat16, "cpu")
        >>> value_cache[1] = 3.0
        >>> lengths, tables = torch.tensor([5]).int(), torch.tensor([[1]]).int()
        >>> query = torch.randn(1, 8, 64).bfloat16()
        >>> output, plan = torch.empty_like(query), aiter.plan_pa_decode(lengths, 1)
        >>> aiter.pa_decode(output, query, key_cache, value_cache, lengths, tables, 0.125, 1, work_plan=plan)
        >>> output.unique().tolist()
        [3.0]
    """
    checks.integer("context_partition_size", context_partition_size, 1)
    if context_partition_size != CONTEXT_PARTITION_SIZE:
        raise NotImplementedError(
            f"context_partition_size: expected {CONTEXT_PARTITION_SIZE}, got {context_partition_size}"
        )
    _check_compute_type(compute_type, key_cache)
    for name, value in {"query_scale": query_scale, "alibi_slopes": alibi_slopes}.items():
        if value is not None:
            raise NotImplementedError(f"{name}: expected None, which is all that is served")
    for name, value in {
        "exp_sums": exp_sums, "max_logits": max_logits, "temporary_output": temporary_output,
    }.items():  # fmt: skip
        if value is not None:
            raise NotImplementedError(f"{name}: expected None; the scratch of a decode belongs to its work_plan")
    is_plain_v = isinstance(value_cache, Tensor) and value_cache.dim() == 4
    decode.pa_decode(
        output,
        query,
        key_cache,
        value_cache,
        context_lengths,
        block_tables,
        softmax_scale,
        query_length,
        work_plan=work_plan,
        key_scale=_scalar(key_scale),
        value_scale=_scalar(value_scale),
        sinks=sinks,
        sliding_window=sliding_window,
        max_context_length=max_context_length,
        kv_layout=paging.PLAIN_V if is_plain_v else paging.CHUNKED,
    )


def _check_compute_type(compute_type: object, key_cache: object) -> None:
    if not isinstance(compute_type, torch.dtype):
        raise TypeError(f"compute_type: expected a torch.dtype, got {type(compute_type).__name__}")
    if not isinstance(key_cache, Tensor) or key_cache.dtype not in paging.CACHE_DTYPES:
        # For the checks of the caches to refuse.
        return
    accepted = [key_cache.dtype, *([torch.bfloat16] if key_cache.dtype in fp8.E4M3 else [])]
    if compute_type not in accepted:
        raise NotImplementedError(
            f"compute_type: expected {' or '.join(map(str, accepted))}, for caches of {key_cache.dtype}, "
            f"got {compute_type}"
        )


def _scalar(scale: Tensor | float | None) -> Tensor | float | None:
    """A scale of one element, which AITER takes in any shape, in the shape that kvscout knows it by."""
    return scale.reshape(1) if isinstance(scale, Tensor) and scale.numel() == 1 else scale


def get_recommended_splits(num_sequences: int, num_kv_heads: int, split_kv_blocks: int = 1) -> int:
    """A ``max_partitions`` that fills the GPU about twice: AITER's Gluon function of this name.

    ::

        min(8, split_kv_blocks * ceil(2 * num_sms / (num_sequences * num_kv_heads * split_kv_blocks)))

    Args:
        num_sequences: sequences in the batch; an empty batch, by which AITER divides, counts as one.
        num_kv_heads: heads in the KV cache.
        split_kv_blocks: the number is a multiple of it, up to 8.

    Returns:
        From 1 to 8. AITER's earlier FlyDSL functions of this name give at least 4.

    Raises:
        TypeError, ValueError: an argument is not an int, or too small; the message names it.

    Example:
        >>> from kvscout.integrations import aiter
        >>> aiter.get_recommended_splits(1000, 1), aiter.get_recommended_splits(1, 1)
        (1, 8)
    """
    checks.integer("num_kv_heads", num_kv_heads, 1)
    checks.integer("split_kv_blocks", split_kv_blocks, 1)
    splits = planning.get_recommended_splits(num_sequences, num_kv_heads * split_kv_blocks)
    return min(planning.MAX_RECOMMENDED_SPLITS, split_kv_blocks * splits)
