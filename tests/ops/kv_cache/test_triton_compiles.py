"""What the Triton variant of ``write_kv_cache`` puts on GPUs, compiled on a machine that need not have one."""

import json

import pytest

# Two workers would compile everything twice.
pytestmark = pytest.mark.xdist_group("compile kv_cache")

# One process compiles everything: Triton must not be in interpreter mode, and importing torch takes seconds.
COMPILE = """
import json, sys, torch
from dataclasses import replace
from kvscout import fp8
from kvscout.ops.kv_cache.variants.triton_scatter import VARIANT
from kvscout.testing.cases.kv_cache import BF16, CHUNKED, FP32, NHD, KvCacheCase
from kvscout.testing.compiled import compile_launch
from kvscout.variants import Choice

found = []
for layout in (CHUNKED, NHD):
    for case in (
        KvCacheCase(8, 2, 192, 16, layout, fp8.FN, BF16, "token", "head"),
        KvCacheCase(8, 2, 512, 64, layout, BF16, FP32),
    ):
        prepared = case.prepare(torch.device("cpu"))
        for arch, configs in (("sm_80", slice(1)), ("sm_90", slice(None))):
            for config in VARIANT.configs(replace(prepared.problem, arch=arch))[configs]:
                launch = compile_launch(prepared, Choice(VARIANT, config), arch)
                for kernel in launch.kernels:
                    numbers = {word: getattr(kernel, word) for word in ("registers", "stack")}
                    found.append(numbers | {"arch": arch, "case": case.name, "config": str(config),
                                 "convert": config.convert, "conversions": kernel.count("F2FP"),
                                 "kernels": len(launch.kernels), "torch_ops": launch.torch_ops})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(run_python):
    return json.loads(run_python("-c", COMPILE, timeout=900).stdout)


@pytest.mark.slow
def test_one_kernel_that_does_not_spill(compiled):
    assert {row["arch"] for row in compiled} == {"sm_80", "sm_90"}
    for row in compiled:
        assert row["kernels"] == 1, row
        assert row["torch_ops"] == [], row
        assert row["stack"] == 0, row
        assert row["registers"] <= 128, row


@pytest.mark.slow
def test_hopper_converts_to_e4m3_in_hardware(compiled):
    by_default = [row for row in compiled if row["convert"]]
    assert {row["arch"] for row in by_default} == {"sm_90"}
    assert all(row["conversions"] > 0 for row in by_default)
