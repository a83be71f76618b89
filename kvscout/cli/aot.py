"""Compile the CuTe DSL kernels ahead of time, for machines that cannot.

Neither a GPU nor CUDA is needed. The folder, copied to a machine with GPUs and named there by KVSCOUT_CACHE_DIR, serves
every kernel to processes that have the package apache-tvm-ffi: no CuTe DSL, no C compiler, nothing compiled at a first
call. It fits this version of kvscout alone. Kernels that the folder already has are kept; runs at the same time share
the work.
Exit code: 0 all there, 1 something failed, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

from .. import env
from ..kernels.cute import store, toolchain
from ..kernels.cute.program import Program
from ..testing.case import family, ops
from . import arguments, console, workers
from .arguments import UsageError

NOT_REACHED = "not reached"

MOST_JOBS = 8
"""Processes at a time unless told otherwise: each takes a core and about a gigabyte."""


class Kernel(NamedTuple):
    """A program, and who asks for it."""

    op: str
    variant: str
    program: Program


class Built(NamedTuple):
    """What came of compiling a program: how long it took, or what went wrong, or that another run had just done it."""

    seconds: float
    error: str | None = None
    kept: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``aot``."""
    cores = min(MOST_JOBS, os.cpu_count() or 1)
    parser.add_argument("ops", nargs="*", metavar="OP", help="operations (default: all that have such kernels)")
    parser.add_argument("--op", action="append", default=[], metavar="OP", help="the same as OP; may be repeated")
    parser.add_argument(
        "--output", metavar="DIR", type=arguments.file_name, help="folder to write into (default: KVSCOUT_CACHE_DIR)"
    )
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=arguments.whole_number(1),
        default=cores,
        help=f"kernels compiled at a time, each in a process (default: the cores, at most {MOST_JOBS}: {cores} here)",
    )
    parser.add_argument(
        "--list", action="store_true", help="only say which kernels there are, and which the folder has"
    )


def run(args: argparse.Namespace) -> int:
    """Compile what is missing, print a table."""
    kernels = select([*args.ops, *args.op])
    folder = env.cache_dir() if args.output is None else args.output.absolute()
    blamed = env.cache_variable() if args.output is None else "--output"
    if os.path.exists(folder) and not folder.is_dir():
        raise UsageError(f"{blamed}: {str(folder)!r} is not a folder")
    if args.list:
        rows = [(k.op, k.variant, k.program.name, _versions(folder, k.program)) for k in kernels]
        console.table(f"kernels in {folder}", ("op", "variant", "kernel", "compiled by CuTe DSL"), rows)
        return 0
    if reason := toolchain.cannot_compile():
        return _without_compiler(kernels, folder, reason)
    missing = [kernel.program for kernel in kernels if not store.is_whole(_file(folder, kernel.program))]
    if missing:
        _check_writable(folder, missing, blamed)
    built: dict[Program, Built] = {}
    interrupted = False
    try:
        _build(missing, folder, args.jobs, built)
    except KeyboardInterrupt:
        interrupted = True
    not_reached = _summarise(kernels, folder, missing, built)
    if interrupted:
        console.error(f"interrupted; {not_reached} of {len(missing)} kernels were not reached")
        return 130
    return int(any(result.error is not None for result in built.values()))


def _without_compiler(kernels: Sequence[Kernel], folder: Path, reason: str) -> int:
    """Where nothing can be compiled, a folder that has every kernel will do, compiled by whichever version."""
    missing = [kernel.program.name for kernel in kernels if not store.files(folder, kernel.program)]
    if not missing:
        console.out(f"all {len(kernels)} kernels are in {folder}")
        return 0
    console.error(
        f"{len(missing)} of {len(kernels)} kernels are missing in {folder}, and none can be compiled here: {reason}"
    )
    return 1


def _check_writable(folder: Path, programs: Sequence[Program], blamed: str) -> None:
    """Make the folder, and try whether files can be written where these go.

    Raises:
        UsageError: they cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{blamed}: cannot make the folder {str(folder)!r}: {reason}") from error
    for place in sorted({_nearest(store.folder(folder, program)) for program in programs}):
        try:
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            raise UsageError(f"{blamed}: cannot write into {str(place)!r}: {error.strerror}") from error


def _nearest(folder: Path) -> Path:
    """The folder itself, or the first of those above it that is there."""
    return next(place for place in (folder, *folder.parents) if os.path.exists(place))


def select(names: Sequence[str]) -> list[Kernel]:
    """Every program that the variants of the selected ops may ask for, each once.

    Raises:
        UsageError: there is no such op, or none that has programs.
    """
    known = ops()
    for name in names:
        if name not in known:
            raise UsageError(f"OP: there is no op {name!r}; there are {', '.join(known)}")
    found: dict[Program, Kernel] = {}
    for op in known:
        if names and op not in names:
            continue
        for variant in family(op).names:
            for program in _programs(op, variant):
                found.setdefault(program, Kernel(op, variant, program))
    if not found:
        raise UsageError(f"OP: no variant of {', '.join(names or known)} has kernels that are compiled ahead of time")
    return list(found.values())


def _programs(op: str, variant: str) -> list[Program]:
    loaded = family(op).load(variant) if variant.startswith("cute_") else None
    if isinstance(loaded, str):
        raise UsageError(f"{op} {variant}: {loaded}")
    return [] if loaded is None or loaded.programs is None else list(loaded.programs())


def _file(folder: Path, program: Program) -> Path:
    return store.file(folder, program, toolchain.DSL_VERSION)


def _versions(folder: Path, program: Program) -> str | None:
    found = [path.stem.removeprefix("cute-") for path in store.files(folder, program)]
    found += [f"{path.stem.removeprefix('cute-')} (damaged)" for path in store.damaged(folder, program)]
    return ", ".join(found) or None


def _build(programs: Sequence[Program], folder: Path, jobs: int, built: dict[Program, Built]) -> None:
    """Compile programs; results are added as they come, so that an interrupted run keeps them."""
    with console.Progress(len(programs), "aot") as progress:
        for program, result in _results(programs, folder, jobs):
            built[program] = result
            if result.error is not None:
                console.error(f"FAILED {program.name}: {result.error}")
            progress.show(program.name)
            progress.advance()


def _results(programs: Sequence[Program], folder: Path, jobs: int) -> Iterator[tuple[Program, Built]]:
    if not programs:
        return
    with workers.pool(min(jobs, len(programs))) as pool:
        futures = {pool.submit(_compile, program, _file(folder, program)): program for program in programs}
        for future in as_completed(futures):
            try:
                result = future.result()
            except BrokenProcessPool as broken:
                result = Built(0.0, f"or a kernel beside it: {broken}")
            yield futures[future], result


def _compile(program: Program, path: Path) -> Built:
    started = time.monotonic()
    try:
        with store.locked(path.parent):
            # Another run may have made it meanwhile.
            if store.is_whole(path):
                return Built(time.monotonic() - started, kept=True)
            from ..kernels.cute.compiler import compile_to

            compile_to(program, path)
    # Whatever CuTe DSL raises for one kernel, the others are compiled.
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        return Built(time.monotonic() - started, "\n".join([f"{type(error).__name__}: {error}", *notes]))
    return Built(time.monotonic() - started)


def _summarise(kernels: Sequence[Kernel], folder: Path, missing: Sequence[Program], built: dict[Program, Built]) -> int:
    """Print what became of each kernel; return how many of the missing ones were not reached."""
    rows, states = [], []
    for op, variant, program in kernels:
        path = _file(folder, program)
        there, result = store.is_whole(path), built.get(program)
        state = _state(program in missing, there, result)
        seconds = f"{result.seconds:.1f}" if result and not result.kept else None
        rows.append((op, variant, program.name, state, seconds, f"{path.stat().st_size / 1024:.0f}" if there else None))
        states.append(state)
    console.table(f"kernels in {folder}", ("op", "variant", "kernel", "state", "seconds", "KB"), rows)
    return states.count(NOT_REACHED)


def _state(was_missing: bool, there: bool, result: Built | None) -> str:
    if result is not None:
        return "failed" if result.error else "kept" if result.kept else "compiled"
    if not there:
        return NOT_REACHED
    # What was being compiled when the run was interrupted was finished, and its result not waited for.
    return "compiled" if was_missing else "kept"
