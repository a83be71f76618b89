"""What a thread block has to do: its task of the plan, and the tokens that its query rows see."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...kernels.cute import ptx
from ...kernels.cute.ptx import load, load_or
from .cute_tile import STEP, Tile

STEP_BITS = STEP.bit_length() - 1


class Data(NamedTuple):
    """What a kernel is given: addresses (0 where there is nothing), strides in bytes, and numbers."""

    output: Int64
    query: Int64
    keys: Int64
    values: Int64
    tables: Int64
    work_info: Int64
    reduce_info: Int64
    key_scale: Int64
    value_scale: Int64
    sinks: Int64
    lse: Int64
    partial_out: Int64  # [Hkv, rows, capacity, D]: a row's partitions are contiguous
    partial_stats: Int64  # [Hkv, rows, capacity, (reference, sum)]
    output_row: Int64
    output_head: Int64
    query_row: Int64
    query_head: Int64
    key_block: Int64
    key_head: Int64
    key_token: Int64
    key_chunk: Int64  # from one 16-byte piece of a token's keys to the next
    value_block: Int64
    value_head: Int64
    value_pitch: Int64  # from a token to the next where values lie so, else from an element of a token to the next
    table_row: Int64
    lse_row: Int64
    key_scale_block: Int64
    key_scale_head: Int64
    key_scale_token: Int64
    value_scale_block: Int64
    value_scale_head: Int64
    value_scale_token: Int64
    arrivals: Int64  # [B, Hkv, 32], int32 zeros: where a sequence's last block merges, or 0
    num_sequences: Int32
    capacity: Int32
    query_length: Int32
    group: Int32
    task_steps: Int32  # steps of a tile of the plan
    back: Int32  # query token at t sees those after t - back, ...
    ahead: Int32  # ... and before t + ahead
    is_float16: Int32  # queries and outputs, else bfloat16
    sinks_are_16_bit: Int32
    keys_by_token: Int32  # whether keys have a scale per token
    values_by_token: Int32
    page_bits: Int32  # a page has 2^page_bits tokens
    rows_first: Int32  # whether the grid's first dimension is row blocks, else tasks
    max_partitions: Int32
    cluster_bits: Int32  # a cluster has 2^cluster_bits blocks
    softmax_scale: Float32
    value_factor: Float32
    per_group: Float32  # 1 / group


class Work(NamedTuple):
    """A thread block's work, in tokens of its sequence."""

    slot: Any
    kv_head: Any
    first_row: Any
    sequence: Any
    first_step: Any
    steps: Any
    lowest: Any  # what any of its rows sees is [lowest, highest)
    highest: Any
    all_low: Any  # what all of its rows see is [all_low, all_high)
    all_high: Any
    context: Any
    rank: Any  # of the block in its cluster


@cute.jit
def touch_constants(data, at):
    """Read each 64 bytes of ``data``: a kernel's arguments are fetched when they are first used, which takes time.

    Into a word of shared memory, or nothing would be read.
    """
    words = Int32(data.output) ^ Int32(data.key_scale) ^ Int32(data.output_row) ^ Int32(data.key_chunk)
    words = words ^ Int32(data.value_scale_block) ^ data.num_sequences ^ data.page_bits
    ptx.shared_store(at, [words])


@cute.jit
def place_of(data, row):
    """Query token, and head within the group, of a row; exact up to 2^20 rows, and without a slow division."""
    position = Int32((Float32(row) + Float32(0.5)) * data.per_group)
    return position, row - position * data.group


@cute.jit
def visible(data, context, position):
    """The tokens ``[low, high)`` that a query token sees. No sum passes 2^31; ``high`` may be negative."""
    at = context - data.query_length + position
    low = cutlass.max(at + 1, data.back) - data.back
    return low, cutlass.min(at, context - data.ahead) + data.ahead


@cute.jit
def steps_of(data, first_tile, end_tile, lowest, highest):
    """First step, and number of steps, of the tiles ``[first_tile, end_tile)`` that hold any token in question."""
    first = cutlass.max(first_tile * data.task_steps, lowest >> STEP_BITS)
    end = cutlass.min(end_tile * data.task_steps, (cutlass.max(highest, 0) + (STEP - 1)) >> STEP_BITS)
    return first, cutlass.max(end - first, 0)


@cute.jit
def read_task(data, slot):
    """Sequence, first tile, end tile and context length of a slot."""
    sequence, first_tile, end_tile, context = load(data.work_info + Int64(slot) * 16, Int32, 4)
    return sequence, first_tile, end_tile, context


@cute.jit
def positions_of(tile: cutlass.Constexpr[Tile], data, first_row):
    """The first and the last query token of a row block."""
    first, _ = place_of(data, first_row)
    last, _ = place_of(data, first_row + (tile.rows - 1))
    return first, cutlass.min(last, data.query_length - 1)


@cute.jit
def row_span(data, context, first_position, last_position):
    """``lowest, highest, all_low, all_high`` of such a block; see :class:`Work`."""
    lowest, all_high = visible(data, context, first_position)
    all_low, highest = visible(data, context, last_position)
    return lowest, highest, all_low, all_high


@cute.jit
def is_seen_in_part(token, work):
    """Whether some row does not see some token of the step from ``token`` on."""
    return token < work.all_low or token + STEP > work.all_high


@cute.jit
def partitions_of(data, sequence):
    """First slot of a sequence, and number of its slots."""
    at = data.reduce_info + Int64(sequence) * 8
    return load(at), load(at + 4)


@cute.jit
def _head_scale(at, by_token, head_step, kv_head):
    """A scale of all keys or values, or of a head's: 1 where there is none, or one per token.

    It has no branch of its own, so that nothing waits for it before it is used.
    """
    is_there = Int32(0)
    if at != 0 and by_token == 0:
        is_there = Int32(1)
    return load_or(at + Int64(kv_head) * head_step, is_there, (1.0,))


@cute.jit
def stages_of(tile: cutlass.Constexpr[Tile], work):
    """Stages that the task uses of each ring, where they are as many."""
    stages = Int32(tile.stages)
    if cutlass.const_expr(tile.long_stages != tile.stages):
        if work.steps > tile.stages:
            stages = Int32(tile.long_stages)
    return stages


@cute.jit
def key_scale(data, kv_head):
    """That of keys."""
    return _head_scale(data.key_scale, data.keys_by_token, data.key_scale_head, kv_head)


@cute.jit
def value_scale(data, kv_head):
    """That of values."""
    return _head_scale(data.value_scale, data.values_by_token, data.value_scale_head, kv_head)


@cute.jit
def output_of(data, sequence, kv_head, row):
    """Address of a row's output, and of its lse."""
    position, in_group = place_of(data, row)
    head = Int64(kv_head * data.group + in_group)
    at = Int64(sequence) * data.query_length + position
    return (
        data.output + at * data.output_row + head * data.output_head,
        data.lse + at * data.lse_row + head * 4,
        head,
    )
