"""What ``pa_decode`` accepts, keeps and refuses."""

import dataclasses
import math

import pytest
import torch

from kvscout import UnsupportedProblem, pa_decode, paging, plan_pa_decode
from kvscout.ops.pa_decode import api
from kvscout.ops.pa_decode.variants import torch_reference

FN = torch.float8_e4m3fn
LAYOUTS = pytest.mark.parametrize("layout", paging.LAYOUTS)


def replaced(**changes):
    return lambda call: call | {name: change(call) for name, change in changes.items()}


def planned(**changes):
    """The call with a plan that was made with something else."""
    options = {"num_kv_heads": 2, **changes}
    return replaced(work_plan=lambda c: plan_pa_decode(options.pop("lengths", c["context_lengths"]), **options))


def widened(name):
    """The call with every second element of a tensor that is twice as wide."""
    return replaced(**{name: lambda c: c[name].repeat_interleave(2, -1)[..., ::2]})


def elsewhere(name):
    return replaced(**{name: lambda c: c[name].to("meta")})


BAD = {
    "output: expected a torch.Tensor, got NoneType": replaced(output=lambda c: None),
    "output: expected dtype torch.bfloat16, got torch.float32": replaced(output=lambda c: c["output"].float()),
    "output: expected shape [3, 4, 64], got [3, 4, 32]": replaced(output=lambda c: c["output"][..., :32]),
    "output: expected a contiguous last dimension": widened("output"),
    "output: expected on cpu": elsewhere("output"),
    "query: expected a torch.Tensor, got list": replaced(query=lambda c: [1]),
    "query: expected dtype torch.bfloat16 or torch.float16, got torch.float32": replaced(
        query=lambda c: c["query"].float()
    ),
    "query: expected shape [B * QL, Hq, D], got [12, 64]": replaced(query=lambda c: c["query"].flatten(0, 1)),
    "query: expected 3 sequences x 1 query tokens = 3 rows, got 2": replaced(query=lambda c: c["query"][:2]),
    "query: expected 3 sequences x 2 query tokens = 6 rows, got 3": replaced(query_length=lambda c: 2),
    "query: head dimension D: expected one of 64, 128, 192, 256, 512, got 32": replaced(
        query=lambda c: c["query"][..., :32]
    ),
    "query: expected a number of heads Hq that is 1 to 64 times the 2 KV heads, got 3": replaced(
        query=lambda c: c["query"][:, :3], output=lambda c: c["output"][:, :3]
    ),
    "query: expected a number of heads Hq that is 1 to 64 times the 2 KV heads, got 130": replaced(
        query=lambda c: c["query"].new_zeros(3, 130, 64), output=lambda c: c["query"].new_zeros(3, 130, 64)
    ),
    "query: expected a contiguous last dimension": widened("query"),
    "key_cache: expected a torch.Tensor, got NoneType": replaced(key_cache=lambda c: None),
    "key_cache: expected dtype torch.float8_e4m3fn or": replaced(key_cache=lambda c: c["key_cache"].float()),
    "key_cache: expected shape [blocks, 2, page, D], got": replaced(key_cache=lambda c: c["key_cache"][0, 0]),
    "key_cache: page size: expected one of 16, 32, 64, 128, got 8": replaced(
        key_cache=lambda c: c["key_cache"][:, :, :8], value_cache=lambda c: c["value_cache"][:, :, :8]
    ),
    "key_cache: expected head dimension 64, like query, got 32": replaced(
        key_cache=lambda c: c["key_cache"][..., :32], value_cache=lambda c: c["value_cache"][..., :32]
    ),
    "key_cache: expected a contiguous last dimension": widened("key_cache"),
    "key_cache: expected on cpu, like query, got meta": replaced(
        key_cache=lambda c: c["key_cache"].to("meta"), value_cache=lambda c: c["value_cache"].to("meta")
    ),
    "value_cache: expected dtype torch.bfloat16, got torch.float16": replaced(
        value_cache=lambda c: c["value_cache"].half()
    ),
    "value_cache: expected shape": replaced(value_cache=lambda c: c["value_cache"][:1]),
    "value_cache: expected a contiguous last dimension": widened("value_cache"),
    "value_cache: expected on cpu": elsewhere("value_cache"),
    "kv_layout: expected one of auto, chunked, plain_v, nhd, hnd, got flat": replaced(kv_layout=lambda c: "flat"),
    "kv_layout: cannot tell nhd from hnd": replaced(
        kv_layout=lambda c: "auto",
        key_cache=lambda c: c["key_cache"][:, :, :2].repeat_interleave(1, 1),
        value_cache=lambda c: c["value_cache"][:, :, :2],
    ),
    "context_lengths: expected dtype torch.int32, got torch.int64": replaced(
        context_lengths=lambda c: c["context_lengths"].long()
    ),
    "context_lengths: expected shape [B], got [3, 1]": replaced(
        context_lengths=lambda c: c["context_lengths"][:, None]
    ),
    "context_lengths: expected a contiguous last dimension": widened("context_lengths"),
    "context_lengths: expected on cpu": elsewhere("context_lengths"),
    "block_tables: expected dtype torch.int32, got torch.int64": replaced(
        block_tables=lambda c: c["block_tables"].long()
    ),
    "block_tables: expected shape [3, max_blocks], got [2,": replaced(block_tables=lambda c: c["block_tables"][:2]),
    "block_tables: expected a contiguous last dimension": widened("block_tables"),
    "block_tables: expected on cpu": elsewhere("block_tables"),
    "softmax_scale: expected a number, got Tensor": replaced(softmax_scale=lambda c: torch.ones(())),
    "softmax_scale: expected a finite number within float32's range, got nan": replaced(
        softmax_scale=lambda c: math.nan
    ),
    "softmax_scale: expected a finite number within float32's range, got 1e+300": replaced(
        softmax_scale=lambda c: 1e300
    ),
    "softmax_scale: expected a finite number within float32's range, got 1000": replaced(
        softmax_scale=lambda c: 10**400
    ),
    "causal: expected a bool, got str": replaced(causal=lambda c: "no"),
    "query_length: expected from 1 to 2147483647, got 0": replaced(query_length=lambda c: 0),
    "query_length: expected an int, got float": replaced(query_length=lambda c: 1.0),
    "work_plan: expected a PADecodePlan, got NoneType": replaced(work_plan=lambda c: None),
    "work_plan: expected a plan made for a batch of 3, got one made for 2": planned(lengths=torch.ones(2).int()),
    "work_plan: expected a plan made for a query_length of 1, got one made for 2": planned(query_length=2),
    "work_plan: expected a plan made for a sliding_window of 0, got one made for 9": planned(sliding_window=9),
    "work_plan: expected a plan made for a sliding_window of 9, got one made for 0": replaced(
        sliding_window=lambda c: 9
    ),
    "work_plan: expected a plan made for the KV heads that key_cache holds (2), got one made for 4": planned(
        num_kv_heads=4
    ),
    "work_plan: expected on cpu, like query, got meta": replaced(
        work_plan=lambda c: dataclasses.replace(c["work_plan"], work_info=c["work_plan"].work_info.to("meta"))
    ),
    "key_scale: expected none with caches of torch.bfloat16": replaced(key_scale=lambda c: 1.0),
    "value_scale: expected none with caches of torch.bfloat16": replaced(value_scale=lambda c: torch.ones(2)),
    "sinks: expected shape [4], got [2]": replaced(sinks=lambda c: torch.ones(2)),
    "sinks: expected dtype torch.float32 or torch.bfloat16, got torch.float64": replaced(
        sinks=lambda c: torch.ones(4).double()
    ),
    "sinks: expected a contiguous last dimension": replaced(sinks=lambda c: torch.ones(8)[::2]),
    "sinks: expected on cpu": replaced(sinks=lambda c: torch.ones(4, device="meta")),
    "sliding_window: expected from -1 to": replaced(sliding_window=lambda c: -2),
    "sliding_window: expected an int, got float": replaced(sliding_window=lambda c: 4.0),
    "lse: expected shape [3, 4], got [4, 3]": replaced(lse=lambda c: torch.ones(4, 3)),
    "lse: expected dtype torch.float32, got torch.bfloat16": replaced(lse=lambda c: torch.ones(3, 4).bfloat16()),
    "lse: expected a contiguous last dimension": replaced(lse=lambda c: torch.ones(4, 3).T),
    "lse: expected on cpu": replaced(lse=lambda c: torch.ones(3, 4, device="meta")),
    "lse: expected elements that do not overlap, got strides (0, 1)": replaced(
        lse=lambda c: torch.ones(1, 4).expand(3, 4)
    ),
    "output: expected elements that do not overlap, got strides (256, 0, 1)": replaced(
        output=lambda c: c["output"][:, :1].expand(3, 4, 64)
    ),
    "query: expected values as they are stored, got a lazily negated view": replaced(
        query=lambda c: torch._neg_view(c["query"])
    ),
    "sinks: expected values as they are stored": replaced(sinks=lambda c: torch._neg_view(torch.ones(4))),
    "context_lengths: expected a dense tensor, got one of layout torch.sparse_coo": replaced(
        context_lengths=lambda c: c["context_lengths"].to_sparse()
    ),
    "kv_layout: expected one of auto, chunked, plain_v, nhd, hnd, got xyz": replaced(kv_layout=lambda c: "xyz"),
    "kv_layout: expected one of auto, chunked, plain_v, nhd, hnd, got ['nhd']": replaced(kv_layout=lambda c: ["nhd"]),
    "max_context_length: expected at least 0, got -1": replaced(max_context_length=lambda c: -1),
    "max_context_length: expected an int, got float": replaced(max_context_length=lambda c: 1.0),
    "variant: pa_decode has no variant 'fastest'": replaced(variant=lambda c: "fastest"),
}


@pytest.mark.parametrize(("message", "spoil"), BAD.items(), ids=BAD.keys())
def test_bad_input_is_named(make, message, spoil):
    with pytest.raises((TypeError, ValueError)) as raised:
        pa_decode(**spoil(make()))
    assert str(raised.value).startswith(message)


BAD_SCALES = {
    "expected dtype torch.float32, got torch.float64": torch.ones(2).double(),
    "expected 1 element, shape [2] or shape [{blocks}, 2, 16], got [3]": torch.ones(3),
    "expected 1 element, shape [2] or shape [{blocks}, 2, 16], got [1, 2]": torch.ones(1, 2),
    "expected on cpu": torch.ones(2, device="meta"),
    "expected a finite number within float32's range, got inf": math.inf,
    "expected a number, got str": "1",
}


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
@pytest.mark.parametrize(("message", "scale"), BAD_SCALES.items(), ids=BAD_SCALES.keys())
def test_bad_scales_are_named(make, name, message, scale):
    call = make(cache=FN)
    with pytest.raises((TypeError, ValueError)) as raised:
        pa_decode(**call, **{name: scale})
    assert str(raised.value).startswith(f"{name}: " + message.format(blocks=len(call["key_cache"])))


def test_the_output_is_returned(make, variant):
    call = make()
    assert pa_decode(**call, variant=variant) is call["output"]
    assert call["output"].isfinite().all()
    assert not call["output"][1].any()


def test_no_sequences(make, variant):
    call = make(())
    lse = torch.empty(0, 4)
    assert pa_decode(**call, lse=lse, variant=variant).shape == (0, 4, 64)


def test_no_pages(make, variant):
    """Neither a pool nor tables are needed where nothing has been written."""
    call = make((0, -1, 0))
    for name in ("key_cache", "value_cache"):
        call[name] = call[name][:0]
    call["block_tables"] = call["block_tables"][:, :0]
    lse = torch.empty(3, 4)
    assert not pa_decode(**call, lse=lse, sinks=torch.ones(4), variant=variant).any()
    assert lse.isneginf().all()


def test_outer_strides_are_free(make, variant):
    """Heads before rows, as a fork of a fused projection has them, in buffers of which nothing else is touched."""
    call = make((5, 0, 300), query_length=2)
    expected = pa_decode(**call, variant=variant).clone()
    rows, heads, dim = expected.shape
    buffer = torch.full((heads, rows + 1, dim + 5), 7.0, dtype=expected.dtype)
    lse = torch.full((rows, heads + 3), 7.0)
    query = torch.zeros(rows, 3 * heads, dim, dtype=expected.dtype)
    query[:, heads : 2 * heads] = call["query"]
    call |= {"output": buffer[:, 1:, 5:].transpose(0, 1), "query": query[:, heads : 2 * heads], "lse": lse[:, 1:5]}
    assert torch.equal(pa_decode(**call, variant=variant), expected)
    assert (buffer[:, 0] == 7).all()
    assert (buffer[..., :5] == 7).all()
    assert (lse[:, 0] == 7).all()
    assert (lse[:, 5:] == 7).all()


@pytest.mark.parametrize("cache", [FN, torch.bfloat16])
def test_layouts_hold_the_same_tokens(make, variant, cache):
    """The same tokens in every layout and page size give the same result, up to the order of a sum."""
    lengths, found = (5, 0, 300), {}
    tokens = torch.randn(2, 320, 2, 64, generator=torch.Generator().manual_seed(1)).to(cache).float()
    for layout in paging.LAYOUTS:
        for page in (16, 128):
            call = make(lengths, layout=layout, cache=cache, page=page)
            kv = paging.pages(call["key_cache"], call["value_cache"], 2, layout)
            for sequence, length in enumerate(lengths):
                for token in range(length):
                    block = int(call["block_tables"][sequence, token // page])
                    place, vx = token % page, kv.values.shape[3]
                    kv.keys[block, :, place] = tokens[0, token].view(2, *kv.keys.shape[3:]).to(cache)
                    kv.values[block, :, place // vx, place % vx] = tokens[1, token].to(cache)
            call["query"] = make(lengths)["query"]
            lse = torch.empty(3, 4)
            found[layout, page] = pa_decode(**call, lse=lse, variant=variant).float(), lse
    first = found["hnd", 16]
    for output, lse in found.values():
        # Where values cancel, what is left has the absolute error of the 16-bit probabilities.
        torch.testing.assert_close(output, first[0], rtol=2**-7, atol=2**-10 * float(first[0].abs().max()))
        torch.testing.assert_close(lse, first[1], rtol=1e-5, atol=1e-5)


@LAYOUTS
def test_layouts_are_told_by_their_shapes(make, layout):
    call = make(layout=layout)
    expected = pa_decode(**call).clone()
    assert torch.equal(pa_decode(**call | {"kv_layout": "auto"}), expected)


def test_scales_in_every_form(make, variant):
    """One scale as a number, a tensor of one element, and repeated for every head and token."""
    call = make((300, 20), cache=FN)
    blocks = len(call["key_cache"])
    found = [
        pa_decode(**call, key_scale=scale(0.5), value_scale=scale(2.0), variant=variant).clone()
        for scale in (
            float,
            torch.tensor,
            lambda s: torch.tensor([s]),
            lambda s: torch.full((2,), s),
            lambda s: torch.full((blocks, 2, 16), s),
            lambda s: torch.full((blocks, 2, 16, 1), s),
        )
    ]
    plain = pa_decode(**call | {"softmax_scale": call["softmax_scale"] * 0.5}, variant=variant).float() * 2
    for output in found:
        torch.testing.assert_close(output.float(), plain, rtol=2**-7, atol=2**-10 * float(plain.abs().max()))


def test_lengths_change_under_a_refreshed_plan(make, variant):
    call = make((300, 290, 20))
    plan, lengths = call["work_plan"], call["context_lengths"]
    for values in ((300, 290, 20), (0, 17, 3), (0, 0, 0), (300, 290, 20)):
        lengths.copy_(torch.tensor(values))
        plan_pa_decode(lengths, 2, plan=plan)
        call["output"].fill_(float("nan"))
        output = pa_decode(**call, variant=variant)
        fresh = plan_pa_decode(lengths, 2, max_partitions=1)
        expected = pa_decode(
            **call | {"output": torch.empty_like(output), "work_plan": fresh}, variant="torch_reference"
        )
        torch.testing.assert_close(output, expected, rtol=2**-7, atol=1e-6)
        assert not output[lengths == 0].any()
        assert not plan.arrival_counters.any()


def test_a_bound_on_lengths_changes_nothing(make, variant):
    """Neither one that is far off nor one that leaves nothing to be split."""
    call = make((5, 0, 250))
    expected = pa_decode(**call, variant=variant).clone()
    for bound in (250, 300, 2**31):
        assert torch.equal(pa_decode(**call, max_context_length=bound, variant=variant), expected)


def test_windows_that_are_none(make):
    """0, -1 and windows longer than any context are the same, whichever of them the plan was made with."""
    call = make()
    expected = pa_decode(**call).clone()
    for planned_with, window in ((0, -1), (-1, 0), (2**40, 0), (0, 2**31 - 1)):
        plan = plan_pa_decode(call["context_lengths"], 2, sliding_window=planned_with)
        assert torch.equal(pa_decode(**call | {"work_plan": plan, "sliding_window": window}), expected)


def test_refusals_are_sentences(make):
    call = make() | {"key_cache": make()["key_cache"].half(), "value_cache": make()["value_cache"].half()}
    with pytest.raises(
        UnsupportedProblem, match=r"triton_tile: caches of torch.float16 need queries of the same dtype"
    ):
        pa_decode(**call, variant="triton_tile")
    assert pa_decode(**call).isfinite().all()


def test_the_cpu_default_is_plain_torch(make):
    call = make()
    plan = call["work_plan"]
    tensors = {name: call[name] for name in api.Call._fields if name in call}
    tensors |= {name: getattr(plan, name) for name in ("work_info", "reduce_info", "arrival_counters")}
    problem, _ = api.check(api.Call(**tensors, plan_numbers=api.plan_numbers(plan)))
    assert api.FAMILY.choose(problem).variant.name == "torch_reference"


def test_partial_results_go_through_the_plan(make):
    call = make((1000,))
    partial_out, _ = call["work_plan"].scratch(2, 64)
    partial_out.fill_(float("nan"))
    pa_decode(**call, variant="triton_tile")
    count = int(call["work_plan"].reduce_info[0, 1])
    assert count > 1
    assert partial_out[:count].isfinite().all()


def test_one_long_sequence_does_not_widen_the_others(make, monkeypatch):
    """The CPU default gathers what each sequence needs: short ones beside a long one are not made as long."""
    gathered, original = [], torch_reference._gather

    def gather(cache, head_dim, tables, *args):
        gathered.append(tables.numel())
        return original(cache, head_dim, tables, *args)

    monkeypatch.setattr(torch_reference, "_gather", gather)
    pa_decode(**make((100_000, *[16] * 31)), variant="torch_reference")
    assert sum(gathered) == 2 * (100_000 // 16 + 31)
