"""``topk_indices``: specification, checks, dispatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ... import checks, torch_ops, tuning
from ...device import arch_of
from ...variants import AUTO, Family

FAMILY = Family("topk", __package__)

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Columns are returned as int32.
MAX_COLUMNS = 2**31 - 1


@dataclass(frozen=True)
class Problem:
    """What variants decide on."""

    arch: str
    num_rows: int
    num_keys: int
    k: int
    dtype: torch.dtype
    sorted: bool
    has_starts: bool = False
    has_ends: bool = False

    def bucket(self) -> tuning.Bucket:
        """What a tuned table tells apart: sizes by power of two, the rest as it is."""
        return tuning.bucket(self, classes=("num_rows", "num_keys", "k"))


class Args(NamedTuple):
    """The checked tensors of a call; ``ks`` and ``ke`` are the window starts and ends."""

    logits: torch.Tensor
    ks: torch.Tensor | None
    ke: torch.Tensor | None
    out: torch.Tensor


def topk_indices(
    logits: torch.Tensor,
    k: int,
    *,
    starts: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    sorted: bool = False,
    variant: str = AUTO,
) -> torch.Tensor:
    """Columns of the k largest logits of every row, within the row's window.

    ::

        out[i] = the first k columns j of window i with logits[i, j] > -inf, by descending logit, then ascending j
        window i: s <= j < e,  s = clamp(starts[i], 0, N),  e = clamp(ends[i], s, N)

    A row with fewer such columns than k ends in -1s. Of equal logits the lower column comes first; -0.0 equals +0.0.
    NaN and -inf count as masked and are never selected; +inf is the largest value. What lies outside the window is
    never looked at, so it may be uninitialised.

    Args:
        logits: float32, bfloat16 or float16 ``[S, N]``, any row stride, last dimension contiguous.
        k: how many columns to select, at least 1; may exceed N.
        starts: int32 ``[S]``, first column of each row's window; None: 0.
        ends: int32 ``[S]``, one past the last column of each row's window; None: N.
        out: int32 ``[S, k]`` to write into, any row stride, last dimension contiguous.
        sorted: True gives the order above. False gives the same columns in an order that is the same at every call
            but otherwise unspecified; the -1s still come last.
        variant: a variant's name (see ``kvscout info``), or "auto": ``KVSCOUT_TOPK_VARIANT`` or the best fit.

    Returns:
        ``out``, or a new int32 ``[S, k]``; columns count from the start of the row of ``logits``, not of the window.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, stride or device; the message names it.
        UnsupportedProblem: no variant, or not the one asked for, serves this call.

    All tensors live on one device. Never synchronises with the host; capturable in a CUDA graph; a captured call
    follows windows that change on the device. Works under ``torch.compile(fullgraph=True)``.

    Source: the selection step of DeepSeek-V3.2's sparse attention.

    Example:
        >>> logits = torch.tensor([[1.0, 3.0, float("nan"), 3.0, 2.0]])
        >>> topk_indices(logits, 3, sorted=True).tolist()
        [[1, 3, 4]]
        >>> topk_indices(logits, 3, ends=torch.tensor([2]).int(), sorted=True).tolist()
        [[1, 0, -1]]
    """
    if out is None:
        checks.tensor("logits", logits, ("S", "N"), LOGITS_DTYPES)
        checks.integer("k", k, 1, MAX_COLUMNS)
        out = torch.empty(logits.shape[0], k, dtype=torch.int32, device=logits.device)
    call = torch_ops.traced("topk") if torch.compiler.is_compiling() else run
    call(logits, starts, ends, out, k, sorted, variant)
    return out


def run(
    logits: torch.Tensor,
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    out: torch.Tensor,
    k: int,
    sorted: bool,
    variant: str,
) -> None:
    """Check, choose, launch: fill ``out``."""
    args = Args(logits, starts, ends, out)
    problem = check(args, k, sorted)
    choice = FAMILY.choose(problem, variant)
    if out.numel():
        choice.launch(problem, args)


@checks.once_per_layout()
def check(args: Args, k: int, sorted: bool) -> Problem:
    """Check every argument of a call and describe it."""
    logits, ks, ke, out = args
    checks.tensor("logits", logits, ("S", "N"), LOGITS_DTYPES)
    num_rows, num_keys = logits.shape
    checks.integer("logits: number of columns N", num_keys, 0, MAX_COLUMNS)
    checks.integer("k", k, 1, MAX_COLUMNS)
    checks.boolean("sorted", sorted)
    for name, bound in (("starts", ks), ("ends", ke)):
        if bound is not None:
            checks.tensor(name, bound, (num_rows,), torch.int32, logits.device)
            checks.last_dim_contiguous(name, bound)
    checks.tensor("out", out, (num_rows, k), torch.int32, logits.device)
    checks.last_dim_contiguous("logits", logits)
    checks.last_dim_contiguous("out", out)
    return Problem(
        arch=arch_of(logits.device),
        num_rows=num_rows,
        num_keys=num_keys,
        k=k,
        dtype=logits.dtype,
        sorted=bool(sorted),
        has_starts=ks is not None,
        has_ends=ke is not None,
    )


def eligible(logits: torch.Tensor, ks: torch.Tensor | None, ke: torch.Tensor | None) -> torch.Tensor:
    """bool ``[S, N]``: the columns that may be selected."""
    column = torch.arange(logits.shape[1], device=logits.device)
    found = logits > float("-inf")
    if ks is not None:
        found &= column >= ks[:, None]
    if ke is not None:
        found &= column < ke[:, None]
    return found
