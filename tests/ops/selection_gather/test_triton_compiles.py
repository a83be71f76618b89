"""What the Triton variant of ``gather_tokens`` puts on GPUs, compiled on a machine that need not have one.

What holds of every variant and architecture is for ``tests/testing/test_compile_matrix.py``.
"""

import json

import pytest

# Two workers would compile everything twice.
pytestmark = pytest.mark.xdist_group("compile selection_gather")

# One process compiles everything: Triton must not be in interpreter mode, and importing torch takes seconds.
COMPILE = """
import json, re, torch
from dataclasses import replace
from kvscout import fp8, paging
from kvscout.ops.selection_gather import api
from kvscout.ops.selection_gather.variants.triton_copy import VARIANT
from kvscout.testing.cases.selection_gather import BF16, SelectionGatherCase
from kvscout.testing.compiled import _HostOps, compile_launch, compiling_for
from kvscout.variants import Choice

CASES = [
    SelectionGatherCase(1, k, heads, dim, page, layout, *(((fp8.FN, 1, 100, "both"), (BF16, 1, 100))[(i + j) % 2]))
    for i, layout in enumerate(paging.LAYOUTS)
    for j, (k, heads, dim, page) in enumerate(
        ((2048, 1, 576, 64), (2048, 8, 128, 16), (100, 2, 64, 128), (4096, 1, 1024, 32))
    )
]
CASES.append(SelectionGatherCase(2, 300, 2, 128, 16, owners="given", ends=True, strided=True, pool="shifted"))
found = []
for number, case in enumerate(CASES):
    prepared = case.prepare(torch.device("cpu"))
    configs = VARIANT.configs(replace(prepared.problem, arch="sm_90"))
    for config in configs if number % 4 == 1 else configs[:1]:
        launch = compile_launch(prepared, Choice(VARIANT, config), "sm_90")
        for kernel in launch.kernels:
            numbers = {word: getattr(kernel, word) for word in ("name", "registers", "stack", "shared")}
            vectors = {word: len(re.findall(word + r"\\.E\\.128", kernel.sass)) for word in ("LDG", "STG")}
            found.append(numbers | vectors | {"case": case.name, "config": str(config), "pool": case.pool,
                         "layout": case.layout, "kernels": len(launch.kernels), "torch_ops": launch.torch_ops})

api.arch_of = lambda device: "sm_90"
int32 = {"dtype": torch.int32}
caches = paging.new_caches("nhd", 8, 2, 16, 64, BF16, "cpu")
given = torch.zeros(4, 16, **int32), *caches, 2, torch.zeros(2, 50, **int32), torch.zeros(2, **int32)
with compiling_for("sm_90") as compiled, _HostOps() as host:
    api.gather_tokens(*given)
print(json.dumps([found, host.names, len(compiled)]))
"""


@pytest.fixture(scope="module")
def compiled(run_python):
    return json.loads(run_python("-c", COMPILE, timeout=900).stdout)


@pytest.mark.slow
def test_two_kernels_that_do_not_spill(compiled):
    kernels = compiled[0]
    assert kernels
    for row in kernels:
        assert row["kernels"] == 2, row
        # The slots, which the first kernel hands to the second.
        assert row["torch_ops"] == ["aten.empty.memory_format"], row
        assert row["stack"] == 0, row
        assert row["shared"] <= 96 << 10, row


@pytest.mark.slow
def test_caches_are_copied_in_whole_vectors(compiled):
    """Written so in every layout, and read so but for strewn values; not where they are not aligned."""
    copies = [row for row in compiled[0] if row["name"] == "copy"]
    assert {row["pool"] for row in copies} == {"separate", "shifted"}
    for row in copies:
        assert (row["STG"] > 0) == (row["pool"] == "separate"), row
        if row["pool"] == "separate" and row["layout"] in ("nhd", "hnd"):
            assert row["LDG"] >= row["STG"], row


@pytest.mark.slow
def test_a_call_allocates_its_result_and_launches_twice(compiled):
    _, host, launches = compiled
    assert host == ["aten.new_empty.default"] * 4 + ["aten.empty.memory_format"]
    assert launches == 2
