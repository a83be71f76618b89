"""``fp8_mqa_logits``: specification, checks, dispatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ... import checks, fp8, torch_ops, tuning
from ...device import arch_of
from ...variants import AUTO, Family

FAMILY = Family("mqa_logits", __package__)

NUM_HEADS = (8, 16, 32, 64, 128)
HEAD_DIMS = (32, 64, 128, 256, 512)

# Rows of a freshly allocated result start this many floats apart or a multiple of it, so that they are 1 KB aligned.
ROW_MULTIPLE = 256


@dataclass(frozen=True)
class Problem:
    """What variants decide on. ``fnuz`` tells the two e4m3 formats apart."""

    arch: str
    num_rows: int
    num_keys: int
    num_heads: int
    head_dim: int
    clean_logits: bool
    has_q_scale: bool = False
    fnuz: bool = False

    def bucket(self) -> tuning.Bucket:
        """What a tuned table tells apart: rows and keys by power of two, the rest, but for a ``q_scale``, as it is."""
        return tuning.bucket(self, classes=("num_rows", "num_keys"), without=("has_q_scale",))


class Args(NamedTuple):
    """The checked tensors of a call; ``ks`` and ``ke`` are the window starts and ends."""

    q: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor
    weights: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor
    q_scale: torch.Tensor | None
    out: torch.Tensor


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    *,
    q_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    variant: str = AUTO,
) -> torch.Tensor:
    """Score every query row against the cached keys of its window (the "lightning indexer").

    ::

        logits[i, j] = k_scale[j] * sum_h weights[i, h] * relu(<q[i, h, :], k[j, :]>)    for s <= j < e
        s = clamp(cu_seq_len_k_start[i], 0, N),  e = clamp(cu_seq_len_k_end[i], s, N)

    Negative, inverted and past-the-end windows are legal; where they cross, they are empty. NaN stays NaN. On a GPU a
    logit's bits depend on its own row and key, and on the variant and config that serve the call, which "auto" picks by
    the sizes; plain torch may round it differently in another batch.

    Args:
        q: e4m3 ``[S, H, D]``, H in 8, 16, 32, 64, 128 and D in 32, 64, 128, 256, 512. Any row and head stride that is
            a multiple of 16 bytes; last dimension contiguous.
        kv: the pair ``(k, k_scale)``: e4m3 ``[N, D]`` of the same format as ``q``, rows a multiple of 16 bytes apart,
            and float32 ``[N]``, contiguous, not negative.
        weights: float32 ``[S, H]``, any row stride.
        cu_seq_len_k_start: int32 ``[S]``, first key of each row's window.
        cu_seq_len_k_end: int32 ``[S]``, one past the last key of each row's window.
        clean_logits: True writes -inf outside the windows, in the same launch. False leaves what lies outside the
            windows as it was: with ``out=None`` that is uninitialised memory, so select within the windows.
        q_scale: float32 ``[S, H]``, any row stride; multiplies ``weights`` when given.
        out: float32 ``[S, N]`` to write into, any row stride, last dimension contiguous. It must not overlap an input,
            which is not checked.
        variant: a variant's name (see ``kvscout info``), or "auto": ``KVSCOUT_MQA_LOGITS_VARIANT`` or the best fit.

    Returns:
        ``out``, or a new float32 ``[S, N]`` whose rows lie a multiple of 256 floats apart.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, stride or device; the message names it.
        UnsupportedProblem: no variant, or not the one asked for, serves this call.

    All tensors live on one device. Not differentiable. Never synchronises with the host; capturable in a CUDA graph,
    once a call with such sizes has run: kernels of Triton and CuTe are compiled or loaded at their first use. A
    captured call follows windows that change on the device. Works under ``torch.compile(fullgraph=True)``.

    Source: DeepSeek-V3.2's indexer; name and argument order follow DeepGEMM's function of the same name.

    Example:
        >>> q = torch.randn(2, 8, 64).to(torch.float8_e4m3fn)
        >>> k = torch.randn(5, 64).to(torch.float8_e4m3fn)
        >>> starts, ends = torch.tensor([0, 1]).int(), torch.tensor([3, 5]).int()
        >>> logits = fp8_mqa_logits(q, (k, torch.ones(5)), torch.rand(2, 8), starts, ends)
        >>> logits.isneginf().tolist()
        [[False, False, False, True, True], [True, False, False, False, False]]
    """
    if not isinstance(kv, tuple) or len(kv) != 2:
        raise TypeError(f"kv: expected the pair (k, k_scale), got {_described(kv)}")
    k, k_scale = kv
    if out is None:
        checks.tensor("q", q, ("S", "H", "D"), fp8.E4M3)
        checks.tensor("kv[0]", k, ("N", "D"), fp8.E4M3)
        out = _new_logits(q, k.shape[0])
    call = run
    if torch.compiler.is_compiling():
        # The traced node would take any number for a bool.
        checks.boolean("clean_logits", clean_logits)
        call = torch_ops.traced("mqa_logits")
    call(q, k, k_scale, weights, cu_seq_len_k_start, cu_seq_len_k_end, q_scale, out, clean_logits, variant)
    return out


def _described(kv: object) -> str:
    return f"{len(kv)} of them" if isinstance(kv, tuple) else type(kv).__name__


def _new_logits(q: torch.Tensor, num_keys: int) -> torch.Tensor:
    stride = -(-num_keys // ROW_MULTIPLE) * ROW_MULTIPLE
    return torch.empty_strided((q.shape[0], num_keys), (stride, 1), dtype=torch.float32, device=q.device)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    q_scale: torch.Tensor | None,
    out: torch.Tensor,
    clean_logits: bool,
    variant: str,
) -> None:
    """Check, choose, launch: fill ``out``."""
    args = Args(q, k, k_scale, weights, cu_seq_len_k_start, cu_seq_len_k_end, q_scale, out)
    problem = check(args, clean_logits)
    choice = FAMILY.choose(problem, variant)
    if out.numel():
        choice.launch(problem, args)


@checks.once_per_layout("q", "k")
def check(args: Args, clean_logits: bool) -> Problem:
    """Check every argument of a call and describe it."""
    q, k, k_scale, weights, ks, ke, q_scale, out = args
    checks.boolean("clean_logits", clean_logits)
    checks.tensor("q", q, ("S", "H", "D"), fp8.E4M3)
    num_rows, num_heads, head_dim = q.shape
    checks.one_of("q: number of heads H", num_heads, NUM_HEADS)
    checks.one_of("q: head dimension D", head_dim, HEAD_DIMS)
    checks.tensor("kv[0]", k, ("N", head_dim), q.dtype, q.device)
    num_keys = k.shape[0]
    checks.tensor("kv[1]", k_scale, (num_keys,), torch.float32, q.device)
    checks.tensor("weights", weights, (num_rows, num_heads), torch.float32, q.device)
    checks.tensor("cu_seq_len_k_start", ks, (num_rows,), torch.int32, q.device)
    checks.tensor("cu_seq_len_k_end", ke, (num_rows,), torch.int32, q.device)
    checks.tensor("out", out, (num_rows, num_keys), torch.float32, q.device)
    if q_scale is not None:
        checks.tensor("q_scale", q_scale, (num_rows, num_heads), torch.float32, q.device)
    checks.rows_aligned("q", q)
    checks.rows_aligned("kv[0]", k)
    checks.rows_apart("out", out)
    for name, vector in (("kv[1]", k_scale), ("weights", weights)):
        checks.last_dim_contiguous(name, vector)
    for name, vector in (("cu_seq_len_k_start", ks), ("cu_seq_len_k_end", ke)):
        checks.last_dim_contiguous(name, vector)
    if q_scale is not None:
        checks.last_dim_contiguous("q_scale", q_scale)
    return Problem(
        arch=arch_of(q.device),
        num_rows=num_rows,
        num_keys=num_keys,
        num_heads=num_heads,
        head_dim=head_dim,
        clean_logits=clean_logits,
        has_q_scale=q_scale is not None,
        fnuz=q.dtype == fp8.FNUZ,
    )
