"""Charts as SVG, by matplotlib, and how to see that a drawn one is of these data and untouched.

The bytes of a drawing depend on the versions of matplotlib and numpy, so drawings are never compared. Each ends in a
comment with a hash of what it was drawn from, the chart and this file, and one of what was drawn; :func:`is_current`
looks at both, and needs no matplotlib.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .charts import Chart, Panel

INK, GRID, PAGE = "#1f2328", "#d1d9e0", "#ffffff"
DARK = {INK: "#e6edf3", GRID: "#30363d", PAGE: "#0d1117"}
"""What takes their place where the reader's browser prefers dark pages."""

OUR_COLOURS = ("#d9480f", "#1971c2", "#2f9e44", "#9c36b5", "#b8860b")
PEER_COLOURS = ("#868e96", "#0c8599", "#c2255c", "#8d6e63", "#7048e8")
"""Of a brightness that both pages set off."""

OUR_MARKERS, PEER_MARKERS = "osD^v", "x+1*2"

WIDTH, PANEL_HEIGHT, SHAPE_HEIGHT, MARGIN = 9.6, 2.9, 0.2, 1.5
"""Inches: of a figure, of a panel, of a line of a panel of shapes, of what stands above and below the panels."""

COLUMNS = 2
MOST_TICKS = 8

SETTINGS: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.markersize": 4,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "kvscout",
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}
"""Text stays text, so that it is small and can be searched; a salt makes names of parts the same every time."""


def missing() -> str | None:
    """A sentence why nothing can be drawn here, or None where it can."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return f"figures are drawn by matplotlib, which cannot be imported ({error}); install kvscout[plot]"
    return None


def svg(chart: Chart) -> str:
    """Draw a chart. Everything is set here: what the reader's own matplotlibrc says does not count."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        columns = min(COLUMNS, len(chart.panels))
        rows = math.ceil(len(chart.panels) / columns)
        height = max(PANEL_HEIGHT, *(SHAPE_HEIGHT * len(panel.shapes) for panel in chart.panels))
        figure = Figure(figsize=(WIDTH, rows * height + MARGIN), facecolor=PAGE, layout="constrained")
        figure.suptitle(f"{chart.title}\n{chart.caption}", fontsize=9)
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        styles = _styles(chart)
        for panel, ax in zip(chart.panels, axes, strict=False):
            _draw(panel, ax, styles)
        for ax in axes[len(chart.panels) :]:
            ax.remove()
        handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Title": chart.title})
    drawn = _with_dark_pages(file.getvalue())
    return f"{drawn}{_seal(chart, drawn)}\n"


def _styles(chart: Chart) -> dict[str, dict[str, Any]]:
    """How each series is drawn: ours filled and solid, peers thin and dashed; the same in every panel."""
    series = {s.name: s.peer for panel in chart.panels for s in panel.series}
    ours, peers = ([name for name, peer in series.items() if peer == wanted] for wanted in (False, True))
    styles: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(ours):
        colour, marker = OUR_COLOURS[i % len(OUR_COLOURS)], OUR_MARKERS[i % len(OUR_MARKERS)]
        styles[name] = {"color": colour, "marker": marker, "linewidth": 1.6, "zorder": 3}
    for i, name in enumerate(peers):
        colour, marker = PEER_COLOURS[i % len(PEER_COLOURS)], PEER_MARKERS[i % len(PEER_MARKERS)]
        styles[name] = {"color": colour, "marker": marker, "linewidth": 1.1, "linestyle": "--", "zorder": 2}
    return styles


def _draw(panel: Panel, ax: Any, styles: dict[str, dict[str, Any]]) -> None:
    ax.set_title(panel.title)
    ax.set_xlabel(panel.x_label)
    ax.set_ylabel(panel.y_label)
    for series in panel.series:
        style = styles[series.name] | ({} if panel.lines else {"linestyle": "none"})
        label = f"{series.name} (peer)" if series.peer else series.name
        ax.plot(*zip(*series.points, strict=True), label=label, **style)
    if panel.roof is not None:
        value, label = panel.roof
        (ax.axvline if panel.shapes else ax.axhline)(value, color=INK, linewidth=1, linestyle=":", label=label)
    if panel.log_x:
        ax.set_xscale("log")
        _plain_numbers(ax.xaxis, {x for series in panel.series for x, _ in series.points})
    if panel.log_y:
        ax.set_yscale("log")
        _plain_numbers(ax.yaxis)
    else:
        ax.set_ylim(bottom=0)
    if panel.shapes:
        ax.set_xlim(left=0)
        ax.set_ylim(len(panel.shapes) - 0.5, -0.5)
        ax.set_yticks(range(len(panel.shapes)), panel.shapes, fontsize=7)


def _plain_numbers(axis: Any, values: Collection[float] = ()) -> None:
    """Label a logarithmic axis at the values, or at round numbers where there are many or none."""
    from matplotlib import ticker

    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _number(value)))
    few = 0 < len(values) <= MOST_TICKS
    axis.set_major_locator(ticker.FixedLocator(sorted(values)) if few else ticker.LogLocator(subs=(1, 2, 3, 5, 7)))


def _number(value: float) -> str:
    """``8k`` for 8192, ``220,000``, ``2M`` for two million, ``0.5``."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}k"
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def _with_dark_pages(drawn: str) -> str:
    """Let ink, grid and page take other colours where the reader prefers dark pages."""
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    return drawn.replace("<defs>", f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>\n <defs>", 1)


def _seal(chart: Chart, drawn: str) -> str:
    return f"<!-- drawn from {_inputs(chart)}, as {_hash(drawn)} -->"


def _inputs(chart: Chart) -> str:
    """A hash of the chart and of this file, which are what decides how it looks."""
    return _hash(json.dumps(asdict(chart), sort_keys=True) + Path(__file__).read_text(encoding="utf-8"))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_current(text: str, chart: Chart) -> bool:
    """Whether a drawing is of this chart, by this file, and nobody has changed it since."""
    drawn, _, _ = text.rpartition("<!-- drawn from ")
    return text == f"{drawn}{_seal(chart, drawn)}\n"
