"""Hopper: pages are wgmma operands as they are copied, e4m3 ones by sums of two; clusters or a second kernel merge.

Wins: on Hopper with chunked caches of D 128 and 256, with others where a block takes all query rows of a KV head. With
plans of 2 to 8 partitions, and so few sequences that all clusters of as many blocks run at once, one launch does all:
0.6 to 1.3 us less.
Limit: e4m3 products are added up with 14 bits: errors of up to 1.3e-3 of a logit. Small batches wait for a chain of
latencies (plan, page ids, first tile, merge), large ones for memory, many rows beside e4m3 caches for softmax. More
than 64 query rows per KV head read the cache again for every 64 (32 of other layouts and of D 64 and 256, 16 of e4m3
with D 256). No context may come within 1024 tokens of 2^31.
Measured: 2026-12-01, H200, 16 heads on one KV head, pages of 128, hot L2, us, e4m3 (bf16): 1 x 8k tokens 4.7 (4.6), 4 x
8k 5.3 (6.7), 8 x 8k 6.6 (8.5), 32 x 8k 20.7 (35.8), 4 x 32k 9.3 (20.6), 3 x 220k 44.1 (80.6); 4 query tokens, 3 x 8k
8.1 (7.8), 8 x 32k 24.7 (38.1); 4 rows of 2048 tokens in pages of 16, clusters of 8, 4.2 (4.6), 64 such rows, clusters
of 2, 8.0 (11.9), a prompt's 4096 such rows 199 (381). 8 x 8k, 8 heads on each of 8 KV heads: chunked 36 (66), nhd in
pages of 16 50 (66; triton_tile 92). 32 x 8k in pages of 64, beside triton_tile: plain_v 29 and 36 (46 and 45), nhd 27
and 42 (36 and 42); in pages of 128 D 64 11 and 22 (21 and 31), D 256 36 and 66 (66 and 74).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .... import fp8
from ....device import DEFAULT_NUM_SMS
from ....kernels import clusters
from ....kernels.cute import runtime
from ....kernels.cute.program import Program
from ....paging import CHUNKED, HND, NHD, PAGE_SIZES, PLAIN_V, Pages
from ....variants import Variant
from ..api import INT32_MAX, SCALAR, TOKEN, Args, Problem
from ..cute_tile import (
    CLUSTER_ROWS,
    COUNTERS,
    REDUCE_FEW,
    REDUCE_PARTS,
    REDUCE_THREADS,
    STEP,
    TOKEN_MAJOR,
    WARPGROUPS,
    Tile,
)

CACHES = {fp8.FN: "e4m3", torch.bfloat16: "bf16", torch.float16: "fp16"}

LAYOUTS = {CHUNKED: CHUNKED, PLAIN_V: PLAIN_V, NHD: TOKEN_MAJOR, HND: TOKEN_MAJOR}

ROWS = {64: (16, 32), 128: (16, 32, 64), 256: (16, 32)}
"""Query rows that a thread block may take, by head dimension. Outputs and scores of more would not fit registers."""

MOST_ROWS_OF_PIECES = 32
"""The most of them where pages are not copied in bulk."""

RING_BYTES = 64 << 10
"""Bytes of keys, and of values, whose copies hide the latency of memory."""

# The kernel divides rows by the group in float32, and CUDA counts a grid's second and third dimension in 16 bits.
MAX_ROWS = 1 << 20
MAX_GRID = 65535

# Thread blocks of the merge, at most: all rows while there are few; with more, blocks that find nothing to do would
# take the time, which is what most of them find where there is less than a second slot per sequence.
MERGE_BLOCKS = 4096
FEW_MERGE_BLOCKS = 528

# Bulk copies and vectors take addresses that are multiples of this.
ALIGNMENT = 16

KERNEL, CLUSTER, LAST = "kernel", "cluster", "last"
"""Who merges the partial results of a sequence that is split: a second kernel, the blocks of a cluster among them, or
the last block of the sequence to store its own. All give the same bits."""

RESIDENT_CLUSTERS = {2: 66, 4: 30, 8: 15}
"""Clusters, by their blocks, that run at once on the 132 multiprocessors of an H200, a block on each: what is taken to
be so where the driver cannot be asked. More of them take their turns: the same result, 2 to 4 us later."""


@dataclass(frozen=True)
class Config:
    """See :class:`~..cute_tile.Tile`; ``merge`` is who merges partial results.

    ``value_stages`` is 0 for as many as the keys of all blocks of a multiprocessor have.
    """

    rows: int
    stages: int
    blocks: int = 1
    by_rows: bool = False
    merge: str = KERNEL
    warpgroups: int = WARPGROUPS
    value_stages: int = 0


QUADS = {
    64: Config(16, 2, blocks=4, warpgroups=1, value_stages=4),
    128: Config(16, 1, blocks=4, warpgroups=1, value_stages=1),
}
"""By head dimension, blocks of a single multiplying warpgroup, four on a multiprocessor: of chunked e4m3 caches without
scales per token. Their warps' instructions for each task, which are half as many, are what short tasks wait for."""


def _refuses(problem: Problem) -> str | None:
    if problem.cache_dtype not in CACHES:
        return "NVIDIA GPUs have no e4m3fnuz arithmetic; quantise to float8_e4m3fn"
    if problem.cache_dtype not in (fp8.FN, problem.dtype):
        return f"caches of {problem.cache_dtype} need queries of the same dtype, not {problem.dtype}"
    if problem.head_dim not in ROWS:
        return f"serves head dimensions {', '.join(map(str, ROWS))}, this is {problem.head_dim}"
    if problem.layout != CHUNKED and not problem.aligned:
        return f"copies pieces of {ALIGNMENT} bytes, which must each lie on a boundary of as many"
    if problem.layout == CHUNKED and not problem.whole_pages:
        return f"copies pages in bulk, which must each be one run of memory on a {ALIGNMENT}-byte boundary"
    if problem.tile % STEP:
        return f"needs a plan whose tiles are multiples of {STEP} tokens, these have {problem.tile}"
    rows = problem.rows_per_head
    config = _default_config(problem)
    if rows > MAX_ROWS or max(problem.num_kv_heads, -(-rows // config.rows)) > MAX_GRID:
        return f"a launch has no room for {problem.num_kv_heads} KV heads of {rows} query rows"
    if rows > config.rows and problem.capacity > MAX_GRID:
        return f"with more than {config.rows} query rows per KV head, a launch has no room for {problem.capacity} tasks"
    return runtime.refusal(_program(problem, config))


def _rank(problem: Problem) -> int:
    """No choice of "auto"'s where Triton's kernel is faster: see what was measured."""
    fits = problem.rows_per_head <= _default_config(problem).rows
    return 150 if fits or (problem.layout == CHUNKED and problem.head_dim >= 128) else 0


def _configs(cache: torch.dtype, dim: int, layout: str, page: int, token_scales: bool) -> list[Config]:
    """Every config: the fewest rows, alone on a multiprocessor, in pairs and in fours, then more rows."""
    stages = RING_BYTES // (STEP * dim * cache.itemsize)
    most = max(ROWS[dim]) if layout == CHUNKED else MOST_ROWS_OF_PIECES
    if cache == fp8.FN and dim == 256:
        # Sums of two have twice the columns.
        most = 16
    alone = [Config(rows, stages, by_rows=rows == 64 and not token_scales) for rows in ROWS[dim] if rows <= most]
    # A pair's registers are just enough, but not for this.
    few_registers = layout == CHUNKED and dim == 128 and token_scales and page == STEP
    least_stages = WARPGROUPS if cache == fp8.FN else 1
    turns_values = layout == TOKEN_MAJOR and cache == fp8.FN
    are_alone = few_registers or turns_values or stages // 2 < least_stages
    pairs = [] if are_alone else [Config(ROWS[dim][0], stages // 2, 2)]
    has_quads = cache == fp8.FN and layout == CHUNKED and not token_scales and dim in QUADS
    quads = [QUADS[dim]] if has_quads else []
    return [alone[0], *pairs, *quads, *alone[1:]]


def _space(problem: Problem) -> list[Config]:
    configs = _tiles(problem)
    in_clusters = _cluster_configs(configs) if _resident_cluster(problem) else []
    last = [replace(config, merge=LAST) for config in configs if _can_last_merge(problem, config)]
    return [*configs, *in_clusters, *last]


def _tiles(problem: Problem) -> list[Config]:
    layout, page = _as_copied(problem)
    configs = _configs(problem.cache_dtype, problem.head_dim, layout, page, _has_token_scales(problem))
    # A single warpgroup adds up in another order than two, and which it is depends on how many tasks there are.
    return [config for config in configs if not problem.batch_invariant or config.warpgroups == WARPGROUPS]


def _cluster_configs(configs: list[Config]) -> list[Config]:
    """Those of configs whose blocks may be clusters, as such."""
    return [replace(config, merge=CLUSTER) for config in configs if config.blocks == 1 and config.rows == CLUSTER_ROWS]


def _resident_cluster(problem: Problem) -> int:
    """The blocks of each cluster where clusters may merge, as all run at once and have all query rows; else 0."""
    size = _cluster_size(problem)
    if size not in RESIDENT_CLUSTERS or not problem.merge_in_tile or problem.rows_per_head > CLUSTER_ROWS:
        return 0
    counted = clusters.resident(problem.arch, size)
    most = RESIDENT_CLUSTERS[size] if counted is None else counted
    return size if problem.num_sequences * problem.num_kv_heads <= most else 0


def _can_last_merge(problem: Problem, config: Config) -> bool:
    """Whether the last block may merge: there is a counter for each of a KV head's blocks of query rows."""
    has_counters = -(-problem.rows_per_head // config.rows) <= COUNTERS
    is_split = problem.merge_in_tile and problem.max_partitions > 1
    return is_split and has_counters and _program(problem, config).spec.can_last_merge


def _cluster_size(problem: Problem) -> int:
    """Blocks that hold every partition of a sequence: a power of two."""
    return 1 << (problem.max_partitions - 1).bit_length()


def _as_copied(problem: Problem) -> tuple[str, int]:
    """Layout and page of a kernel's tile."""
    return LAYOUTS[problem.layout], problem.page if problem.layout == CHUNKED else STEP


def _has_token_scales(problem: Problem) -> bool:
    return TOKEN in (problem.key_scale, problem.value_scale)


def _default_config(problem: Problem) -> Config:
    configs = _tiles(problem)
    # Blocks that merge at once what they send to each other take less time than a second kernel's start.
    if _resident_cluster(problem):
        return _cluster_configs(configs)[0]
    fitting = [config for config in configs if config.rows >= problem.rows_per_head] or configs[-1:]
    # With at most one task a multiprocessor, deep rings took up to 13% less time; with more, pairs of blocks 7% to 26%,
    # as one of them loads while the other one ends; with more than these have room for, fours of them 5% to 20%.
    tasks = problem.capacity * problem.num_kv_heads
    together = 4 if tasks > 2 * DEFAULT_NUM_SMS else 2 if tasks > DEFAULT_NUM_SMS else 1
    config = max((config for config in fitting if config.blocks <= together), key=lambda config: config.blocks)
    # Where most sequences are not split, most blocks of a second kernel would be launched for nothing; but a block that
    # merges many partitions alone takes longer than many blocks that share them.
    few_splits = problem.capacity < 2 * problem.num_sequences and problem.max_partitions <= REDUCE_FEW
    return replace(config, merge=LAST) if few_splits and _can_last_merge(problem, config) else config


def _program(problem: Problem, config: Config) -> Program:
    cache, token_scales = CACHES[problem.cache_dtype], _has_token_scales(problem)
    layout, page = _as_copied(problem)
    return _named(cache, problem.head_dim, layout, page, config, token_scales)


def _named(cache: str, dim: int, layout: str, page: int, config: Config, token_scales: bool) -> Program:
    # A pair has room for more values than keys.
    value_stages = config.value_stages or config.stages * config.blocks
    tile = Tile(
        cache, page, config.rows, config.stages, config.blocks, token_scales, config.by_rows, dim, layout, value_stages,
        config.merge == CLUSTER, config.warpgroups,
    )  # fmt: skip
    return Program(tile.name, "kvscout.ops.pa_decode.cute_launch:build", tile)


def _programs() -> Iterator[Program]:
    copied = [*((CHUNKED, page) for page in PAGE_SIZES), (PLAIN_V, STEP), (TOKEN_MAJOR, STEP)]
    for (dtype, cache), dim, (layout, page) in itertools.product(CACHES.items(), ROWS, copied):
        for token_scales in (False, True) if dtype == fp8.FN else (False,):
            configs = _configs(dtype, dim, layout, page, token_scales)
            for config in (*configs, *_cluster_configs(configs)):
                yield _named(cache, dim, layout, page, config, token_scales)


def _load(problem: Problem, config: Config) -> None:
    _kernel(problem, config)


@functools.lru_cache(maxsize=4096)
def _kernel(problem: Problem, config: Config) -> Callable[..., Any]:
    return runtime.load(_program(problem, config))


def _launch(problem: Problem, config: Config, args: Args) -> None:
    rows, kv_heads = problem.rows_per_head, problem.num_kv_heads
    row_blocks = -(-rows // config.rows)
    rows_first = row_blocks > 1
    is_cluster, is_last = config.merge == CLUSTER, config.merge == LAST
    partials = _aligned(args.scratch()) if problem.max_partitions > 1 and not is_cluster else None
    out_address, stats_address = (0, 0) if partials is None else (partials[0].data_ptr(), partials[1].data_ptr())
    output, query, lse, sinks = args.output, args.query, args.lse, args.sinks
    keys, values = args.kv.keys, args.kv.values
    output_row, output_head, _ = output.stride()
    query_row, query_head, _ = query.stride()
    reach = problem.window or INT32_MAX
    merge = (0, 0, 32) if partials is None or is_last else _merge_grid(problem)
    arrivals = 0 if partials is None or not is_last else args.arrival_counters.data_ptr()
    size = _cluster_size(problem) if is_cluster else 1
    data = (
        output.data_ptr(), query.data_ptr(), keys.data_ptr(), values.data_ptr(), args.block_tables.data_ptr(),
        args.work_info.data_ptr(), args.reduce_info.data_ptr(), _address(args.key_scale), _address(args.value_scale),
        _address(sinks), _address(lse), out_address, stats_address,
        2 * output_row, 2 * output_head, 2 * query_row, 2 * query_head,
        *_cache_strides(args.kv),
        4 * args.block_tables.stride(0), 0 if lse is None else 4 * lse.stride(0),
        *_scale_strides(problem.key_scale, args.key_scale), *_scale_strides(problem.value_scale, args.value_scale),
        arrivals,
        problem.num_sequences, problem.capacity, problem.query_length, problem.group, problem.tile // STEP,
        reach, 1 if problem.causal else reach,
        int(problem.dtype == torch.float16), int(sinks is not None and sinks.dtype != torch.float32),
        int(problem.key_scale == TOKEN), int(problem.value_scale == TOKEN),
        problem.page.bit_length() - 1, int(rows_first), problem.max_partitions, size.bit_length() - 1,
        args.softmax_scale * args.key_factor, args.value_factor, 1 / problem.group,
    )  # fmt: skip
    grid = (row_blocks, problem.capacity) if rows_first else (problem.capacity, row_blocks)
    if is_cluster:
        grid = size, problem.num_sequences
    _kernel(problem, config)(args.context_lengths, data, *grid, kv_heads, *merge)


def _cache_strides(kv: Pages) -> tuple[int, int, int, int, int, int, int]:
    """Strides in bytes: keys' by block, head, token and chunk, values' by block, head, and token or element."""
    size = kv.keys.element_size()
    key_block, key_head, key_token, key_chunk, _ = (size * stride for stride in kv.keys.stride())
    value_block, value_head, _, value_token, value_element = (size * stride for stride in kv.values.stride())
    is_token_major = LAYOUTS[kv.layout] == TOKEN_MAJOR
    chunk, pitch = (ALIGNMENT, value_token) if is_token_major else (key_chunk, value_element)
    return key_block, key_head, key_token, chunk, value_block, value_head, pitch


def _merge_grid(problem: Problem) -> tuple[int, int, int]:
    """Sequences, and thread blocks for each of them, that the merge begins with; threads of a block."""
    sequences, kv_heads = problem.num_sequences, problem.num_kv_heads
    most = MERGE_BLOCKS if problem.capacity >= 2 * sequences else FEW_MERGE_BLOCKS
    # Few partial results of a row are a warp's work, more are several warps', each on a multiprocessor of its own if
    # there are as many.
    of_row = 1 if problem.capacity < REDUCE_FEW * sequences else REDUCE_PARTS
    warps = of_row * problem.rows_per_head
    threads = 32 if warps * sequences * kv_heads <= DEFAULT_NUM_SMS else REDUCE_THREADS
    blocks = min(-(-warps * 32 // threads), max(1, most // (sequences * kv_heads)))
    return min(sequences, max(1, most // (blocks * kv_heads))), blocks, threads


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _aligned(partials: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Memory for partial results, or other memory where vectors could not lie there."""
    if any(partial.data_ptr() % ALIGNMENT for partial in partials):
        out, stats = partials
        return out.new_empty(out.shape), stats.new_empty(stats.shape)
    return partials


def _scale_strides(kind: str, scale: Tensor | None) -> tuple[int, int, int]:
    """Strides of a scale by block, head and token, in bytes."""
    if scale is None or kind == SCALAR:
        return 0, 0, 0
    if kind != TOKEN:
        return 0, 4 * scale.stride(0), 0
    block, head, token = scale.stride()
    return 4 * block, 4 * head, 4 * token


VARIANT = Variant(
    launch=_launch,
    default_config=_default_config,
    refuses=_refuses,
    space=_space,
    records_grad=False,
    rank=_rank,
    lacks=lambda: runtime.unavailable(_programs()),
    load=_load,
    programs=_programs,
)
