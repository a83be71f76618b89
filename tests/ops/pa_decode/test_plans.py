"""What ``pa_decode`` makes of batch-invariant plans and of forks."""

import pytest
import torch

from kvscout import pa_decode, plan_pa_decode
from kvscout.ops.pa_decode.api import FAMILY

LENGTHS = (700, 0, 300, 1290, 20)
BATCHES = ((0,), (2,), (3,), (4, 1, 0), (3, 2), (4, 1, 3, 0, 2))
QUERIES, GROUP, DIM = 2, 4, 64
SPLIT = {"max_partitions": 4, "query_length": QUERIES}


@pytest.fixture
def everyone(make):
    """A call of all sequences; float16 outputs show more of what the order of sums does than bfloat16 ones."""
    call = make(LENGTHS, group=GROUP, kv_heads=1, dim=DIM, cache=torch.float16, query_length=QUERIES)
    return call | {"query": call["query"].half(), "output": call["output"].half()}


def poisoned(plan, group=GROUP):
    for memory in plan.scratch(group * QUERIES, DIM):
        memory.fill_(float("nan"))
    return plan


def decoded(call, batch, variant, **options):
    """Outputs and lse of some sequences, by sequence, and by sequence the number of its tasks."""
    kv_heads, device = call["key_cache"].shape[1], call["query"].device
    sequences = torch.tensor(batch, device=device)
    rows = (sequences[:, None] * QUERIES + torch.arange(QUERIES, device=device)).flatten()
    call = call | {name: call[name][sequences] for name in ("context_lengths", "block_tables")}
    call |= {name: call[name][rows] for name in ("query", "output")}
    plan = plan_pa_decode(call["context_lengths"], kv_heads, **SPLIT, **options)
    poisoned(plan, call["query"].shape[1] // kv_heads)
    lse = torch.full(call["query"].shape[:2], float("nan"), device=device)
    pa_decode(**call | {"work_plan": plan, "lse": lse, "variant": variant})
    results = torch.cat((call["output"].flatten(1), lse), 1).unflatten(0, (-1, QUERIES))
    tasks = plan.reduce_info[:, 1].tolist()
    return dict(zip(batch, results, strict=True)), dict(zip(batch, tasks, strict=True))


@pytest.fixture(params=[name for name in FAMILY.names if not name.startswith("torch")])
def planned_variant(request):
    """Name of each variant that runs here and follows the plan.

    torch's does not: how far it gathers depends on the longest sequence of a batch, and so, before results are rounded
    to 16 bits, do their last bits.
    """
    refusal = FAMILY.unavailable(request.param, "cpu")
    if refusal is not None:
        pytest.skip(refusal)
    return request.param


def on_cuda(call):
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in call.items()}


def spread(call, variant, **options):
    """Of each sequence that is not empty, the different results and numbers of tasks that batches give it."""
    results, tasks = {}, {}
    for batch in BATCHES:
        found, counts = decoded(call, batch, variant, **options)
        for sequence in batch:
            assert found[sequence].isfinite().all() or LENGTHS[sequence] < QUERIES
            results.setdefault(sequence, set()).add(found[sequence].numpy().tobytes())
            tasks.setdefault(sequence, set()).add(counts[sequence])
    return results, tasks


@pytest.mark.parametrize(("tiles_per_partition", "tasks_of"), [(1, (3, 0, 2, 4, 1)), (2, (2, 0, 1, 3, 1))])
def test_bits_of_a_batch_invariant_plan_do_not_depend_on_the_batch(
    everyone, planned_variant, tiles_per_partition, tasks_of
):
    options = {"batch_invariant": True, "workgroup_budget": 8, "tiles_per_partition": tiles_per_partition}
    results, tasks = spread(everyone, planned_variant, **options)
    assert tasks == {sequence: {count} for sequence, count in enumerate(tasks_of)}
    assert all(len(bits) == 1 for bits in results.values())


def test_bits_of_other_plans_do(everyone, planned_variant):
    """Otherwise the test above would not see anything."""
    results, tasks = spread(everyone, planned_variant, workgroup_budget=8)
    for sequence in (0, 3):
        assert len(tasks[sequence]) > 1
        assert len(results[sequence]) > 1


@pytest.mark.gpu
def test_bits_of_a_batch_invariant_plan_do_not_depend_on_a_large_batch(make):
    """Of which the kernels that merge partial results take several rows at a time."""
    lengths = tuple(range(2, 2002, 31))
    call = on_cuda(make(lengths, group=16, kv_heads=8, dim=DIM, cache=torch.float16, query_length=QUERIES))
    call |= {"query": call["query"].half(), "output": call["output"].half()}
    options = {"batch_invariant": True, "workgroup_budget": 64}
    together, tasks = decoded(call, range(len(lengths)), "auto", **options)
    for sequence in (0, 20, 40, len(lengths) - 1):
        alone, count = decoded(call, [sequence], "auto", **options)
        assert count[sequence] == tasks[sequence]
        assert torch.equal(alone[sequence], together[sequence])


def test_a_fork_decodes_like_its_plan_through_its_own_memory(everyone, variant):
    call = everyone
    plan = poisoned(plan_pa_decode(call["context_lengths"], 1, **SPLIT, workgroup_budget=8))
    fork = poisoned(plan.fork())
    expected = pa_decode(**call | {"work_plan": plan, "variant": variant}).clone()
    held = [memory.clone() for memory in plan.scratch(GROUP * QUERIES, DIM)]
    other = torch.full_like(expected, float("nan"))
    pa_decode(**call | {"work_plan": fork, "output": other, "query": -call["query"], "variant": variant})
    assert not torch.equal(other, expected)
    for memory, before in zip(plan.scratch(GROUP * QUERIES, DIM), held, strict=True):
        torch.testing.assert_close(memory, before, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(pa_decode(**call | {"work_plan": fork, "variant": variant}), expected)
    assert not plan.arrival_counters.any()
    assert not fork.arrival_counters.any()


@pytest.mark.gpu
def test_forks_run_at_once_on_other_streams(make):
    """Graphs of a plan and of a fork, replayed over one another, while one refresh serves both."""
    call = make((4000, 300, 77), group=8, cache=torch.bfloat16)
    call = on_cuda(call)
    lengths = call["context_lengths"]
    plan = plan_pa_decode(lengths, 2)
    plans = [plan, plan.fork()]
    calls = [call | {"work_plan": p, "output": torch.empty_like(call["output"])} for p in plans]
    calls[1]["query"] = -call["query"]
    streams, graphs = [torch.cuda.Stream() for _ in calls], [torch.cuda.CUDAGraph() for _ in calls]
    for one, graph in zip(calls, graphs, strict=True):
        pa_decode(**one)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(20):
                pa_decode(**one)
    for values in ((4000, 300, 77), (0, 299, 5), (3999, 0, 1)):
        lengths.copy_(torch.tensor(values))
        plan_pa_decode(lengths, 2, plan=plan)
        torch.cuda.synchronize()
        expected = [pa_decode(**one).clone() for one in calls]
        for one in calls:
            one["output"].fill_(float("nan"))
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for one, value in zip(calls, expected, strict=True):
            assert torch.equal(one["output"], value)
