"""What names a Triton kernel, and where its file lies; what becomes of files is for ``tests/aot``."""

import json

import pytest
from triton import knobs

from kvscout.kernels import triton_store
from kvscout.kernels.triton_store import Kernel, arch_of, target_of

SPECIALISATION = json.dumps(
    {
        "signature": {"x": "*fp32", "n": "i32", "y": "constexpr", "BLOCK": "constexpr"},
        "constant_keys": [[2], [3]],
        "constant_vals": [None, 64],
        "attrs_keys": [[0]],
        "attrs_vals": [[["tt.divisibility", 16]]],
        "options": {"num_warps": 4, "num_stages": 2},
    }
)
KERNEL = Kernel("kvscout.ops.some_op.variants.triton_some", "_kernel", "sm_90", SPECIALISATION, "0123456789abcdef" * 2)


def test_a_kernel_has_a_name_for_tables_and_one_for_people(tmp_path):
    assert KERNEL.name == "_kernel-01234567"
    assert KERNEL.described() == (
        "kvscout.ops.some_op.variants.triton_some._kernel for sm_90 "
        "(x: *fp32 by 16, n: i32, y=None, BLOCK=64, num_warps=4, num_stages=2)"
    )
    place = KERNEL.file(tmp_path).relative_to(tmp_path).as_posix()
    assert place == f"triton/sm_90/triton_some._kernel/{KERNEL.key}/kernel"


@pytest.mark.parametrize(
    ("arch", "backend", "lanes"),
    [
        ("sm_80", "cuda", 32),
        ("sm_103", "cuda", 32),
        ("gfx942", "hip", 64),
        ("gfx90a", "hip", 64),
        ("gfx1250", "hip", 32),
    ],
)
def test_architectures_as_triton_calls_them(arch, backend, lanes):
    target = target_of(arch)
    assert (target.backend, target.warp_size) == (backend, lanes)
    assert arch_of(target) == arch


@pytest.mark.parametrize("arch", ["cpu", "sm_", "sm_90a", "gfx", "", "gfx/../x"])
def test_what_is_no_architecture_is_said(arch):
    with pytest.raises(ValueError, match="expected an architecture like sm_90 or gfx942, got"):
        target_of(arch)


@pytest.mark.parametrize("answer", [True, False, None])
def test_a_hook_that_was_there_is_asked_first(monkeypatch, answer):
    asked, looked_up = [], []
    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = lambda **call: asked.append(call) or answer
        monkeypatch.setattr(triton_store, "_look_up", looked_up.append)
        triton_store.install()
        hook = knobs.runtime.jit_cache_hook
        triton_store.install()
        assert knobs.runtime.jit_cache_hook is hook
        ours, theirs = {"fn": Kernel("kvscout.ops.x", "_k", "", "", "")}, {"fn": Kernel("kvscouting", "_k", "", "", "")}
        assert [hook(**ours), hook(**theirs)] == [bool(answer)] * 2
    assert asked == [ours, theirs]
    assert looked_up == ([] if answer else [ours])
