"""``import kvscout`` loads torch and nothing beside it."""

import json
import pkgutil
import sys

import pytest

import kvscout.integrations
import kvscout.ops

OPS = [module.name for module in pkgutil.iter_modules(kvscout.ops.__path__)]
ADAPTERS = [module.name for module in pkgutil.iter_modules(kvscout.integrations.__path__)]
STATEMENTS = [
    "import kvscout",
    "from kvscout import *",
    *(f"import kvscout.ops.{op}.api" for op in OPS),
    *(f"import kvscout.integrations.{name}" for name in ADAPTERS),
]

REPORT = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"


@pytest.fixture(scope="module")
def loaded_by(run_python):
    """Top-level names of every module that a statement leaves loaded in a new process."""
    return lambda statement: set(json.loads(run_python("-c", f"{statement}\n{REPORT}").stdout))


@pytest.fixture(scope="module")
def with_torch(loaded_by):
    """What torch loads, numpy included where it is installed, and the standard library."""
    return loaded_by("import torch") | sys.stdlib_module_names


@pytest.mark.parametrize("statement", STATEMENTS)
def test_import_adds_kvscout_alone(statement, loaded_by, with_torch):
    assert not with_torch & {"triton", "cutlass", "tvm_ffi", "transformers", "rich"}
    assert loaded_by(statement) - with_torch == {"kvscout"}


def test_adapters_are_imported_on_demand_alone(run_python):
    assert {"aiter", "deep_gemm"} <= set(ADAPTERS)
    found = run_python("-c", "import sys, kvscout; print([n for n in sys.modules if 'kvscout.integrations' in n])")
    assert found.stdout.strip() == "[]"


def test_optional_packages_are_not_needed(run_python):
    """The score, on a machine where no optional package can be imported."""
    code = """
import sys
sys.modules |= dict.fromkeys(("triton", "cutlass", "tvm_ffi", "transformers", "rich"))
import torch, kvscout
q, k = torch.ones(1, 8, 32).to(torch.float8_e4m3fn), torch.ones(2, 32).to(torch.float8_e4m3fn)
window = torch.zeros(1).int(), torch.full((1,), 2).int()
print(kvscout.fp8_mqa_logits(q, (k, torch.ones(2)), torch.ones(1, 8), *window).tolist())
"""
    assert run_python("-c", code).stdout.strip() == "[[256.0, 256.0]]"
