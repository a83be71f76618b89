"""``cute_wgmma`` on a Hopper GPU: what a call launches, what a graph replays, and calls that overlap."""

import functools
from dataclasses import replace

import pytest
import torch

from kvscout import pa_decode, plan_pa_decode
from kvscout.kernels.cute import runtime
from kvscout.ops.pa_decode.api import FAMILY, Call, check, plan_numbers
from kvscout.ops.pa_decode.variants.cute_wgmma import VARIANT
from kvscout.paging import LAYOUTS
from kvscout.testing import paged_inputs

pytestmark = pytest.mark.gpu

NAME = "cute_wgmma"
DEVICE = torch.device("cuda")
FN = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def on_hopper():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    refusal = FAMILY.unavailable(NAME, "sm_90") or runtime.unavailable(VARIANT.programs())
    if refusal is not None or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(refusal or "needs a Hopper GPU")


def make(lengths, cache=FN, page=128, group=16, query_length=1, splits=(132, 264), layout="chunked", dim=128):
    generator = torch.Generator(DEVICE).manual_seed(len(lengths))
    found = paged_inputs.tables(lengths, page, generator)
    keys, values = paged_inputs.caches(layout, found, 1, page, dim, cache, generator)
    query = torch.randn(len(lengths) * query_length, group, dim, generator=generator, device=DEVICE).bfloat16()
    context_lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    plan = plan_pa_decode(
        context_lengths, 1, max_partitions=splits[0], workgroup_budget=splits[1], query_length=query_length
    )
    return {
        "output": torch.full_like(query, float("nan")),
        "query": query,
        "key_cache": keys,
        "value_cache": values,
        "context_lengths": context_lengths,
        "block_tables": found.block_tables,
        "softmax_scale": dim**-0.5,
        "query_length": query_length,
        "work_plan": plan,
        "kv_layout": layout,
        "variant": NAME,
    }


def same_bits(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("cache", [FN, torch.bfloat16])
def test_a_call_is_a_kernel_and_a_merge(cache, on_the_gpu):
    call = make((8192, 300, 0), cache)
    decode, reduce = on_the_gpu(lambda: pa_decode(**call))
    assert "decode" in decode
    assert "reduce" in reduce


def test_a_call_that_is_never_split_is_one_kernel(on_the_gpu):
    call = make((800, 300, 0), splits=(1, 264))
    (name,) = on_the_gpu(lambda: pa_decode(**call))
    assert "decode" in name


def prepared(call, lse=None):
    """What a variant is given for a call."""
    plan = call["work_plan"]
    words = {name: value for name, value in call.items() if name in Call._fields}
    return check(
        Call(
            **words, work_info=plan.work_info, reduce_info=plan.reduce_info, arrival_counters=plan.arrival_counters,
            plan_numbers=plan_numbers(plan), lse=lse,
        ),
        plan.scratch,
    )  # fmt: skip


def merges_of(call, sinks=None):
    """What each way to merge makes of a call, for each config: outputs and their logarithms, over poisoned memory."""
    lse = torch.empty(call["query"].shape[:2], device=DEVICE)
    problem, args = prepared(call | ({} if sinks is None else {"sinks": sinks}), lse)
    found = {}
    for config in VARIANT.configs(problem):
        for memory in (args.output, lse, *args.scratch()):
            memory.fill_(float("nan"))
        VARIANT.launch(problem, config, args)
        tile = replace(config, merge="kernel")
        found.setdefault(tile, {})[config.merge] = args.output.clone(), lse.clone()
        assert not args.arrival_counters.any(), config
    return found


def check_merges(call, ways, sinks=None):
    for config, merged in merges_of(call, sinks).items():
        wanted = ways if config.rows == 16 else ways - {"cluster"}
        if config.blocks > 1:
            wanted = {"kernel"}
        assert set(merged) == wanted, config
        for way, (output, lse) in merged.items():
            assert not output.isnan().any(), (config, way)
            assert same_bits(output, merged["kernel"][0]), (config, way)
            assert same_bits(lse.view(torch.int32), merged["kernel"][1].view(torch.int32)), (config, way)


EVERY_WAY = {"kernel", "cluster", "last"}
MERGED_LENGTHS = (0, 1, 128, 129, 300, 0, 1000, 2047, 2048, 4099, 7, 8192, 0, 512, 5000)


@pytest.mark.parametrize("partitions", range(2, 9))
@pytest.mark.parametrize(("cache", "group"), [(FN, 16), (torch.bfloat16, 5)])
@pytest.mark.parametrize(("layout", "dim"), [*((layout, 128) for layout in LAYOUTS), ("chunked", 64), ("hnd", 256)])
def test_all_ways_to_merge_give_the_same_bits(partitions, cache, group, layout, dim):
    splits = partitions, 15 * partitions
    call = make(MERGED_LENGTHS, cache, layout=layout, dim=dim, group=group, page=32, splits=splits)
    check_merges(call, EVERY_WAY, sinks=torch.linspace(-2, 4, group, device=DEVICE))


@pytest.mark.parametrize(("partitions", "most"), [(2, 66), (3, 30), (4, 30), (5, 15), (8, 15)])
@pytest.mark.parametrize("empty", [0, 1, 3])
def test_clusters_merge_as_many_sequences_as_are_resident(partitions, most, empty):
    for sequences, ways in ((most, EVERY_WAY), (most + 1, EVERY_WAY - {"cluster"}), (1, EVERY_WAY)):
        lengths = tuple(0 if empty and i % 4 < empty else 100 + 37 * i for i in range(sequences))
        check_merges(make(lengths, splits=(partitions, partitions * sequences)), ways)
        # Most of them are not split, so that slots are not where they would be.
        check_merges(make(lengths, splits=(partitions, sequences + 1)), ways if sequences > 1 else EVERY_WAY)
    check_merges(make((0,) * most, splits=(partitions, partitions * most)), EVERY_WAY)


def test_the_last_block_merges_few_and_many_partial_results():
    for lengths in ((9000, 0, 0, 0, 0, 300), (20_000, *(0,) * 150), (5000,) * 90):
        for query_length, group in ((1, 16), (4, 16), (3, 64)):
            call = make(lengths, query_length=query_length, group=group, splits=(132, 132))
            check_merges(call, {"kernel", "last"})


def test_clusters_and_last_blocks_take_no_second_kernel(on_the_gpu):
    call = make((2048,) * 8, splits=(2, 16))
    (name,) = on_the_gpu(lambda: pa_decode(**call))
    assert "decode" in name
    call = make((2048,) * 67, splits=(8, 68))
    (name,) = on_the_gpu(lambda: pa_decode(**call))
    assert "decode" in name


@pytest.mark.parametrize("cache", [FN, torch.bfloat16])
@pytest.mark.parametrize(
    ("way", "partitions", "sequences", "layout"),
    [("cluster", 2, 66, "chunked"), ("cluster", 2, 64, "nhd"), ("cluster", 4, 30, "chunked"),
     ("cluster", 8, 15, "chunked"), ("last", 2, 100, "chunked"), ("last", 8, 15, "plain_v"), ("last", 132, 9, "hnd")],
)  # fmt: skip
def test_many_replays_of_every_way_to_merge_give_the_same_bits(cache, way, partitions, sequences, layout):
    lengths = tuple((2048, 300, 0, 5000, 129)[i % 5] for i in range(sequences))
    call = make(lengths, cache, layout=layout, splits=(partitions, max(132, partitions * sequences)))
    problem, args = prepared(call)
    expected = merges_of(call)
    config = next(config for config in VARIANT.configs(problem) if config.merge == way)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            VARIANT.launch(problem, config, args)
    wrong = torch.zeros((), device=DEVICE, dtype=torch.int64)
    bits = expected[replace(config, merge="kernel")]["kernel"][0].view(torch.int16)
    for _ in range(2000):
        args.output.fill_(float("nan"))
        for part in args.scratch():
            part.fill_(float("nan"))
        graph.replay()
        wrong += (args.output.view(torch.int16) != bits).sum()
    assert int(wrong) == 0
    assert not args.arrival_counters.any()


@pytest.mark.parametrize("splits", [(2, 132), (8, 120), (132, 20)])
def test_replays_of_other_merges_follow_lengths_that_change(splits):
    longest = (8192, 4099, 1, 700, *(300,) * 9)
    call = make(longest, splits=splits)
    output, lengths = call["output"], call["context_lengths"]
    pa_decode(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan_pa_decode(lengths, 1, plan=call["work_plan"])
        pa_decode(**call)
    others = (0,) * 9
    for changed in (longest, (1, 2, 0, 3, *others), (0,) * 13, (8192, *(0,) * 12), (129, 4000, 1, 0, *others), longest):
        lengths.copy_(torch.tensor(changed))
        output.fill_(float("nan"))
        graph.replay()
        assert not output.isnan().any()
        expected = torch.empty_like(output)
        pa_decode(**call | {"output": expected, "variant": "triton_tile"})
        assert (output - expected).float().norm() <= 5e-3 * expected.float().norm()
        assert not call["work_plan"].arrival_counters.any()


def chained(call, between):
    """What 20 calls make, each of whose queries are the call before's outputs, and which writes over what it read."""
    read, written = call["query"].clone(), torch.zeros_like(call["query"])
    for _ in range(20):
        # Values are averages, which shrink from call to call.
        pa_decode(**call | {"query": read, "output": written, "value_scale": 20.0})
        between()
        read, written = written, read
    return read


def test_calls_of_clusters_that_start_while_the_one_before_ends_see_all_that_it_wrote():
    call = make((2048,) * 60 + (0, 700), splits=(2, 132))
    chain = functools.partial(chained, call)
    slowly = chain(torch.cuda.synchronize)
    assert slowly.isfinite().all()
    for _ in range(20):
        assert same_bits(chain(lambda: None), slowly)


@pytest.mark.parametrize("cache", [FN, torch.bfloat16])
@pytest.mark.parametrize("query_length", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replays_follow_lengths_that_change(cache, query_length, layout):
    longest = (8192, 4099, 1, 700)
    call = make(longest, cache, query_length=query_length, layout=layout)
    output, lengths = call["output"], call["context_lengths"]
    # A kernel is loaded by its first launch, which cannot be captured.
    pa_decode(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan_pa_decode(lengths, 1, query_length=query_length, plan=call["work_plan"])
        pa_decode(**call)
    for changed in (longest, (1, 2, 0, 3), (0, 0, 0, 0), (129, 4000, 1, 0), longest):
        lengths.copy_(torch.tensor(changed))
        for scratch in call["work_plan"].scratch(16 * query_length, 128):
            scratch.fill_(float("nan"))
        output.fill_(float("nan"))
        graph.replay()
        replayed = output.clone()
        output.fill_(float("nan"))
        pa_decode(**call)
        assert same_bits(replayed, output)
        expected = torch.empty_like(output)
        pa_decode(**call | {"output": expected, "variant": "triton_tile"})
        assert (output - expected).float().norm() <= 5e-3 * expected.float().norm()
        assert not output.isnan().any()


def test_calls_that_start_while_the_one_before_ends_see_all_that_it_wrote():
    call = make((8192, 4099, 1, 700))
    chain = functools.partial(chained, call)
    slowly = chain(torch.cuda.synchronize)
    assert slowly.isfinite().all()
    for _ in range(5):
        assert same_bits(chain(lambda: None), slowly)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = chain(lambda: None)
    for _ in range(5):
        graph.replay()
        assert same_bits(replayed, slowly)


@pytest.mark.parametrize("cache", [FN, torch.bfloat16])
@pytest.mark.parametrize(("layout", "dim"), [*((layout, 128) for layout in LAYOUTS), ("chunked", 64), ("chunked", 256)])
def test_many_replays_over_poisoned_scratch_give_the_same_bits(cache, layout, dim):
    call = make((8192, 5000, 300, 0, 8191, 77, 2048, 6001), cache, layout=layout, dim=dim, page=32)
    output, scratch = call["output"], call["work_plan"].scratch(16, dim)
    pa_decode(**call)
    expected = output.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            pa_decode(**call)
    wrong = torch.zeros((), device=DEVICE, dtype=torch.int64)
    for _ in range(200):
        output.fill_(float("nan"))
        for part in scratch:
            part.fill_(float("nan"))
        graph.replay()
        wrong += (output.view(torch.int16) != expected.view(torch.int16)).sum()
    assert int(wrong) == 0
