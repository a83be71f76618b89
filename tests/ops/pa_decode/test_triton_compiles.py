"""What the Triton variant of ``pa_decode`` puts on GPUs, compiled on a machine that need not have one.

What holds of every variant and architecture is for ``tests/testing/test_compile_matrix.py``.
"""

import json

import pytest

from kvscout.device import SHARED_BYTES

# Two workers would compile everything twice.
pytestmark = pytest.mark.xdist_group("compile pa_decode")

# One process compiles everything: Triton must not be in interpreter mode, and importing torch takes seconds.
COMPILE = """
import json, torch
from dataclasses import replace
from kvscout.ops.pa_decode.variants.triton_tile import VARIANT
from kvscout.testing.cases.pa_decode import PaDecodeCase
from kvscout.testing.compiled import compile_launch
from kvscout.variants import Choice

wide = {"group": 16, "kv_heads": 1}
CASES = [
    PaDecodeCase((300,), page=page, cache=cache, query_length=query_length, **wide)
    for cache in ("e4m3", "bf16") for page, query_length in ((128, 1), (128, 4), (16, 1))
]
CASES += [
    PaDecodeCase((300,), scales="token", sinks="ends", window=100, layout="plain_v", page=32, **wide),
    PaDecodeCase((300,), layout="nhd", cache="fp16", dtype="fp16", causal=False, **wide),
    PaDecodeCase((300,), dim=192, scales="head", query_length=2, **wide),
    PaDecodeCase((300,), dim=256, cache="bf16", page=64, **wide),
    PaDecodeCase((300,), dim=512, layout="hnd", **wide),
]
CASES += [
    PaDecodeCase((0, 300), splits=(132, 1), label="one slot a sequence", **wide),
    PaDecodeCase((300, 300), splits=(1, 264), label="one partition", **wide),
    PaDecodeCase((3000, 300), window=1, label="one tile", **wide),
]
found = []
for case in CASES:
    prepared = case.prepare(torch.device("cpu"))
    for arch in ("sm_90", "gfx942") if case.label else ("sm_90",):
        problem = replace(prepared.problem, arch=arch)
        launch = compile_launch(prepared, Choice(VARIANT, VARIANT.default_config(problem)), arch)
        for kernel in launch.kernels:
            found.append({
                "arch": arch, "case": case.name, "kernel": kernel.name, "stack": kernel.stack, "shared": kernel.shared,
                "wgmma": kernel.count("HGMMA"), "mma": kernel.count("HMMA") + kernel.count("v_mfma\\\\w*"),
                "copies": kernel.count("LDGSTS"),
                "torch_ops": launch.torch_ops, "atomics": kernel.count("ATOMG") + kernel.count("global_atomic_add"),
                "waits": kernel.count("ACQBULK"), "triggers": kernel.count("PREEXIT"),
            })
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(run_python):
    return json.loads(run_python("-c", COMPILE, timeout=900).stdout)


@pytest.mark.slow
def test_two_kernels_that_fit_and_do_not_spill(compiled):
    assert {row["arch"] for row in compiled} == {"sm_90", "gfx942"}
    # Those with a label are one kernel; on AMD the one that its last program merges elsewhere is two.
    assert len(compiled) == (2 * 11 + 3) + 4
    for row in compiled:
        assert row["torch_ops"] == [], row
        assert row["shared"] <= SHARED_BYTES[row["arch"]], row
        assert row["stack"] == 0, row


@pytest.mark.slow
def test_tiles_are_copied_asynchronously_into_matrix_instructions(compiled):
    tiles = [row for row in compiled if "tile" in row["kernel"]]
    assert len(tiles) == 14 + 3
    for row in tiles:
        assert row["copies"] > 0 or row["arch"].startswith("gfx"), row
        assert row["wgmma"] + row["mma"] > 0, row
        # Instructions that read shared memory take 64 rows, so they are for that many.
        assert (row["wgmma"] > 0) == (row["arch"] == "sm_90" and "-ql4" in row["case"]), row


@pytest.mark.slow
def test_what_is_not_split_or_merged_by_its_last_program_is_one_kernel(compiled):
    kernels = {}
    for row in compiled:
        kernels.setdefault((row["arch"], row["case"]), []).append(row)
    for (arch, case), found in kernels.items():
        can_arrive = case == "one slot a sequence" and arch.startswith("sm_")
        assert len(found) == (1 if can_arrive or case in ("one partition", "one tile") else 2), (arch, case)
        assert any(row["atomics"] for row in found) == can_arrive, (arch, case)


@pytest.mark.slow
def test_kernels_start_while_those_ahead_end_where_the_gpu_can(compiled):
    for row in compiled:
        assert (row["waits"] > 0) == (row["arch"] == "sm_90"), row
        assert (row["triggers"] > 0) == (row["arch"] == "sm_90"), row
