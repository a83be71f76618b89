"""Hopper: keys and queries through TMA into rings of shared memory, two warpgroups multiply, one launch does it all.

Wins: everywhere on Hopper, D <= 128.
Limit: relu and multiply-add of every dot product, which share the register file with the matrix unit.
Measured: not yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ....device import num_sms
from ....kernels.cute import runtime
from ....kernels.cute.program import Program
from ....variants import Variant
from ..api import NUM_HEADS, Args, Problem
from ..cute_tile import MAX_COLUMNS, Tile

HEAD_DIMS = (32, 64, 128)


@dataclass(frozen=True)
class Config:
    """Tile shape; see :class:`~..cute_tile.Tile`."""

    rows: int
    split: str = "rows"
    stage_keys: int = 128
    kv_stages: int = 4
    block_cost: int = 3


def _refuses(problem: Problem) -> str | None:
    if problem.head_dim not in HEAD_DIMS:
        return f"keeps queries in shared memory up to head dimension {HEAD_DIMS[-1]}, this is {problem.head_dim}"
    if problem.fnuz:
        return "NVIDIA GPUs have no e4m3fnuz arithmetic; quantise to float8_e4m3fn"
    return runtime.refusal(_program(problem, _default_config(problem)))


def _default_config(problem: Problem) -> Config:
    most = _most_rows(problem.num_heads)
    if problem.num_rows <= 4:
        # Few rows wait for memory: no more columns than there are rows, and both warpgroups on the same ones.
        rows = min(1 << (problem.num_rows - 1).bit_length(), most)
        return Config(rows, "keys")
    return Config(most)


def _most_rows(num_heads: int) -> int:
    # 32 rows of 8 heads would spill.
    return min(MAX_COLUMNS // num_heads, 16)


def _space(problem: Problem) -> Iterable[Config]:
    return _configs(problem.num_heads)


def _configs(num_heads: int) -> Iterator[Config]:
    most = _most_rows(num_heads)
    for rows in (1, 2, 4):
        if rows <= most:
            yield Config(rows, "keys")
    yield Config(most)


def _program(problem: Problem, config: Config) -> Program:
    tile = Tile(
        problem.num_heads,
        problem.head_dim,
        config.rows,
        config.split,
        config.stage_keys,
        config.kv_stages,
        config.block_cost,
    )
    return Program(tile.name, "kvscout.ops.mqa_logits.cute_launch:build", tile)


def _launch(problem: Problem, config: Config, args: Args) -> None:
    q, k, k_scale, weights, ks, ke, q_scale, out = args
    program = _program(problem, config)
    tile = program.spec
    blocks = -(-problem.num_rows // tile.block_rows) * -(-problem.num_keys // tile.stage_keys)
    runtime.load(program)(
        q,
        k,
        k_scale,
        weights,
        weights if q_scale is None else q_scale,
        ks,
        ke,
        out,
        int(problem.has_q_scale),
        int(problem.clean_logits),
        min(blocks, num_sms(q.device)),
    )


def _programs() -> Iterator[Program]:
    for heads in NUM_HEADS:
        for dim in HEAD_DIMS:
            for config in _configs(heads):
                yield _program(Problem("sm_90", 1, 1, heads, dim, False), config)


VARIANT = Variant(
    launch=_launch,
    default_config=_default_config,
    refuses=_refuses,
    space=_space,
    rank=lambda problem: 150,
    programs=_programs,
)
