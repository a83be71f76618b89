"""How long a launch takes: on a GPU by replaying CUDA graphs with a hot and a cold L2, on the CPU by the clock.

A GPU's samples lie between two events, so they hold neither Python nor the driver's launch: the queue is kept full
while they are taken. What remains is the cost of a graph's node, about 0.6 us for one that does nothing, and in a cold
sample the start of a graph, about 3 us more (an H200 adds to one float in 1.6 us hot, 4.4 us cold).
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Launch = Callable[[], Any]

TARGET_S = 0.1
"""Time that the samples of one measurement take together, as far as the bounds on their number allow."""
MIN_RUNS, MAX_RUNS = 5, 200

CALLS = 10
"""Calls in a hot graph: starting a graph costs microseconds, which they share."""
LONG_S = 1e-3
"""A call that takes longer is not worth repeating within a graph."""

FLUSH_BYTES = 256 << 20
"""Several times the L2 of any GPU so far (an H200 has 60 MB)."""
BACKLOG = 32
"""Flushes queued ahead of hot samples, about 2 ms of work: the host stays ahead of the GPU from then on."""


@dataclass(frozen=True)
class Timing:
    """Samples of one launch; ``spread`` is the distance of their 10th and 90th percentile over the median."""

    min_us: float
    median_us: float
    spread: float
    runs: int

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> Timing:
        """Summarise samples."""
        ordered = sorted(samples_us)
        low, high = (ordered[round(part * (len(ordered) - 1))] for part in (0.1, 0.9))
        median = statistics.median(ordered)
        return cls(ordered[0], median, (high - low) / median if median > 0 else 0.0, len(ordered))


def hot(launch: Launch, device: torch.device) -> Timing:
    """Time a launch that finds its inputs where the launch before it left them.

    The launch must be repeatable as it is, and on a GPU capturable in a CUDA graph.
    """
    if device.type == "cpu":
        return _clock(launch)
    calls = CALLS if rough_seconds(launch) < LONG_S else 1
    graph = capture(launch, calls)
    flush = _flush(device)
    seconds = replay_us([graph.replay], 1)[0] * 1e-6
    for _ in range(BACKLOG):
        flush()
    graph.replay()
    return Timing.of([sample / calls for sample in replay_us([graph.replay], _runs(seconds))])


def cold(launches: Sequence[Launch], device: torch.device) -> Timing:
    """Time a launch that finds nothing of its own in a GPU's L2.

    Args:
        launches: the same launch over distinct inputs, taken in turn. Each must be repeatable and capturable.
        device: the GPU that they run on.
    """
    for launch in launches:
        launch()
    graphs = [capture(launch, 1) for launch in launches]
    flush = _flush(device)
    replays = [graph.replay for graph in graphs]
    seconds = max(replay_us(replays, len(replays), flush)) * 1e-6
    return Timing.of(replay_us(replays, _runs(seconds + FLUSH_BYTES / 1e12), flush))


def interleaved(
    launches: Sequence[Launch], device: torch.device, target_s: float, least: int, cold: bool = False
) -> list[list[float]]:
    """Microseconds of each launch, taken in turn: what changes meanwhile (clock, heat, neighbours) changes for all.

    Args:
        launches: each repeatable, and on a GPU capturable in a CUDA graph. They may share inputs and outputs.
        device: where they run.
        target_s: time that all samples take together, as far as the bounds on their number allow.
        least: samples of each launch, at least.
        cold: whether a GPU's L2 is flushed before each sample; else it holds what the launch before left there.
    """
    if device.type == "cpu":
        rounds = _runs(sum(map(rough_seconds, launches)), target_s, least)
        return _columns([_clocked(launch) for _ in range(rounds) for launch in launches], len(launches))
    calls = [1 if cold or rough_seconds(launch) >= LONG_S else CALLS for launch in launches]
    replays = [capture(launch, number).replay for launch, number in zip(launches, calls, strict=True)]
    flush = _flush(device)
    seconds = sum(replay_us(replays, len(replays), flush if cold else None)) * 1e-6
    if not cold:
        for _ in range(BACKLOG):
            flush()
        replays[-1]()
    rounds = _runs(seconds + len(launches) * cold * FLUSH_BYTES / 1e12, target_s, least)
    found = _columns(replay_us(replays, rounds * len(replays), flush if cold else None), len(replays))
    return [[sample / number for sample in samples] for samples, number in zip(found, calls, strict=True)]


def _columns(samples: Sequence[float], width: int) -> list[list[float]]:
    return [list(samples[column::width]) for column in range(width)]


def _runs(seconds: float, target_s: float | None = None, least: int = MIN_RUNS) -> int:
    target_s = TARGET_S if target_s is None else target_s
    return min(MAX_RUNS, max(least, math.ceil(target_s / max(seconds, 1e-9))))


def _clock(launch: Launch) -> Timing:
    launch()
    return Timing.of([_clocked(launch) for _ in range(_runs(rough_seconds(launch)))])


def _clocked(launch: Launch) -> float:
    start = time.perf_counter()
    launch()
    return (time.perf_counter() - start) * 1e6


def rough_seconds(launch: Launch) -> float:
    """Roughly how long a call takes, the host's part included, once everything is compiled."""
    synchronize: Launch = torch.cuda.synchronize if torch.cuda.is_available() else int
    launch()
    synchronize()
    start = time.perf_counter()
    launch()
    synchronize()
    return time.perf_counter() - start


def capture(launch: Launch, calls: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of so many calls, replayed once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            launch()
    graph.replay()
    return graph


def _flush(device: torch.device) -> Launch:
    """What replaces all of L2, by reading.

    L2 full of written data would have to be written back during the timed launch: on an H200 that adds up to 10 us
    (reading 256 MB takes 69 us hot, 71 us after such a flush, 79 us after one that writes).
    """
    flushed = torch.ones(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    largest = torch.empty((), dtype=torch.int32, device=device)
    return functools.partial(torch.amax, flushed, 0, out=largest)


def replay_us(replays: Sequence[Launch], runs: int, before: Launch | None = None) -> list[float]:
    """Microseconds of ``runs`` replays, taken in turn, each after an untimed ``before``."""
    pairs = []
    for run in range(runs):
        if before is not None:
            before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replays[run % len(replays)]()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in pairs]
