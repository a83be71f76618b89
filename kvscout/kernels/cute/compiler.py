"""Compiles programs with CuTe DSL and links them into shared libraries that need no part of it.

Importing this module imports CuTe DSL. Neither a GPU nor CUDA is needed.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import store, toolchain
from .program import ARCH, KernelUnavailable, Program

# CuTe DSL replaces the hook, as if the process were its own.
_hook = sys.excepthook
import cutlass.cute as cute  # noqa: E402
from cutlass.runtime import find_runtime_libraries  # noqa: E402

sys.excepthook = _hook

# What CuTe DSL's full runtime has and its static one lacks: how a CUDA error of the generated host code is raised.
ERROR_SHIM = """
extern const char *cudaGetErrorString(int);
void CuteDSLRT_TVMFFISetRaisedCudaError(void (*raise)(const char *, const char **, int), int code) {
    const char *parts[] = {"CUDA error: ", cudaGetErrorString(code)};
    raise("RuntimeError", parts, 2);
}
"""


def compile_to(program: Program, path: Path) -> None:
    """Compile a program into the shared library ``path``, which is replaced in one step.

    Raises:
        KernelUnavailable: there is no C compiler, or it failed.
        OSError: the file cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="kvscout-") as name:
        folder = Path(name)
        compiled(program).export_to_c(str(folder / "kernel.o"), function_name=program.name)
        (folder / "shim.c").write_text(ERROR_SHIM)
        _link(program, folder)
        library = (folder / "kernel.so").read_bytes()
    store.write(path, library)


def compiled(program: Program, options: str = "") -> Any:
    """CuTe DSL's own compiled function of a program; ``options`` are further ones for ``cute.compile``."""
    module, _, name = program.builder.partition(":")
    try:
        function, arguments = getattr(importlib.import_module(module), name)(program.spec)
        return cute.compile(function, *arguments, options=f"--enable-tvm-ffi --gpu-arch {ARCH} {options}")
    except Exception as error:
        error.add_note(f"while {program.name} was compiled for {ARCH} with CuTe DSL {toolchain.dsl_version()}")
        raise


def _link(program: Program, folder: Path) -> None:
    """Link ``kernel.o`` of a folder, the shim, and CuTe DSL's static runtime into ``kernel.so``.

    The CUDA runtime and tvm-ffi are left open: they are the process's own when the library is loaded. What the library
    has itself it must use, whichever version of CuTe DSL's runtime the process has beside it (-Bsymbolic).
    """
    command = toolchain.c_compiler()
    if command is None:
        raise KernelUnavailable(f"{program.name}: {toolchain.NO_C_COMPILER}")
    full_runtime = Path(find_runtime_libraries(enable_tvm_ffi=False)[0])
    runtime = str(full_runtime.with_name("libcuda_dialect_runtime_static.a"))
    words = [*command, "-shared", "-fPIC", "-O1", "-Wl,-Bsymbolic", "-o", "kernel.so", "kernel.o", "shim.c", runtime]
    try:
        done = subprocess.run([*words, "-lpthread", "-ldl"], cwd=folder, capture_output=True, text=True)
    except OSError as error:
        raise KernelUnavailable(f"{program.name}: cannot run the C compiler {command[0]!r}: {error}") from error
    if done.returncode:
        raise KernelUnavailable(f"{program.name}: linking failed: {' '.join(words)}\n{done.stderr}")
