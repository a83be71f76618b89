"""How long a launch takes when it runs back to back for a second, and what clock and power the GPU settles at.

A burst of a few launches finds a cool chip at its highest clock; a matrix kernel that runs on meets the power limit,
and its clock comes down.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch

from . import provenance, timing

SUSTAINED_S = 1.0
"""Time that is measured."""
WARM_UP_S = 0.5
"""Time before that, in which clock and power settle."""
GRAPH_S = 1e-3
"""A graph holds as many calls as take this long, so that the host keeps ahead of the GPU."""
MAX_CALLS = 200

FIELDS = {"sm_clock_mhz": "clocks.sm", "power_w": "power.draw.instant"}


@dataclass(frozen=True)
class Sustained:
    """Launches back to back.

    Attributes:
        us: microseconds per call.
        calls: how many there were.
        sm_clock_mhz: median of the SM clock meanwhile, None where it could not be read.
        power_w: median of the power draw meanwhile, None where it could not be read.
        readings: how often either of them was read.
    """

    us: float
    calls: int
    sm_clock_mhz: float | None
    power_w: float | None
    readings: int


def sustained(launch: timing.Launch, device: torch.device) -> Sustained:
    """Run a launch for about a second after a warm-up, on a GPU as replays of a CUDA graph."""
    with _Watch(device) as watch:
        seconds, calls = _on_gpu(launch) if device.type == "cuda" else _on_cpu(launch)
        end = time.perf_counter()
    readings = watch.between(end - seconds, end)
    clock, power = (_median([reading[name] for reading in readings]) for name in FIELDS)
    return Sustained(seconds / calls * 1e6, calls, clock, power, len(readings))


def _on_gpu(launch: timing.Launch) -> tuple[float, int]:
    """Seconds between the first call's start and the last one's end, and the number of calls."""
    calls = min(MAX_CALLS, max(1, math.ceil(GRAPH_S / max(timing.rough_seconds(launch), 1e-9))))
    graph = timing.capture(launch, calls)
    per_graph_s = min(timing.replay_us([graph.replay], 3)) * 1e-6
    warm_up, replays = (max(1, math.ceil(part / per_graph_s)) for part in (WARM_UP_S, SUSTAINED_S))
    for _ in range(warm_up):
        graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3, replays * calls


def _on_cpu(launch: timing.Launch) -> tuple[float, int]:
    launch()
    calls, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < SUSTAINED_S or calls == 0:
        launch()
        calls += 1
    return elapsed, calls


def _median(answers: Sequence[str | None]) -> float | None:
    """Median of what nvidia-smi answered; it has words for what a GPU does not tell."""
    numbers = []
    for answer in answers:
        with contextlib.suppress(ValueError):
            numbers.append(float(answer or ""))
    return statistics.median(numbers) if numbers else None


class _Reading(NamedTuple):
    time_s: float
    values: Mapping[str, str | None]


@dataclass
class _Watch:
    """Reads a GPU's clock and power again and again, in processes of nvidia-smi, until the block ends."""

    device: torch.device
    read: Callable[[torch.device, Mapping[str, str]], Mapping[str, str | None]] = provenance.nvidia_smi
    _readings: list[_Reading] = field(default_factory=list, init=False)
    _done: threading.Event = field(default_factory=threading.Event, init=False)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.is_set():
            values = self.read(self.device, FIELDS)
            if not any(values.values()):
                return
            self._readings.append(_Reading(time.perf_counter(), values))

    def between(self, start_s: float, end_s: float) -> list[Mapping[str, str | None]]:
        """What was read between two times of ``time.perf_counter``."""
        return [reading.values for reading in self._readings if start_s <= reading.time_s <= end_s]
