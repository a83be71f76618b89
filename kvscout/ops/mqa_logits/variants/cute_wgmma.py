"""Hopper: keys and queries through TMA into rings of shared memory, two warpgroups multiply, one launch does it all.

Wins: everywhere on Hopper, D <= 128.
Limit: relu and multiply-add of every dot product, which share the register file with the matrix unit, and the power
cap: the clock is 1.75 instead of 2 GHz from the first call on, and less under lasting load. Small shapes: half of the
time is the start.
Measured: 2026-11-30, H200, D128, clean off, causal, cold L2, us (DeepGEMM in the same run): 16384^2 H64 1791 (2241),
H32 929 (1228); 8192^2 461 (568), 242 (326); 4096^2 130 (151), 71 (89); 2048^2 39.0 (45.3), 23.7 (28.8); 1024^2 16.5
(17.3), 12.2 (13.6); 1024 x 128k 1764 (2262), 911 (1241); H64 64 x 8192 14.2 (34.5), 16 x 128k 35.4 (454), 1 x 128k 10.8
(437). Over 24 model shapes 1.34 times as fast as DeepGEMM, 3.86 times as fast as AITER's Triton kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ....device import num_sms
from ....kernels.cute import runtime
from ....kernels.cute.program import Program
from ....variants import Variant
from ..api import NUM_HEADS, Args, Problem
from ..cute_tile import MAX_COLUMNS, Tile

HEAD_DIMS = (32, 64, 128)

# A key's number plus a stage or a piece of the fill, and the sum of all costs, must fit 32 bits.
MAX_KEYS = (1 << 31) - 8192
MAX_COST = (1 << 31) - 1

# 32 rows of 8 heads would fill the accumulators too, but spill.
MAX_ROWS = 16

# Logits up to which stages of 64 keys, whose shares are more equal, took less time than stages of 128: by 9% at 1024^2,
# 4% at 2048^2. At 4096^2 they took 7% more, at 1024 x 128k 11%.
SMALL_LOGITS = 8 << 20

# Logits up to which half as many rows took less time at 32 heads or fewer, by 3% at 1024^2; 8% more at 2048^2.
TINY_LOGITS = 2 << 20


@dataclass(frozen=True)
class Config:
    """Tile shape; see :class:`~..cute_tile.Tile`."""

    rows: int
    split: str = "rows"
    stage_keys: int = 128
    kv_stages: int = 4
    block_cost: int = 4


def _refuses(problem: Problem) -> str | None:
    if problem.head_dim not in HEAD_DIMS:
        return f"keeps queries in shared memory up to head dimension {HEAD_DIMS[-1]}, this is {problem.head_dim}"
    if problem.num_keys > MAX_KEYS or _total_cost(problem, _default_config(problem)) > MAX_COST:
        return f"counts keys and tiles in 32 bits, too few for {problem.num_rows} x {problem.num_keys} logits"
    if problem.fnuz:
        return "NVIDIA GPUs have no e4m3fnuz arithmetic; quantise to float8_e4m3fn"
    return runtime.refusal(_program(problem.num_heads, problem.head_dim, _default_config(problem)))


def _total_cost(problem: Problem, config: Config) -> int:
    """The largest that the schedule's sum of costs can be."""
    tile = _tile(problem.num_heads, problem.head_dim, config)
    blocks = -(-problem.num_rows // tile.block_rows)
    tiles = -(-problem.num_keys // tile.stage_keys)
    return blocks * (tiles * tile.tile_cost + tile.block_cost)


def _most_rows(num_heads: int) -> int:
    return min(MAX_COLUMNS // num_heads, MAX_ROWS)


def _small(rows: int) -> Config:
    return Config(rows, stage_keys=64, kv_stages=8, block_cost=3)


def _default_config(problem: Problem) -> Config:
    most = _most_rows(problem.num_heads)
    # No more columns than the rows need: 8 rows of 32 heads x 128k took 16 us with 4 rows a warpgroup, 24 with 8.
    if problem.num_rows <= 4:
        # Both warpgroups on the same rows, and different keys.
        return Config(min(_power_of_two(problem.num_rows), most), "keys")
    logits = problem.num_rows * problem.num_keys
    if problem.num_heads <= 32 and logits <= TINY_LOGITS:
        most //= 2
    rows = min(_power_of_two(problem.num_rows) // 2, most)
    return _small(rows) if logits <= SMALL_LOGITS or rows < most else Config(rows)


def _power_of_two(n: int) -> int:
    """The least power of two from ``n`` on."""
    return 1 << (n - 1).bit_length()


def _configs(num_heads: int) -> Iterator[Config]:
    most = _most_rows(num_heads)
    for rows in (1, 2, 4):
        if rows <= most:
            yield Config(rows, "keys")
    for rows in (4, 8, 16):
        if rows < most:
            yield _small(rows)
    yield _small(most)
    yield Config(most)


def _space(problem: Problem) -> Iterable[Config]:
    return (config for config in _configs(problem.num_heads) if _total_cost(problem, config) <= MAX_COST)


def _program(num_heads: int, head_dim: int, config: Config) -> Program:
    tile = _tile(num_heads, head_dim, config)
    return Program(tile.name, "kvscout.ops.mqa_logits.cute_launch:build", tile)


def _tile(num_heads: int, head_dim: int, config: Config) -> Tile:
    return Tile(num_heads, head_dim, config.rows, config.split, config.stage_keys, config.kv_stages, config.block_cost)


def _programs() -> Iterator[Program]:
    for num_heads in NUM_HEADS:
        for head_dim in HEAD_DIMS:
            for config in _configs(num_heads):
                yield _program(num_heads, head_dim, config)


def _load(problem: Problem, config: Config) -> None:
    _kernel(problem.num_heads, problem.head_dim, config)


@functools.cache
def _kernel(num_heads: int, head_dim: int, config: Config) -> tuple[Callable[..., Any], int]:
    """The kernel, and how many query rows a thread block takes at a time."""
    return runtime.load(_program(num_heads, head_dim, config)), _tile(num_heads, head_dim, config).block_rows


def _launch(problem: Problem, config: Config, args: Args) -> None:
    q, k, k_scale, weights, ks, ke, q_scale, out = args
    kernel, block_rows = _kernel(problem.num_heads, problem.head_dim, config)
    tiles = -(-problem.num_rows // block_rows) * -(-problem.num_keys // config.stage_keys)
    kernel(
        _regular(q), _regular(k), k_scale, weights, weights if q_scale is None else q_scale, ks, ke, out,
        problem.has_q_scale, problem.clean_logits, min(tiles, num_sms(q.device)),
    )  # fmt: skip


def _regular(x: torch.Tensor) -> torch.Tensor:
    """``x`` with strides that a tensor map takes: where there is one of a dimension, its stride may be anything."""
    strides = x.stride()
    if strides[0] % 16 == 0 and strides[-2] % 16 == 0:
        return x
    return x.as_strided(x.shape, [16 if n == 1 else s for n, s in zip(x.shape, strides, strict=True)])


VARIANT = Variant(
    launch=_launch,
    default_config=_default_config,
    refuses=_refuses,
    space=_space,
    records_grad=False,
    rank=lambda problem: 150,
    lacks=lambda: runtime.unavailable(_programs()),
    load=_load,
    programs=_programs,
)
