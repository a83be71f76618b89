"""``plan_pa_decode`` and ``get_recommended_splits``: specification, checks, dispatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ... import checks, torch_ops, tuning
from ...device import arch_of
from ...device import num_sms as sms_of
from ...variants import AUTO, Family
from .plan import COUNTER_STRIDE, TILES, PADecodePlan

FAMILY = Family("pa_plan", __package__)

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

LOG2_MAX_SLOTS_TIMES_SEQUENCES = {128: 39, 256: 40}
"""By tile: sequences have at most 2^31 / tile tiles, so that up to here the products of the plan's arithmetic fit 64
bits."""

MAX_SLOTS = 2**24
"""A plan uses no more slots than there are tiles of 128 tokens, and so many hold more than a GPU's memory."""

MAX_RECOMMENDED_SPLITS = 8

LARGE_WORKGROUPS = ("sm_90",)
"""Where one workgroup fills an SM, and a second one's start and partial results cost more than they hide."""

SMALL_TILES = ("sm_90",)
"""Where a plan has tiles of 128 tokens unless told otherwise: tiles of 256 are too few for all SMs where a batch is one
sequence of 8K tokens, or four of 2048, and smaller ones balance larger batches better."""


@dataclass(frozen=True)
class Problem:
    """What variants decide on.

    A ``sliding_window`` of 0 is none, ``tile`` is in tokens, and ``tiles_per_partition`` 0 is not batch-invariant.
    """

    arch: str
    num_sequences: int
    capacity: int
    max_partitions: int
    sliding_window: int
    query_length: int
    tile: int
    tiles_per_partition: int

    def bucket(self) -> tuning.Bucket:
        """What a tuned table tells apart: sizes by power of two, the rest as it is."""
        return tuning.bucket(self, classes=("num_sequences", "capacity", "max_partitions", "sliding_window"))

    @property
    def most_tasks(self) -> int:
        """Most tasks of one sequence: batch-invariant plans divide the slots equally, whatever the lengths."""
        if self.tiles_per_partition == 0:
            return self.max_partitions
        return min(self.max_partitions, self.capacity // self.num_sequences)

    @property
    def reach(self) -> int:
        """Tokens before a sequence's end that its first query can see, at most INT32_MAX, which is all of them."""
        if self.sliding_window == 0:
            return INT32_MAX
        return min(self.sliding_window + self.query_length - 1, INT32_MAX)


class Args(NamedTuple):
    """The checked tensors of a call; the last two are its outputs."""

    context_lengths: torch.Tensor
    work_info: torch.Tensor
    reduce_info: torch.Tensor


def plan_pa_decode(
    context_lengths: torch.Tensor,
    num_kv_heads: int,
    *,
    max_partitions: int | None = None,
    workgroup_budget: int | None = None,
    sliding_window: int = 0,
    query_length: int = 1,
    tile: int | None = None,
    batch_invariant: bool = False,
    tiles_per_partition: int | None = None,
    plan: PADecodePlan | None = None,
    variant: str = AUTO,
) -> PADecodePlan:
    """Split a batch's contexts into tasks of about the same number of tiles, for ``pa_decode``.

    ::

        first_i   = max(ctx_i - (QL-1) - W, 0) // tile if W > 0 else 0     first tile that a query sees
        tiles_i   = ceil(max(ctx_i, 0) / tile) - first_i
        capacity  = min(B * max_partitions, max(B, ceil(workgroup_budget / num_kv_heads)))
        remaining = capacity - #{tiles_i > 0};  total = max(sum(tiles), 1);  cum = inclusive prefix sum of tiles
        count_i   = min([tiles_i > 0] + cum_i*remaining // total - (cum_i - tiles_i)*remaining // total,
                        tiles_i, max_partitions)
        start_i   = exclusive prefix sum of count_i
        task p of i, in slot start_i + p:  tiles [first_i + p*tiles_i // count_i, first_i + (p+1)*tiles_i // count_i)

    The order and the number of a sequence's partial sums decide its last bits. Above they depend on the lengths of the
    whole batch; with ``batch_invariant`` they depend on nothing but the sequence's own length and the arguments::

        slots     = min(max_partitions, ceil(workgroup_budget / num_kv_heads));  capacity = B * slots
        count_i   = min(ceil(tiles_i / tiles_per_partition), slots)

    so a sequence too long for its slots gets longer tasks. With one tile per partition each sequence is split as if it
    were alone. The price is that a large batch is split as far as a small one, which more tiles per partition limit,
    and that scratch and grid grow with B * slots, which a smaller ``max_partitions`` limits.

    Args:
        context_lengths: int32 ``[B]``, contiguous: tokens of each sequence, its query tokens included. Zero and
            negative lengths are empty sequences. B may be 0. A plan takes any length; ``pa_decode`` takes none within
            1024 tokens of 2^31.
        num_kv_heads: heads in the KV cache; every head runs all tasks.
        max_partitions: most tasks of one sequence; None takes the number of SMs (or the plan's).
        workgroup_budget: workgroups to fill, over all KV heads; None takes the number of SMs on sm_90, less what KV
            heads cannot share equally, twice that number elsewhere (or the plan's).
        sliding_window: W, the tokens that a query sees, its own position included; 0 and -1 are no window.
        query_length: QL, query tokens per sequence.
        tile: tokens per tile, 128 or 256; None takes 128 on sm_90, 256 elsewhere (or the plan's). A sequence has no
            more tasks than tiles: small ones give more SMs a part of a small batch, and any batch more even tasks.
        batch_invariant: split each sequence without regard to the others. The bits of its outputs then do not depend on
            its batch, as long as both batches are planned with the same other arguments (so not with what
            ``get_recommended_splits`` says of each), on the same kind of device, and decoded by the same variant, which
            is not ``torch_reference``: that one follows no plan.
        tiles_per_partition: tiles of a task in a batch-invariant plan; None takes 1 (or the plan's).
        plan: an earlier plan of the same batch size, heads, window, query length, tile and batch invariance: its
            tensors are rewritten in place, nothing is allocated, and CUDA graphs that read them follow. So do the
            plan's forks.
        variant: a variant's name (see ``kvscout info``), or "auto": ``KVSCOUT_PA_PLAN_VARIANT`` or the best fit.

    Returns:
        ``plan``, or a new :class:`PADecodePlan` on the device of ``context_lengths``. It owns the scratch of the
        decodes that follow it: two decodes that run at once on different streams need two plans, or a plan and its
        :meth:`~PADecodePlan.fork`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, stride or device, or is not what ``plan``
            was made with, or ``capacity`` would be more than 2^24 slots; the message names it.
        UnsupportedProblem: no variant, or not the one asked for, serves this call.

    One kernel; never synchronises with the host; capturable in a CUDA graph, whose replays follow lengths that change
    on the device. Works under ``torch.compile(fullgraph=True)``.

    Source: the split policy and tensors are those of AITER's planned paged-attention decode; its tiles have 256 tokens,
    and it has no batch-invariant plans.

    Example:
        >>> lengths = torch.tensor([1000, 0, 300], dtype=torch.int32)
        >>> plan = plan_pa_decode(lengths, 1, workgroup_budget=6, tile=256)
        >>> plan.reduce_info.tolist()
        [[0, 3], [3, 0], [3, 2]]
        >>> plan.work_info.tolist()
        [[0, 0, 1, 1000], [0, 1, 2, 1000], [0, 2, 4, 1000], [2, 0, 1, 300], [2, 1, 2, 300], [0, 0, 0, 0]]
        >>> options = {"tile": 256, "batch_invariant": True, "tiles_per_partition": 2}
        >>> plan_pa_decode(lengths, 1, **options).reduce_info[:, 1].tolist()
        [2, 0, 1]
    """
    checks.tensor("context_lengths", context_lengths, ("B",), torch.int32)
    checks.integer("num_kv_heads", num_kv_heads, 1, INT32_MAX)
    checks.integer("sliding_window", sliding_window, -1, INT64_MAX)
    checks.integer("query_length", query_length, 1, INT32_MAX)
    if max_partitions is not None:
        checks.integer("max_partitions", max_partitions, 1, INT32_MAX)
    if workgroup_budget is not None:
        checks.integer("workgroup_budget", workgroup_budget, 1, INT32_MAX)
    if tile is not None:
        checks.integer("tile", tile, 1)
        checks.one_of("tile", tile, TILES)
    checks.boolean("batch_invariant", batch_invariant)
    if tiles_per_partition is not None:
        checks.integer("tiles_per_partition", tiles_per_partition, 1, INT32_MAX)
        if not batch_invariant:
            raise ValueError(f"tiles_per_partition: expected None without batch_invariant, got {tiles_per_partition}")
    settings = _Settings(
        num_kv_heads, max_partitions, workgroup_budget, max(sliding_window, 0), query_length, tile, batch_invariant,
        tiles_per_partition,
    )  # fmt: skip
    if plan is None:
        plan = _new_plan(context_lengths, settings)
    else:
        _check_refresh(plan, context_lengths, settings)
    call = torch_ops.traced("pa_plan") if torch.compiler.is_compiling() else run
    call(
        context_lengths, plan.work_info, plan.reduce_info,
        plan.max_partitions, plan.sliding_window, plan.query_length, plan.tile, plan.tiles_per_partition, variant,
    )  # fmt: skip
    return plan


class _Settings(NamedTuple):
    """What a plan is made or refreshed with, checked; None stands for a default, or the plan's."""

    num_kv_heads: int
    max_partitions: int | None
    workgroup_budget: int | None
    sliding_window: int
    query_length: int
    tile: int | None
    batch_invariant: bool
    tiles_per_partition: int | None

    def capacity(self, num_sequences: int, max_partitions: int, workgroup_budget: int) -> int:
        per_head = -(-workgroup_budget // self.num_kv_heads)
        if self.batch_invariant:
            return num_sequences * min(max_partitions, per_head)
        return min(num_sequences * max_partitions, max(num_sequences, per_head))


def _new_plan(context_lengths: torch.Tensor, settings: _Settings) -> PADecodePlan:
    device, num_sequences, num_kv_heads = context_lengths.device, context_lengths.shape[0], settings.num_kv_heads
    max_partitions, workgroup_budget, tile = settings.max_partitions, settings.workgroup_budget, settings.tile
    if max_partitions is None:
        max_partitions = sms_of(device)
    if workgroup_budget is None:
        workgroup_budget = _default_budget(arch_of(device), sms_of(device), num_kv_heads)
    if tile is None:
        tile = 128 if arch_of(device) in SMALL_TILES else 256
    capacity = settings.capacity(num_sequences, max_partitions, workgroup_budget)
    if capacity > MAX_SLOTS:
        raise ValueError(
            f"max_partitions, workgroup_budget: expected at most 2**24 slots in all, but {max_partitions} and "
            f"{workgroup_budget} give {capacity} for {num_sequences} sequences"
        )
    return PADecodePlan(
        work_info=torch.empty(capacity, 4, dtype=torch.int32, device=device),
        reduce_info=torch.empty(num_sequences, 2, dtype=torch.int32, device=device),
        arrival_counters=torch.zeros(num_sequences, num_kv_heads, COUNTER_STRIDE, dtype=torch.int32, device=device),
        num_kv_heads=num_kv_heads,
        max_partitions=max_partitions,
        sliding_window=settings.sliding_window,
        query_length=settings.query_length,
        tile=tile,
        batch_invariant=settings.batch_invariant,
        tiles_per_partition=(settings.tiles_per_partition or 1) if settings.batch_invariant else 0,
    )


def _default_budget(arch: str, num_sms: int, num_kv_heads: int) -> int:
    if arch not in LARGE_WORKGROUPS:
        return 2 * num_sms
    # All heads have as many slots, and what is one too many for the SMs would run when all others have ended.
    return num_sms // num_kv_heads * num_kv_heads or num_sms


def _check_refresh(plan: PADecodePlan, context_lengths: torch.Tensor, settings: _Settings) -> None:
    """Check that a plan was made with the arguments it is refreshed with."""
    if not isinstance(plan, PADecodePlan):
        raise TypeError(f"plan: expected a PADecodePlan, got {type(plan).__name__}")
    num_sequences = context_lengths.shape[0]
    expected, found = context_lengths.device, plan.work_info.device
    if found != expected:
        raise ValueError(f"plan: expected on {expected}, like context_lengths, got {found}")
    given = {
        "context_lengths: number of sequences": (num_sequences, plan.num_sequences),
        "num_kv_heads": (settings.num_kv_heads, plan.num_kv_heads),
        "max_partitions": (settings.max_partitions, plan.max_partitions),
        "sliding_window": (settings.sliding_window, plan.sliding_window),
        "query_length": (settings.query_length, plan.query_length),
        "tile": (settings.tile, plan.tile),
        "batch_invariant": (settings.batch_invariant, plan.batch_invariant),
        "tiles_per_partition": (settings.tiles_per_partition, plan.tiles_per_partition),
    }
    for name, (value, made_with) in given.items():
        if value is not None and value != made_with:
            raise ValueError(f"{name}: expected {made_with}, with which the plan was made, got {value}")
    budget = settings.workgroup_budget
    if budget is not None:
        capacity = settings.capacity(num_sequences, plan.max_partitions, budget)
        if capacity != plan.capacity:
            raise ValueError(
                f"workgroup_budget: expected one that gives the plan's {plan.capacity} slots, got {budget}, "
                f"which gives {capacity}"
            )


def run(
    context_lengths: torch.Tensor,
    work_info: torch.Tensor,
    reduce_info: torch.Tensor,
    max_partitions: int,
    sliding_window: int,
    query_length: int,
    tile: int,
    tiles_per_partition: int,
    variant: str,
) -> None:
    """Check, choose, launch: fill ``work_info`` and ``reduce_info``."""
    args = Args(context_lengths, work_info, reduce_info)
    problem = check(args, max_partitions, sliding_window, query_length, tile, tiles_per_partition)
    choice = FAMILY.choose(problem, variant)
    if problem.num_sequences:
        choice.launch(problem, args)


def check(
    args: Args, max_partitions: int, sliding_window: int, query_length: int, tile: int, tiles_per_partition: int
) -> Problem:
    """Check every tensor of a call and describe it."""
    lengths, work_info, reduce_info = args
    checks.tensor("context_lengths", lengths, ("B",), torch.int32)
    num_sequences = lengths.shape[0]
    checks.tensor("work_info", work_info, ("capacity", 4), torch.int32, lengths.device)
    checks.tensor("reduce_info", reduce_info, (num_sequences, 2), torch.int32, lengths.device)
    for name, value in (("context_lengths", lengths), ("work_info", work_info), ("reduce_info", reduce_info)):
        if not value.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tuple(value.stride())}")
    capacity = work_info.shape[0]
    log2_max = LOG2_MAX_SLOTS_TIMES_SEQUENCES[tile]
    if capacity * num_sequences > 2**log2_max or capacity > INT32_MAX:
        raise ValueError(
            f"context_lengths: expected at most 2**{log2_max} sequences x slots with tiles of {tile} tokens, "
            f"got {num_sequences} sequences x {capacity} slots"
        )
    return Problem(
        arch=arch_of(lengths.device),
        num_sequences=num_sequences,
        capacity=capacity,
        max_partitions=max_partitions,
        sliding_window=sliding_window,
        query_length=query_length,
        tile=tile,
        tiles_per_partition=tiles_per_partition,
    )


def get_recommended_splits(num_sequences: int, num_kv_heads: int, *, num_sms: int | None = None) -> int:
    """A ``max_partitions`` that fills the GPU about twice while partition merges stay cheap.

    ::

        max(1, min(8, ceil(2 * num_sms / (num_sequences * num_kv_heads))))

    Args:
        num_sequences: sequences in the batch; an empty batch counts as one.
        num_kv_heads: heads in the KV cache.
        num_sms: SMs of the GPU; None takes the current one's (an H200's 132 where there is none).

    Returns:
        From 1 to 8.

    Raises:
        TypeError, ValueError: an argument is not an int, or too small; the message names it.

    Example:
        >>> get_recommended_splits(64, 1, num_sms=132)
        5
    """
    checks.integer("num_sequences", num_sequences, 0)
    checks.integer("num_kv_heads", num_kv_heads, 1)
    if num_sms is None:
        num_sms = sms_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    checks.integer("num_sms", num_sms, 1)
    workgroups = max(num_sequences, 1) * num_kv_heads
    return max(1, min(MAX_RECOMMENDED_SPLITS, -(-2 * num_sms // workgroups)))
