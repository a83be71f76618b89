"""``fp8_mqa_logits`` as its callers meet it: results, layouts of the output, messages, compilation."""

import itertools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvscout import UnsupportedProblem, checks, fp8_mqa_logits
from kvscout.ops.mqa_logits.api import FAMILY, Args, Problem, check
from kvscout.ops.mqa_logits.variants.torch_reference import reference

SERVING_ON_CPU = ("torch_reference", "torch_chunked", "triton_direct", "triton_staged")


def make(rows=5, keys=70, heads=16, dim=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads, dim, generator=generator).to(torch.float8_e4m3fn)
    k = torch.randn(keys, dim, generator=generator).to(torch.float8_e4m3fn)
    k_scale = torch.rand(keys, generator=generator)
    weights = torch.randn(rows, heads, generator=generator)
    starts = torch.arange(rows).int()
    ends = torch.full((rows,), keys).int() - starts
    return {
        "q": q,
        "kv": (k, k_scale),
        "weights": weights,
        "cu_seq_len_k_start": starts,
        "cu_seq_len_k_end": ends,
    }


def brute_force(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end):
    """The formula of the docstring, one number at a time, with neither masks nor matrix products."""
    k, k_scale = kv
    logits = torch.full((len(q), len(k)), float("-inf"), dtype=torch.float64)
    for i, j in itertools.product(range(len(q)), range(len(k))):
        start = min(max(int(cu_seq_len_k_start[i]), 0), len(k))
        end = min(max(int(cu_seq_len_k_end[i]), start), len(k))
        if start <= j < end:
            total = 0.0
            for h in range(q.shape[1]):
                dot = sum(a * b for a, b in zip(q[i, h].tolist(), k[j].tolist(), strict=True))
                total += float(weights[i, h]) * max(dot, 0.0)
            logits[i, j] = total * float(k_scale[j])
    return logits


def test_the_definition_is_the_formula():
    call = make(rows=4, keys=6, heads=8, dim=32)
    call["cu_seq_len_k_start"] = torch.tensor([0, -3, 4, 2]).int()
    call["cu_seq_len_k_end"] = torch.tensor([6, 3, 2, 99]).int()
    (k, k_scale), expected = call["kv"], brute_force(**call)
    found = reference(call["q"], k, k_scale, call["weights"], call["cu_seq_len_k_start"], call["cu_seq_len_k_end"])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@given(
    windows=st.lists(
        st.tuples(st.integers(-(2**31), 2**31 - 1) | st.integers(-5, 45), st.integers(-5, 45) | st.just(2**31 - 1)),
        min_size=1,
        max_size=6,
    ),
    keys=st.integers(0, 40),
    clean=st.booleans(),
    variant=st.sampled_from(SERVING_ON_CPU),
)
def test_any_window_is_legal(windows, keys, clean, variant):
    call = make(rows=len(windows), keys=keys, heads=8, dim=32)
    call["cu_seq_len_k_start"], call["cu_seq_len_k_end"] = torch.tensor(windows, dtype=torch.int32).T.contiguous()
    poison = torch.full((len(windows), keys), float("nan"))
    found = fp8_mqa_logits(**call, clean_logits=clean, out=poison, variant=variant)
    k, k_scale = call["kv"]
    expected = reference(call["q"], k, k_scale, call["weights"], call["cu_seq_len_k_start"], call["cu_seq_len_k_end"])
    if not clean:
        expected = expected.masked_fill(expected.isneginf(), float("nan"))
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-4, equal_nan=True)


def test_a_new_result_has_aligned_rows():
    found = fp8_mqa_logits(**make(keys=70))
    assert found.shape == (5, 70)
    assert found.stride() == (256, 1)
    assert fp8_mqa_logits(**make(keys=257)).stride() == (512, 1)


def test_out_is_written_and_returned():
    out = torch.full((5, 70 + 3), 7.0)
    found = fp8_mqa_logits(**make(), out=out[:, :70])
    assert found.data_ptr() == out.data_ptr()
    assert torch.equal(found, fp8_mqa_logits(**make()))
    assert (out[:, 70:] == 7).all()


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_score(rows, keys):
    assert fp8_mqa_logits(**make(rows=rows, keys=keys)).shape == (rows, keys)


def test_q_scale_multiplies_the_weights():
    call, q_scale = make(), torch.rand(5, 16)
    scaled = fp8_mqa_logits(**call, q_scale=q_scale)
    call["weights"] = call["weights"] * q_scale
    assert torch.equal(scaled, fp8_mqa_logits(**call))


@pytest.mark.parametrize("variant", SERVING_ON_CPU)
def test_compiled_equals_eager(variant):
    def score(**call):
        return fp8_mqa_logits(**call, variant=variant) * 2

    compiled = torch.compile(score, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, keys in ((5, 70), (3, 41)):
        call = make(rows, keys)
        assert torch.equal(compiled(**call), score(**call))


def test_compiled_writes_out():
    out = torch.full((5, 70), float("nan"))
    compiled = torch.compile(fp8_mqa_logits, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(**make(), out=out)
    assert torch.equal(out, fp8_mqa_logits(**make()))


@pytest.mark.parametrize("clean", [1, 0, None])
def test_compiled_takes_what_eager_takes(clean):
    compiled = torch.compile(fp8_mqa_logits, backend="aot_eager")
    for call in (fp8_mqa_logits, compiled):
        with pytest.raises(TypeError, match=r"^clean_logits: expected a bool, got "):
            call(**make(), clean_logits=clean)


def replaced(**changes):
    return lambda call: call | {name: change(call) for name, change in changes.items()}


BAD = {
    "q: expected a torch.Tensor, got list": replaced(q=lambda c: [1]),
    "q: expected dtype torch.float8_e4m3fn or torch.float8_e4m3fnuz, got torch.float32": replaced(
        q=lambda c: c["q"].float()
    ),
    "q: expected shape [S, H, D], got [5, 1024]": replaced(q=lambda c: c["q"].flatten(1)),
    "q: number of heads H: expected one of 8, 16, 32, 64, 128, got 12": replaced(q=lambda c: c["q"][:, :12]),
    "q: head dimension D: expected one of 32, 64, 128, 256, 512, got 48": replaced(q=lambda c: c["q"][..., :48]),
    "q: expected rows that start on 16-byte boundaries": replaced(q=lambda c: c["q"].repeat(1, 1, 2)[..., 8:72]),
    "q: expected a contiguous last dimension": replaced(q=lambda c: c["q"].repeat(1, 1, 2)[..., ::2]),
    "kv: expected the pair (k, k_scale), got Tensor": replaced(kv=lambda c: c["kv"][0]),
    "kv[0]: expected shape [N, 64], got [70, 32]": replaced(kv=lambda c: (c["kv"][0][:, :32], c["kv"][1])),
    "kv[0]: expected dtype torch.float8_e4m3fn, got torch.float8_e4m3fnuz": replaced(
        kv=lambda c: (c["kv"][0].view(torch.float8_e4m3fnuz), c["kv"][1])
    ),
    "kv[1]: expected shape [70], got [69]": replaced(kv=lambda c: (c["kv"][0], c["kv"][1][1:])),
    "kv[1]: expected a contiguous last dimension": replaced(kv=lambda c: (c["kv"][0], c["kv"][1].repeat(2)[::2])),
    "weights: expected shape [5, 16], got [5, 8]": replaced(weights=lambda c: c["weights"][:, :8]),
    "weights: expected dtype torch.float32, got torch.float64": replaced(weights=lambda c: c["weights"].double()),
    "cu_seq_len_k_start: expected dtype torch.int32, got torch.int64": replaced(
        cu_seq_len_k_start=lambda c: c["cu_seq_len_k_start"].long()
    ),
    "cu_seq_len_k_end: expected shape [5], got [4]": replaced(cu_seq_len_k_end=lambda c: c["cu_seq_len_k_end"][1:]),
    "q_scale: expected shape [5, 16], got [5]": replaced(q_scale=lambda c: torch.ones(5)),
    "out: expected shape [5, 70], got [5, 71]": replaced(out=lambda c: torch.empty(5, 71)),
    "out: expected dtype torch.float32, got torch.bfloat16": replaced(
        out=lambda c: torch.empty(5, 70, dtype=torch.bfloat16)
    ),
    "out: expected on cpu, like the other tensors, got meta": replaced(out=lambda c: torch.empty(5, 70, device="meta")),
    "out: expected rows at least 70 elements apart": replaced(
        out=lambda c: torch.empty(140).as_strided((5, 70), (2, 1))
    ),
    "q_scale: expected a contiguous last dimension": replaced(q_scale=lambda c: torch.ones(5, 32)[:, ::2]),
    "clean_logits: expected a bool, got str": replaced(clean_logits=lambda c: "no"),
    "kv: expected the pair (k, k_scale), got 3 of them": replaced(kv=lambda c: (*c["kv"], c["kv"][1])),
    "weights: expected a dense tensor, got one of layout torch.sparse_csr": replaced(
        weights=lambda c: c["weights"].to_sparse_csr()
    ),
    "q_scale: expected a dense tensor, got one of layout torch.sparse_coo": replaced(
        q_scale=lambda c: c["weights"].to_sparse()
    ),
    "weights: expected a dense tensor, got a nested one": replaced(
        weights=lambda c: torch.nested.nested_tensor(list(c["weights"]))
    ),
    "weights: expected values as they are stored, got a lazily negated view": replaced(
        weights=lambda c: torch._neg_view(c["weights"])
    ),
    "kv[1]: expected values as they are stored, got a lazily negated view": replaced(
        kv=lambda c: (c["kv"][0], torch.complex(c["kv"][1], c["kv"][1]).conj().imag.as_strided((70,), (1,)))
    ),
    "out: expected values as they are stored, got a lazily negated view": replaced(
        out=lambda c: torch._neg_view(torch.empty(5, 70))
    ),
    "variant: expected a str, got list": replaced(variant=lambda c: []),
    "variant: mqa_logits has no variant 'fastest'": replaced(variant=lambda c: "fastest"),
}


@pytest.mark.parametrize(("message", "spoil"), BAD.items(), ids=BAD.keys())
@pytest.mark.parametrize("after_a_good_call", [False, True])
def test_bad_input_is_named(message, spoil, after_a_good_call):
    if after_a_good_call:
        fp8_mqa_logits(**make())
        fp8_mqa_logits(**make(), q_scale=torch.ones(5, 16), out=torch.empty(5, 70))
    with pytest.raises((TypeError, ValueError)) as raised:
        fp8_mqa_logits(**spoil(make()))
    assert str(raised.value).startswith(message)
    assert raised.value.__context__ is None


def misplaced(x):
    """``x`` with the same shape and strides, 8 bytes past a 16-byte boundary."""
    room = torch.zeros(x.numel() + 16, dtype=torch.uint8).view(x.dtype)
    offset = (8 - room.data_ptr()) % 16
    return room[offset : offset + x.numel()].view(x.shape).copy_(x)


@pytest.mark.parametrize("name", ["q", "kv[0]"])
def test_a_misplaced_tensor_is_seen_after_a_good_call(name):
    call = make()
    fp8_mqa_logits(**call)
    if name == "q":
        call["q"] = misplaced(call["q"])
    else:
        call["kv"] = (misplaced(call["kv"][0]), call["kv"][1])
    message = f"{name}: expected rows that start on 16-byte boundaries, got strides .* an address that is 8 past one"
    with pytest.raises(ValueError, match=f"^{re.escape(name)}{message.removeprefix(name)}"):
        fp8_mqa_logits(**call)


def test_a_layout_is_checked_once(monkeypatch):
    """What keeps the host's part of a call to microseconds."""
    called = []

    def counting(name, check):
        return lambda *arguments: (called.append(name), check(*arguments))[1]

    for name in ("tensor", "rows_aligned", "rows_apart", "last_dim_contiguous", "boolean", "one_of"):
        monkeypatch.setattr(checks, name, counting(name, getattr(checks, name)))
    call = make(rows=6, keys=71)
    first = fp8_mqa_logits(**call, out=torch.empty(6, 71))
    assert len(called) > 10
    called.clear()
    assert torch.equal(fp8_mqa_logits(**make(rows=6, keys=71), out=torch.empty(6, 71)), first)
    assert not called
    fp8_mqa_logits(**call, clean_logits=False, out=torch.empty(6, 71))
    assert len(called) > 10


def test_a_named_variant_never_falls_back():
    call = make(dim=512)
    with pytest.raises(UnsupportedProblem, match="triton_staged: stages keys of head dimension up to 256, this is 512"):
        fp8_mqa_logits(**call, variant="triton_staged")
    assert fp8_mqa_logits(**call, variant="triton_direct").shape == (5, 70)


@pytest.mark.parametrize(
    ("arch", "fnuz", "sentence"),
    [
        ("sm_80", False, None),
        ("sm_90", True, "NVIDIA GPUs have no e4m3fnuz arithmetic; quantise to float8_e4m3fn"),
        ("gfx942", False, None),
        ("sm_90", False, None),
        ("gfx942", True, None),
        ("gfx950", False, None),
    ],
)
def test_each_gpu_is_told_which_e4m3_it_multiplies(arch, fnuz, sentence):
    problem = Problem(arch, 5, 70, 16, 64, clean_logits=True, fnuz=fnuz)
    for variant in ("triton_direct", "triton_staged"):
        assert FAMILY.refusal(variant, problem) == sentence


def test_the_environment_names_a_variant(monkeypatch):
    assert fp8_mqa_logits(**make(dim=512)).shape == (5, 70)
    monkeypatch.setenv("KVSCOUT_MQA_LOGITS_VARIANT", "triton_staged")
    with pytest.raises(UnsupportedProblem, match="triton_staged"):
        fp8_mqa_logits(**make(dim=512))
    assert fp8_mqa_logits(**make(dim=512), variant="torch_chunked").shape == (5, 70)


def test_a_wrong_name_in_the_environment_is_told(monkeypatch):
    monkeypatch.setenv("KVSCOUT_MQA_LOGITS_VARIANT", "nonsense")
    with pytest.raises(ValueError, match="KVSCOUT_MQA_LOGITS_VARIANT: mqa_logits has no variant 'nonsense'"):
        fp8_mqa_logits(**make())


@pytest.mark.parametrize("variant", SERVING_ON_CPU)
def test_results_carry_no_gradient(variant):
    call, q_scale = make(), torch.ones(5, 16)
    expected = fp8_mqa_logits(**call, variant=variant)
    for x in (call["q"], *call["kv"], call["weights"], q_scale):
        x.requires_grad_()
    found = fp8_mqa_logits(**call, q_scale=q_scale, variant=variant)
    assert not found.requires_grad
    assert torch.equal(found, expected)
    # One that asks for a gradient itself is written all the same.
    out = torch.empty(5, 70, requires_grad=True)
    assert fp8_mqa_logits(**call, out=out, variant=variant).grad_fn is None
    assert torch.equal(out, expected)


def test_tensors_without_memory_are_not_offered_to_triton():
    problem = Problem("meta", 5, 70, 16, 64, clean_logits=True)
    assert FAMILY.choose(problem).variant.name == "torch_chunked"
    assert "these tensors are on meta" in FAMILY.refusal("triton_staged", problem)


def test_memory_is_bounded_by_the_budget_not_by_the_keys():
    """Two million keys: masks of whole rows would take 4 MB each for two rows, and far more for a block of rows."""
    call = make(rows=64, keys=2_000_000, heads=8, dim=32)
    call["cu_seq_len_k_end"] = torch.full((64,), 1000).int()
    out = torch.empty(64, 2_000_000)
    with TensorBytes() as seen:
        fp8_mqa_logits(**call, out=out, clean_logits=False)
    assert 0 < seen.largest <= 4 << 20


class TensorBytes(TorchDispatchMode):
    """The largest new tensor that an operation made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
            if result.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, result.nbytes)
        return result


def test_the_cpu_default_is_the_bounded_variant():
    problem = check(Args(*unpacked(make()), None, torch.empty(5, 70)), True)
    assert FAMILY.choose(problem).variant.name == "torch_chunked"


def unpacked(call):
    q, kv, *rest = call.values()
    return q, *kv, *rest
