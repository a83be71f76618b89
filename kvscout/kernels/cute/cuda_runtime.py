"""The CUDA runtime that kernels call: the one that torch runs on, which Python loads for torch's eyes only."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

NEEDED = ("cudaLibraryLoadData", "cudaLaunchKernelExC", "cudaGetDriverEntryPointByVersion")
"""The youngest functions that kernels call. They are looked up when called; one that is missing ends the process."""


@functools.cache
def refusal() -> str | None:
    """A sentence why kernels cannot call torch's CUDA runtime, or None where they can, or where torch has no CUDA."""
    if torch.version.cuda is None:
        return None
    library = _path()
    if library is None:
        return "torch has loaded no libcudart.so, which the kernels call"
    functions = ctypes.CDLL(library)
    missing = [name for name in NEEDED if not hasattr(functions, name)]
    return f"torch's CUDA runtime is too old: {library} has no {', '.join(missing)}" if missing else None


@functools.cache
def share() -> None:
    """Let kernels find the CUDA runtime. Without it they load, and must not be launched."""
    library = None if torch.version.cuda is None else _path()
    if library is None:
        return
    if torch.cuda.is_available():
        torch.cuda.init()
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def _path() -> str | None:
    """Where the process's libcudart.so lies; of several, that of the CUDA version that torch was built for."""
    name = f"/libcudart.so.{str(torch.version.cuda).partition('.')[0]}"
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[5] for line in lines if "/libcudart.so" in line}
    return max(mapped, key=lambda path: (name in path, path), default=None)
