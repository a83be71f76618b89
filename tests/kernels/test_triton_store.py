"""What names a Triton kernel, and where its file lies; what becomes of files is for ``tests/aot``."""

import pytest

from kvscout.kernels.triton_store import Kernel, Specialisation, arch_of, target_of

SPECIALISATION = Specialisation(
    signature={"x": "*fp32", "n": "i32", "y": "constexpr", "BLOCK": "constexpr"},
    constants={(2,): None, (3,): 64},
    attributes={(0,): [["tt.divisibility", 16]]},
    options={"num_warps": 4, "num_stages": 2},
)
KERNEL = Kernel("kvscout.ops.some_op.variants.triton_some", "_kernel", "sm_90", "0123456789abcdef" * 2, SPECIALISATION)


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
