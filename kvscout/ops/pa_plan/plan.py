"""``PADecodePlan``: how a batch's tokens are split into tasks, and the memory that partial results go through."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

TILES = (128, 256)
"""Tokens that a tile may have: the grain in which a sequence is split."""

COUNTER_STRIDE = 32
"""int32 per arrival counter, so that each has a 128-byte line of its own."""


@dataclass(frozen=True, eq=False)
class PADecodePlan:
    """What :func:`kvscout.plan_pa_decode` returns and ``pa_decode`` follows.

    The tasks of sequence ``i`` are the slots ``reduce_info[i, 0] + p`` for ``p`` in ``range(reduce_info[i, 1])``, in
    the order of their tiles; each of a sequence's KV heads runs them all. Hold a plan as long as the batch's shape
    lasts and refresh it in place (``plan_pa_decode(..., plan=plan)``) when lengths change.

    A plan owns its scratch and its arrival counters, so two decodes that run at once on different streams need two
    plans, or a plan and its :meth:`fork`.

    Attributes:
        work_info: int32 ``[capacity, 4]``: (sequence, first tile, end tile, context length); an unused slot is zeros.
        reduce_info: int32 ``[B, 2]``: (first slot, number of slots) of each sequence; an empty one has none.
        arrival_counters: int32 ``[B, Hkv, 32]``, zeros: a line per sequence and KV head for a kernel that merges its
            own partial results, zeros again when it has: ``triton_tile`` where a plan has one slot a sequence, and
            ``cute_wgmma`` where it has less than two.
        num_kv_heads: heads in the KV cache.
        max_partitions: most tasks that one sequence is split into.
        sliding_window: tokens that a query sees, its own position included; 0 sees all.
        query_length: query tokens per sequence.
        tile: tokens per tile, one of :data:`TILES`.
        batch_invariant: whether a sequence is split without regard to the rest of its batch.
        tiles_per_partition: tiles of a task in a batch-invariant plan, while slots suffice; 0 in any other plan.
    """

    work_info: Tensor
    reduce_info: Tensor
    arrival_counters: Tensor
    num_kv_heads: int
    max_partitions: int
    sliding_window: int
    query_length: int
    tile: int = 256
    batch_invariant: bool = False
    tiles_per_partition: int = 0
    _scratch: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    @property
    def capacity(self) -> int:
        """Slots in ``work_info``: the most tasks per KV head that any lengths are split into."""
        return self.work_info.shape[0]

    @property
    def num_sequences(self) -> int:
        """Sequences in the batch."""
        return self.reduce_info.shape[0]

    def fork(self) -> PADecodePlan:
        """A plan of the same work with scratch and arrival counters of its own, for a decode on another stream.

        Shared are ``work_info`` and ``reduce_info``, the tensors themselves, and every number: so a refresh in place,
        of this plan or of a fork (``plan_pa_decode(..., plan=...)``), plans for this plan and for all of its forks. It
        must not begin before the decodes that read the work so far have ended, nor must decodes begin before it has
        ended; ordering the streams is the caller's, and so it is with the clearing of the counters here.

        A fork is as safe to capture in a CUDA graph as a plan: its tensors stay where they are, and replays follow
        refreshes. Fork before a capture, not within it.

        Returns:
            A new plan, which may outlive this one.

        Example:
            >>> from kvscout import plan_pa_decode
            >>> plan = plan_pa_decode(torch.tensor([1000, 300], dtype=torch.int32), 1)
            >>> fork = plan.fork()
            >>> fork.work_info is plan.work_info, fork.scratch(8, 64)[0] is plan.scratch(8, 64)[0]
            (True, False)
        """
        return replace(self, arrival_counters=torch.zeros_like(self.arrival_counters))

    def scratch(self, rows_per_head: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Memory for the partial results of every task: made on first use, the same afterwards. Not initialised.

        Args:
            rows_per_head: query rows that share a KV head (query length x query heads per KV head).
            head_dim: elements of a head.

        Returns:
            ``partial_out``, float32 ``[capacity, Hkv, rows_per_head, head_dim]``, and ``partial_stats``, float32
            ``[capacity, Hkv, rows_per_head, 2]`` = (largest logit, sum of exponentials relative to it).
        """
        key = (rows_per_head, head_dim)
        if key not in self._scratch:
            rows = (self.capacity, self.num_kv_heads, rows_per_head)
            device = self.work_info.device
            self._scratch[key] = (
                torch.empty(*rows, head_dim, dtype=torch.float32, device=device),
                torch.empty(*rows, 2, dtype=torch.float32, device=device),
            )
        return self._scratch[key]
