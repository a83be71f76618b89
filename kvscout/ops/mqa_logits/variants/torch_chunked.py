"""Plain torch in float32, a block of rows and keys at a time, so that memory stays bounded.

Wins: on the CPU, where it is the default.
Limit: on a GPU it scores the blocks outside the windows too, because it may not read the windows back.
Measured: 2026-11-30, 2 CPU cores, 256 x 4096, H64, D128: blocks of 2 MB 0.14 s, 16 MB 0.17 s, 64 MB 0.24 s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ....variants import Variant
from ..api import Args, Problem
from .torch_reference import window


@dataclass(frozen=True)
class Config:
    """Block sizes: ``budget_bytes`` of float32 dot products are held at a time, ``block_kv`` keys wide."""

    budget_bytes: int
    block_kv: int


def _default_config(problem: Problem) -> Config:
    # A GPU wants few large launches, a CPU core wants the block to stay in its cache.
    return Config(2 << 20, 512) if problem.arch == "cpu" else Config(256 << 20, 8192)


def _space(problem: Problem) -> Iterable[Config]:
    yield Config(1 << 16, 64)


def _launch(problem: Problem, config: Config, args: Args) -> None:
    weights = args.weights if args.q_scale is None else args.weights * args.q_scale
    block_rows = max(1, config.budget_bytes // (4 * problem.num_heads * config.block_kv))
    for row in range(0, problem.num_rows, block_rows):
        rows = slice(row, row + block_rows)
        q, ks, ke, out = args.q[rows].float(), args.ks[rows], args.ke[rows], args.out[rows]
        start, end = _key_range(problem, ks, ke)
        if problem.clean_logits:
            out[:, :start] = out[:, end:] = float("-inf")
        for key in range(start, end, config.block_kv):
            keys = slice(key, min(key + config.block_kv, end))
            dots = (q.flatten(0, 1) @ args.k[keys].float().T).relu_().unflatten(0, q.shape[:2])
            logits = (weights[rows, None] @ dots)[:, 0] * args.k_scale[keys]
            inside = window(ks, ke, problem.num_keys, keys)
            out[:, keys] = torch.where(inside, logits, float("-inf") if problem.clean_logits else out[:, keys])


def _key_range(problem: Problem, ks: torch.Tensor, ke: torch.Tensor) -> tuple[int, int]:
    """First and last key that any row of the block sees; all keys where looking would stop a GPU."""
    if problem.arch != "cpu":
        return 0, problem.num_keys
    start, end = ks.clamp(0, problem.num_keys), ke.clamp(max=problem.num_keys)
    seen = start < end
    return (int(start[seen].min()), int(end[seen].max())) if seen.any() else (0, 0)


VARIANT = Variant(
    launch=_launch,
    default_config=_default_config,
    space=_space,
    rank=lambda problem: 10,
)
