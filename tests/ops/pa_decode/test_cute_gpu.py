"""``cute_wgmma`` on a Hopper GPU: what a call launches, what a graph replays, and calls that overlap."""

import pytest
import torch

from kvscout import pa_decode, plan_pa_decode
from kvscout.kernels.cute import runtime
from kvscout.ops.pa_decode.api import FAMILY
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
    """Each call's queries are the call before's outputs, and it writes over what that one read."""
    call = make((8192, 4099, 1, 700))
    first = call["query"].clone()

    def chain(between):
        read, written = first.clone(), torch.zeros_like(first)
        for _ in range(20):
            # Values are averages, which shrink from call to call.
            pa_decode(**call | {"query": read, "output": written, "value_scale": 20.0})
            between()
            read, written = written, read
        return read

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
