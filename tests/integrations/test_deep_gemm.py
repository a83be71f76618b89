"""DeepGEMM's names, argument by argument, against the definition in float64."""

import inspect
import re

import pytest
import torch

from kvscout import UnsupportedProblem
from kvscout.integrations import deep_gemm
from kvscout.ops.mqa_logits.variants.torch_reference import reference

NONE = inspect.Parameter.empty
LEGACY = {
    "q": NONE, "kv": NONE, "weights": NONE, "cu_seq_len_k_start": NONE, "cu_seq_len_k_end": NONE, "clean_logits": True,
    "max_seqlen_k": 0,
}  # fmt: skip
SIGNATURES = {
    "fp8_mqa_logits": LEGACY,
    "fp8_fp4_mqa_logits": LEGACY | {"logits_dtype": torch.float32, "schedule_meta": None},
}
BOTH = pytest.mark.parametrize("name", SIGNATURES)


def arguments(call, name="fp8_mqa_logits"):
    """The required arguments of a function, in their order."""
    q = call["q"] if name == "fp8_mqa_logits" else (call["q"], None)
    return [q, (call["k"], call["k_scale"]), call["weights"], call["ks"], call["ke"]]


def compressed(logits, call, width):
    """The definition of a compressed result, NaN where it is undefined."""
    rows, keys = logits.shape
    expected = torch.full((rows, width), float("nan"), dtype=torch.float64)
    for row in range(rows):
        start = min(max(int(call["ks"][row]), 0), keys)
        for key in range(start, min(int(call["ke"][row]), keys, start + width)):
            expected[row, key - start] = logits[row, key]
    return expected


@BOTH
def test_arguments_have_the_original_s_names_order_and_defaults(name):
    found = inspect.signature(getattr(deep_gemm, name)).parameters.values()
    assert {p.name: p.default for p in found} == SIGNATURES[name]
    assert [p.name for p in found] == list(SIGNATURES[name])
    assert {p.kind for p in found} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@BOTH
def test_scores_are_the_definition_by_position_and_by_keyword(name, make, assert_scores):
    call = make()
    expected = reference(**call)
    function, given = getattr(deep_gemm, name), arguments(call, name)
    assert_scores(function(*given), expected)
    found = function(**dict(zip(SIGNATURES[name], given, strict=False)))
    assert_scores(found, expected)
    assert found.isneginf().any()


@pytest.mark.parametrize("clean", [True, False])
@BOTH
def test_clean_logits_fills_outside_the_windows_and_false_writes_nothing_there(
    name, clean, make, assert_scores, monkeypatch
):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: empty(*shape, **how).fill_(7))
    call = make()
    expected = reference(**call)
    found = getattr(deep_gemm, name)(*arguments(call, name), clean)
    assert_scores(found, expected if clean else expected.masked_fill(expected.isneginf(), 7))
    # Nor does anything but a logit's place change: the room that each row has more.
    rows = found.as_strided((5, found.stride(0)), found.stride())
    assert (rows[:, 70:] == 7).all()


def test_windows_past_the_ends_are_clamped(make, assert_scores):
    call = make(rows=4) | {"ks": torch.tensor([-9, 60, 50, 80]).int(), "ke": torch.tensor([3, 99, 40, 90]).int()}
    expected = reference(**call)
    assert_scores(deep_gemm.fp8_mqa_logits(*arguments(call)), expected)
    found = deep_gemm.fp8_mqa_logits(*arguments(call), False, 12)
    wanted = compressed(expected, call, 12)
    assert wanted.isfinite().sum(1).tolist() == [3, 10, 0, 0]
    assert_scores(found.masked_fill(wanted.isnan(), float("nan")), wanted)


@pytest.mark.parametrize("dtype", deep_gemm.LOGITS_DTYPES)
@pytest.mark.parametrize(("rows", "keys"), [(5, 70), (5, 256), (3, 1), (0, 9), (4, 0), (0, 0)])
def test_results_have_the_original_s_shape_and_row_strides(rows, keys, dtype, make):
    given = arguments(make(rows, keys), "fp8_fp4_mqa_logits")
    multiple = 1024 // dtype.itemsize

    def up(x, unit):
        return (x + unit - 1) // unit * unit

    found = deep_gemm.fp8_fp4_mqa_logits(*given, logits_dtype=dtype)
    assert (found.shape, found.dtype, found.stride()) == ((rows, keys), dtype, (up(up(keys + 256, 256), multiple), 1))
    for width in (1, 256, 257, 600):
        found = deep_gemm.fp8_fp4_mqa_logits(*given, False, width, dtype)
        assert (found.shape, found.dtype) == ((rows, width), dtype)
        assert found.stride() == (up(up(width, 256), multiple), 1)
        # No rows are hidden behind the last.
        assert found.untyped_storage().nbytes() == rows * found.stride(0) * dtype.itemsize


@pytest.mark.parametrize("width", [1, 20, 70, 300])
@pytest.mark.parametrize("most", [1, 70 * 2, deep_gemm.SCRATCH_LOGITS])
def test_compressed_rows_start_at_their_first_key(width, most, make, assert_scores, monkeypatch):
    """Whatever the block of rows; a window longer than the width loses its end, and no other row has it."""
    monkeypatch.setattr(deep_gemm, "SCRATCH_LOGITS", most)
    call = make()
    expected = compressed(reference(**call), call, width)
    assert expected.isfinite().any()
    for function, name in ((deep_gemm.fp8_mqa_logits, "fp8_mqa_logits"), (deep_gemm.fp8_fp4_mqa_logits, "")):
        found = function(*arguments(call, name), clean_logits=False, max_seqlen_k=width)
        assert_scores(found.masked_fill(expected.isnan(), float("nan")), expected)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("most", [1, deep_gemm.SCRATCH_LOGITS])
def test_bfloat16_logits_are_the_float32_ones_rounded_once(clean, most, make, monkeypatch):
    monkeypatch.setattr(deep_gemm, "SCRATCH_LOGITS", most)
    call = make()
    given = arguments(call, "fp8_fp4_mqa_logits")
    inside = reference(**call).isfinite()
    rows = slice(0, 1) if most == 1 else slice(None)
    found = deep_gemm.fp8_fp4_mqa_logits(*given, clean, logits_dtype=torch.bfloat16)
    single = deep_gemm.fp8_fp4_mqa_logits(
        (given[0][0][rows], None), given[1], *(x[rows] for x in given[2:]), clean, logits_dtype=torch.float32
    )
    assert torch.equal(found[rows][inside[rows]], single[inside[rows]].bfloat16())
    if clean:
        assert torch.equal(found.isneginf(), ~inside)


def test_lists_will_do_for_pairs(make):
    call = make()
    expected = deep_gemm.fp8_mqa_logits(*arguments(call))
    q, kv, *rest = arguments(call)
    assert torch.equal(deep_gemm.fp8_mqa_logits(q, list(kv), *rest), expected)
    assert torch.equal(deep_gemm.fp8_fp4_mqa_logits([q, None], list(kv), *rest), expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"clean_logits": False, "max_seqlen_k": 30}, {"logits_dtype": torch.bfloat16}],
    ids=["plain", "compressed", "bfloat16"],
)
def test_compiled_equals_eager(options, make):
    call = make()
    given = arguments(call, "fp8_fp4_mqa_logits")
    compiled = torch.compile(deep_gemm.fp8_fp4_mqa_logits, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*given, **options), deep_gemm.fp8_fp4_mqa_logits(*given, **options)
    width = expected.shape[1]
    inside = (
        torch.arange(width) < (call["ke"] - call["ks"]).clamp(max=width)[:, None] if "max_seqlen_k" in options else ...
    )
    assert torch.equal(found[inside], expected[inside])


def replaced(index, change):
    """The arguments with one of them changed."""
    return lambda given: [change(x) if i == index else x for i, x in enumerate(given)]


BAD = {
    "q: expected a torch.Tensor, got list": replaced(0, lambda q: [1]),
    "q: expected dtype torch.float8_e4m3fn or torch.float8_e4m3fnuz, got torch.int8": replaced(
        0, lambda q: q.view(torch.int8)
    ),
    "q: expected shape [S, H, D], got [5, 1024]": replaced(0, lambda q: q.flatten(1)),
    "q: number of heads H: expected one of 8, 16, 32, 64, 128, got 3": lambda given: [
        given[0][:, :3], given[1], given[2][:, :3], *given[3:]
    ],
    "kv: expected a pair, got Tensor": replaced(1, lambda kv: kv[0]),
    "kv: expected a pair, got 3 of them": replaced(1, lambda kv: (*kv, None)),
    "kv[0]: expected shape [N, 64], got [70, 32]": replaced(1, lambda kv: (kv[0][:, :32], kv[1])),
    "kv[0]: expected dtype torch.float8_e4m3fn, got torch.float8_e4m3fnuz": replaced(
        1, lambda kv: (kv[0].view(torch.float8_e4m3fnuz), kv[1])
    ),
    "kv[1]: expected dtype torch.float32, got torch.int32": replaced(1, lambda kv: (kv[0], kv[1].int())),
    "kv[1]: expected shape [70], got [69]": replaced(1, lambda kv: (kv[0], kv[1][1:])),
    "weights: expected dtype torch.float32, got torch.bfloat16": replaced(2, lambda x: x.bfloat16()),
    "weights: expected dtype torch.float32, got torch.float16": replaced(2, lambda x: x.half()),
    "weights: expected shape [5, ": replaced(2, lambda x: x.repeat(2, 1)),
    "weights: expected shape [5, 16], got [5, 8]": replaced(2, lambda x: x[:, :8]),
    "cu_seq_len_k_start: expected dtype torch.int32, got torch.int64": replaced(3, lambda x: x.long()),
    "cu_seq_len_k_start: expected shape [5], got [10]": replaced(3, lambda x: x.repeat(2)),
    "cu_seq_len_k_end: expected shape [5], got [10]": replaced(4, lambda x: x.repeat(2)),
    "cu_seq_len_k_end: expected shape [5], got [4]": replaced(4, lambda x: x[1:]),
    "cu_seq_len_k_end: expected on cpu": replaced(4, lambda x: x.to("meta")),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"clean_logits": False, "max_seqlen_k": 8}], ids=["plain", "compressed"])
@pytest.mark.parametrize(("message", "spoil"), BAD.items(), ids=BAD)
def test_bad_tensors_are_named(message, spoil, options, make, monkeypatch):
    # Small blocks: what a block of rows does not show must be seen all the same.
    monkeypatch.setattr(deep_gemm, "SCRATCH_LOGITS", 1)
    given = spoil(arguments(make()))
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
        deep_gemm.fp8_mqa_logits(*given, **options)
    newer = re.sub("^q: ", "q[0]: ", message)
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(newer)):
        deep_gemm.fp8_fp4_mqa_logits((given[0], None), *given[1:], **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"clean_logits": 1}, TypeError, "clean_logits: expected a bool, got int"),
        ({"max_seqlen_k": 8}, ValueError, "clean_logits: expected False with max_seqlen_k=8, got True"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k: expected from 0 to 2147483647, got -1"),
        ({"max_seqlen_k": 8.0}, TypeError, "max_seqlen_k: expected an int, got float"),
        ({"max_seqlen_k": True}, TypeError, "max_seqlen_k: expected an int, got bool"),
    ],
)
@BOTH
def test_bad_options_are_named(name, options, error, message, make):
    with pytest.raises(error, match="^" + re.escape(message)):
        getattr(deep_gemm, name)(*arguments(make(), name), **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, None, "float32"])
def test_other_dtypes_of_logits_are_refused(dtype, make):
    with pytest.raises(ValueError, match=r"^logits_dtype: expected one of torch\.float32, torch\.bfloat16, got "):
        deep_gemm.fp8_fp4_mqa_logits(*arguments(make(), ""), logits_dtype=dtype)


def test_what_is_not_fp8_is_refused(make):
    q, *rest = arguments(make())
    scales = torch.ones(5, 16, dtype=torch.int32)
    for values in (q, q.view(torch.int8)):
        with pytest.raises(NotImplementedError, match=r"^q\[1\]: expected None, for FP8 queries; FP4 and MX"):
            deep_gemm.fp8_fp4_mqa_logits((values, scales), *rest)
    with pytest.raises(TypeError, match=r"^q: expected a pair, got Tensor"):
        deep_gemm.fp8_fp4_mqa_logits(q, *rest)


def test_a_schedule_is_refused(make):
    with pytest.raises(NotImplementedError, match=r"^schedule_meta: expected None"):
        deep_gemm.fp8_fp4_mqa_logits(*arguments(make(), ""), schedule_meta=torch.zeros(9, dtype=torch.int32))


def test_refusals_of_variants_pass_through(make, monkeypatch):
    monkeypatch.setenv("KVSCOUT_MQA_LOGITS_VARIANT", "cute_wgmma")
    with pytest.raises(UnsupportedProblem, match="cute_wgmma"):
        deep_gemm.fp8_mqa_logits(*arguments(make()))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [0, 300])
def test_a_captured_call_follows_windows_that_change(width, make):
    call = make(61, 1024, 64, 128, device="cuda")
    given = arguments(call)

    def score():
        return deep_gemm.fp8_mqa_logits(*given, clean_logits=not width, max_seqlen_k=width)

    def defined(logits):
        if not width:
            return logits.clone()
        outside = torch.arange(width, device="cuda") >= (call["ke"] - call["ks"])[:, None]
        return logits.masked_fill(outside, 0)

    # Kernels are loaded by their first launch, which cannot be captured.
    score()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = score()
    for shift in (0, 100, 700):
        call["ks"].add_(shift)
        graph.replay()
        replayed = defined(captured)
        assert torch.equal(replayed, defined(score()))
