"""What the Triton variant of ``tables_of_blocks`` puts on GPUs, compiled on a machine that need not have one.

What holds of every variant and architecture is for ``tests/testing/test_compile_matrix.py``.
"""

import json

import pytest

# Two workers would compile everything twice.
pytestmark = pytest.mark.xdist_group("compile selection_tables")

# One process compiles everything: Triton must not be in interpreter mode, and importing torch takes seconds.
COMPILE = """
import json, torch
from dataclasses import replace
from kvscout.ops.selection_tables import api
from kvscout.ops.selection_tables.variants.triton_sort import VARIANT
from kvscout.testing.cases.selection_tables import SelectionTablesCase
from kvscout.testing.compiled import _HostOps, compile_launch, compiling_for
from kvscout.variants import Choice

CASES = [SelectionTablesCase(2, k, size, page, 2, 100) for k, size, page in (
    (1, 16, 16), (16, 128, 16), (2048, 16, 16), (2048, 128, 16), (4096, 1024, 16)
)]
CASES += [SelectionTablesCase(2, 500, 96, 32, 2, 100, owners=owners, ends=True, strided=True)
          for owners in ("given", "strangers")]
found = []
for case in CASES:
    prepared = case.prepare(torch.device("cpu"))
    for config in VARIANT.configs(replace(prepared.problem, arch="sm_90")):
        launch = compile_launch(prepared, Choice(VARIANT, config), "sm_90")
        for kernel in launch.kernels:
            numbers = {word: getattr(kernel, word) for word in ("registers", "stack", "shared")}
            found.append(numbers | {"case": case.name, "config": str(config),
                         "kernels": len(launch.kernels), "torch_ops": launch.torch_ops})

api.arch_of = lambda device: "sm_90"
int32 = {"dtype": torch.int32}
given = torch.zeros(4, 16, **int32), torch.zeros(2, 50, **int32), torch.zeros(2, **int32)
with compiling_for("sm_90") as compiled, _HostOps() as host:
    api.tables_of_blocks(*given, 128, 16)
print(json.dumps([found, host.names, len(compiled)]))
"""


@pytest.fixture(scope="module")
def compiled(run_python):
    return json.loads(run_python("-c", COMPILE, timeout=900).stdout)


@pytest.mark.slow
def test_one_kernel_that_does_not_spill(compiled):
    kernels = compiled[0]
    assert kernels
    for row in kernels:
        assert row["kernels"] == 1, row
        assert row["torch_ops"] == [], row
        assert row["stack"] == 0, row
        assert row["shared"] <= 48 << 10, row


@pytest.mark.slow
def test_a_call_allocates_its_result_and_launches_once(compiled):
    _, host, launches = compiled
    assert host == ["aten.new_empty.default"] * 2
    assert launches == 1
