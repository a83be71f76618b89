"""AITER's scores, argument by argument, against the definition in float64."""

import inspect
import math
import re

import pytest
import torch

import kvscout
from kvscout import UnsupportedProblem
from kvscout.integrations import aiter
from kvscout.ops.mqa_logits.variants.torch_reference import reference

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz

NONE = inspect.Parameter.empty
TRITON = {
    "Q": NONE, "KV": NONE, "kv_scales": NONE, "weights": NONE, "cu_starts": NONE, "cu_ends": NONE, "clean_logits": True,
}  # fmt: skip
SIGNATURES = {"fp8_mqa_logits": TRITON, "flydsl_fp8_mqa_logits": TRITON | {"stream": None, "variant": None}}
SCORES = pytest.mark.parametrize("name", SIGNATURES)


@SCORES
def test_arguments_have_the_original_s_names_order_and_defaults(name):
    found = inspect.signature(getattr(aiter, name)).parameters.values()
    assert [(p.name, p.default) for p in found] == list(SIGNATURES[name].items())
    assert {p.kind for p in found} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("dtype", [FN, FNUZ])
@SCORES
def test_they_are_the_definition_by_position_and_by_keyword(name, dtype, make, assert_scores):
    call = make()
    call |= {"q": call["q"].float().to(dtype), "k": call["k"].float().to(dtype)}
    expected = reference(**call)
    function = getattr(aiter, name)
    assert_scores(function(*call.values()), expected)
    assert_scores(function(**dict(zip(TRITON, call.values(), strict=False))), expected)


@pytest.mark.parametrize("clean", [True, False])
@SCORES
def test_clean_logits_fills_outside_the_windows_and_false_writes_nothing_there(
    name, clean, make, assert_scores, monkeypatch
):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: empty(*shape, **how).fill_(7))
    call = make()
    expected = reference(**call)
    found = getattr(aiter, name)(*call.values(), clean)
    assert_scores(found, expected if clean else expected.masked_fill(expected.isneginf(), 7))
    rows = found.as_strided((5, found.stride(0)), found.stride())
    assert (rows[:, 70:] == 7).all()


@pytest.mark.parametrize(("rows", "keys"), [(5, 70), (5, 256), (3, 257), (3, 1), (0, 9), (4, 0)])
@SCORES
def test_results_have_the_original_s_shape_and_row_strides(name, rows, keys, make):
    found = getattr(aiter, name)(*make(rows, keys).values())
    assert (found.shape, found.dtype) == ((rows, keys), torch.float32)
    assert found.stride() == (max(1, math.ceil(keys / 256) * 256), 1)


@SCORES
def test_windows_past_the_ends_are_clamped(name, make, assert_scores):
    call = make(rows=4) | {"ks": torch.tensor([-9, 60, 50, 80]).int(), "ke": torch.tensor([3, 99, 40, 90]).int()}
    assert_scores(getattr(aiter, name)(*call.values()), reference(**call))


@pytest.mark.parametrize(("rows", "keys"), [(5, 70), (1, 1)])
@SCORES
def test_other_shapes_of_as_many_elements_are_taken(name, rows, keys, make):
    call = make(rows, keys)
    expected = getattr(aiter, name)(*call.values())
    call |= {"k_scale": call["k_scale"][:, None], "weights": call["weights"][..., None]}
    call |= {"ks": call["ks"][:, None], "ke": call["ke"][None]}
    if rows == 1:
        call |= {x: call[x].reshape(()) for x in ("k_scale", "ks", "ke")}
    assert torch.equal(getattr(aiter, name)(*call.values()), expected)


def test_a_variant_of_kvscout_may_be_named(make, monkeypatch):
    given = make().values()
    expected = aiter.flydsl_fp8_mqa_logits(*given, variant="torch_reference")
    assert torch.equal(aiter.flydsl_fp8_mqa_logits(*given, True, None, "torch_reference"), expected)
    monkeypatch.setenv("KVSCOUT_MQA_LOGITS_VARIANT", "torch_reference")
    assert torch.equal(aiter.flydsl_fp8_mqa_logits(*given), expected)
    with pytest.raises(ValueError, match=r"^variant: mqa_logits has no variant 'mfma_r2_w4'; it has "):
        aiter.flydsl_fp8_mqa_logits(*given, variant="mfma_r2_w4")
    with pytest.raises(UnsupportedProblem, match="cute_wgmma"):
        aiter.flydsl_fp8_mqa_logits(*given, variant="cute_wgmma")


@pytest.mark.parametrize("stream", [0, "default"])
def test_what_is_no_stream_is_refused(stream, make):
    with pytest.raises(TypeError, match=r"^stream: expected a torch\.cuda\.Stream or None, got "):
        aiter.flydsl_fp8_mqa_logits(*make().values(), stream=stream)


@pytest.mark.gpu
def test_a_stream_is_where_it_runs(make):
    given = list(make(64, 4096, 64, 128, device="cuda").values())
    expected = aiter.flydsl_fp8_mqa_logits(*given)
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    late = torch.zeros_like(given[3])
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        # The weights come late on that stream: on another they would be seen to be zeros.
        torch.cuda._sleep(1 << 26)
        late.copy_(given[3])
    given[3] = late
    found = aiter.flydsl_fp8_mqa_logits(*given, stream=stream)
    assert torch.cuda.current_stream() == current
    current.wait_stream(stream)
    assert torch.equal(found, expected)
    on_cpu = make().values()
    with pytest.raises(ValueError, match=r"^stream: expected one of cpu, like Q, got one of cuda"):
        aiter.flydsl_fp8_mqa_logits(*on_cpu, stream=stream)


BAD = {
    "Q: expected a torch.Tensor, got NoneType": ("q", lambda x: None),
    "Q: expected dtype torch.float8_e4m3fn or torch.float8_e4m3fnuz, got torch.float32": ("q", lambda x: x.float()),
    "Q: expected shape [S, H, D], got [5, 1024]": ("q", lambda x: x.flatten(1)),
    "Q: head dimension D: expected one of 32, 64, 128, 256, 512, got 48": ("q", lambda x: x[..., :48]),
    "Q: expected a contiguous last dimension": ("q", lambda x: x.repeat_interleave(2, -1)[..., ::2]),
    "Q: expected rows that start on 16-byte boundaries": (
        "q", lambda x: x.view(torch.uint8).repeat(1, 1, 2)[..., 1:65].view(FN)
    ),
    "KV: expected dtype torch.float8_e4m3fn, got torch.float8_e4m3fnuz": ("k", lambda x: x.float().to(FNUZ)),
    "KV: expected shape [N, D], got [70, 1, 64]": ("k", lambda x: x[:, None]),
    "KV: expected shape [N, 64], got [70, 32]": ("k", lambda x: x[:, :32]),
    "kv_scales: expected a torch.Tensor, got float": ("k_scale", lambda x: 1.0),
    "kv_scales: expected shape [70], got [35]": ("k_scale", lambda x: x[::2]),
    "kv_scales: expected dtype torch.float32, got torch.float64": ("k_scale", lambda x: x.double()),
    "weights: expected shape [5, 16], got [5, 8]": ("weights", lambda x: x[:, :8]),
    "weights: expected dtype torch.float32, got torch.bfloat16": ("weights", lambda x: x.bfloat16()),
    "cu_starts: expected dtype torch.int32, got torch.int64": ("ks", lambda x: x.long()),
    "cu_starts: expected shape [5], got [4]": ("ks", lambda x: x[1:]),
    "cu_ends: expected shape [5], got [4]": ("ke", lambda x: x[1:]),
    "cu_ends: expected on cpu": ("ke", lambda x: x.to("meta")),
}  # fmt: skip


@pytest.mark.parametrize(("message", "spoil"), BAD.items(), ids=BAD)
@SCORES
def test_bad_tensors_have_their_name_in_aiter(name, message, spoil, make):
    argument, change = spoil
    call = make()
    call[argument] = change(call[argument])
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
        getattr(aiter, name)(*call.values())


@SCORES
def test_clean_logits_must_be_a_bool(name, make):
    with pytest.raises(TypeError, match=r"^clean_logits: expected a bool, got int"):
        getattr(aiter, name)(*make().values(), 1)


@SCORES
def test_compiled_equals_eager(name, make):
    given = make().values()
    compiled = torch.compile(getattr(aiter, name), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), getattr(aiter, name)(*given))


def test_names_are_those_of_kvscout_s_arguments():
    known = inspect.signature(kvscout.fp8_mqa_logits).parameters
    assert {name.partition("[")[0] for name in aiter.NAMES} <= set(known)
    assert set(aiter.NAMES.values()) <= set(TRITON)
