"""``plan_pa_decode`` under ``torch.compile``, as a ``torch.library`` op, and in CUDA graphs."""

from dataclasses import fields

import pytest
import torch

from kvscout import PADecodePlan, plan_pa_decode
from kvscout.testing import oracles


def int32(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def assert_same(got, expected):
    assert type(got) is PADecodePlan
    for field in fields(PADecodePlan):
        if field.name != "_scratch":
            a, b = getattr(got, field.name), getattr(expected, field.name)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else (type(a), a) == (type(b), b), field.name


@pytest.fixture
def compiled():
    torch.compiler.reset()
    return torch.compile(plan_pa_decode, fullgraph=True, dynamic=True, backend="aot_eager")


BATCHES = (int32(1000, 0, 300), int32(5, 6, 7, 8, 70_000), int32(4000), int32(1, 2, 3), int32())


def test_compiled_plan_is_the_eager_one(compiled):
    for lengths in BATCHES:
        for num_kv_heads in (1, 2, 4):
            assert_same(compiled(lengths, num_kv_heads), plan_pa_decode(lengths, num_kv_heads))
        options = {"max_partitions": 9, "workgroup_budget": 33, "sliding_window": 2**40, "query_length": 3}
        for tile in (128, 256):
            options["tile"] = tile
            assert_same(compiled(lengths, 2, **options), plan_pa_decode(lengths, 2, **options))


def test_compiled_batch_invariant_plan_is_the_eager_one(compiled):
    for lengths in BATCHES[:2]:
        for tiles_per_partition in (None, 2):
            options = {"batch_invariant": True, "tiles_per_partition": tiles_per_partition, "max_partitions": 9}
            plan = compiled(lengths, 2, **options)
            assert_same(plan, plan_pa_decode(lengths, 2, **options))
            plan.work_info.fill_(-1)
            assert_same(compiled(lengths, 2, **options, plan=plan), plan_pa_decode(lengths, 2, **options))


def test_compiled_plans_do_not_share_scratch(compiled):
    first, second = (compiled(BATCHES[0], 2) for _ in range(2))
    assert first.scratch(4, 64)[0].data_ptr() != second.scratch(4, 64)[0].data_ptr()


def test_compiled_refresh_in_place(compiled):
    plan = plan_pa_decode(BATCHES[0], 2, sliding_window=300, tile=128)
    addresses = [plan.work_info.data_ptr(), plan.reduce_info.data_ptr(), plan.arrival_counters.data_ptr()]
    assert compiled(BATCHES[3], 2, sliding_window=300, plan=plan) is plan
    assert [plan.work_info.data_ptr(), plan.reduce_info.data_ptr(), plan.arrival_counters.data_ptr()] == addresses
    assert_same(plan, plan_pa_decode(BATCHES[3], 2, sliding_window=300, tile=128))


def test_a_plan_within_a_compiled_function(compiled):
    work_of = torch.compile(lambda c: plan_pa_decode(c, 2).work_info, fullgraph=True, dynamic=True, backend="aot_eager")
    stats_of = torch.compile(
        lambda c, plan: plan_pa_decode(c, 2, plan=plan).scratch(3, 8)[1].zero_() + plan.work_info.sum(),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for lengths in BATCHES[:2]:
        plan = plan_pa_decode(lengths, 2)
        assert torch.equal(work_of(lengths), plan.work_info)
        assert torch.equal(stats_of(lengths, plan), torch.full((plan.capacity, 2, 3, 2), float(plan.work_info.sum())))


def test_the_op_is_what_its_schema_says():
    plan = plan_pa_decode(BATCHES[0], 2)
    for tile, tiles in ((256, 0), (256, 2), (128, 0)):
        numbers = (plan.max_partitions, 2**40, 3, tile, tiles)
        arguments = (BATCHES[1][:3].clone(), plan.work_info, plan.reduce_info, *numbers, "auto")
        torch.library.opcheck(torch.ops.kvscout.pa_plan.default, arguments)


@pytest.mark.gpu
def test_replays_follow_lengths_without_a_sync():
    lengths = int32(8192, 0, 300, 70_000, device="cuda")
    plan = plan_pa_decode(lengths, 1, sliding_window=5000)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            plan_pa_decode(lengths, 1, sliding_window=5000, plan=plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for values in ((1, 2, 3, 4), (0, 0, 0, 0), (200_000, -1, 5001, 256), (8192, 0, 300, 70_000)):
        lengths.copy_(int32(*values))
        graph.replay()
        expected = oracles.pa_plan(values, plan.capacity, plan.max_partitions, 5000, 1, plan.tile)
        assert [tuple(row) for row in plan.work_info.tolist()] == expected.work
        assert [tuple(row) for row in plan.reduce_info.tolist()] == expected.reduce
