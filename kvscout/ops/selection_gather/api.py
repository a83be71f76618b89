"""``gather_tokens``: specification, checks, dispatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import checks, paging, torch_ops, tuning
from ...device import arch_of
from ...variants import AUTO, Family
from ..selection_tables import rows
from ..selection_tables.api import new_tables

FAMILY = Family("selection_gather", __package__)


@dataclass(frozen=True)
class Problem:
    """What variants decide on."""

    arch: str
    num_rows: int
    k: int
    num_sequences: int
    max_blocks: int
    num_blocks: int
    num_kv_heads: int
    head_dim: int
    page: int
    layout: str
    dtype: torch.dtype
    has_sequences: bool = False
    has_ends: bool = False
    has_key_scale: bool = False
    has_value_scale: bool = False

    def bucket(self) -> tuning.Bucket:
        """What a tuned table tells apart: sizes by power of two, the rest as it is."""
        return tuning.bucket(self, classes=("num_rows", "k", "num_sequences", "max_blocks", "num_blocks"))

    @property
    def pages_per_row(self) -> int:
        """Pages that a row's tokens are copied to."""
        return -(-self.k // self.page)


class Args(NamedTuple):
    """The tensors of a call; scales are there if they are per token, and may be ``[blocks, Hkv, page, 1]``."""

    selected: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    context_lengths: Tensor
    sequences: Tensor | None
    ends: Tensor | None
    key_scale: Tensor | None
    value_scale: Tensor | None
    out_key_cache: Tensor
    out_value_cache: Tensor
    out_tables: Tensor
    out_lengths: Tensor
    out_key_scale: Tensor | None
    out_value_scale: Tensor | None

    def pages(self, layout: str) -> tuple[paging.Pages, paging.Pages]:
        """The caches that are read and those that are written, token by token."""
        return (
            paging.viewed(layout, self.key_cache, self.value_cache),
            paging.viewed(layout, self.out_key_cache, self.out_value_cache),
        )

    def scales(self) -> list[tuple[Tensor, Tensor] | None]:
        """Of keys and of values, the scales that are read and those that are written: ``[blocks, Hkv, page]``."""
        pairs = ((self.key_scale, self.out_key_scale), (self.value_scale, self.out_value_scale))
        return [
            None if scale is None or out is None else (scale[..., 0] if scale.dim() == 4 else scale, out)
            for scale, out in pairs
        ]


class Tokens(NamedTuple):
    """Copies of what each row attends to, as ``pa_decode`` takes them.

    Attributes:
        key_cache: layout, page size and dtype of the cache that was read; ``ceil(k / page)`` blocks a row, row by row.
        value_cache: likewise.
        block_tables: int32 ``[rows, ceil(k / page)]``, the same for every selection.
        context_lengths: int32 ``[rows]``: how many tokens a row selects.
        key_scale: float32 ``[blocks, Hkv, page]`` if it was given per token; else as it was given.
        value_scale: likewise.
    """

    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    context_lengths: Tensor
    key_scale: Tensor | float | None = None
    value_scale: Tensor | float | None = None


def gather_tokens(
    selected: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    block_tables: Tensor,
    context_lengths: Tensor,
    *,
    sequences: Tensor | None = None,
    ends: Tensor | None = None,
    key_scale: Tensor | float | None = None,
    value_scale: Tensor | float | None = None,
    kv_layout: str = paging.AUTO,
    out: Tokens | None = None,
    variant: str = AUTO,
) -> Tokens:
    """Copy selected tokens, bit for bit, into a compact paged cache of the same layout, page size and dtype.

    Row i gets the tokens of ``selected[i]`` that lie in ``[0, end_i)``, each once, in the order of the sequence, with
    the ``end_i`` of :func:`tables_of_blocks`. What lies behind a row's last token is unspecified, and may be NaN.

    Args:
        selected: int32 ``[rows, k]``, any strides: places in the sequence. Those before 0, past the row's end or
            selected before in the row count for nothing. Any order.
        key_cache: what to read, as ``pa_decode`` takes it: one of the layouts of :mod:`kvscout.paging`.
        value_cache: likewise.
        num_kv_heads: heads of the caches.
        block_tables: int32 ``[B, max_blocks]``, any strides: the pages of each sequence.
        context_lengths: int32 ``[B]``: tokens of each sequence.
        sequences: as for :func:`tables_of_blocks`.
        ends: as for :func:`tables_of_blocks`.
        key_scale: as ``pa_decode`` takes it. Scales per token, ``[blocks, Hkv, page]`` or ``[blocks, Hkv, page, 1]``,
            are copied with their tokens; all others (a number, or float32 of 1 element or ``[Hkv]``) are handed on.
        value_scale: likewise.
        kv_layout: layout of the caches, or "auto" to tell by their shapes.
        out: what to write into: a former result of these shapes, or one made of other memory, for instance with caches
            of ``paging.new_caches(layout, rows * ceil(k / page), ...)``. May not overlap what is read.
        variant: a variant's name (see ``kvscout info``), or "auto": ``KVSCOUT_SELECTION_GATHER_VARIANT`` or the best
            fit.

    Returns:
        The result: new memory, or that of ``out``, beside scales that were handed on.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, stride or device; the message names it.
        UnsupportedProblem: no variant, or not the one asked for, serves this call.

    All tensors live on one device. Never synchronises with the host; capturable in a CUDA graph, whose replays follow
    all tensors. Works under ``torch.compile(fullgraph=True)``.

    Two launches on a GPU, for up to 4096 entries a row and a head dimension of up to 1024. Rows share no copies: of
    each cache ``rows * k * Hkv * D`` elements are read and written. In nhd and hnd a token's elements lie together, in
    chunked and plain_v its values are strewn.

    Source: the token selection of DeepSeek-V3.2, whose kernels read pages of one token.

    Example:
        >>> key_cache, value_cache = paging.new_caches("nhd", 4, 1, 16, 64, torch.bfloat16, "cpu")
        >>> key_cache[2, 3, 0, 0] = 5.0
        >>> selected = torch.tensor([[19, 1, 19, -1]], dtype=torch.int32)
        >>> pages, lengths = torch.tensor([[0, 2]]).int(), torch.tensor([20]).int()
        >>> found = gather_tokens(selected, key_cache, value_cache, 1, pages, lengths)
        >>> found.key_cache[0, :2, 0, 0].tolist(), found.block_tables.tolist(), found.context_lengths.tolist()
        ([0.0, 5.0], [[0]], [2])
    """
    given = key_scale, value_scale
    key_scale, value_scale = (_per_token(scale) for scale in given)
    rows.check_selected(selected)
    if key_scale is None:
        _check_handed_on("key_scale", given[0], num_kv_heads, selected.device)
    if value_scale is None:
        _check_handed_on("value_scale", given[1], num_kv_heads, selected.device)
    if out is None:
        kv = paging.pages(key_cache, value_cache, num_kv_heads, kv_layout)
        out = _new_tokens(kv, key_cache, value_cache, selected, key_scale, value_scale)
    elif not isinstance(out, Tokens):
        raise TypeError(f"out: expected Tokens, got {type(out).__name__}")
    out_key_scale = None if key_scale is None else out.key_scale
    out_value_scale = None if value_scale is None else out.value_scale
    call = torch_ops.traced("selection_gather") if torch.compiler.is_compiling() else run
    call(
        selected, key_cache, value_cache, block_tables, context_lengths, sequences, ends, key_scale, value_scale,
        *out[:4], out_key_scale, out_value_scale, num_kv_heads, kv_layout, variant,
    )  # fmt: skip
    return out._replace(
        key_scale=given[0] if key_scale is None else out_key_scale,
        value_scale=given[1] if value_scale is None else out_value_scale,
    )


def _per_token(scale: Tensor | float | None) -> Tensor | None:
    """A scale per token; None for any other."""
    return scale if isinstance(scale, Tensor) and scale.dim() >= 3 else None


def _check_handed_on(name: str, scale: Tensor | float | None, num_kv_heads: int, device: torch.device) -> None:
    """Check a scale that is not per token: nothing, a number, or a tensor of 1 element or ``[Hkv]``."""
    if isinstance(scale, Tensor):
        if tuple(scale.shape) not in ((), (1,), (num_kv_heads,)):
            raise ValueError(
                f"{name}: expected 1 element, shape [{num_kv_heads}] or shape [blocks, {num_kv_heads}, page], "
                f"got {list(scale.shape)}"
            )
        checks.tensor(name, scale, tuple(scale.shape), torch.float32, device)
    elif scale is not None:
        checks.number(name, scale)


def _new_tokens(
    kv: paging.Pages,
    key_cache: Tensor,
    value_cache: Tensor,
    selected: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> Tokens:
    num_rows, k = selected.shape
    per_row = -(-k // kv.page)
    blocks = num_rows * per_row
    keys, values = (cache.new_empty(blocks, *cache.shape[1:]) for cache in (key_cache, value_cache))
    k_scale, v_scale = (
        None if scale is None else scale.new_empty(blocks, kv.num_kv_heads, kv.page)
        for scale in (key_scale, value_scale)
    )
    return Tokens(keys, values, *new_tables(selected, per_row), k_scale, v_scale)


def run(*arguments: Any) -> None:
    """Check, choose, launch: fill the tensors that :class:`Args` calls out; its fields, then those of :func:`check`."""
    *tensors, num_kv_heads, kv_layout, variant = arguments
    args = Args(*tensors)
    problem = check(args, num_kv_heads, kv_layout)
    choice = FAMILY.choose(problem, variant)
    if problem.num_rows:
        choice.launch(problem, args)


@checks.once_per_layout()
def check(args: Args, num_kv_heads: int, kv_layout: str) -> Problem:
    """Check every argument of a call and describe it."""
    selected = args.selected
    kv = paging.pages(args.key_cache, args.value_cache, num_kv_heads, kv_layout)
    rows.check(selected, args.block_tables, args.context_lengths, args.sequences, args.ends)
    if kv.keys.device != selected.device:
        raise ValueError(f"key_cache: expected on {selected.device}, like selected, got {kv.keys.device}")
    _check_scale("key_scale", args.key_scale, kv)
    _check_scale("value_scale", args.value_scale, kv)
    num_rows, k = selected.shape
    num_sequences, max_blocks = args.block_tables.shape
    problem = Problem(
        arch=arch_of(selected.device),
        num_rows=num_rows,
        k=k,
        num_sequences=num_sequences,
        max_blocks=max_blocks,
        num_blocks=kv.keys.shape[0],
        num_kv_heads=num_kv_heads,
        head_dim=kv.head_dim,
        page=kv.page,
        layout=kv.layout,
        dtype=kv.dtype,
        has_sequences=args.sequences is not None,
        has_ends=args.ends is not None,
        has_key_scale=args.key_scale is not None,
        has_value_scale=args.value_scale is not None,
    )
    _check_out(args, problem)
    return problem


def _check_scale(name: str, scale: Tensor | None, kv: paging.Pages) -> None:
    if scale is not None:
        shape = (kv.keys.shape[0], kv.num_kv_heads, kv.page)
        checks.tensor(name, scale, shape if scale.dim() == 3 else (*shape, 1), torch.float32, kv.keys.device)


def _check_out(args: Args, problem: Problem) -> None:
    per_row, device = problem.pages_per_row, args.selected.device
    rows.check_out(args.selected, per_row, args.out_tables, args.out_lengths)
    blocks = problem.num_rows * per_row
    for name, out, cache in (
        ("out.key_cache", args.out_key_cache, args.key_cache),
        ("out.value_cache", args.out_value_cache, args.value_cache),
    ):
        checks.tensor(name, out, (blocks, *cache.shape[1:]), cache.dtype, device)
        checks.last_dim_contiguous(name, out)
        checks.elements_apart(name, out)
    shape = (blocks, problem.num_kv_heads, problem.page)
    if problem.has_key_scale:
        checks.tensor("out.key_scale", args.out_key_scale, shape, torch.float32, device)
    if problem.has_value_scale:
        checks.tensor("out.value_scale", args.out_value_scale, shape, torch.float32, device)
