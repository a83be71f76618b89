"""Who merges partial results, and that it makes no difference to any bit."""

from dataclasses import replace

import pytest
import torch

from kvscout import pa_decode, plan_pa_decode
from kvscout.ops.pa_decode import api
from kvscout.ops.pa_decode.variants.triton_tile import VARIANT
from kvscout.ops.pa_plan.plan import TILES
from kvscout.testing.cases.pa_decode import PaDecodeCase

CPU = torch.device("cpu")
BY_KERNEL, BY_LAST = ({"last_merges": last} for last in (False, True))


@pytest.fixture
def interpreted():
    """Skips where Triton does not take tensors on the CPU."""
    refusal = api.FAMILY.unavailable("triton_tile", "cpu")
    if refusal is not None:
        pytest.skip(refusal)


def launched(prepared, **changes):
    """Outputs of a launch into poisoned memory, and the counters behind it."""
    prepared.poison()
    for memory in prepared.args.scratch():
        memory.fill_(float("nan"))
    VARIANT.launch(prepared.problem, replace(VARIANT.default_config(prepared.problem), **changes), prepared.args)
    assert not prepared.args.arrival_counters.any()
    return {name: tensor.clone() for name, tensor in prepared.outputs.items()}


CASES = {
    "rows of two programs": PaDecodeCase((700, 1, 530), group=20, kv_heads=1, dim=64, splits=(4, 16), sinks="ends"),
    "one slot each, two of them free": PaDecodeCase((0, 1100, -3), dim=64, splits=(3, 1), sinks="plain"),
    "more partitions than are read at once": PaDecodeCase((9000,), group=2, kv_heads=1, dim=64, splits=(40, 40)),
    "several queries, dimension 192": PaDecodeCase((600, 300), dim=192, query_length=3, splits=(2, 8), cache="bf16"),
    "tiles of 128": PaDecodeCase((129, 700, 0), dim=64, splits=(8, 32), cache="bf16", sinks="ends", tile=128),
    "a window": PaDecodeCase((1500, 40), dim=64, window=700, splits=(8, 32), layout="nhd", scales="token"),
}


@pytest.mark.parametrize("name", CASES)
def test_both_ways_give_the_same_bits(name, interpreted):
    prepared = CASES[name].prepare(CPU)
    assert prepared.args.reduce_info[:, 1].max() > 1
    expected = launched(prepared, **BY_KERNEL)
    assert all(comparison.ok for comparison in prepared.check("triton_tile"))
    for output, value in launched(prepared, **BY_LAST).items():
        torch.testing.assert_close(value, expected[output], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("block_tokens", [16, 32, 64, 128])
@pytest.mark.parametrize("window", [0, 200])
def test_steps_of_any_config_divide_the_smallest_tile(block_tokens, window, interpreted):
    """Else a task's last step would hold tokens of the next one's first tile, and count them twice."""
    case = PaDecodeCase(
        (700, 128, 129, 0),
        group=4,
        kv_heads=1,
        dim=64,
        page=32,
        query_length=3,
        window=window,
        splits=(8, 32),
        tile=128,
    )
    prepared = case.prepare(CPU)
    assert prepared.args.reduce_info[0, 1] > 1
    launched(prepared, block_tokens=block_tokens)
    assert all(comparison.ok for comparison in prepared.check("triton_tile"))
    problems = [replace(prepared.problem, arch=arch) for arch in ("sm_80", "sm_90", "sm_100", "gfx942", "gfx1250")]
    assert all(min(TILES) % config.block_tokens == 0 for problem in problems for config in VARIANT.configs(problem))


def test_a_row_merges_alike_alone_and_among_many(interpreted):
    """One program of the merge takes one row while there are few, and several where there are many."""
    lengths = (700,) * 129
    many = PaDecodeCase(lengths, group=16, kv_heads=2, dim=64, splits=(3, 774), odd=("sparse",), num_blocks=64).prepare(
        CPU
    )
    sequences = many.problem.num_sequences
    assert sequences * many.problem.num_kv_heads * many.problem.rows_per_head > 4096
    together = launched(many)
    last = sequences - 1
    begin = int(many.args.reduce_info[last, 0])
    tasks = many.args.work_info[begin : begin + 3].clone()
    assert (tasks[:, 0] == last).all()
    tasks[:, 0] = 0
    one = many.args._replace(
        output=torch.full_like(many.args.output[last:], float("nan")),
        lse=torch.full_like(many.args.lse[last:], float("nan")),
        query=many.args.query[last:],
        context_lengths=many.args.context_lengths[last:],
        block_tables=many.args.block_tables[last:],
        work_info=tasks,
        reduce_info=torch.tensor([[0, 3]], dtype=torch.int32),
        arrival_counters=many.args.arrival_counters[last:],
    )
    problem = replace(many.problem, num_sequences=1, capacity=3)
    VARIANT.launch(problem, VARIANT.default_config(problem), one)
    assert torch.equal(one.output, together["output"][last:])
    assert torch.equal(one.lse, together["lse"][last:])


@pytest.mark.parametrize(
    ("arch", "changes", "last_merges"),
    [
        ("sm_90", {"capacity": 4, "num_sequences": 4}, True),
        ("sm_80", {"capacity": 4, "num_sequences": 4}, True),
        ("gfx942", {"capacity": 4, "num_sequences": 4}, False),
        ("sm_90", {"capacity": 5, "num_sequences": 4}, False),
        ("sm_90", {"capacity": 4, "num_sequences": 4, "merge_in_tile": False}, False),
    ],
)
def test_the_last_program_merges_where_slots_are_as_few_as_sequences(arch, changes, last_merges):
    problem = replace(PaDecodeCase((300,)).prepare(CPU).problem, arch=arch, **changes)
    assert VARIANT.default_config(problem).last_merges is last_merges
    others = [config.last_merges for config in VARIANT.configs(problem)]
    assert (True in others) is (changes.get("merge_in_tile", True) and arch != "gfx942")


def call_of(make, **options):
    arguments = make(**options)
    plan = arguments.pop("work_plan")
    return arguments | {
        "work_info": plan.work_info,
        "reduce_info": plan.reduce_info,
        "arrival_counters": plan.arrival_counters,
        "plan_numbers": api.plan_numbers(plan),
    }


@pytest.mark.parametrize(
    ("bound", "window", "can_split"),
    [(None, 0, True), (1, 0, False), (0, 0, False), (None, 1, False), (None, 2, True), (1, 300, False)],
)
@pytest.mark.parametrize("tile", [128, 256])
def test_what_cannot_be_split_is_planned_without_a_merge(make, tile, bound, window, can_split):
    """``bound`` is the longest context, in tiles; one token more is another tile."""
    call = call_of(make, lengths=(100, 3), sliding_window=window, tile=tile)
    most = None if bound is None else bound * tile
    problem, _ = api.check(api.Call(**call, max_context_length=most))
    assert problem.tile == tile
    assert (problem.max_partitions > 1) is can_split
    if most:
        problem, _ = api.check(api.Call(**call, max_context_length=most + 1))
        assert problem.max_partitions > 1


def test_the_switch_keeps_tile_kernels_from_merging(make, monkeypatch):
    call = call_of(make, lengths=(100, 3))
    assert api.check(api.Call(**call))[0].merge_in_tile
    monkeypatch.setenv("KVSCOUT_PA_CLUSTER_MERGE", "0")
    assert not api.check(api.Call(**call))[0].merge_in_tile
    monkeypatch.setenv("KVSCOUT_PA_CLUSTER_MERGE", "perhaps")
    with pytest.raises(ValueError, match=r"^KVSCOUT_PA_CLUSTER_MERGE: expected 0, 1, .*got 'perhaps'$"):
        api.check(api.Call(**call))


def test_a_broken_promise_is_seen_in_rows_that_a_partition_does_not_see(make, interpreted):
    call = make(lengths=(258,), query_length=4)
    lse = torch.zeros(call["query"].shape[:2])
    broken = pa_decode(**call, lse=lse, variant="triton_tile", max_context_length=256)
    assert broken.isnan().all()
    assert lse.isnan().all()


def test_configs_of_batch_invariant_plans_do_not_depend_on_the_batch():
    problem = replace(PaDecodeCase((300,)).prepare(CPU).problem, arch="sm_90")
    few, many = {"num_sequences": 1, "capacity": 32}, {"num_sequences": 64, "capacity": 2048}
    for cache in (torch.float8_e4m3fn, torch.bfloat16):
        tiles = [
            VARIANT.default_config(replace(problem, cache_dtype=cache, batch_invariant=invariant, **size))
            for invariant in (True, False) for size in (few, many)
        ]  # fmt: skip
        assert tiles[0] == tiles[1]
        assert tiles[2] != tiles[3]


def test_a_broken_promise_about_lengths_is_seen(make, interpreted):
    call = make(lengths=(600, 40))
    assert call["work_plan"].reduce_info[:, 1].tolist() == [2, 1]
    _broken_promise(call | {"variant": "triton_tile"})


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in api.FAMILY.names if not name.startswith("torch")])
def test_so_it_is_on_a_gpu(make, name):
    call = make(lengths=(600, 40), layout="chunked", dim=128)
    call = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in call.items()}
    call["work_plan"] = plan_pa_decode(call["context_lengths"], 2, max_partitions=4, workgroup_budget=8, tile=256)
    _broken_promise(call | {"variant": name})


def _broken_promise(call):
    lse = torch.zeros(call["query"].shape[:2], device=call["query"].device)
    right = pa_decode(**call, lse=lse).clone()
    right_lse = lse.clone()
    assert right.isfinite().all()
    broken = pa_decode(**call, lse=lse, max_context_length=256)
    assert broken[0].isnan().all()
    assert lse[0].isnan().all()
    assert torch.equal(broken[1], right[1])
    assert torch.equal(lse[1], right_lse[1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_replays_with_poisoned_partials_give_the_first_one_s_bits(name):
    prepared = CASES[name].prepare(torch.device("cuda"))
    config = VARIANT.default_config(prepared.problem)
    expected = None
    for last_merges in (False, True):
        VARIANT.launch(prepared.problem, replace(config, last_merges=last_merges), prepared.args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for memory in prepared.args.scratch():
                memory.fill_(float("nan"))
            for output in prepared.outputs.values():
                output.fill_(float("nan"))
            VARIANT.launch(prepared.problem, replace(config, last_merges=last_merges), prepared.args)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(10_000):
            graph.replay()
            found = [output.view(torch.int16).clone() for output in prepared.outputs.values()]
            expected = expected or found
            for one, other in zip(found, expected, strict=True):
                wrong += (one != other).any()
        assert wrong.item() == 0
        assert not prepared.args.arrival_counters.any()
