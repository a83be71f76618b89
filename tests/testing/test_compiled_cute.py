"""What ptxas and cuobjdump say of CuTe DSL kernels, on a machine that need not have a GPU."""

import json

import pytest

from kvscout.kernels.cute import toolchain
from kvscout.testing import compiled_cute

pytestmark = [
    pytest.mark.xdist_group("cute"),
    pytest.mark.skipif(toolchain.cannot_compile() is not None, reason="needs CuTe DSL and a C compiler"),
]

COMPILE = """
import json
from kvscout.kernels.cute.program import Program
from kvscout.testing.compiled_cute import compile_program
from tests.kernels.cute.cute_add import Spec

found = {}
for builder in ("build", "build_on_stack", "build_without_wait"):
    made = compile_program(Program(builder, f"tests.kernels.cute.cute_add:{builder}", Spec()))
    kernel, = made.kernels
    found[builder] = {
        "spills": made.spills, "warnings": made.warnings, "log": made.log,
        "registers": kernel.registers, "stack": kernel.stack, "name": kernel.name,
        "count": {name: kernel.count(name) for name in ("FADD", "HGMMA", "EXIT")},
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(run_python):
    # Of another architecture's name in the environment nothing comes.
    return json.loads(run_python("-c", COMPILE, env={"CUTE_DSL_ARCH": "sm_100a"}).stdout)


def test_a_kernel_is_compiled_for_hopper_and_its_instructions_counted(found):
    add = found["build"]
    assert "for 'sm_90a'" in add["log"]
    assert "_add" in add["name"]
    assert 4 <= add["registers"] <= 32
    assert (add["stack"], add["spills"], add["warnings"]) == (0, 0, [])
    assert add["count"]["FADD"] == 1
    assert add["count"]["HGMMA"] == 0
    assert add["count"]["EXIT"] >= 1


def test_an_array_that_cannot_stay_in_registers_is_seen(found):
    assert found["build_on_stack"]["stack"] >= 4 * 64


def test_what_ptxas_says_of_wgmma_is_seen(found):
    multiply = found["build_without_wait"]
    assert multiply["count"]["HGMMA"] == 1
    assert len(multiply["warnings"]) == 1
    assert "(C7517) wgmma.wait_group is injected" in multiply["warnings"][0]


def test_remarks_with_a_code_and_warnings_are_told_from_the_rest():
    log = """ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
ptxas warning : Local memory used for function 'k', size of stack frame: 8 bytes
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""
    assert compiled_cute.warnings_in(log) == tuple(log.splitlines()[:2])
