"""Peers: how they are found, and what those of the scores hand to their libraries.

The libraries themselves are not here: modules that compute the same in plain torch stand in for them.
"""

import sys
import types

import pytest
import torch

from kvscout.ops.mqa_logits.api import Problem
from kvscout.ops.mqa_logits.variants.torch_reference import reference, window
from kvscout.testing import peers
from kvscout.testing.cases.mqa_logits import MqaLogitsCase
from kvscout.testing.peers.mqa_logits import aiter

CPU = torch.device("cpu")
KERNEL = "aiter.ops.triton._triton_kernels.attention.fp8_mqa_logits"


def case(clean=True, **options):
    return MqaLogitsCase(9, 70, 32, 64, clean, "misaligned", **options)


def problem(arch="sm_90", heads=64, dim=128, **options):
    return Problem(arch, 9, 70, heads, dim, False, **options)


def verified(peer, of_case):
    prepared = of_case.prepare(CPU)
    return peers.verify_peer(of_case, peer, prepared, peer.prepare(prepared))


def test_peers_are_found_by_listing_a_folder():
    assert peers.names("mqa_logits") == ("aiter", "deepgemm")
    assert peers.names("no_such_op") == ()
    assert [peers.load("mqa_logits", name).name for name in peers.names("mqa_logits")] == ["aiter", "deepgemm"]


def test_a_peer_says_what_tells_its_version():
    found = {name: peers.load(op, name).module for op in ("mqa_logits", "pa_decode") for name in peers.names(op)}
    flash = {"fa3": "flash_attn_interface", "flashinfer": "flashinfer", "xqa": "flashinfer"}
    assert found == flash | {"aiter": "aiter", "deepgemm": "deep_gemm", "sdpa": ""}


def test_finding_peers_imports_no_library(run_python):
    code = (
        "import sys; from kvscout.testing import peers\n"
        "for name in peers.names('mqa_logits'): peers.load('mqa_logits', name)\n"
        "print({'deep_gemm', 'aiter', 'triton'} & set(sys.modules))"
    )
    assert run_python("-c", code).stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("raised", "sentence"),
    [
        (ModuleNotFoundError("gone", name="a_library"), "needs the Python package 'a_library', which is not installed"),
        (AssertionError("no CUDA"), "a_library cannot be imported: AssertionError: no CUDA"),
        (OSError("libcuda.so.1"), "a_library cannot be imported: OSError: libcuda.so.1"),
    ],
)
def test_a_library_that_cannot_be_imported(monkeypatch, raised, sentence):
    def import_module(name):
        raise raised

    monkeypatch.setattr(peers.importlib, "import_module", import_module)
    assert peers.import_failure("a_library") == sentence


@pytest.mark.parametrize(
    ("name", "arch", "words"),
    [
        ("deepgemm", "sm_80", "has kernels for sm_90 and sm_100; this is sm_80"),
        ("deepgemm", "cpu", "this is cpu"),
        ("aiter", "cpu", "needs a GPU"),
    ],
)
def test_unavailable_on_this_device(name, arch, words):
    assert words in peers.load("mqa_logits", name).unavailable(arch)


@pytest.mark.parametrize(
    ("name", "asked", "words"),
    [
        ("deepgemm", problem(), None),
        ("deepgemm", problem(heads=32, dim=32), None),
        ("deepgemm", problem(heads=128), "for 32, 64 heads, not for 128"),
        ("deepgemm", problem(heads=8), "not for 8"),
        ("deepgemm", problem("sm_100", heads=8), None),
        ("deepgemm", problem(dim=256), "head dimensions 32, 64, 128, not for 256"),
        ("deepgemm", problem(fnuz=True), "e4m3fn alone"),
        ("deepgemm", problem(has_q_scale=True), "takes no q_scale"),
        ("aiter", problem(heads=128, dim=256), None),
        ("aiter", problem(fnuz=True), "e4m3fnuz on AMD alone"),
        ("aiter", problem("gfx942", fnuz=True), None),
        ("aiter", problem(has_q_scale=True), "takes no q_scale"),
    ],
)
def test_refusals(name, asked, words):
    found = peers.load("mqa_logits", name).refuses(asked)
    assert (found is None) if words is None else (words in found)


@pytest.fixture
def deep_gemm(monkeypatch):
    """A module with DeepGEMM's function, which writes junk outside the windows unless told to clean."""

    def fp8_mqa_logits(q, kv, weights, ks, ke, clean_logits=True, max_seqlen_k=0):
        assert q.is_contiguous() and kv[0].is_contiguous()
        logits = reference(q, *kv, weights, ks, ke, dtype=torch.float32)
        return logits if clean_logits else logits.masked_fill(logits.isneginf(), 1e30)

    module = types.ModuleType("deep_gemm")
    module.fp8_mqa_logits = fp8_mqa_logits
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    return module


@pytest.mark.parametrize("of_case", [case(True), case(False), case(False, strided=True)], ids=str)
def test_deepgemm(deep_gemm, of_case):
    found = verified(peers.load("mqa_logits", "deepgemm"), of_case)
    assert found.message == ""
    assert 0 < found.max_rel < 1e-6


def test_deepgemm_is_found_where_it_is_installed(deep_gemm):
    assert peers.load("mqa_logits", "deepgemm").unavailable("sm_90") is None


@pytest.mark.parametrize("clean", [True, False])
def test_a_wrong_peer_is_seen(deep_gemm, monkeypatch, clean):
    """Its logits lack the scales of the keys."""
    right = deep_gemm.fp8_mqa_logits
    unscaled = lambda q, kv, *rest, **options: right(q, (kv[0], torch.ones_like(kv[1])), *rest, **options)  # noqa: E731
    monkeypatch.setattr(deep_gemm, "fp8_mqa_logits", unscaled)
    assert "largest relative difference" in verified(peers.load("mqa_logits", "deepgemm"), case(clean)).message


def test_a_peer_that_does_not_clean_is_seen(deep_gemm, monkeypatch):
    right = deep_gemm.fp8_mqa_logits
    dirty = lambda *rest, clean_logits: right(*rest, clean_logits=False)  # noqa: E731
    monkeypatch.setattr(deep_gemm, "fp8_mqa_logits", dirty)
    assert "-inf positions differ" in verified(peers.load("mqa_logits", "deepgemm"), case()).message


class Kernel:
    """Takes the arguments of AITER's kernel; writes inside the windows alone, as that does."""

    def __getitem__(self, grid):
        self.grid = grid
        return self

    def __call__(self, **given):
        self.given = given
        q, k, logits = given["Q_ptr"], given["KV_ptr"], given["logits_ptr"]
        strides = [given[f"stride_{name}"] for name in ("q_s", "q_h", "q_d", "kv_s", "kv_d", "logits_s", "logits_k")]
        assert strides == [*q.stride(), *k.stride(), *logits.stride()]
        assert (given["stride_w_s"], given["stride_w_h"]) == given["weights_ptr"].stride()
        assert (given["seq_len"], given["NUM_HEADS"], given["HEAD_SIZE"]) == tuple(q.shape)
        assert (given["seq_len_kv"], given["HEAD_SIZE"]) == tuple(k.shape)
        windows = given["cu_start_ptr"], given["cu_end_ptr"]
        scores = reference(q, k, given["kv_scales_ptr"], given["weights_ptr"], *windows, dtype=torch.float32)
        torch.where(window(*windows, k.shape[0]), scores, logits, out=logits)


@pytest.fixture
def kernel(monkeypatch):
    module = types.ModuleType(KERNEL)
    module._fp8_mqa_logits_kernel = Kernel()
    monkeypatch.setitem(sys.modules, KERNEL, module)
    for parent in [KERNEL.rsplit(".", up)[0] for up in range(1, KERNEL.count(".") + 1)]:
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    return module._fp8_mqa_logits_kernel


@pytest.mark.parametrize("of_case", [case(True), case(False), case(True, strided=True)], ids=str)
def test_aiter(kernel, of_case):
    assert verified(peers.load("mqa_logits", "aiter"), of_case).message == ""
    assert kernel.grid == (9,)
    assert (kernel.given["BLOCK_KV"], kernel.given["num_warps"], kernel.given["num_stages"]) == (128, 4, 2)


def test_aiter_calls_its_own_function_on_amd(monkeypatch):
    """Its options for AMD are for it to choose."""
    module = types.ModuleType(aiter.FUNCTION)
    module.fp8_mqa_logits = lambda *given: given
    prepared = case().prepare(CPU)
    prepared.problem = problem("gfx942")
    peer = peers.load("mqa_logits", "aiter")
    monkeypatch.setattr(aiter.importlib, "import_module", {aiter.FUNCTION: module}.__getitem__)
    given = peer.prepare(prepared)()
    assert [a is b for a, b in zip(given[:6], prepared.args[:6], strict=True)] == [True] * 6
    assert given[6:] == (False,)


def test_what_a_launch_returns_can_be_poisoned():
    floats, integers = torch.ones(3), torch.ones(2, dtype=torch.int32)
    peers._poison((floats, integers, None))
    assert floats.isnan().all()
    assert integers.tolist() == [-(2**31)] * 2
