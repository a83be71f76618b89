"""What the Triton variants put on an H200 (and an A100), compiled on a machine that need not have one.

Numbers come from machine code; whether it computes the right thing is for the cases to say.
"""

import json

import pytest

pytestmark = pytest.mark.xdist_group("triton_compiles")

# One process compiles everything: Triton must not be in interpreter mode, and importing torch takes seconds.
COMPILE = """
import json, sys, torch
from dataclasses import replace
from kvscout.testing.case import SUITE, cases, family
from kvscout.testing.compiled import compile_launch
from kvscout.variants import Choice

found = []
for op, names in json.loads(sys.argv[1]).items():
    for case in cases(op):
        if case.name not in names and case.level != SUITE:
            continue
        prepared = case.prepare(torch.device("cpu"))
        for variant_name in family(op).names:
            if not variant_name.startswith("triton"):
                continue
            variant = family(op).load(variant_name)
            if variant.refuses(prepared.problem):
                continue
            for arch in ("sm_90", "sm_80") if case.name in names else ("sm_90",):
                configs = variant.configs(replace(prepared.problem, arch=arch))
                for config in configs if case.name in names and arch == "sm_90" else configs[:1]:
                    launch = compile_launch(prepared, Choice(variant, config), arch)
                    for kernel in launch.kernels:
                        counts = {word: kernel.count(word) for word in ("QGMMA", "HGMMA", "FMNMX.NAN")}
                        numbers = {word: getattr(kernel, word) for word in ("registers", "stack", "shared")}
                        found.append(numbers | counts | {"op": op, "arch": arch, "case": case.name,
                                     "variant": variant_name, "config": str(config), "kernels": len(launch.kernels),
                                     "torch_ops": launch.torch_ops})
print(json.dumps(found))
"""

# Besides the default config of every small case: cases of which every config is compiled.
CASES = {
    "mqa_logits": [
        "64x2048-h64-d128-misaligned",
        "64x2048-h32-d128-misaligned-clean",
        "17x76-h128-d64-causal-clean",
        "64x2048-h64-d256-misaligned",
        "17x76-h8-d512-causal-clean",
        "18x90-h16-d128-misaligned-q_scale-strided",
    ],
    "pa_decode": [],
}
SHARED_MEMORY = {"sm_90": 227 << 10, "sm_80": 163 << 10}


@pytest.fixture(scope="module")
def compiled(run_python):
    return json.loads(run_python("-c", COMPILE, json.dumps(CASES), timeout=900).stdout)


@pytest.mark.slow
def test_nothing_spills(compiled):
    assert {row["op"] for row in compiled} == set(CASES)
    assert {row["arch"] for row in compiled} == {"sm_80", "sm_90"}
    for row in compiled:
        assert row["stack"] == 0, row
        assert row["registers"] <= 255, row
        assert row["shared"] <= SHARED_MEMORY[row["arch"]], row


@pytest.mark.slow
def test_logits_are_one_kernel_and_no_other_device_work(compiled):
    rows = [row for row in compiled if row["op"] == "mqa_logits"]
    assert {row["variant"] for row in rows} == {"triton_direct", "triton_staged"}
    for row in rows:
        assert row["kernels"] == 1, row
        assert row["torch_ops"] == [], row


@pytest.mark.slow
def test_nan_survives_the_relu(compiled):
    """The interpreter cannot tell: to it, every maximum keeps NaN."""
    for row in compiled:
        if row["op"] == "mqa_logits":
            assert row["FMNMX.NAN"] > 0, row


@pytest.mark.slow
def test_staged_logits_run_on_the_fp8_matrix_unit(compiled):
    staged = [row for row in compiled if row["variant"] == "triton_staged" and row["arch"] == "sm_90"]
    rows = [row for row in staged if "-h64-" in row["case"]]
    assert rows
    for row in rows:
        assert row["QGMMA"] > 0, row
        assert row["HGMMA"] == 0, row
