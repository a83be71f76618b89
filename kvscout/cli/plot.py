"""Draw figures, as SVG, of what "kvscout bench --json" wrote.

A file gives up to three figures: times of pa_decode against batch and against context, bandwidth reached against bytes
moved (of cold calls that move for longer than they compute), and rates of fp8_mqa_logits by shape; each with variants,
peers and, where it was measured for that GPU, the roof. Needs matplotlib: pip install 'kvscout[plot]'.
Exit code: 0 all right, 1 nothing to draw or no matplotlib, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..reports import charts, drawing, results
from ..reports.charts import Chart
from . import console
from .arguments import UsageError, file_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``plot``."""
    parser.add_argument("files", nargs="+", metavar="FILE", type=file_name, help="what kvscout bench --json wrote")
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=file_name,
        default=Path(),
        help="write the figures into this folder, which is made if need be (default: this one)",
    )


def run(args: argparse.Namespace) -> int:
    """Read every file, draw every figure, and say what was written."""
    made = _charts(args.files)
    if sentence := drawing.missing():
        console.error(sentence)
        return 1
    if not made:
        console.error(
            f"nothing to draw: these files have no {charts.LEAST_POINTS} cases of pa_decode that differ in batch or in "
            f"context alone, no {charts.LEAST_POINTS} shapes of fp8_mqa_logits, and no bandwidths of cold calls"
        )
        return 1
    drawn = [(args.output / f"{chart.name}.svg", drawing.svg(chart), chart) for chart in made]
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        for file, text, chart in drawn:
            file.write_text(text, encoding="utf-8")
            console.out(f"{file}: {chart.title} ({chart.caption})")
    # A name with a null byte is a ValueError.
    except (OSError, ValueError) as error:
        raise UsageError(f"--output: cannot write into {str(args.output)!r}: {error}") from error
    return 0


def _charts(files: list[Path]) -> list[Chart]:
    """The figures of every file.

    Raises:
        UsageError: a file cannot be read, or two of them would give figures of the same name.
    """
    made: dict[str, tuple[Path, Chart]] = {}
    for file in dict.fromkeys(files):
        try:
            found = charts.charts(results.read(file))
        except results.ResultsError as error:
            raise UsageError(f"FILE: {error}") from error
        for chart in found:
            before, _ = made.setdefault(chart.name, (file, chart))
            if before != file:
                raise UsageError(f"FILE: {before} and {file} would both be drawn as {chart.name}.svg; draw them apart")
    return [chart for _, chart in made.values()]
