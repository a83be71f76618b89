"""Compile kernels ahead of time, for machines that cannot, or shall not wait.

Without --model and --shapes: every CuTe DSL kernel that a call can ask for. With them: just the kernels that the calls
of these models ask for on the GPUs of --archs, CuTe DSL's and Triton's, found out by making the calls on tensors
without memory. Neither a GPU nor CUDA is needed. The folder, copied to a machine with GPUs and named there by
KVSCOUT_CACHE_DIR, serves CuTe DSL kernels to processes that have the package apache-tvm-ffi: no CuTe DSL, no C
compiler, nothing compiled at a first call; and Triton kernels to processes that have the same version of Triton, which
still builds its launchers with a C compiler. It fits this version of kvscout alone. Kernels that the folder already has
are kept; runs at the same time share the work.
Exit code: 0 all there, 1 something failed, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .. import device, env
from ..aot import models
from ..kernels.cute import store, toolchain
from ..kernels.cute.program import ARCH, Program
from ..testing.case import family, ops
from . import arguments, builds, console, replays, workers
from .arguments import UsageError
from .builds import AnyKernel, Built, file_of

NOT_REACHED = "not reached"

MOST_JOBS = 8
"""Processes at a time unless told otherwise: each takes a core and about a gigabyte."""


class Kernel(NamedTuple):
    """A program of CuTe DSL, or a kernel of Triton, and who asks for it."""

    op: str
    variant: str
    program: AnyKernel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``aot``."""
    parser.add_argument("ops", nargs="*", metavar="OP", help="operations (default: all that have such kernels)")
    parser.add_argument("--op", action="append", default=[], metavar="OP", help="the same as OP; may be repeated")
    parser.add_argument(
        "--output", metavar="DIR", type=arguments.file_name, help="folder to write into (default: KVSCOUT_CACHE_DIR)"
    )
    arguments.add_jobs(parser, MOST_JOBS, "kernels compiled at a time, each in a process")
    parser.add_argument(
        "--list", action="store_true", help="only say which kernels there are, and which the folder has"
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        choices=sorted(models.MODELS),
        help="a model whose calls are to find their kernels there; may be repeated",
    )
    parser.add_argument(
        "--shapes",
        action="append",
        default=[],
        metavar="FILE",
        type=arguments.file_name,
        help="a JSON file of such models (see kvscout/aot/models.py); may be repeated",
    )
    parser.add_argument(
        "--archs",
        metavar="ARCH,...",
        help=f"GPUs that the models run on: {', '.join(device.NUM_SMS)}, or any other with its number of "
        "multiprocessors (AMD: compute units), as in sm_90:114 (default: sm_90)",
    )


def run(args: argparse.Namespace) -> int:
    """Compile what is missing, print a table."""
    by_model = bool(args.model or args.shapes)
    if by_model and (args.ops or args.op):
        raise UsageError("OP: goes without --model and --shapes, which say what is compiled")
    if args.archs is not None and not by_model:
        raise UsageError("--archs: goes with --model or --shapes; CuTe DSL kernels are for sm_90a alone")
    folder = env.cache_dir() if args.output is None else args.output.absolute()
    blamed = env.cache_variable() if args.output is None else "--output"
    if os.path.exists(folder) and not folder.is_dir():
        raise UsageError(f"{blamed}: {str(folder)!r} is not a folder")
    if by_model:
        asked, failed = replays.of(args.model, args.shapes, args.archs or "sm_90", args.jobs)
        kernels = _asked(asked)
    else:
        kernels, failed = select([*args.ops, *args.op]), False
    if args.list:
        _list(kernels, folder, by_model)
        return int(failed)
    if reason := toolchain.cannot_compile():
        programs = [kernel for kernel in kernels if isinstance(kernel.program, Program)]
        if not by_model:
            return _without_compiler(programs, folder, reason)
        failed |= bool(programs and _without_compiler(programs, folder, reason))
        kernels = [kernel for kernel in kernels if kernel not in programs]
    missing = [kernel.program for kernel in kernels if not store.is_whole(file_of(folder, kernel.program))]
    if missing:
        _check_writable(folder, missing, blamed)
    built: dict[AnyKernel, Built] = {}
    interrupted = False
    try:
        _build(missing, folder, args.jobs, built)
    except KeyboardInterrupt:
        interrupted = True
    not_reached = _summarise(kernels, folder, missing, built, by_model)
    if interrupted:
        console.error(f"interrupted; {not_reached} of {len(missing)} kernels were not reached")
        return 130
    return int(failed or any(result.error is not None for result in built.values()))


def _list(kernels: Sequence[Kernel], folder: Path, by_model: bool) -> None:
    """Print which kernels the folder has, and by which versions of a compiler."""
    if by_model:
        columns = ("op", "variant", "gpu", "kernel", "compiled by")
        rows = [(k.op, k.variant, _arch(k), k.program.name, _versions(folder, k.program)) for k in kernels]
        console.table(f"kernels in {folder}", columns, rows)
    else:
        names = [(k.op, k.variant, k.program.name, _versions(folder, k.program)) for k in kernels]
        console.table(f"kernels in {folder}", ("op", "variant", "kernel", "compiled by CuTe DSL"), names)


def _arch(kernel: Kernel) -> str:
    return ARCH if isinstance(kernel.program, Program) else kernel.program.arch


def _asked(programs: Sequence[AnyKernel]) -> list[Kernel]:
    """Who asks for what, by the module that it is made of."""
    known = {kernel.program: kernel for kernel in _all_programs()}
    kernels = []
    for program in programs:
        if isinstance(program, Program):
            kernels.append(known[program])
        else:
            _, _, op, *rest = program.module.split(".")
            kernels.append(Kernel(op, rest[-1] if rest[0] == "variants" else "-", program))
    return kernels


def _without_compiler(kernels: Sequence[Kernel], folder: Path, reason: str) -> int:
    """Where nothing can be compiled, a folder that has every kernel will do, compiled by whichever version."""
    missing = [k.program.name for k in kernels if isinstance(k.program, Program) and not store.files(folder, k.program)]
    if not missing:
        console.out(f"all {len(kernels)} kernels are in {folder}")
        return 0
    console.error(
        f"{len(missing)} of {len(kernels)} kernels are missing in {folder}, and none can be compiled here: {reason}"
    )
    return 1


def _check_writable(folder: Path, programs: Sequence[AnyKernel], blamed: str) -> None:
    """Make the folder, and try whether files can be written where these go.

    Raises:
        UsageError: they cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{blamed}: cannot make the folder {str(folder)!r}: {reason}") from error
    for place in sorted({_nearest(file_of(folder, program).parent) for program in programs}):
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
    found = _all_programs(names)
    if not found:
        raise UsageError(f"OP: no variant of {', '.join(names or known)} has kernels that are compiled ahead of time")
    return found


def _all_programs(names: Sequence[str] = ()) -> list[Kernel]:
    found: dict[Program, Kernel] = {}
    for op in ops():
        if names and op not in names:
            continue
        for variant in family(op).names:
            for program in _programs(op, variant):
                found.setdefault(program, Kernel(op, variant, program))
    return list(found.values())


def _programs(op: str, variant: str) -> list[Program]:
    loaded = family(op).load(variant) if variant.startswith("cute_") else None
    if isinstance(loaded, str):
        raise UsageError(f"{op} {variant}: {loaded}")
    return [] if loaded is None or loaded.programs is None else list(loaded.programs())


def _versions(folder: Path, program: AnyKernel) -> str | None:
    if not isinstance(program, Program):
        path = program.file(folder)
        version = importlib.metadata.version("triton")
        return version if store.is_whole(path) else f"{version} (damaged)" if path.exists() else None
    found = [path.stem.removeprefix("cute-") for path in store.files(folder, program)]
    found += [f"{path.stem.removeprefix('cute-')} (damaged)" for path in store.damaged(folder, program)]
    return ", ".join(found) or None


def _build(
    programs: Sequence[AnyKernel],
    folder: Path,
    jobs: int,
    built: dict[AnyKernel, Built],
) -> None:
    """Compile programs; results are added as they come, so that an interrupted run keeps them."""
    with console.Progress(len(programs), "aot") as progress:
        for program, result in _results(programs, folder, jobs):
            built[program] = result
            if result.error is not None:
                console.error(f"FAILED {program.name}: {result.error}")
            progress.show(program.name)
            progress.advance()


def _results(programs: Sequence[AnyKernel], folder: Path, jobs: int) -> Iterator[tuple[AnyKernel, Built]]:
    if programs:
        with workers.pool(min(jobs, len(programs))) as pool:
            yield from builds.results(pool, programs, folder)


def _summarise(
    kernels: Sequence[Kernel],
    folder: Path,
    missing: Sequence[AnyKernel],
    built: dict[AnyKernel, Built],
    by_model: bool,
) -> int:
    """Print what became of each kernel; return how many of the missing ones were not reached."""
    rows, states = [], []
    for kernel in kernels:
        op, variant, program = kernel
        path = file_of(folder, program)
        content, result = store.read(path), built.get(program)
        state = _state(program in missing, content is not None, result)
        seconds = f"{result.seconds:.1f}" if result and not result.kept else None
        about = (op, variant, _arch(kernel)) if by_model else (op, variant)
        size = None if content is None else f"{len(content) / 1024:.0f}"
        rows.append((*about, program.name, state, seconds, size))
        states.append(state)
    columns = ("op", "variant", "gpu") if by_model else ("op", "variant")
    console.table(f"kernels in {folder}", (*columns, "kernel", "state", "seconds", "KB"), rows)
    return states.count(NOT_REACHED)


def _state(was_missing: bool, there: bool, result: Built | None) -> str:
    if result is not None:
        return "failed" if result.error else "kept" if result.kept else "compiled"
    if not there:
        return NOT_REACHED
    # What was being compiled when the run was interrupted was finished, and its result not waited for.
    return "compiled" if was_missing else "kept"
