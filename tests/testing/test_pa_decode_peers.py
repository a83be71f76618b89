"""Peers of ``pa_decode``: what they refuse, and what they hand to their libraries.

The libraries themselves are not here: modules that compute the same in plain torch stand in for them. torch's own
attention is here, and is what it is.
"""

import sys
import types
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.bias import CausalBias

from kvscout import paging
from kvscout.ops.pa_decode.variants.torch_reference import reference
from kvscout.testing import peers
from kvscout.testing.case import BENCH, cases
from kvscout.testing.cases.pa_decode import PaDecodeCase
from kvscout.testing.peers import pa_decode
from kvscout.testing.peers.pa_decode import ROUNDED_PARTS, SINGLE_E4M3, sdpa

CPU = torch.device("cpu")
FN = torch.float8_e4m3fn
NAMES = ("fa3", "flashinfer", "xqa")
"""Other libraries' kernels."""


def case(*lengths, **options):
    """A batch with last pages that are partly NaN."""
    return PaDecodeCase(lengths or (37, 5, 64), **{"group": 3, "dim": 64, "odd": ("no_lse",), **options})


def problem(arch="sm_90", lengths=(5,), **options):
    return replace(case(*lengths, **options).prepare(CPU).problem, arch=arch)


def verified(name, of_case):
    peer, prepared = peers.load("pa_decode", name), of_case.prepare(CPU)
    return peers.verify_peer(of_case, peer, prepared, peer.prepare(prepared))


def attend(query, keys, values, lengths, tables, scale, query_length=1, **options):
    """The definition, on caches as peers take them."""
    assert all(x.is_contiguous() and x.float().isfinite().all() for x in (query, keys, values))
    assert tables.min() >= 0
    assert tables.max() < len(keys)
    kv = paging.pages(keys, values, keys.shape[2], "nhd")
    return reference(query, kv, lengths, tables, scale, query_length, dtype=torch.float32, **options)[0]


def rounded(x):
    return x.to(FN).to(x.dtype)


def test_the_folder():
    assert peers.names("pa_decode") == ("fa3", "flashinfer", "sdpa", "xqa")


def test_finding_peers_imports_no_library(run_python):
    code = (
        "import sys; from kvscout.testing import peers\n"
        "for name in peers.names('pa_decode'): peers.load('pa_decode', name)\n"
        "print({'flashinfer', 'flash_attn_interface', 'triton'} & set(sys.modules))"
    )
    assert run_python("-c", code).stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("name", "arch", "words"),
    [
        ("fa3", "sm_100", "has kernels for sm_90; this is sm_100"),
        ("fa3", "cpu", "this is cpu"),
        ("xqa", "sm_80", "this is sm_80"),
        ("xqa", "gfx942", "this is gfx942"),
        ("flashinfer", "sm_75", "sm_80 and later; this is sm_75"),
        ("flashinfer", "gfx942", "this is gfx942"),
        ("flashinfer", "cpu", "this is cpu"),
    ],
)
def test_unavailable_on_this_device(name, arch, words):
    assert words in peers.load("pa_decode", name).unavailable(arch)


@pytest.mark.parametrize(("name", "arch"), [("fa3", "sm_90"), ("xqa", "sm_120"), ("flashinfer", "sm_80")])
def test_unavailable_without_the_library(monkeypatch, name, arch):
    for module in ("flashinfer", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    assert peers.load("pa_decode", name).unavailable(arch)


CAST = "takes caches of the query's type or e4m3"


@pytest.mark.parametrize(
    ("options", "refusals"),
    [
        ({}, {}),
        ({"cache": "bf16", "layout": "nhd", "page": 128, "window": 7}, {}),
        ({"cache": "fp16", "dtype": "fp16"}, {}),
        ({"scales": "scalar"}, {}),
        ({"window": 9, "causal": False}, {}),
        ({"cache": "fp16"}, dict.fromkeys(NAMES, CAST)),
        ({"cache": "fnuz"}, dict.fromkeys(NAMES, "e4m3fn alone")),
        ({"dim": 512}, dict.fromkeys(NAMES, "not 512")),
        ({"scales": "token"}, dict.fromkeys(NAMES, "no scale per token")),
        ({"odd": ()}, dict.fromkeys(NAMES, "without lse alone")),
        ({"dim": 192}, {"flashinfer": "dimensions 64, 128, 256, not 192"}),
        ({"scales": "head"}, dict.fromkeys(("flashinfer", "xqa"), "no scale per head")),
        ({"scales": "factor", "query_length": 2}, {"xqa": "one token a sequence, not 2"}),
        ({"sinks": "plain"}, {"fa3": "without sinks alone", "flashinfer": "takes no sinks"}),
        (
            {"window": 9, "causal": False, "query_length": 2},
            {"flashinfer": "no window to the right", "xqa": "one token a sequence"},
        ),
    ],
    ids=str,
)
def test_refusals(options, refusals):
    found = {name: peers.load("pa_decode", name).refuses(problem(**options)) for name in NAMES}
    assert {name for name, sentence in found.items() if sentence} == set(refusals)
    for name, words in refusals.items():
        assert words in found[name]


def test_no_peer_refuses_a_bench_case_but_xqa_those_of_several_tokens():
    """Problems of the bench cases, with fewer and shorter sequences."""
    for of_case in cases("pa_decode", [BENCH]):
        asked = replace(of_case, lengths=(3,)).prepare(CPU).problem
        refusing = [name for name in NAMES if peers.load("pa_decode", name).refuses(asked)]
        assert refusing == (["xqa"] if of_case.query_length > 1 else [])


def test_who_is_judged_by_what():
    budgets = {
        (name, cache): peers.load("pa_decode", name).tolerance(problem(cache=cache))
        for name in NAMES
        for cache in ("e4m3", "bf16")
    }
    assert budgets == {
        ("fa3", "e4m3"): SINGLE_E4M3,
        ("fa3", "bf16"): None,
        ("flashinfer", "e4m3"): ROUNDED_PARTS,
        ("flashinfer", "bf16"): ROUNDED_PARTS,
        ("xqa", "e4m3"): SINGLE_E4M3,
        ("xqa", "bf16"): ROUNDED_PARTS,
    }


@pytest.mark.parametrize("layout", paging.LAYOUTS)
@pytest.mark.parametrize("cache", ["e4m3", "bf16"])
def test_copies_hold_what_the_case_holds(layout, cache):
    prepared = case(37, -1, 16, layout=layout, cache=cache, odd=("no_lse", "strided")).prepare(CPU)
    given, args = pa_decode.inputs(prepared), prepared.args
    assert given.lengths.tolist() == [37, 0, 16]
    assert given.num_pages.tolist() == [3, 0, 1]
    assert given.block_tables.shape == (3, 3)
    assert given.block_tables[1:].tolist() == [[0, 0, 0], [int(args.block_tables[2, 0]), 0, 0]]
    tables = args.block_tables[:, :3]
    expected = reference(args.query, args.kv, args.context_lengths, tables, args.softmax_scale, dtype=torch.float32)[0]
    torch.testing.assert_close(attend(*given[:4], given.block_tables, args.softmax_scale), expected)


class Wrapper:
    """FlashInfer's wrappers: pages are a list of all of them and where each sequence's start."""

    def __init__(self, workspace, layout, **options):
        assert (workspace.dtype, layout, int(workspace[:99].max())) == (torch.uint8, "NHD", 0)
        self.options = options
        self.made.append(self)

    def plan(self, *given, sm_scale, window_left, q_data_type, kv_data_type, causal=False):
        *rows, indptr, indices, last, self.heads, self.kv_heads, self.dim, self.page = given
        self.rows = [row.tolist() for row in rows]
        assert {x.dtype for x in (*rows, indptr, indices, last)} == {torch.int32}
        counts = indptr.diff()
        self.lengths = (counts - 1).clamp(min=0) * self.page + last
        self.tables = torch.zeros(len(counts), max(int(counts.max()), 1), dtype=torch.int32)
        for i, (start, end) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
            self.tables[i, : end - start] = indices[start:end]
        self.scale, self.window, self.causal = sm_scale, window_left + 1, causal
        self.types = q_data_type, kv_data_type

    def run(self, query, kv, v_scale, out):
        assert self.types == (query.dtype, kv[0].dtype)
        assert [self.page, self.kv_heads, self.dim] == list(kv[0].shape[1:])
        assert self.heads == query.shape[1]
        options = {"causal": self.causal, "window": self.window, "value_scale": 1.0 if v_scale is None else v_scale}
        query_length = len(query) // len(self.lengths)
        return out.copy_(attend(query, *kv, self.lengths, self.tables, self.scale, query_length, **options))


@pytest.fixture
def flashinfer(monkeypatch):
    module = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = type("Decode", (Wrapper,), {})
    module.BatchPrefillWithPagedKVCacheWrapper = type("Prefill", (Wrapper,), {})
    monkeypatch.setattr(Wrapper, "made", [], raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return module


@pytest.mark.parametrize(
    "of_case",
    [
        case(),
        case(37, 0, 64, layout="hnd", cache="bf16", window=11, odd=("no_lse", "strided")),
        case(scales="scalar", dtype="fp16", page=64),
        case(layout="nhd", causal=False, window=11),
    ],
    ids=str,
)
def test_flashinfer_decodes(flashinfer, of_case):
    found = verified("flashinfer", of_case)
    assert found.message == ""
    (wrapper,) = Wrapper.made
    assert type(wrapper).__name__ == "Decode"
    assert wrapper.options == {"use_tensor_cores": True, "backend": "fa2"}


@pytest.mark.parametrize(
    "of_case",
    [
        case(query_length=3),
        case(query_length=2, causal=False, cache="bf16"),
        case(query_length=3, window=9, scales="factor"),
    ],
    ids=str,
)
def test_flashinfer_verifies_several_tokens_with_its_prefill(flashinfer, of_case):
    assert verified("flashinfer", of_case).message == ""
    (wrapper,) = Wrapper.made
    assert type(wrapper).__name__ == "Prefill"
    assert wrapper.options == {"backend": "fa2"}
    assert wrapper.rows == [[i * of_case.query_length for i in range(4)]]


def test_what_errs_like_single_e4m3_is_too_much_for_flashinfer(flashinfer, monkeypatch):
    right = Wrapper.run
    monkeypatch.setattr(Wrapper, "run", lambda self, query, *rest, **given: right(self, rounded(query), *rest, **given))
    assert "exceeds" in verified("flashinfer", case()).message


@pytest.fixture
def xqa(monkeypatch):
    """FlashInfer's function, rounding the queries to e4m3 with FP8 caches."""

    def decode(query, kv, workspace, tables, lengths, longest, *, bmm1_scale, bmm2_scale, window_left, out, **options):
        sinks = options.pop("sinks")
        assert options == {"kv_layout": "NHD", "backend": "xqa"}
        assert (workspace.dtype, int(workspace[:99].max())) == (torch.uint8, 0)
        assert isinstance(bmm1_scale, float)
        assert isinstance(bmm2_scale, float)
        assert longest == tables.shape[1] * kv[0].shape[1]
        assert sinks is None or sinks.dtype == torch.float32
        given = {"value_scale": bmm2_scale, "sinks": sinks, "window": window_left + 1}
        query = rounded(query) if kv[0].dtype == FN else query
        return out.copy_(attend(query, *kv, lengths, tables, bmm1_scale, **given))

    package, module = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.decode")
    module.trtllm_batch_decode_with_kv_cache = decode
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", module)
    return module


@pytest.mark.parametrize(
    "of_case",
    [
        case(),
        case(scales="scalar", sinks="plain", layout="plain_v"),
        case(cache="bf16", window=11, page=128, odd=("no_lse", "strided")),
        case(cache="bf16", window=11, causal=False, layout="nhd"),
    ],
    ids=str,
)
def test_xqa(xqa, of_case):
    found = verified("xqa", of_case)
    assert found.message == ""
    assert peers.load("pa_decode", "xqa").unavailable("sm_90") is None
    if of_case.cache == "e4m3":
        assert 1e-2 < found.max_rel < SINGLE_E4M3.max_rel


def test_the_case_alone_would_not_take_what_xqa_gives(xqa):
    of_case, peer = case(), peers.load("pa_decode", "xqa")
    prepared = of_case.prepare(CPU)
    strict = replace(peer, tolerance=lambda problem: None)
    assert "exceeds" in peers.verify_peer(of_case, strict, prepared, strict.prepare(prepared)).message


@pytest.mark.parametrize("wrong", [0.5, float("nan")])
def test_no_tolerance_excuses_a_wrong_peer(xqa, monkeypatch, wrong):
    right = xqa.trtllm_batch_decode_with_kv_cache
    monkeypatch.setattr(xqa, "trtllm_batch_decode_with_kv_cache", lambda *a, **given: right(*a, **given).mul_(wrong))
    assert verified("xqa", case()).message


@pytest.fixture
def fa3(monkeypatch):
    """FlashAttention-3's functions, taking e4m3 queries with FP8 caches and giving bfloat16."""

    def metadata(batch, query_length, longest, heads, kv_heads, dim, lengths, qkv_dtype, page_size, **shared):
        return {"numbers": (batch, query_length, longest, heads, kv_heads, dim, qkv_dtype, page_size), **shared}

    def attention(query, keys, values, *, cache_seqlens, page_table, softmax_scale, scheduler_metadata, **options):
        planned, (left, right), causal = scheduler_metadata, options.pop("window_size"), options.pop("causal")
        batch, query_length, heads, dim = query.shape
        page, kv_heads = keys.shape[1:3]
        longest = page_table.shape[1] * page
        assert planned["numbers"] == (batch, query_length, longest, heads, kv_heads, dim, keys.dtype, page)
        assert (planned["window_size"], planned["causal"], query.dtype) == ((left, right), causal, keys.dtype)
        assert (left, right) == (-1, -1) or right == (0 if causal else left)
        key_scale = value_scale = 1.0
        wide = query.float()
        if keys.dtype == FN:
            assert {tuple(scale.shape) for scale in options.values()} == {(batch, kv_heads)}
            q_descale, key_scale, value_scale = (options[f"{x}_descale"] for x in "qkv")
            assert all(torch.equal(scale, scale[:1].expand_as(scale)) for scale in (key_scale, value_scale))
            wide *= q_descale.repeat_interleave(heads // kv_heads, 1)[:, None, :, None]
            key_scale, value_scale = key_scale[0], value_scale[0]
        else:
            assert options == {}
        given = {"key_scale": key_scale, "value_scale": value_scale, "window": left + 1, "causal": causal}
        rows = wide.flatten(0, 1)
        found = attend(rows, keys, values, cache_seqlens, page_table, softmax_scale, query_length, **given)
        return found.view(query.shape).to(torch.bfloat16 if keys.dtype == FN else query.dtype)

    module = types.ModuleType("flash_attn_interface")
    module.get_scheduler_metadata, module.flash_attn_with_kvcache = metadata, attention
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    return module


@pytest.mark.parametrize(
    "of_case",
    [
        case(),
        case(37, 0, 64, scales="head", query_length=2, dtype="fp16"),
        case(scales="scalar", window=9, odd=("no_lse", "tiny")),
        case(cache="bf16", query_length=3, page=128, odd=("no_lse", "strided")),
        case(cache="fp16", dtype="fp16", query_length=3, causal=False, window=5, layout="hnd"),
    ],
    ids=str,
)
def test_fa3(fa3, of_case):
    found = verified("fa3", of_case)
    assert found.message == ""
    assert peers.load("pa_decode", "fa3").unavailable("sm_90") is None
    assert (found.max_rel > 1e-2) == (of_case.cache == "e4m3")


@pytest.mark.parametrize(
    ("of_case", "mask"),
    [
        (case(), "tensor"),
        (case(64, 64, 64, page=64), None),
        (case(64, 64, cache="bf16", odd=("no_lse", "strided"), layout="nhd"), None),
        (case(37, 37, query_length=3, layout="hnd"), "causal"),
        (case(5, 5, query_length=8, page=64), "tensor"),
        (case(37, 0, 64, query_length=2, causal=False, window=5, cache="fp16", dtype="fp16"), "tensor"),
        (case(64, 5, window=9, layout="plain_v", scales="factor"), "tensor"),
        (case(37, 5, scales="head", group=1), "tensor"),
        (case(64, scales="scalar", dim=192), None),
    ],
    ids=str,
)
def test_sdpa(of_case, mask, monkeypatch):
    """The right result, and no mask where none is needed: that decides which of torch's kernels can run."""
    given = []
    right = sdpa.scaled_dot_product_attention
    monkeypatch.setattr(
        sdpa, "scaled_dot_product_attention", lambda *args, **more: given.append(args[3]) or right(*args, **more)
    )
    assert verified("sdpa", of_case).message == ""
    assert peers.load("pa_decode", "sdpa").unavailable("cpu") is None
    kinds = {type(None): None, CausalBias: "causal", torch.Tensor: "tensor"}
    assert {kinds[type(found)] for found in given} == {mask}


def test_sdpa_copies_pages_at_every_launch():
    """What a user without a kernel for pages would have to do, and what its time is mostly made of."""
    of_case, peer = case(37, cache="bf16"), peers.load("pa_decode", "sdpa")
    prepared = of_case.prepare(CPU)
    launch = peer.prepare(prepared)
    keys, values = (launch.__closure__[launch.__code__.co_freevars.index("given")].cell_contents[i] for i in (1, 2))
    before = launch()
    keys.zero_(), values.zero_()
    assert before.any()
    assert not launch().any()


@pytest.mark.parametrize(
    ("options", "words"),
    [({"sinks": "plain"}, "takes no sinks"), ({"scales": "token"}, "no scale per token"), ({"odd": ()}, "without lse")],
)
def test_sdpa_refuses(options, words):
    assert words in peers.load("pa_decode", "sdpa").refuses(problem(**options))


def test_sdpa_serves_every_bench_case_by_the_cases_own_bound():
    for of_case in cases("pa_decode", [BENCH]):
        asked, peer = replace(of_case, lengths=(3,)).prepare(CPU).problem, peers.load("pa_decode", "sdpa")
        assert (peer.refuses(asked), peer.tolerance(asked)) == (None, None)
    assert peer.tolerance(problem(scales="head")) == ROUNDED_PARTS
