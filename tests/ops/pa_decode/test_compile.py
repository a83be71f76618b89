"""``pa_decode`` under ``torch.compile``, as a ``torch.library`` op, and in CUDA graphs."""

import pytest
import torch

from kvscout import pa_decode, plan_pa_decode
from kvscout.ops.pa_decode import api

FN = torch.float8_e4m3fn


@pytest.fixture
def compiled():
    torch.compiler.reset()
    return torch.compile(pa_decode, fullgraph=True, dynamic=True, backend="aot_eager")


def test_compiled_equals_eager(make, compiled, variant):
    for lengths, query_length in (((5, 0, 300), 1), ((40, 257), 2)):
        call = make(lengths, query_length=query_length)
        expected = pa_decode(**call, variant=variant).clone()
        call["output"].fill_(float("nan"))
        assert compiled(**call, variant=variant) is call["output"]
        assert torch.equal(call["output"], expected)


OPTIONS = {
    "sinks": lambda c: {"sinks": torch.tensor([0.5, -1.0, float("inf"), 2.0])},
    "lse": lambda c: {"lse": torch.full((3, 4), float("nan"))},
    "numbers": lambda c: {"key_scale": 0.5, "value_scale": 2.0},
    "heads": lambda c: {"key_scale": torch.rand(2), "value_scale": torch.rand(2)},
    "tokens": lambda c: {"key_scale": torch.rand(len(c["key_cache"]), 2, 16), "value_scale": 2},
    "not_causal": lambda c: {"causal": False, "max_context_length": 300},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_compiles(make, compiled, option):
    call = make(cache=FN)
    call |= OPTIONS[option](call)
    pa_decode(**call)
    written = [call[name] for name in ("output", "lse") if name in call]
    expected = [tensor.clone() for tensor in written]
    for tensor in written:
        tensor.fill_(float("nan"))
    compiled(**call)
    for tensor, value in zip(written, expected, strict=True):
        assert torch.equal(tensor, value)


def test_plan_and_decode_in_one_graph(make):
    """A step as an engine runs it: refresh the plan for the new lengths, then attend."""

    def step(output, lengths, plan, call):
        plan_pa_decode(lengths, 2, plan=plan)
        return pa_decode(output, context_lengths=lengths, work_plan=plan, **call) * 2

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    call = make((300, 290, 20))
    output, lengths, plan = (call.pop(name) for name in ("output", "context_lengths", "work_plan"))
    for values in ((300, 290, 20), (0, 17, 3)):
        lengths.copy_(torch.tensor(values))
        expected = step(output, lengths, plan, call)
        plan.work_info.fill_(-1)
        assert torch.equal(compiled(output, lengths, plan, call), expected)


def test_the_op_is_what_its_schema_says(make):
    call = make()
    plan = call["work_plan"]
    tensors = {name: call[name] for name in api.Call._fields if name in call}
    tensors |= {name: getattr(plan, name) for name in ("work_info", "reduce_info", "arrival_counters")}
    tensors |= {"plan_numbers": api.plan_numbers(plan), "lse": torch.empty(3, 4)}
    torch.library.opcheck(torch.ops.kvscout.pa_decode.default, tuple(api.Call(**tensors)))


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [FN, torch.bfloat16])
def test_replays_follow_plan_and_lengths(make, cache):
    call = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in make((4000, 300, 77), cache=cache).items()}
    lengths, output = call["context_lengths"], call["output"]
    plan = call["work_plan"] = plan_pa_decode(lengths, 2)
    sinks, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    pa_decode(**call, sinks=sinks)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            plan_pa_decode(lengths, 2, plan=plan)
            pa_decode(**call, sinks=sinks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for values, sink in (
        ((4000, 300, 77), 1.0),
        ((0, 0, 0), 5.0),
        ((3999, 1, 0), float("-inf")),
        ((4000, 300, 77), 0.0),
    ):
        lengths.copy_(torch.tensor(values))
        sinks.fill_(sink)
        output.fill_(float("nan"))
        graph.replay()
        expected = pa_decode(**call | {"output": torch.empty_like(output)}, sinks=sinks, variant="torch_reference")
        torch.testing.assert_close(output, expected, rtol=2**-6, atol=1e-3)
        assert not output[lengths == 0].any()
