"""``pa_decode``: specification, checks, dispatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import checks, env, fp8, paging, torch_ops, tuning
from ...device import arch_of
from ...variants import AUTO, Family
from ..pa_plan.plan import PADecodePlan

FAMILY = Family("pa_decode", __package__)

HEAD_DIMS = (64, 128, 192, 256, 512)
MAX_GROUP = 64
DTYPES = (torch.bfloat16, torch.float16)

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

# What a tuned table has by power of two.
SIZES = ("num_sequences", "capacity", "max_partitions", "window")

NONE, SCALAR, HEAD, TOKEN = "none", "scalar", "head", "token"
"""What a scale tensor belongs to; a scale that is a plain number is no tensor, so it counts as "none" here."""


Scratch = Callable[[int, int], tuple[Tensor, Tensor]]
"""``PADecodePlan.scratch``: memory for partial results, by query rows per KV head and head dimension."""


class PlanNumbers(NamedTuple):
    """The numbers that a plan was made with."""

    num_kv_heads: int
    max_partitions: int
    sliding_window: int
    query_length: int
    tile: int
    tiles_per_partition: int


@dataclass(frozen=True)
class Problem:
    """What variants decide on.

    A ``window`` of 0 is none; ``key_scale`` and ``value_scale`` name a kind of tensor; ``whole_pages`` and ``aligned``
    are those of the caches (:class:`kvscout.paging.Pages`). ``max_partitions`` is 1 where no sequence of the call can
    be split, whatever the plan. ``merge_in_tile`` lets a variant's tile kernel merge partial results itself; else a
    second kernel must. With ``batch_invariant`` no choice that changes bits may look at ``num_sequences`` or
    ``capacity``.
    """

    arch: str
    num_sequences: int
    query_length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    layout: str
    page: int
    capacity: int
    max_partitions: int
    tile: int
    window: int = 0
    causal: bool = True
    key_scale: str = NONE
    value_scale: str = NONE
    has_sinks: bool = False
    has_lse: bool = False
    merge_in_tile: bool = True
    batch_invariant: bool = False
    whole_pages: bool = True
    aligned: bool = True

    def bucket(self) -> tuning.Bucket | None:
        """What a tuned table tells apart: sizes by power of two, the rest as it is; sinks and lse do not count.

        None for batch-invariant plans: configs change bits, and which of them serve a call depends on its batch.
        """
        if self.batch_invariant:
            return None
        return tuning.bucket(self, classes=SIZES, without=("has_sinks", "has_lse"))

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rows_per_head(self) -> int:
        """Query rows of one sequence that share a KV head."""
        return self.query_length * self.group


class Call(NamedTuple):
    """A call as its schema in :mod:`kvscout.torch_ops` has it: a plan in parts, a scale as a tensor or as a factor."""

    output: Tensor
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    context_lengths: Tensor
    block_tables: Tensor
    softmax_scale: float
    query_length: int
    work_info: Tensor
    reduce_info: Tensor
    arrival_counters: Tensor
    plan_numbers: Sequence[int]
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    key_factor: float | None = None
    value_factor: float | None = None
    sinks: Tensor | None = None
    sliding_window: int = 0
    causal: bool = True
    lse: Tensor | None = None
    kv_layout: str = paging.AUTO
    variant: str = AUTO
    max_context_length: int | None = None


class Args(NamedTuple):
    """The checked tensors and numbers of a call.

    ``key_scale`` is a 1-element, ``[Hkv]`` or ``[blocks, Hkv, page]`` tensor, and ``key_factor`` a number that
    multiplies it; likewise for values. ``scratch()`` gives the memory for partial results (``PADecodePlan.scratch``).
    """

    output: Tensor
    query: Tensor
    kv: paging.Pages
    context_lengths: Tensor
    block_tables: Tensor
    work_info: Tensor
    reduce_info: Tensor
    arrival_counters: Tensor
    key_scale: Tensor | None
    value_scale: Tensor | None
    sinks: Tensor | None
    lse: Tensor | None
    softmax_scale: float
    key_factor: float
    value_factor: float
    scratch: Callable[[], tuple[Tensor, Tensor]]


def pa_decode(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lengths: Tensor,
    block_tables: Tensor,
    softmax_scale: float,
    query_length: int = 1,
    *,
    work_plan: PADecodePlan,
    key_scale: Tensor | float | None = None,
    value_scale: Tensor | float | None = None,
    sinks: Tensor | None = None,
    sliding_window: int = 0,
    causal: bool = True,
    lse: Tensor | None = None,
    max_context_length: int | None = None,
    kv_layout: str = paging.AUTO,
    variant: str = AUTO,
) -> Tensor:
    """Attend from the newest tokens of every sequence to its paged key and value caches.

    For query token p of a sequence with C tokens, at position t_p = C - QL + p, and for each of its heads h, which
    read KV head h // G::

        s_t    = softmax_scale * <query[p, h], key_scale * key_t>                 for every visible token t of [0, C)
        weight = exp(s_t) / (sum over visible t of exp(s_t) + exp(sinks[h]))
        output = sum over visible t of weight_t * value_scale * value_t
        lse    = log of that denominator

    Causal: t is visible where t <= t_p and, with a window W, t > t_p - W. Not causal: every t is visible or, with a
    window, those with \\|t - t_p\\| < W. A row that sees nothing gives zeros and an lse of -inf, whatever its sink.

    Token t of sequence i is in page ``block_tables[i, t // page]``, at ``t % page``.

    Args:
        output: ``[B * QL, Hq, D]`` to write into; dtype of ``query``; last dimension contiguous, any other strides
            that keep elements apart.
        query: bfloat16 or float16 ``[B * QL, Hq, D]``, D in 64, 128, 192, 256, 512; last dimension contiguous, any
            other strides. Row ``i * QL + p`` is query token p of sequence i.
        key_cache: e4m3, bfloat16 or float16, in one of the layouts of :mod:`kvscout.paging`, pages of 16, 32, 64 or 128
            tokens; last dimension contiguous, any other strides. Hq / Hkv = G is a whole number up to 64.
        value_cache: the same layout, dtype and page size.
        context_lengths: int32 ``[B]``, contiguous: tokens of each sequence, its QL query tokens included. Zero and
            negative lengths are empty sequences; none may come within 1024 tokens of 2^31, since kernels count tokens
            in 32 bits. They must be those that ``work_plan`` was made or refreshed with.
        block_tables: int32 ``[B, max_blocks]``, any row stride. Entries past a sequence's last page are never looked up
            and may hold anything.
        softmax_scale: multiplies the scores; usually ``D ** -0.5``.
        query_length: QL, query tokens per sequence.
        work_plan: from ``plan_pa_decode`` with the same batch size, heads, window and query length.
        key_scale: for e4m3 caches: None (1), a number, or float32 of 1 element, ``[Hkv]`` or, per token,
            ``[blocks, Hkv, page]`` or ``[blocks, Hkv, page, 1]``, any strides. 16-bit caches take none.
        value_scale: likewise; its kind need not be that of ``key_scale``.
        sinks: float32 or dtype of ``query``, ``[Hq]``, contiguous: a logit per head that is neither scaled nor windowed
            and has a zero value. -inf is none; +inf takes all weight, so the outputs are zeros and the lse is +inf.
        sliding_window: W, the tokens that a query sees, its own included; 0 and -1 are no window.
        causal: False lets a query see the tokens after its own too.
        lse: float32 ``[B * QL, Hq]`` to write into, natural logarithm; last dimension contiguous.
        max_context_length: a bound on ``context_lengths`` that the host knows, for all replays of a graph. Where it
            leaves no sequence to be split, nothing is launched to merge. Contexts beyond it give right rows and lse, or
            NaN.
        kv_layout: "chunked", "plain_v", "nhd", "hnd", or "auto" to tell by the caches' shapes.
        variant: a variant's name (see ``kvscout info``), or "auto": ``KVSCOUT_PA_DECODE_VARIANT`` or the best fit.

    Returns:
        ``output``.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, stride or device, or ``work_plan`` was made
            for another call; the message names it.
        UnsupportedProblem: no variant, or not the one asked for, serves this call.

    All tensors live on one device. Not differentiable. Lengths and table entries are not checked there: a table must
    cover its sequence's length. Memory that no token of a sequence owns (the tail of its last page, other pages and
    their scales) may hold NaN, and so may pages that lie before every window. What the sequence's own tokens hold must
    be finite: a NaN or infinite key or value can spoil each of the sequence's rows, also those that do not see it.

    Never synchronises with the host; capturable in a CUDA graph, whose replays follow a plan, lengths and tables that
    are refreshed in place. Works under ``torch.compile(fullgraph=True)``. Partial results go through scratch that the
    plan owns: two decodes that run at once on different streams need two plans, or a plan and its ``fork()``.

    Source: the contract is that of AITER's planned paged-attention decode.

    Example:
        >>> from kvscout import paging, plan_pa_decode
        >>> key_cache, value_cache = paging.new_caches("nhd", 4, 2, 16, 64, torch.bfloat16, "cpu")
        >>> value_cache[3] = 1.0
        >>> lengths = torch.tensor([5, 0], dtype=torch.int32)
        >>> tables = torch.tensor([[3], [-1]], dtype=torch.int32)
        >>> query = torch.randn(2, 8, 64, dtype=torch.bfloat16)
        >>> plan = plan_pa_decode(lengths, 2)
        >>> output = torch.empty_like(query)
        >>> pa_decode(output, query, key_cache, value_cache, lengths, tables, 0.125, work_plan=plan)[:, 0, 0].tolist()
        [1.0, 0.0]
    """
    if not isinstance(work_plan, PADecodePlan):
        raise TypeError(f"work_plan: expected a PADecodePlan, got {type(work_plan).__name__}")
    key_scale, key_factor = _tensor_and_factor(key_scale)
    value_scale, value_factor = _tensor_and_factor(value_scale)
    call = Call(
        output, query, key_cache, value_cache, context_lengths, block_tables, softmax_scale, query_length,
        work_plan.work_info, work_plan.reduce_info, work_plan.arrival_counters, plan_numbers(work_plan),
        key_scale, value_scale, key_factor, value_factor, sinks, sliding_window, causal, lse, kv_layout, variant,
        max_context_length,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        # A traced call cannot hand over what the plan keeps: the op makes scratch of its own.
        torch_ops.traced("pa_decode")(*call)
    else:
        run(*call, plan_scratch=work_plan.scratch)
    return output


def plan_numbers(plan: PADecodePlan) -> list[int]:
    """A plan's :class:`PlanNumbers`, as a schema takes them."""
    return [
        plan.num_kv_heads, plan.max_partitions, plan.sliding_window, plan.query_length, plan.tile,
        plan.tiles_per_partition,
    ]  # fmt: skip


def _tensor_and_factor(scale: Tensor | float | None) -> tuple[Tensor | None, float | None]:
    """A scale as what it is: a tensor, a number, or neither."""
    return (scale, None) if isinstance(scale, Tensor) else (None, scale)


def run(*arguments: Any, plan_scratch: Scratch | None = None) -> None:
    """Check, choose, launch: fill the output of the :class:`Call` that the arguments make."""
    call = Call(*arguments)
    problem, args = check(call, plan_scratch)
    choice = FAMILY.choose(problem, call.variant)
    if call.output.numel():
        choice.launch(problem, args)


def check(call: Call, plan_scratch: Scratch | None = None) -> tuple[Problem, Args]:
    """Check every argument of a call, describe it, and bring the caches and scales into one form."""
    output, query, lengths, block_tables = call.output, call.query, call.context_lengths, call.block_tables
    sinks, lse, query_length = call.sinks, call.lse, call.query_length
    checks.integer("query_length", query_length, 1, INT32_MAX)
    checks.boolean("causal", call.causal)
    checks.integer("sliding_window", call.sliding_window, -1, INT64_MAX)
    checks.number("softmax_scale", call.softmax_scale)
    if call.max_context_length is not None:
        checks.integer("max_context_length", call.max_context_length, 0)
    checks.tensor("query", query, ("B * QL", "Hq", "D"), DTYPES)
    num_rows, num_heads, head_dim = query.shape
    device = query.device
    checks.one_of("query: head dimension D", head_dim, HEAD_DIMS)
    checks.tensor("context_lengths", lengths, ("B",), torch.int32, device)
    num_sequences = lengths.shape[0]
    if num_rows != num_sequences * query_length:
        raise ValueError(
            f"query: expected {num_sequences} sequences x {query_length} query tokens = {num_sequences * query_length} "
            f"rows, got {num_rows}"
        )
    checks.tensor("output", output, (num_rows, num_heads, head_dim), query.dtype, device)
    checks.tensor("block_tables", block_tables, (num_sequences, "max_blocks"), torch.int32, device)
    plan = PlanNumbers(*call.plan_numbers)
    window = _effective(call.sliding_window)
    _check_plan(plan, call, window)
    kv = _pages(call, plan.num_kv_heads)
    if num_heads % kv.num_kv_heads or not 1 <= num_heads // kv.num_kv_heads <= MAX_GROUP:
        raise ValueError(
            f"query: expected a number of heads Hq that is 1 to {MAX_GROUP} times the {kv.num_kv_heads} KV heads, "
            f"got {num_heads}"
        )
    key_scale, key_kind = _scale("key_scale", call.key_scale, call.key_factor, kv)
    value_scale, value_kind = _scale("value_scale", call.value_scale, call.value_factor, kv)
    if sinks is not None:
        checks.tensor("sinks", sinks, (num_heads,), (torch.float32, query.dtype), device)
        checks.last_dim_contiguous("sinks", sinks)
    if lse is not None:
        checks.tensor("lse", lse, (num_rows, num_heads), torch.float32, device)
        checks.last_dim_contiguous("lse", lse)
        checks.elements_apart("lse", lse)
    rows = {"output": output, "query": query, "context_lengths": lengths, "block_tables": block_tables}
    for name, value in rows.items():
        checks.last_dim_contiguous(name, value)
    checks.elements_apart("output", output)
    problem = Problem(
        arch=arch_of(device),
        num_sequences=num_sequences,
        query_length=query_length,
        num_heads=num_heads,
        num_kv_heads=kv.num_kv_heads,
        head_dim=head_dim,
        dtype=query.dtype,
        cache_dtype=kv.dtype,
        layout=kv.layout,
        page=kv.page,
        capacity=call.work_info.shape[0],
        max_partitions=plan.max_partitions if _can_split(plan, call, window) else 1,
        tile=plan.tile,
        window=window,
        causal=call.causal,
        key_scale=key_kind,
        value_scale=value_kind,
        has_sinks=sinks is not None,
        has_lse=lse is not None,
        merge_in_tile=env.pa_cluster_merge(),
        batch_invariant=plan.tiles_per_partition > 0,
        whole_pages=kv.whole_pages,
        aligned=kv.aligned,
    )
    args = Args(
        output=output,
        query=query,
        kv=kv,
        context_lengths=lengths,
        block_tables=block_tables,
        work_info=call.work_info,
        reduce_info=call.reduce_info,
        arrival_counters=call.arrival_counters,
        key_scale=key_scale,
        value_scale=value_scale,
        sinks=sinks,
        lse=lse,
        softmax_scale=float(call.softmax_scale),
        key_factor=1.0 if call.key_factor is None else float(call.key_factor),
        value_factor=1.0 if call.value_factor is None else float(call.value_factor),
        scratch=lambda: _scratch(problem, device, plan_scratch),
    )
    return problem, args


def _effective(sliding_window: int) -> int:
    """The window, 0 where it is none or reaches further than a context can be long."""
    return sliding_window if 0 < sliding_window < INT32_MAX else 0


def _check_plan(plan: PlanNumbers, call: Call, window: int) -> None:
    """Check that a plan was made for this call; its KV heads are compared with the caches in :func:`_pages`."""
    if call.work_info.device != call.query.device:
        raise ValueError(f"work_plan: expected on {call.query.device}, like query, got {call.work_info.device}")
    made_for = {
        "a batch": (call.reduce_info.shape[0], call.context_lengths.shape[0]),
        "a query_length": (plan.query_length, call.query_length),
        "a sliding_window": (_effective(plan.sliding_window), window),
    }
    for name, (planned, called) in made_for.items():
        if planned != called:
            raise ValueError(f"work_plan: expected a plan made for {name} of {called}, got one made for {planned}")


def _can_split(plan: PlanNumbers, call: Call, window: int) -> bool:
    """Whether a sequence may have more than one task: by plan and slots, by its tiles, or those its windows touch."""
    tiles = [INT32_MAX]
    if call.max_context_length is not None:
        tiles.append(-(-call.max_context_length // plan.tile))
    if window:
        # The tokens that a sequence's queries see, wherever they begin in a tile.
        tiles.append((window + plan.query_length - 2 + plan.tile - 1) // plan.tile + 1)
    return min(plan.max_partitions, call.work_info.shape[0], *tiles) > 1


def _pages(call: Call, planned_heads: int) -> paging.Pages:
    """The caches token by token, checked against the plan's KV heads and the query."""
    checks.one_of("kv_layout", call.kv_layout, (paging.AUTO, *paging.LAYOUTS))
    key_cache, device, head_dim = call.key_cache, call.query.device, call.query.shape[2]
    if isinstance(key_cache, Tensor) and key_cache.dim() in (4, 5):
        places = {paging.NHD: (2,), paging.AUTO: (1, 2)}.get(call.kv_layout, (1,)) if key_cache.dim() == 4 else (1,)
        held = [key_cache.shape[place] for place in places]
        if planned_heads not in held:
            raise ValueError(
                f"work_plan: expected a plan made for the KV heads that key_cache holds "
                f"({' or '.join(map(str, held))}), got one made for {planned_heads}"
            )
    kv = paging.pages(key_cache, call.value_cache, planned_heads, call.kv_layout)
    if kv.head_dim != head_dim:
        raise ValueError(f"key_cache: expected head dimension {head_dim}, like query, got {kv.head_dim}")
    if key_cache.device != device:
        raise ValueError(f"key_cache: expected on {device}, like query, got {key_cache.device}")
    return kv


def _scale(name: str, scale: Tensor | None, factor: float | None, kv: paging.Pages) -> tuple[Tensor | None, str]:
    """A scale tensor and its kind; a per-token one as ``[blocks, Hkv, page]``."""
    if factor is not None:
        checks.number(name, factor)
    if kv.dtype not in fp8.E4M3 and (scale is not None or factor is not None):
        raise ValueError(f"{name}: expected none with caches of {kv.dtype}, which are not quantised")
    if scale is None:
        return None, NONE
    per_token = (kv.keys.shape[0], kv.num_kv_heads, kv.page)
    kinds = {(): SCALAR, (1,): SCALAR, (kv.num_kv_heads,): HEAD, per_token: TOKEN, (*per_token, 1): TOKEN}
    # With one KV head, one element per head is a scalar by another name.
    kind = SCALAR if tuple(scale.shape) == (1,) else kinds.get(tuple(scale.shape))
    if kind is None:
        raise ValueError(
            f"{name}: expected 1 element, shape [{kv.num_kv_heads}] or shape {list(per_token)}, got {list(scale.shape)}"
        )
    checks.tensor(name, scale, tuple(scale.shape), torch.float32, kv.keys.device)
    return (scale.squeeze(-1) if scale.dim() == 4 else scale), kind


def _scratch(problem: Problem, device: torch.device, plan_scratch: Scratch | None) -> tuple[Tensor, Tensor]:
    """The plan's memory for partial results, or new memory of the same shapes."""
    if plan_scratch is not None:
        return plan_scratch(problem.rows_per_head, problem.head_dim)
    rows = (problem.capacity, problem.num_kv_heads, problem.rows_per_head)
    return (
        torch.empty(*rows, problem.head_dim, dtype=torch.float32, device=device),
        torch.empty(*rows, 2, dtype=torch.float32, device=device),
    )
