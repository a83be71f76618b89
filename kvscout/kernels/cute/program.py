"""What names a kernel, and what its file depends on. Imports nothing that compiles or loads."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCH = "sm_90a"
"""What kernels are compiled for. The ``a``: wgmma and setmaxnreg are sm_90's own, and no other GPU runs them."""


class KernelUnavailable(RuntimeError):
    """A kernel has no file that loads, and none can be made here; the message names it and says why."""


@dataclass(frozen=True)
class Program:
    """One kernel that can be compiled: what names it and how to build it.

    Attributes:
        name: letters, digits and underscores; the exported function is called so.
        builder: ``"package.module:function"``, imported only to compile. ``function(spec)`` returns what
            ``cute.compile`` is given: the ``cute.jit`` host function, and a tuple of fake arguments, among them
            ``make_fake_stream(use_tvm_ffi_env_stream=True)``.
        spec: a frozen dataclass whose repr tells it from every other.
    """

    name: str
    builder: str
    spec: Any

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z_]\w*", self.name, re.ASCII):
            raise ValueError(f"name: expected letters, digits and underscores, got {self.name!r}")
        if not re.fullmatch(r"[\w.]+:\w+", self.builder):
            raise ValueError(f"builder: expected 'package.module:function', got {self.builder!r}")
        if " at 0x" in repr(self.spec):
            raise ValueError(f"spec: its repr names an address, which differs from run to run: {self.spec!r}")


@functools.cache
def fingerprint(program: Program) -> str:
    """Sixteen hex digits that change with the program, its sources and the code that makes files of them.

    The sources are the builder's module, every ``cute_*.py`` beside it, and this folder: what a kernel is made of must
    lie there.
    """
    digest = hashlib.sha256(_sources_digest(program.builder.partition(":")[0]))
    digest.update(repr((program.name, program.builder, program.spec)).encode())
    return digest.hexdigest()[:16]


@functools.cache
def _sources_digest(module: str) -> bytes:
    digest = hashlib.sha256()
    for file in sources(module):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.digest()


def sources(module: str) -> list[Path]:
    """Every file that the kernels of a builder's module are made of, in the order of their names."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"there is no module {module}", name=module)
    builder = Path(found.origin)
    files = {builder, *builder.parent.glob("cute_*.py"), *Path(__file__).parent.glob("*.py")}
    return sorted(files, key=lambda file: (file.name, file))
