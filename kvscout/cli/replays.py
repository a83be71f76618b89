"""What ``kvscout aot --model`` compiles: what the calls of models ask for, in processes that stand for GPUs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from .. import device, env, tuning
from ..aot import models
from . import console, workers
from .arguments import UsageError
from .builds import AnyKernel

GFX1250_NEEDS = (3, 9)
"""The first version of Triton whose kernels for gfx1250 were looked at and do not spill their registers."""


def of(names: Sequence[str], files: Sequence[Path], archs: str, jobs: int) -> tuple[list[AnyKernel], bool]:
    """What the calls of these models ask for on these GPUs, and whether it is not known for one of them.

    GPUs of one architecture may choose differently where there are tuned tables of them: all choices count.

    Raises:
        UsageError: there is no Triton to ask, or it interprets its kernels, or what describes a model or a GPU cannot
            be read, or a model's call is not legal.
        UnsupportedProblem: no variant serves a call.
        WrongVariable: a variable that says which tuned tables there are means nothing.
    """
    wanted, gpus = _models(names, files), _gpus(archs)
    if importlib.util.find_spec("triton") is None:
        raise UsageError("--model, --shapes: need the Python package 'triton', which is not installed")
    if env.triton_interpret():
        raise UsageError("TRITON_INTERPRET: is set, so that Triton compiles nothing")
    served: list[device.StandIn] = []
    failed = False
    for arch, num_sms in gpus:
        reason = _cannot_serve(arch)
        if reason is None and num_sms is None:
            reason = f"which kernels are asked for depends on its number of multiprocessors N; name it as {arch}:N"
        if reason is not None or num_sms is None:
            console.error(f"{arch}: {reason}")
            failed = True
        else:
            served += _with_tables(arch, num_sms)
    found: dict[AnyKernel, None] = {}
    with console.Progress(len(served), "aot: calls") as progress:
        for gpu, asked in _replays(wanted, served, jobs):
            found |= dict.fromkeys(asked)
            progress.show(gpu.arch)
            progress.advance()
    return list(found), failed


def _with_tables(arch: str, num_sms: int) -> list[device.StandIn]:
    """A GPU that follows the rule alone, and one for each model of it that a tuned table is here for."""
    tuned = tuning.models(arch, num_sms)
    if tuned:
        console.out(f"{arch}: what the rule chooses, and what is tuned for {', '.join(map(repr, tuned))}")
    return [device.StandIn(arch, num_sms, model) for model in (None, *tuned)]


def _models(names: Sequence[str], files: Sequence[Path]) -> dict[str, models.Model]:
    found = {name: models.MODELS[name] for name in names}
    try:
        for file in files:
            found |= {f"{file}: {name}": model for name, model in models.read(file).items()}
    except models.WrongModel as error:
        raise UsageError(f"--shapes: {error}") from error
    return found


def _gpus(archs: str) -> list[tuple[str, int | None]]:
    """The GPUs that ``--archs`` names, with their multiprocessors, None where nobody has said; sm_90a is sm_90.

    Raises:
        UsageError: a name or a number cannot be read.
    """
    found: dict[tuple[str, int | None], None] = {}
    for word in archs.split(","):
        parts = re.fullmatch(r"(?:(sm_\d{2,3})a?|(gfx[0-9a-f]{3,4}))(?::([1-9]\d{0,3}))?", word.strip(), re.ASCII)
        if parts is None:
            raise UsageError(
                "--archs: expected architectures like sm_90a, gfx942 or gfx942:80, separated by commas, "
                f"got {word.strip()!r}"
            )
        arch, number = parts[1] or parts[2], parts[3]
        found[arch, int(number) if number else device.NUM_SMS.get(arch)] = None
    return list(found)


def _cannot_serve(arch: str) -> str | None:
    version = importlib.metadata.version("triton")
    if arch == "gfx1250" and tuple(map(int, version.split(".")[:2])) < GFX1250_NEEDS:
        needed = ".".join(map(str, GFX1250_NEEDS))
        return f"needs Triton {needed} or newer, whose kernels fit its registers; {version} is installed"
    return None


def _replays(
    wanted: Mapping[str, models.Model], gpus: Sequence[device.StandIn], jobs: int
) -> Iterator[tuple[device.StandIn, list[AnyKernel]]]:
    """Each GPU's in a process of its own, in the order of the GPUs."""
    for start in range(0, len(gpus), jobs):
        with contextlib.ExitStack() as pools:
            futures = [
                (gpu, pools.enter_context(workers.pool(1)).submit(_replay, dict(wanted), gpu))
                for gpu in gpus[start : start + jobs]
            ]
            for gpu, future in futures:
                try:
                    yield gpu, future.result()
                except models.WrongModel as error:
                    raise UsageError(f"--model, --shapes: {error}") from error
                except BrokenProcessPool as broken:
                    raise UsageError(f"--archs: the process that stood for {gpu.arch} has ended: {broken}") from broken


def _replay(wanted: Mapping[str, models.Model], gpu: device.StandIn) -> list[AnyKernel]:
    from ..aot.replay import kernels_of

    return kernels_of(wanted, gpu)
