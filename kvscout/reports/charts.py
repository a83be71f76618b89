"""What the figures of a run show: panels of series, as numbers and words. Nothing is drawn here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ..device import GPUS
from ..roofline import Cost
from ..testing.case import BENCH
from ..testing.cases.mqa_logits import MqaLogitsCase
from ..testing.cases.pa_decode import PaDecodeCase
from ..testing.measure import Measurement
from .results import Run

SomeCase = TypeVar("SomeCase")

LEAST_POINTS = 3
"""A line through fewer shows nothing."""

MOVING = ("kv_cache", "selection_gather", "pa_decode")
"""Ops that move more than they compute."""


@dataclass(frozen=True)
class Series:
    """What one variant or peer did; ``peer`` where it is another library's kernel, or torch."""

    name: str
    peer: bool
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: what all of its points share.
        x_label: with the unit, as ``y_label``.
        series: what is drawn, our variants first.
        log_x: whether the axis is logarithmic; likewise ``log_y``.
        lines: whether a series' points are joined.
        roof: the measured ceiling of the axis that shows a rate, and what it is called.
        shapes: where the y axis has no numbers, what its places are called, from the top.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    lines: bool = False
    roof: tuple[float, str] | None = None
    shapes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chart:
    """One figure.

    Attributes:
        name: the file's name without its suffix.
        title: what it shows.
        shows: a sentence that says how to read it.
        caption: the GPU, the date and how times were taken.
        panels: two in a row.
    """

    name: str
    title: str
    shows: str
    caption: str
    panels: tuple[Panel, ...]


def charts(run: Run) -> list[Chart]:
    """Every figure that a run has enough points for."""
    made = [_latency(run), _bandwidth(run), _rates(run)]
    return [chart for chart in made if chart.panels]


def _chart(run: Run, kind: str, title: str, shows: str, cold: bool, panels: Iterator[Panel]) -> Chart:
    place = re.sub(r"[^a-z0-9]+", "-", run.device.lower()).strip("-")
    caption = f"{run.origin}; medians, {'cold L2' if cold else 'inputs in the cache'}"
    return Chart(f"{place}-{run.name}-{kind}", title, shows, caption, tuple(panels))


def _latency(run: Run) -> Chart:
    """Times of ``pa_decode`` against the batch and against the context, where nothing else differs."""
    timed = [(m, case) for m, case in _timed(run, PaDecodeCase) if len(set(case.lengths)) == 1]

    def panels() -> Iterator[Panel]:
        for axis, other, x_label in (
            (_batch, _context, "batch (sequences)"),
            (_context, _batch, "context (tokens a sequence)"),
        ):
            groups: dict[tuple[PaDecodeCase, int], list[tuple[Measurement, PaDecodeCase]]] = {}
            for m, case in timed:
                groups.setdefault((_without_size(case), other(case)), []).append((m, case))
            for (common, fixed), found in groups.items():
                if len({axis(case) for _, case in found}) >= LEAST_POINTS:
                    what = f"{fixed:,} tokens a sequence" if other is _context else f"{fixed} sequences"
                    yield Panel(
                        f"{_kind(common)}, {what}",
                        x_label,
                        "time (µs)",
                        _series((m, axis(case), m.judged.median_us) for m, case in found if m.judged),
                        log_x=True,
                        log_y=True,
                        lines=True,
                    )

    shows = "Lower is better. Where a line is flat, a launch and its start-up are what is timed, not the work."
    return _chart(run, "latency", "pa_decode: time against batch and context", shows, _are_cold(timed), panels())


def _batch(case: PaDecodeCase) -> int:
    return len(case.lengths)


def _context(case: PaDecodeCase) -> int:
    return case.lengths[0]


def _without_size(case: PaDecodeCase) -> PaDecodeCase:
    """What cases have in common that differ in batch and context alone."""
    pool = int("sparse" in case.odd) * case.num_blocks
    return replace(case, lengths=(0,), num_blocks=pool, label="", level=BENCH)


def _kind(case: PaDecodeCase) -> str:
    """A case without its size, in words."""
    words = [f"{case.cache} cache", f"{case.group * case.kv_heads}/{case.kv_heads} heads of {case.dim}"]
    words += [f"{case.query_length} query tokens"] * (case.query_length > 1) + ["sparse"] * ("sparse" in case.odd)
    words += [f"window {case.window}"] * (case.window > 0) + [f"scale per {case.scales}"] * (case.scales != "none")
    return ", ".join(words)


def _bandwidth(run: Run) -> Chart:
    """Bandwidth against bytes of cold calls whose floor is that of memory, an op a panel."""
    gpu = GPUS.get(run.device)
    ops = dict.fromkeys(m.op for m in run.measurements if m.op in MOVING)

    def panels() -> Iterator[Panel]:
        for op in ops:
            of_op = [m for m in run.measurements if m.op == op and m.cold is not None]
            moving = [m for m in of_op if m.cost is not None and _moves(m.cost, run)]
            found = [(m, m.cost.bytes, m.tbytes_per_s) for m in moving if m.cost and m.tbytes_per_s]
            if len({x for _, x, _ in found}) >= LEAST_POINTS:
                yield Panel(
                    op,
                    "bytes that must move at least",
                    "bandwidth (TB/s)",
                    _series(found),
                    log_x=True,
                    roof=_roof(gpu.hbm_bytes_per_s if gpu else None, "measured read rate of memory", "TB/s"),
                )

    shows = (
        "Higher is better. Calls that compute for longer than they move are left out; points of the same bytes are "
        "different shapes."
    )
    return _chart(run, "bandwidth", "Bandwidth reached against bytes moved", shows, True, panels())


def _roof(per_s: float | None, name: str, unit: str) -> tuple[float, str] | None:
    """A ceiling in units of 10^12 a second, None where it is not known."""
    return None if per_s is None else (per_s / 1e12, f"{name}, {per_s / 1e12:.4g} {unit}")


def _moves(cost: Cost, run: Run) -> bool:
    """Whether a call's floor is memory's; taken for granted where the GPU's ceilings are not known."""
    gpu = GPUS.get(run.device)
    return gpu is None or cost.floor_s(gpu) == cost.bytes / gpu.hbm_bytes_per_s


def _rates(run: Run) -> Chart:
    """Rates of ``fp8_mqa_logits``, a shape a line, the largest at the bottom."""
    gpu = GPUS.get(run.device)
    timed = _timed(run, MqaLogitsCase)

    def panels() -> Iterator[Panel]:
        for heads, dim in dict.fromkeys((case.heads, case.dim) for _, case in timed):
            found = [(m, _shape(case)) for m, case in timed if (case.heads, case.dim) == (heads, dim)]
            flops = {shape: m.cost.flops for m, shape in found if m.cost}
            shapes = tuple(sorted(flops, key=lambda shape: (flops[shape], shape)))
            if len(shapes) >= LEAST_POINTS:
                yield Panel(
                    f"{heads} heads of {dim}",
                    "rate (TFLOPS)",
                    "rows x keys",
                    _series((m, m.tflops, shapes.index(shape)) for m, shape in found if m.tflops),
                    roof=_roof(gpu.fp8_flops_per_s if gpu else None, "measured FP8 matrix rate", "TFLOPS"),
                    shapes=shapes,
                )

    shows = "Higher is better; only logits inside the windows count. The shapes with most to compute are at the bottom."
    return _chart(run, "rates", "fp8_mqa_logits: rate by shape", shows, _are_cold(timed), panels())


def _shape(case: MqaLogitsCase) -> str:
    """A case without heads and dimension, in few words."""
    words = [f"{case.rows}x{case.keys}"] + [f"packed x{case.sequences}"] * (case.sequences > 1)
    words += [case.windows] * (case.windows not in ("causal", "packed"))
    words += [word for word in ("clean", "q_scale", "strided", "fnuz") if getattr(case, word)]
    return " ".join(words)


def _timed(run: Run, kind: type[SomeCase]) -> list[tuple[Measurement, SomeCase]]:
    """The measurements with a figure whose case is known and of a kind, each with it."""
    found = [(m, run.cases.get((m.op, m.case))) for m in run.measurements if m.judged is not None]
    return [(m, case) for m, case in found if isinstance(case, kind)]


def _are_cold(timed: Sequence[tuple[Measurement, object]]) -> bool:
    return any(m.cold is not None for m, _ in timed)


def _series(found: Iterable[tuple[Measurement, float, float]]) -> tuple[Series, ...]:
    """Points by variant, from left to right; our variants before peers."""
    points: dict[tuple[bool, str], list[tuple[float, float]]] = {}
    for m, x, y in found:
        points.setdefault((m.peer, m.variant), []).append((x, y))
    ordered = sorted(points.items(), key=lambda item: item[0][0])
    return tuple(Series(name, peer, tuple(sorted(where))) for (peer, name), where in ordered)
