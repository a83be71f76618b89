"""Finds or makes the file of a kernel, and loads it."""

from __future__ import annotations

import contextlib
import errno
import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ... import env
from ...errors import Required
from . import cuda_runtime, store, toolchain
from .program import KernelUnavailable, Program

_COMPILING = threading.Lock()

_FAILED: dict[Program, str] = {}
"""Why a kernel could not be made or loaded in this process, which does not try again."""

_recorded: list[Program] | None = None


@contextlib.contextmanager
def recording() -> Iterator[list[Program]]:
    """Within the context every kernel can be had, and none does anything: the list collects which were asked for.

    A kernel is in the list of each context in which it is launched. For a process that does nothing else: variants keep
    what they were given.
    """
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


def _note(program: Program, *arguments: object) -> None:
    """What stands for a kernel while they are recorded, launched or only loaded."""
    if _recorded is not None and program not in _recorded:
        _recorded.append(program)


def unavailable(programs: Iterable[Program]) -> str | None:
    """A sentence why :func:`load` could not succeed for any of these, or None where it could for some."""
    if (reason := _cannot_load()) or _why_no_compile() is None:
        return reason
    reasons = []
    for program in programs:
        reason = refusal(program)
        if reason is None:
            return None
        reasons.append(reason)
    return f"none of its {len(reasons)} kernels can be had: {reasons[0]}"


def refusal(program: Program) -> str | None:
    """A sentence why :func:`load` could not succeed here, or None where it would. Cheap: loads and compiles nothing.

    With KVSCOUT_AOT_ONLY it is :class:`~kvscout.errors.Required` where nothing but a file that loads is missing.
    """
    if _recorded is not None:
        return None
    if sentence := _FAILED.get(program):
        return Required(sentence) if env.aot_only() else sentence
    return _refusal(program)


@functools.cache
def _refusal(program: Program) -> str | None:
    if reason := _cannot_load():
        return reason
    reason = _why_no_compile()
    sentence = None if reason is None else _absent(program, reason)
    return Required(sentence) if sentence is not None and env.aot_only() else sentence


def can_make(program: Program) -> bool:
    """Whether :func:`load` would compile a kernel here that has no file yet."""
    return _why_no_compile() is None and refusal(program) is None


def _cannot_load() -> str | None:
    return cuda_runtime.refusal() if toolchain.has_loader() else toolchain.NO_LOADER


def _absent(program: Program, reason: str) -> str | None:
    """Why there is no file to load where none can be made, or None where there is one."""
    try:
        root = env.cache_dir()
    except env.WrongVariable as error:
        return f"{error}; and {reason}"
    if store.files(root, program):
        return None
    if damaged := store.damaged(root, program):
        return f"{', '.join(map(str, damaged))}: damaged or not readable, and {reason}"
    return f"{root} holds no {program.name} of these sources (see 'kvscout aot'), and {reason}"


def _why_no_compile() -> str | None:
    return "KVSCOUT_AOT_ONLY is set" if env.aot_only() else toolchain.cannot_compile()


@functools.cache
def load(program: Program) -> Callable[..., Any]:
    """The kernel as a function of torch tensors and numbers, which launches on torch's current stream.

    A file of the cache is taken where there is one, of CuTe DSL's version where it can compile. Otherwise the kernel is
    compiled into the cache, which takes seconds; several processes that want the same one compile it once.

    Raises:
        KernelUnavailable: there is no file that loads, and none can be made. The process remembers it: :func:`refusal`
            says so from then on, and nothing is tried again.
    """
    if _recorded is not None:
        _note(program)
        return functools.partial(_note, program)
    if reason := refusal(program):
        raise KernelUnavailable(f"{program.name}: {reason}")
    cuda_runtime.share()
    try:
        return _loaded(program)
    except KernelUnavailable as error:
        _remember(program, error)
        raise


def _remember(program: Program, error: KernelUnavailable) -> None:
    _FAILED[program] = str(error).removeprefix(f"{program.name}: ")


def _loaded(program: Program) -> Callable[..., Any]:
    if (reason := _why_no_compile()) is None:
        return _compiled(program)
    failures = []
    for path in store.files(env.cache_dir(), program):
        try:
            return _function(program, path)
        except KernelUnavailable as error:
            failures.append(str(error))
    # No failure: the file that was there a moment ago is gone.
    raise KernelUnavailable(
        "; ".join([*failures, reason]) if failures else f"{program.name}: {_absent(program, reason)}"
    )


def _compiled(program: Program) -> Callable[..., Any]:
    """Load a kernel where the compiler is at hand for what is missing or does not load."""
    try:
        return _compiled_in(env.cache_dir(), program)
    except env.WrongVariable as error:
        _warn_of_cache(str(error))
    except OSError as error:
        _warn_of_cache(f"{env.cache_dir()} cannot be written ({error.strerror or error})")
    try:
        return _compiled_in(Path(store.temporary().name), program)
    except OSError as error:
        raise KernelUnavailable(f"{program.name}: no folder takes its file: {error}") from error


@functools.cache
def _warn_of_cache(reason: str) -> None:
    warnings.warn(
        f"{reason}: kernels are compiled for this process alone; KVSCOUT_CACHE_DIR names another folder",
        stacklevel=5,
    )


def _compiled_in(root: Path, program: Program) -> Callable[..., Any]:
    path = store.file(root, program, toolchain.DSL_VERSION)
    function = _function_if_usable(program, path)
    if function is not None:
        return function
    with store.locked(path.parent), _COMPILING:
        # Another process or thread may have written it meanwhile, or failed to.
        function = _function_if_usable(program, path)
        if function is None:
            if program in _FAILED:
                raise KernelUnavailable(f"{program.name}: {_FAILED[program]}")
            _compile(program, path)
            function = _function_just_written(program, path)
    return function


def _function_just_written(program: Program, path: Path) -> Callable[..., Any]:
    try:
        return _function(program, path)
    except KernelUnavailable as error:
        if store.is_whole(path):
            raise
        raise FileNotFoundError(errno.ENOENT, f"{path.name} is gone, or was changed, since it was written") from error


def _compile(program: Program, path: Path) -> None:
    try:
        from .compiler import compile_to

        compile_to(program, path)
    except OSError:
        raise
    except KernelUnavailable as error:
        _remember(program, error)
        raise
    # CuTe DSL raises whatever its parts do.
    except Exception as error:
        said = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        unavailable = KernelUnavailable(f"{program.name}: it does not compile: {said}")
        # While the lock is held, so that a thread that waits for it does not try again.
        _remember(program, unavailable)
        raise unavailable from error


def _function_if_usable(program: Program, path: Path) -> Callable[..., Any] | None:
    if not store.is_whole(path):
        return None
    try:
        return _function(program, path)
    except KernelUnavailable as error:
        warnings.warn(f"compiled again: {error}", stacklevel=6)
        return None


def _function(program: Program, path: Path) -> Callable[..., Any]:
    import tvm_ffi

    try:
        function: Callable[..., Any] = tvm_ffi.load_module(path).get_function(program.name)
    except Exception as error:
        raise KernelUnavailable(f"{program.name}: {path} does not load: {error}") from error
    return function
