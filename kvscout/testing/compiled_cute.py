"""Compiling a CuTe DSL program on a machine without a GPU, and reading the result.

Needs CuTe DSL, and Triton for its cuobjdump.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..kernels.cute.program import Program
from .compiled import Resources, disassembly


@dataclass(frozen=True)
class CompiledProgram:
    """What ptxas made of a program.

    Attributes:
        kernels: registers, stack, static shared memory and SASS of each kernel. What shared memory a launch adds is
            not ptxas's to know.
        spills: bytes that the kernels' spills store and load.
        warnings: what ptxas warns of, and its remarks that have a code, such as C7510 (wgmma serialised).
        log: all that it printed.
    """

    kernels: tuple[Resources, ...]
    spills: int
    warnings: tuple[str, ...]
    log: str


def compile_program(program: Program) -> CompiledProgram:
    """Compile a program as :func:`kvscout.kernels.cute.compiler.compile_to` does, and keep what that throws away."""
    from ..kernels.cute.compiler import compiled

    printed = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="kvscout-") as folder:
        options = f"--keep-cubin --dump-dir {folder} remarks{{ptx}} --ptxas-options '-v'"
        with contextlib.redirect_stderr(printed):
            compiled(program, options)
        cubins = [path.read_bytes() for path in sorted(Path(folder).rglob("*.cubin"))]
    log = re.sub(r"\x1b\[[\d;]*m", "", printed.getvalue())
    kernels = tuple(kernel for cubin in cubins for kernel in _kernels(disassembly(cubin)))
    logged = re.findall(r"Used (\d+) registers", log)
    if not kernels or len(logged) != len(kernels):
        raise RuntimeError(
            f"{program.name}: {len(kernels)} kernels in the cubins, {len(logged)} in ptxas's log:\n{log}"
        )
    spills = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log)))
    return CompiledProgram(kernels, spills, warnings_in(log), log)


def warnings_in(log: str) -> tuple[str, ...]:
    """The lines of ptxas's log that say what is wrong with the code; some of those are called "info"."""
    lines = re.findall(r"ptxas (?:info|warning)\s*: .*", log)
    return tuple(line for line in lines if "ptxas warning" in line or re.search(r"\(C\d+\)", line))


def _kernels(text: str) -> list[Resources]:
    """Each kernel of a cubin, from cuobjdump's resource usage and SASS."""
    usage = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    _, *parts = re.split(r"^\s*Function : (\S+)$", text, flags=re.MULTILINE)
    sass = dict(zip(parts[::2], parts[1::2], strict=True))
    return [Resources(name, int(reg), int(stack), int(shared), sass[name]) for name, reg, stack, shared in usage]
