"""Kernels compiled into a folder by several processes, none of which needs a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ..kernels.cute import store, toolchain
from ..kernels.cute.program import Program

if TYPE_CHECKING:
    from ..kernels import triton_store

AnyKernel: TypeAlias = "Program | triton_store.Kernel"
"""One of CuTe DSL, or one of Triton."""


class Built(NamedTuple):
    """What came of compiling a kernel: how long it took, or what went wrong, or that another run had just done it.

    ``killed``: the process that compiled it, or a kernel beside it, has ended.
    """

    seconds: float
    error: str | None = None
    kept: bool = False
    killed: bool = False


def file_of(folder: Path, kernel: AnyKernel) -> Path:
    """Where a kernel lies in a folder."""
    return store.file(folder, kernel, toolchain.DSL_VERSION) if isinstance(kernel, Program) else kernel.file(folder)


def results(pool: ProcessPoolExecutor, kernels: Sequence[AnyKernel], folder: Path) -> Iterator[tuple[AnyKernel, Built]]:
    """Compile kernels, and say of each what came of it, the first that is done first."""
    try:
        futures = {pool.submit(compile_one, kernel, file_of(folder, kernel)): kernel for kernel in kernels}
    except BrokenProcessPool as broken:
        yield from ((kernel, _killed(broken)) for kernel in kernels)
        return
    for future in as_completed(futures):
        try:
            result = future.result()
        except BrokenProcessPool as broken:
            result = _killed(broken)
        yield futures[future], result


def _killed(broken: BrokenProcessPool) -> Built:
    return Built(0.0, f"or a kernel beside it: {broken}", killed=True)


def compile_one(kernel: AnyKernel, path: Path) -> Built:
    """Compile a kernel into a file, unless it is there."""
    started = time.monotonic()
    try:
        with store.locked(path.parent):
            # Another run may have made it meanwhile.
            if store.is_whole(path):
                return Built(time.monotonic() - started, kept=True)
            if isinstance(kernel, Program):
                from ..kernels.cute.compiler import compile_to

                compile_to(kernel, path)
            else:
                from ..kernels import triton_store

                triton_store.compile_to(kernel, path)
    # Whatever a compiler raises for one kernel, the others are compiled.
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        return Built(time.monotonic() - started, "\n".join([f"{type(error).__name__}: {error}", *notes]))
    return Built(time.monotonic() - started)
