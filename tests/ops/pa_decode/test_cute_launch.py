"""What a call of ``cute_wgmma`` puts on a GPU: one call of one program, on the caller's own tensors."""

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvscout import pa_decode, plan_pa_decode
from kvscout.kernels.cute import runtime
from kvscout.ops.pa_decode import cute_tile
from kvscout.ops.pa_decode.api import Call, check, plan_numbers
from kvscout.ops.pa_decode.variants import cute_wgmma
from kvscout.testing.compiled import _HostOps

MOST = 2**31 - 1
FN = torch.float8_e4m3fn


def fields():
    """Names of what the kernel is given, in order, without importing CuTe DSL."""
    tree = ast.parse(Path(cute_tile.__file__).with_name("cute_work.py").read_text())
    (data,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Data")
    return [node.target.id for node in data.body if isinstance(node, ast.AnnAssign)]


FIELDS = fields()


@pytest.fixture
def launches(monkeypatch, on_hopper):
    """Every call of a kernel: its tile, its data by name, and the numbers after it. None is compiled."""
    found = []

    def load(program):
        def kernel(device, data, *numbers):
            named = SimpleNamespace(**dict(zip(FIELDS, data, strict=True)))
            found.append(SimpleNamespace(tile=program.spec, device=device, data=named, numbers=numbers))

        return kernel

    monkeypatch.setattr(runtime, "load", load)
    return found


@pytest.fixture
def call(make):
    def make_call(cache=FN, dtype=torch.bfloat16, **more):
        made = make(**{"dim": 128, "layout": "chunked", "cache": cache, **more})
        for name in ("query", "output"):
            made[name] = made[name].to(dtype)
        return made

    return make_call


def decode(call, launches, **more):
    with _HostOps() as host:
        assert pa_decode(**call, **more, variant="cute_wgmma") is call["output"]
    # Whatever is neither a view nor free of data would be a kernel, a copy or a wait.
    assert [name for name in host.names if not name.startswith("aten.empty")] == []
    (launch,) = launches
    launches.clear()
    return launch, host.names


def _launch_with(made, **changes):
    """Launch with another config than the rule's."""
    plan = made.pop("work_plan")
    words = {name: value for name, value in made.items() if name in Call._fields}
    asked, args = check(
        Call(
            **words, work_info=plan.work_info, reduce_info=plan.reduce_info, arrival_counters=plan.arrival_counters,
            plan_numbers=plan_numbers(plan),
        ),
        plan.scratch,
    )  # fmt: skip
    cute_wgmma._launch(asked, replace(cute_wgmma._default_config(asked), **changes), args)
    made["work_plan"] = plan
    return asked


def test_a_call_is_one_program_on_the_caller_s_own_tensors(call, launches):
    made = call(group=4, kv_heads=2, page=32, query_length=3)
    made["work_plan"] = plan_pa_decode(
        made["context_lengths"], 2, max_partitions=9, workgroup_budget=12, query_length=3
    )  # fmt: skip
    lse = torch.empty(*made["query"].shape[:2])
    sinks = torch.zeros(8)
    launch, host_ops = decode(made, launches, lse=lse, sinks=sinks, key_scale=0.5, value_scale=torch.ones(2))
    # Scratch, at the plan's first call.
    assert len(host_ops) == 2
    data = launch.data
    assert data.output == made["output"].data_ptr()
    assert data.query == made["query"].data_ptr()
    assert data.keys == made["key_cache"].data_ptr()
    assert data.values == made["value_cache"].data_ptr()
    assert data.tables == made["block_tables"].data_ptr()
    assert data.lse == lse.data_ptr()
    assert data.sinks == sinks.data_ptr()
    assert data.key_scale == 0
    plan = made["work_plan"]
    assert (data.work_info, data.reduce_info) == (plan.work_info.data_ptr(), plan.reduce_info.data_ptr())
    assert (data.partial_out, data.partial_stats) == tuple(x.data_ptr() for x in plan.scratch(12, 128))
    assert (data.output_row, data.output_head) == (8 * 128 * 2, 128 * 2)
    assert (data.key_block, data.key_head) == (2 * 32 * 128, 32 * 128)
    assert (data.value_scale_block, data.value_scale_head, data.value_scale_token) == (0, 4, 0)
    assert (data.num_sequences, data.capacity, data.query_length, data.group) == (3, plan.capacity, 3, 4)
    assert data.softmax_scale == 0.5 * made["softmax_scale"]
    assert (data.back, data.ahead) == (MOST, 1)
    assert launch.device is made["context_lengths"]
    assert launch.numbers == (plan.capacity, 1, 2, 3, 12, 32)
    assert data.arrivals == 0
    assert decode(made, launches)[1] == []


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("layout", ["chunked", "plain_v", "nhd", "hnd"])
def test_a_cache_is_read_with_its_strides(layout, dim, call, launches):
    cache = FN if layout == "plain_v" else torch.bfloat16
    launch, _ = decode(call(layout=layout, dim=dim, page=32, cache=cache), launches)
    data, tile, size = launch.data, launch.tile, cache.itemsize
    # Two KV heads, pages of 32.
    row, page = dim * size, 32 * dim * size
    assert (data.key_block, data.value_block, data.page_bits) == (2 * page, 2 * page, 5)
    head = row if layout == "nhd" else page
    assert (data.key_head, data.value_head) == (head, head)
    token = {"nhd": 2 * row, "hnd": row}.get(layout, 16)
    assert (data.key_token, data.key_chunk) == (token, 16 if layout in ("nhd", "hnd") else 32 * 16)
    pitch = {"chunked": 16, "plain_v": 32 * size}.get(layout, token)
    assert data.value_pitch == pitch
    kind = {"nhd": "token_major", "hnd": "token_major"}.get(layout, layout)
    assert (tile.layout, tile.dim, tile.page) == (kind, dim, 32 if layout == "chunked" else 128)


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_keys_and_values_may_share_a_pool(layout, call, launches):
    made = call(layout=layout, cache=torch.bfloat16)
    pool = torch.stack((made["key_cache"], made["value_cache"]), 1)
    made["key_cache"], made["value_cache"] = pool.unbind(1)
    launch, _ = decode(made, launches)
    data, page = launch.data, 16 * 128 * 2
    assert (data.key_block, data.value_block) == (4 * page, 4 * page)
    assert data.values - data.keys == 2 * page


@pytest.mark.parametrize(
    ("window", "causal", "reach"),
    [(0, True, (MOST, 1)), (0, False, (MOST, MOST)), (5, True, (5, 1)), (5, False, (5, 5))],
)
def test_a_window_and_its_direction_are_two_distances(window, causal, reach, call, launches):
    launch, _ = decode(call(sliding_window=window), launches, causal=causal)
    assert (launch.data.back, launch.data.ahead) == reach


@pytest.mark.parametrize(
    ("group", "query_length", "rows", "blocks"),
    [(16, 1, 16, 1), (6, 3, 32, 1), (16, 4, 64, 1), (64, 3, 64, 3), (13, 5, 64, 2)],
)
def test_rows_are_cut_into_blocks(group, query_length, rows, blocks, call, launches, monkeypatch):
    monkeypatch.setenv("KVSCOUT_PA_CLUSTER_MERGE", "0")
    launch, _ = decode(call(group=group, query_length=query_length, kv_heads=1), launches)
    assert launch.tile.rows == rows
    capacity = launch.data.capacity
    # Blocks of one task come one after the other, to find its pages in L2.
    assert launch.numbers[:2] == ((blocks, capacity) if blocks > 1 else (capacity, 1))
    assert launch.data.rows_first == (blocks > 1)


def test_small_blocks_are_launched_like_others(call, launches):
    made = call(group=16, kv_heads=1, query_length=2)
    small = next(config for config in cute_wgmma._space(_launch_with(made, merge="kernel")) if config.warpgroups == 1)
    other = launches.pop()
    _launch_with(made, **vars(small))
    (launch,) = launches
    assert (launch.tile.warpgroups, launch.tile.threads, launch.tile.blocks) == (1, 256, 4)
    # Two blocks of 16 rows.
    assert launch.numbers[:2] == (2, launch.data.capacity)
    assert launch.numbers[2:] == other.numbers[2:]
    assert launch.data.arrivals == 0


@pytest.mark.parametrize(("tile", "steps"), [(128, 1), (256, 2)])
def test_a_tile_of_the_plan_is_whole_steps(tile, steps, call, launches):
    made = call()
    made["work_plan"] = plan_pa_decode(made["context_lengths"], 2, tile=tile)
    launch, _ = decode(made, launches)
    assert launch.data.task_steps == steps


def test_a_plan_without_splits_takes_no_merge_and_no_scratch(call, launches):
    made = call()
    made["work_plan"] = plan_pa_decode(made["context_lengths"], 2, max_partitions=1)
    launch, host_ops = decode(made, launches)
    assert host_ops == []
    assert (launch.data.partial_out, launch.data.partial_stats) == (0, 0)
    assert launch.numbers[3:] == (0, 0, 32)


@pytest.mark.parametrize(("partitions", "bits"), [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3)])
def test_clusters_hold_a_sequence_s_partitions_and_take_no_merge_and_no_scratch(partitions, bits, call, launches):
    made = call(group=4, kv_heads=2)
    made["work_plan"] = plan_pa_decode(made["context_lengths"], 2, max_partitions=partitions)
    with _HostOps() as host:
        _launch_with(made, merge="cluster")
    assert host.names == []
    (launch,) = launches
    assert launch.tile.cluster
    assert (launch.data.partial_out, launch.data.partial_stats) == (0, 0)
    assert (launch.data.max_partitions, launch.data.cluster_bits) == (partitions, bits)
    # A cluster along the first dimension, and nothing after it.
    assert launch.numbers == (1 << bits, 3, 2, 0, 0, 32)
    assert launch.data.rows_first == 0


def test_the_rule_takes_clusters_of_two_unless_it_must_not(call, launches, monkeypatch):
    made = call(group=4, kv_heads=2)
    made["work_plan"] = plan_pa_decode(made["context_lengths"], 2, max_partitions=2)
    launch, _ = decode(made, launches)
    assert launch.tile.cluster
    assert launch.numbers == (2, 3, 2, 0, 0, 32)
    monkeypatch.setenv("KVSCOUT_PA_CLUSTER_MERGE", "0")
    launch, _ = decode(made, launches)
    assert not launch.tile.cluster
    assert launch.numbers[:3] == (made["work_plan"].capacity, 1, 2)
    assert launch.numbers[3] > 0
    monkeypatch.delenv("KVSCOUT_PA_CLUSTER_MERGE")
    # Nor where no sequence can be split.
    launch, _ = decode(made, launches, max_context_length=128)
    assert not launch.tile.cluster
    assert launch.numbers[3:] == (0, 0, 32)


@pytest.mark.parametrize(("sequences", "heads", "query_length"), [(16, 2, 1), (5, 1, 9)])
def test_the_last_block_merges_where_most_sequences_are_not_split(
    sequences, heads, query_length, call, launches, monkeypatch
):
    made = call(lengths=(9,) * sequences, group=16, kv_heads=heads, query_length=query_length)
    plan = made["work_plan"]
    assert plan.capacity < 2 * sequences
    launch, host_ops = decode(made, launches)
    assert len(host_ops) == 2
    # No second kernel, and counters that none of its others counts.
    assert launch.data.arrivals == plan.arrival_counters.data_ptr()
    assert launch.data.partial_out != 0
    assert launch.numbers[2:] == (heads, 0, 0, 32)
    tile = launch.tile
    _launch_with(made, merge="kernel")
    launch = launches.pop()
    assert (launch.tile, launch.data.arrivals) == (tile, 0)
    assert launch.numbers[3] > 0
    # Nothing arrives where nothing is split, nor where merges in a tile are turned off.
    launch, _ = decode(made, launches, max_context_length=128)
    assert (launch.data.arrivals, launch.data.partial_out, launch.numbers[3:]) == (0, 0, (0, 0, 32))
    monkeypatch.setenv("KVSCOUT_PA_CLUSTER_MERGE", "0")
    launch, _ = decode(made, launches)
    assert launch.data.arrivals == 0
    assert launch.numbers[3] > 0


def test_a_merge_has_as_many_warps_as_it_has_work_for(call, launches):
    for lengths, heads, grid in (
        # A warp for each row: on a multiprocessor of its own, or four in a block.
        ((9,) * 4, 1, (4, 16, 32)), ((9,) * 20, 1, (20, 4, 128)),
        # No more blocks than would find little to do.
        ((1,) * 600, 1, (528, 1, 128)), ((1,) * 1000, 2, (264, 1, 128)),
    ):  # fmt: skip
        _launch_with(call(lengths=lengths, group=16, kv_heads=heads), merge="kernel")
        assert launches.pop().numbers[-3:] == grid
    # Rows of many partial results are four warps' each.
    for sequences, grid in ((2, (2, 64, 32)), (4, (4, 16, 128))):
        made = call(lengths=(9000,) * sequences, group=16, kv_heads=1)
        made["work_plan"] = plan_pa_decode(made["context_lengths"], 1, max_partitions=16, workgroup_budget=32)
        launch, _ = decode(made, launches)
        assert launch.numbers[-3:] == grid


@pytest.mark.parametrize("kind", ["key", "value", "both"])
def test_scales_per_token_are_read_with_any_strides(kind, call, launches):
    made = call(page=16)
    blocks = made["key_cache"].shape[0]
    scales = {"key": torch.ones(blocks, 16, 2).transpose(1, 2), "value": torch.ones(1).expand(blocks, 2, 16)}
    given = {f"{name}_scale": scale for name, scale in scales.items() if kind in (name, "both")}
    launch, _ = decode(made, launches, **given)
    assert launch.tile.token_scales
    data = launch.data
    assert (data.keys_by_token, data.values_by_token) == (kind != "value", kind != "key")
    if kind != "value":
        assert (data.key_scale_block, data.key_scale_head, data.key_scale_token) == (128, 4, 8)
    if kind != "key":
        assert (data.value_scale_block, data.value_scale_head, data.value_scale_token) == (0, 0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sinks", [torch.float32, None])
def test_types_of_queries_and_sinks(dtype, sinks, call, launches):
    made = call(dtype=dtype)
    launch, _ = decode(made, launches, sinks=torch.zeros(4, dtype=sinks or dtype))
    assert launch.data.is_float16 == (dtype == torch.float16)
    assert launch.data.sinks_are_16_bit == (sinks is None)


def test_scratch_that_vectors_cannot_lie_in_is_replaced():
    aligned = torch.empty(8, 2), torch.empty(8)
    assert cute_wgmma._aligned(aligned) is aligned
    out, stats = cute_wgmma._aligned((torch.empty(9)[1:].view(4, 2), torch.empty(8)))
    assert (out.shape, stats.shape) == ((4, 2), (8,))
    assert out.data_ptr() % 16 == stats.data_ptr() % 16 == 0
