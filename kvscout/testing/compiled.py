"""Compiling what a Triton variant would launch, for a GPU that need not be here, and reading the result.

Needs Triton outside its interpreter mode (``TRITON_INTERPRET`` unset).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ..device import shared_bytes
from ..kernels.triton_store import AbsentGpu
from ..variants import Choice
from .case import Prepared

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1250": GPUTarget("hip", "gfx1250", 32),
}
"""Architectures that kernels can be compiled for, by the name that :func:`kvscout.device.arch_of` gives them."""

SIMDS = 4
"""SIMDs that a program's waves are spread over, on every AMD GPU of these."""


@contextmanager
def compiling_for(arch: str) -> Iterator[list[Any]]:
    """Within the context, launches compile for ``arch`` and run nothing; the list collects Triton's kernels."""
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **{**kwargs, "warmup": True})
        compiled.append(kernel)
        return kernel

    # Not driver.reset_active(): without a GPU there is no default driver to go back to.
    active = driver._active
    driver.set_active(AbsentGpu(TARGETS[arch]))
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver._active = active


@dataclass(frozen=True)
class Resources:
    """What a compiler gave a kernel.

    Attributes:
        name: the kernel's name.
        registers: 32-bit registers a thread; vector registers on AMD.
        stack: bytes of stack and spills a thread.
        shared: bytes of shared memory.
        sass: machine code as text; the assembly on AMD.
        waves: waves of which a SIMD of an AMD GPU has room for the registers and the shared memory; 0 on others.
    """

    name: str
    registers: int
    stack: int
    shared: int
    sass: str
    waves: int = 0

    def count(self, instruction: str) -> int:
        """How many instructions start with ``instruction``: the rest of a name follows a dot, or nothing does."""
        return len(re.findall(rf"\s{instruction}[.\s]", self.sass))


def resources(kernel: Any) -> Resources:
    """Registers, stack and machine code of a compiled kernel."""
    if "amdgcn" in kernel.asm:
        return _amd_resources(kernel.metadata, kernel.asm["amdgcn"])
    text = disassembly(kernel.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage for {kernel.metadata.name}")
    return Resources(kernel.metadata.name, int(found[1]), int(found[2]), kernel.metadata.shared, text)


def _amd_resources(metadata: Any, text: str) -> Resources:
    registers, private = (_number(rf"\.{name}:", text) for name in ("vgpr_count", "private_segment_fixed_size"))
    # Some is set aside for what is then kept in registers; what counts is whether it is used.
    stack = private if re.search(r"\sscratch_(load|store)_", text) else 0
    programs = shared_bytes(metadata.target.arch) // max(metadata.shared, 1)
    waves = min(_number("; Occupancy:", text), programs * metadata.num_warps // SIMDS)
    return Resources(metadata.name, registers, stack, metadata.shared, text, waves)


def _number(after: str, text: str) -> int:
    """The first number that follows a label in the assembly."""
    found = re.search(rf"{after}\s+(\d+)", text)
    if found is None:
        raise RuntimeError(f"the assembly has no {after!r}")
    return int(found[1])


def disassembly(cubin: bytes) -> str:
    """Resource usage and SASS of every kernel of a cubin, as the cuobjdump that Triton brings prints them."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = [str(cuobjdump), "-res-usage", "-sass", file.name]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout


class _HostOps(TorchDispatchMode):
    """Notes every torch operation that would put work on the device or make the host wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class CompiledLaunch:
    """What one launch of a variant puts on a GPU: its kernels, and torch operations beside them."""

    kernels: tuple[Resources, ...]
    torch_ops: tuple[str, ...]


def compile_launch(prepared: Prepared, choice: Choice, arch: str) -> CompiledLaunch:
    """Compile what ``choice`` would launch on ``arch`` for a case prepared on the CPU."""
    problem = replace(prepared.problem, arch=arch)
    with compiling_for(arch) as compiled, _HostOps() as host:
        choice.launch(problem, prepared.args)
    return CompiledLaunch(tuple(map(resources, compiled)), tuple(host.names))
