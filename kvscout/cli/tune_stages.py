"""The stages of ``kvscout tune``: several processes find out about cases and compile, this one alone times.

One batch of buckets after another is finished, so that what ends a run early costs no more than the batch at hand.
Within a batch, what each variant takes by itself is compiled, then checked and quickly timed; after that the other
configs of those variants that are left. Nothing is compiled while something is timed.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

import torch

from .. import env
from ..device import arch_of
from ..kernels.cute import runtime, store
from ..kernels.cute.program import Program
from ..testing import tune
from ..testing.case import Case
from ..testing.scout import Scouted, bucket_of, scout
from ..testing.sweep import FAILED, ContextLost
from ..testing.tune import Begun, Clock, Trial, Tuned
from ..tuning import Bucket
from . import builds, console, workers
from .builds import AnyKernel

BATCH = 16
"""Buckets that pass through the stages together."""

MOST_SCOUTS = 4
"""Processes that make the inputs of cases at a time; each takes the GPU's memory for one case."""


class Stopped(Exception):
    """The run ends here, with what is finished; the message says why."""


class OutOfTime(Stopped):
    """The time of the run is over."""


class Limit:
    """So many seconds from now on, or no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds, self._started = seconds, time.monotonic()

    def check(self) -> None:
        """Go on.

        Raises:
            OutOfTime: the seconds are over.
        """
        if self._seconds is not None and time.monotonic() - self._started > self._seconds:
            raise OutOfTime(f"the {self._seconds:g} s of --seconds were over")


@dataclass(frozen=True)
class Work:
    """A bucket, its cases, and what is known of each."""

    op: str
    bucket: Bucket
    cases: list[Case] = field(default_factory=list)
    scouted: list[Scouted] = field(default_factory=list)

    def own_kernels(self) -> list[AnyKernel]:
        """What the first stage launches."""
        return [kernel for known in self.scouted for kernel in known.needs(known.own)]

    def other_kernels(self, begun: Begun) -> list[AnyKernel]:
        """What the second stage launches beside it."""
        return [
            kernel
            for number, known in enumerate(self.scouted)
            for kernel in known.needs(key for key in known.kernels if begun.wants(number, key))
        ]


def scouted(cases: Sequence[Case], where: torch.device, seed: int, jobs: int) -> Iterator[tuple[Case, Scouted | str]]:
    """What is known of each case, or why its inputs cannot be made. One process alone finds out no kernels.

    Raises:
        Stopped: a process has ended.
        ContextLost: the GPU's context broke in this process.
    """
    if jobs == 1 or not cases:
        yield from ((case, bucket_of(case, where, seed)) for case in cases)
        return
    again = []
    single_threaded = functools.partial(torch.set_num_threads, 1)
    with workers.pool(min(jobs, MOST_SCOUTS, len(cases)), single_threaded) as pool:
        futures = [pool.submit(_scout, case, where, arch_of(where), seed) for case in cases]
        for case, future in zip(cases, futures, strict=True):
            try:
                found = future.result()
            except BrokenProcessPool as broken:
                raise Stopped(f"a process that made the inputs of cases has ended: {broken}") from broken
            if isinstance(found, str):
                again.append(case)
            else:
                yield case, found
    # Several processes may lack the memory that one has.
    yield from ((case, bucket_of(case, where, seed)) for case in again)


def _scout(case: Case, where: torch.device, arch: str, seed: int) -> Scouted | str:
    """What a process does with a case; what breaks its context breaks this one's when it is met again."""
    try:
        return scout(case, where, arch, seed)
    except ContextLost as lost:
        return str(lost)


class Compiler:
    """Compiles kernels before they are launched, into the cache in which launches look for them."""

    def __init__(self, pool: ProcessPoolExecutor | None, limit: Limit, say: Callable[[str], None]) -> None:
        self._pool, self._limit, self._say = pool, limit, say

    def make(self, kernels: Iterable[AnyKernel]) -> None:
        """Compile each kernel that is not there, once. What fails fails again where it is launched and reported.

        Raises:
            OutOfTime: the time of the run is over.
            Stopped: a process has ended; the kernel would end this one too.
        """
        if self._pool is None:
            return
        folder = env.cache_dir()
        wanted = [kernel for kernel in dict.fromkeys(kernels) if _can_make(kernel)]
        missing = [kernel for kernel in wanted if not store.is_whole(builds.file_of(folder, kernel))]
        for number, (_, built) in enumerate(builds.results(self._pool, missing, folder), 1):
            if built.killed:
                raise Stopped(f"a kernel killed the process that compiled it: {built.error}")
            self._say(f"{number} of {console.count(len(missing), 'kernel')} compiled")
            self._limit.check()


def _can_make(kernel: AnyKernel) -> bool:
    """Whether a launch would compile a kernel that is not there."""
    return runtime.can_make(kernel) if isinstance(kernel, Program) else not env.triton_aot_only()


@contextlib.contextmanager
def compiler(jobs: int, limit: Limit, progress: console.Progress) -> Iterator[Compiler]:
    """A compiler with so many processes; one that does nothing where there is to be no more than this one."""

    def say(detail: str) -> None:
        progress.show(f"({detail})")
        progress.advance(0)

    if jobs == 1:
        yield Compiler(None, limit, say)
        return
    with workers.pool(jobs) as pool:
        yield Compiler(pool, limit, say)


def search(
    work: Sequence[Work],
    where: torch.device,
    by: Clock,
    found: list[Tuned],
    limit: Limit,
    jobs: int,
    *,
    seed: int,
    within: float,
    seconds_per_case: float | None,
) -> None:
    """Tune bucket after bucket; results are added as they come, so that a run that ends early keeps them.

    Raises:
        OutOfTime: the time of the run is over; no further bucket is begun.
        Stopped: a process has ended.
        ContextLost: a kernel broke the GPU's context.
    """
    with console.Progress(len(work), "tune") as progress, compiler(jobs, limit, progress) as compile:
        for start in range(0, len(work), BATCH):
            batch = work[start : start + BATCH]
            compile.make(kernel for item in batch for kernel in item.own_kernels())
            begun = []
            for item in batch:
                limit.check()
                progress.show(f"{item.op} {item.cases[0].name}")
                progress.advance(0)
                begun.append(tune.begin(item.bucket, item.cases, where, by, seed=seed, within=within))
            pairs = list(zip(batch, begun, strict=True))
            compile.make(kernel for item, first in pairs for kernel in item.other_kernels(first))
            for item, first in pairs:
                limit.check()
                progress.show(f"{item.op} {item.cases[0].name}")
                found.append(tune.finish(first, where, by, seed=seed, seconds_per_case=seconds_per_case))
                for trial in found[-1].trials:
                    if trial.status == FAILED:
                        console.error(failure(trial))
                progress.advance()


def failure(trial: Trial) -> str:
    """The line that says what failed."""
    return console.failure(trial.op, trial.case, trial.variant, trial.config, trial.message)
