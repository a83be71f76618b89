"""Finds or makes the file of a kernel, and loads it."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import env
from . import cuda_runtime, store, toolchain
from .program import KernelUnavailable, Program

_COMPILING = threading.Lock()


@functools.cache
def refusal(program: Program) -> str | None:
    """A sentence why :func:`load` could not succeed here, or None where it would. Cheap: loads and compiles nothing."""
    if not toolchain.has_loader():
        return toolchain.NO_LOADER
    if reason := cuda_runtime.refusal():
        return reason
    reason = _why_no_compile()
    if reason is None or store.files(env.cache_dir(), program):
        return None
    return f"{env.cache_dir()} holds no {program.name} of these sources (see 'kvscout aot'), and {reason}"


def _why_no_compile() -> str | None:
    return "KVSCOUT_AOT_ONLY is set" if env.aot_only() else toolchain.cannot_compile()


@functools.cache
def load(program: Program) -> Callable[..., Any]:
    """The kernel as a function of torch tensors and numbers, which launches on torch's current stream.

    A file of the cache is taken where there is one, of this CuTe DSL's version if it is installed. Otherwise the kernel
    is compiled into the cache, which takes seconds; several processes that want the same one compile it once.

    Raises:
        KernelUnavailable: there is no file that loads, and none can be made.
    """
    if reason := refusal(program):
        raise KernelUnavailable(f"{program.name}: {reason}")
    cuda_runtime.share()
    if (reason := _why_no_compile()) is None:
        return _compiled(program)
    failures = []
    for path in store.files(env.cache_dir(), program):
        try:
            return _function(program, path)
        except KernelUnavailable as error:
            failures.append(str(error))
    raise KernelUnavailable("; ".join([*failures, reason]))


def _compiled(program: Program) -> Callable[..., Any]:
    """Load a kernel where the compiler is at hand for what is missing or does not load."""
    try:
        return _compiled_in(env.cache_dir(), program)
    except OSError as error:
        _warn_of_cache(error.strerror or str(error))
    try:
        return _compiled_in(Path(store.temporary().name), program)
    except OSError as error:
        raise KernelUnavailable(f"{program.name}: no folder takes its file: {error}") from error


@functools.cache
def _warn_of_cache(reason: str) -> None:
    warnings.warn(
        f"{env.cache_dir()} cannot be written ({reason}): kernels are compiled for this process alone; "
        "KVSCOUT_CACHE_DIR names another folder",
        stacklevel=4,
    )


def _compiled_in(root: Path, program: Program) -> Callable[..., Any]:
    path = store.file(root, program, str(toolchain.dsl_version()))
    function = _function_if_usable(program, path)
    if function is not None:
        return function
    with store.locked(path.parent), _COMPILING:
        # Another process or thread may have written it meanwhile.
        function = _function_if_usable(program, path)
        if function is None:
            from .compiler import compile_to

            compile_to(program, path)
    return function or _function(program, path)


def _function_if_usable(program: Program, path: Path) -> Callable[..., Any] | None:
    if not store.is_whole(path):
        return None
    try:
        return _function(program, path)
    except KernelUnavailable as error:
        warnings.warn(f"compiled again: {error}", stacklevel=5)
        return None


def _function(program: Program, path: Path) -> Callable[..., Any]:
    import tvm_ffi

    try:
        function: Callable[..., Any] = tvm_ffi.load_module(path).get_function(program.name)
    except Exception as error:
        raise KernelUnavailable(f"{program.name}: {path} does not load: {error}") from error
    return function
