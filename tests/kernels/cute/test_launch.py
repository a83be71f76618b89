"""A kernel that was compiled and loaded, run up to the launch on a CUDA runtime that launches nothing."""

import json
import subprocess

import pytest
import torch

from kvscout.kernels.cute import cuda_runtime, runtime, store, toolchain
from tests.kernels.cute.fake_cudart import build

pytestmark = [
    pytest.mark.xdist_group("cute"),
    pytest.mark.skipif(toolchain.cannot_compile() is not None, reason="needs CuTe DSL and a C compiler"),
    pytest.mark.skipif(not toolchain.has_loader(), reason="needs tvm-ffi"),
]

# As on a machine with a GPU: Python has loaded the CUDA runtime for torch's eyes only.
LAUNCH = """
import ctypes, json, sys
import torch, tvm_ffi
from kvscout.kernels.cute import runtime
from kvscout.kernels.cute.program import Program
from tests.kernels.cute.cute_add import Spec
from tests.kernels.cute.fake_cudart import Config, Vector

cuda = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_LOCAL)
torch.cuda.is_available, torch.cuda.init, torch.version.cuda = lambda: True, lambda: None, "99.0"
add = runtime.load(Program("add", "tests.kernels.cute.cute_add:build", Spec()))
memory = [Vector(1000) for _ in range(3)]
vectors = [tvm_ffi.from_dlpack(vector) for vector in memory]
with tvm_ffi.use_raw_stream(vectors[0].device, 4711):
    add(*vectors, 1000)
launched = Config.in_dll(cuda, "launched")
found = {"grid": list(launched.grid), "block": list(launched.block), "stream": launched.stream}
ctypes.c_int.in_dll(cuda, "result").value = 719
try:
    add(*vectors, 1000)
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def test_what_is_launched_where_and_how_a_failure_is_raised(run_python, tmp_path, cache, add, library):
    path = store.file(cache, add, toolchain.dsl_version())
    store.write(path, library)
    cudart = build(path, tmp_path)
    done = run_python("-c", LAUNCH, str(cudart), env={"KVSCOUT_CACHE_DIR": str(cache), "KVSCOUT_AOT_ONLY": "1"})
    assert json.loads(done.stdout) == {
        "grid": [8, 1, 1],
        "block": [128, 1, 1],
        "stream": 4711,
        "error": "RuntimeError: CUDA error: unspecified launch failure",
    }


def test_a_cuda_runtime_that_is_too_old_is_refused(run_python, tmp_path, cache, add, library):
    path = store.file(cache, add, toolchain.dsl_version())
    store.write(path, library)
    cudart = build(path, tmp_path, without=["cudaLibraryLoadData"])
    done = run_python("-c", LAUNCH, str(cudart), env={"KVSCOUT_CACHE_DIR": str(cache)}, check=False)
    reason = f"KernelUnavailable: add: torch's CUDA runtime is too old: {cudart} has no cudaLibraryLoadData"
    assert done.stderr.splitlines()[-1].endswith(reason)


def test_without_a_cuda_runtime_a_torch_for_cuda_is_refused(monkeypatch, add, cache):
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    monkeypatch.setattr(cuda_runtime, "_path", lambda: None)
    assert runtime.refusal(add) == "torch has loaded no libcudart.so, which the kernels call"


def test_a_library_leaves_open_nothing_but_cuda_and_tvm_ffi(tmp_path, library):
    """Anything else would be missed on the machine that the file is carried to, and only when it is called."""
    (tmp_path / "add.so").write_bytes(library)
    run = ["nm", "-D", "-u", tmp_path / "add.so"]
    names = [line.split()[-1] for line in subprocess.run(run, capture_output=True, text=True).stdout.splitlines()]
    assert any(name.startswith("cudaLaunchKernel") for name in names)
    assert [
        name for name in names if not name.startswith(("cuda", "TVMFFI", "_ITM", "__")) and "@GLIBC" not in name
    ] == []
