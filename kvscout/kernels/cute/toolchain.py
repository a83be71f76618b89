"""What compiling and loading take, and whether it is installed; finding out imports none of it."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import shutil
from collections.abc import Sequence

from ... import env

NO_LOADER = "needs the Python package 'apache-tvm-ffi', which is not installed"
NO_DSL = "the Python package 'nvidia-cutlass-dsl', which compiles kernels, is not installed"
NO_C_COMPILER = "there is no C compiler to link kernels with (cc, gcc, clang, or what CC names)"

DSL_VERSION = "4.8.1"
"""The one version of CuTe DSL that compiles kernels: what they are written in changes with it."""


@functools.cache
def has_loader() -> bool:
    """Whether tvm-ffi is installed."""
    return importlib.util.find_spec("tvm_ffi") is not None


@functools.cache
def dsl_version() -> str | None:
    """Version of the installed CuTe DSL, or None."""
    try:
        return importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def c_compiler() -> Sequence[str] | None:
    """The command that links: what CC says, or the first C compiler on PATH, or None."""
    asked = env.c_compiler()
    commands = [asked] if asked else [["cc"], ["gcc"], ["clang"]]
    return next((command for command in commands if shutil.which(command[0])), None)


def cannot_compile() -> str | None:
    """Why no kernel can be compiled here, or None where one can."""
    version = dsl_version()
    if version is None:
        return NO_DSL
    if version != DSL_VERSION:
        return f"kernels are compiled by 'nvidia-cutlass-dsl' {DSL_VERSION}, not by {version}, which is installed"
    try:
        return NO_C_COMPILER if c_compiler() is None else None
    except env.WrongVariable as error:
        return str(error)
