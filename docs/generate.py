"""Write the generated parts of README.md and docs/: what there is, what was measured, and what the demo printed.

``python docs/generate.py`` writes them, ``--check`` only says which are out of date, ``--demo`` first runs the demo and
keeps its output. A generated part stands between two marks and is never edited by hand. Figures are files; drawing them
needs matplotlib, telling which are out of date does not (:mod:`kvscout.reports.drawing`).
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import kvscout
from kvscout import env
from kvscout.cli.info import collect
from kvscout.cli.main import commands
from kvscout.cli.timed_cases import PRESETS
from kvscout.reports import charts, drawing, results, tables
from kvscout.reports.charts import Chart
from kvscout.reports.tables import table
from kvscout.testing import compile_matrix, shapes_csv
from kvscout.testing.case import family, ops

PAGES = ("README.md", "docs/performance.md", "docs/shapes-csv.md", "docs/support-matrix.md")
FIGURES = ROOT / "docs" / "figures"
RESULTS = ROOT / "benchmarks" / "results"
DEMO_OUTPUT = ROOT / "docs" / "demo-output.txt"

RUNS_ON = {
    "torch": "any device",
    "triton": "NVIDIA sm_80+; AMD gfx942, gfx950, gfx1250",
    "cute": "NVIDIA sm_90",
}
"""What the kernels of a backend are written for."""

MARKED = re.compile(r"(<!-- begin generated: (?P<name>[\w-]+) -->\n).*?(<!-- end generated -->)", re.DOTALL)


def support_matrix() -> str:
    """Every variant of every op, where it runs, and what was measured."""
    figures = measured(RESULTS)
    rows = []
    for op, variants in collect()["ops"].items():
        for variant in variants:
            name, summary = variant["name"], markdown(variant["summary"]).rstrip(".")
            found = "; ".join(figures.get((op, name), [])) or "-"
            rows.append([f"`{op}`", f"`{name}`", RUNS_ON[name.partition("_")[0]], summary, found])
    return table(("op", "variant", "written for", "what it does", "measured"), rows)


def gpu_matrix() -> str:
    """What is known of every variant that has kernels of its own, on every architecture."""
    archs, ran, compiled = compile_matrix.ARCHS, run_on(RESULTS), compile_matrix.compiled()
    rows = []
    for op, variants in collect()["ops"].items():
        for name in (variant["name"] for variant in variants if not variant["name"].startswith("torch_")):
            cells = []
            for arch in archs:
                if family(op).unavailable(name, arch) is not None and ran.get((op, name, arch)) is None:
                    cells.append("refused")
                else:
                    cells.append(ran.get((op, name, arch)) or ("compiled" if (op, name, arch) in compiled else "-"))
            rows.append([f"`{op}`", f"`{name}`", *cells])
    return table(("op", "variant", *(f"{arch} ({of.gpus})" for arch, of in archs.items())), rows)


def run_on(results: Path) -> dict[tuple[str, str, str], str]:
    """What result files say of an op's variant on an architecture: "measured", "run", or "WRONG"."""
    found: dict[tuple[str, str, str], str] = {}
    for content in sorted((json.loads(path.read_text()) for path in results.glob("*/*.json")), key=_time_of):
        arch = content["machine"]["arch"]
        for (op, variant), statuses in _statuses(content, "outcomes").items():
            if "failed" in statuses:
                found[op, variant, arch] = "WRONG"
            elif "passed" in statuses and found.get((op, variant, arch)) != "measured":
                found[op, variant, arch] = "run"
        for (op, variant), statuses in _statuses(content, "measurements").items():
            # Only what was right is timed.
            if "passed" in statuses and found.get((op, variant, arch)) != "WRONG":
                found[op, variant, arch] = "measured"
    return found


def measured(results: Path) -> dict[tuple[str, str], list[str]]:
    """For each op and variant a sentence per GPU, of the newest result files that ``verify`` and ``bench`` wrote."""
    verified: dict[tuple[str, str, str], list[str]] = {}
    timed: dict[tuple[str, str, str], list[str]] = {}
    for content in sorted((json.loads(path.read_text()) for path in results.glob("*/*.json")), key=_time_of):
        for (op, variant), statuses in _statuses(content, "outcomes").items():
            passed, failed = statuses.count("passed"), statuses.count("failed")
            text = f"{passed} cases right" if failed == 0 else f"{failed} of {passed + failed} cases WRONG"
            if passed + failed:
                verified[op, variant, content["machine"]["device"]] = [f"{text} ({_time_of(content)[:10]})"]
        for (op, variant), statuses in _statuses(content, "measurements").items():
            if passed := statuses.count("passed"):
                timed[op, variant, content["machine"]["device"]] = [f"{passed} timed"]
    sentences: dict[tuple[str, str], list[str]] = {}
    for key in sorted({*verified, *timed}):
        op, variant, device = key
        sentences.setdefault((op, variant), []).append(
            f"{device}: {', '.join([*verified.get(key, []), *timed.get(key, [])])}"
        )
    return sentences


def _time_of(content: dict[str, Any]) -> str:
    return str(content["time"])


def _statuses(content: dict[str, Any], key: str) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for record in content.get(key, []):
        # What "auto" chose was measured, not "auto".
        found.setdefault((record["op"], record.get("chosen") or record["variant"]), []).append(record["status"])
    return found


def public_names() -> str:
    """What ``import kvscout`` offers, each with its op and the first line of its docstring."""
    ops = list(collect()["ops"])
    rows = []
    for name in kvscout.__all__:
        documented = getattr(kvscout, name)
        op = next((op for op in ops if documented.__module__.startswith(f"kvscout.ops.{op}.")), "")
        rows.append((ops.index(op) if op else len(ops), name, first_line(documented), f"`{op}`" if op else ""))
    return table(("name", "what it does", "op"), [[f"`{name}`", line, op] for _, name, line, op in sorted(rows)])


def first_line(documented: object) -> str:
    """First line of a docstring, as Markdown."""
    return markdown((inspect.getdoc(documented) or "").partition("\n")[0])


def markdown(text: str) -> str:
    """A docstring's line without the marks that only reStructuredText has."""
    return re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"`\1`", text).replace("``", "`")


def command_table() -> str:
    """Every command of the command line."""
    return table(("command", "what it does"), [(f"`kvscout {name}`", first_line(m)) for name, m in commands().items()])


def settings() -> str:
    """Every environment variable that is read."""
    rows = [(f"`{setting.name}`", f"`{setting.default}`", setting.meaning) for setting in env.SETTINGS]
    return table(("variable", "default", "meaning"), rows)


def demo_output() -> str:
    """What the demo printed when it was last run for the README."""
    return f"```text\n{DEMO_OUTPUT.read_text().strip()}\n```\n"


def runs() -> list[results.Run]:
    """Every run of ``bench`` that is kept; those with peers first."""
    found = [results.read(path) for path in sorted(RESULTS.glob("*/bench-*.json"))]
    return sorted(found, key=lambda run: not any(m.peer for m in run.measurements))


def performance() -> str:
    """Every run: where it comes from, its figures, its tables."""
    return "\n".join(part for run in runs() for part in _performance(run))


def _performance(run: results.Run) -> Iterator[str]:
    ops_of_run = ", ".join(f"`{op}`" for op in dict.fromkeys(m.op for m in run.measurements))
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items() if version)
    file = run.file.relative_to(ROOT).as_posix()
    cold = any(m.cold is not None for m in run.measurements)
    yield (
        f"## {ops_of_run} on {run.device}: {run.name}\n\n`{run.command}`, {run.date}, at {str(run.commit)[:12]}: "
        f"[{run.file.name}](../{file}). Medians, {'with a cold L2' if cold else 'with the inputs in the cache'}. "
        f"{versions}.\n"
    )
    yield from (f"{sentence}\n" for sentence in run.missing)
    for chart in charts.charts(run):
        yield f"![{chart.title}](figures/{chart.name}.svg)\n\n{chart.caption}. {chart.shows}\n"
    yield from tables.sections(run, PRESETS)


def shapes_columns() -> str:
    """The columns of each op in a file of shapes."""
    return "\n".join(f"### `{op}`\n\n{_columns(op)}" for op in ops())


def _columns(op: str) -> str:
    meanings = _attributes(inspect.getdoc(shapes_csv.case_class(op)) or "")
    rows = []
    for name, field in shapes_csv.columns(op).items():
        default = "needed" if field.default is MISSING else f"`{shapes_csv.cell(field.default)}`".replace("``", "blank")
        rows.append((f"`{name}`", shapes_csv.takes(op, name), default, meanings.get(name, "")))
    return table(("column", "takes", "default", "meaning"), rows)


def _attributes(doc: str) -> dict[str, str]:
    """What a class's docstring says of its attributes."""
    section = re.search(r"^Attributes:\n((?:    .*\n?|\n)*)", doc, re.MULTILINE)
    lines = re.sub(r"\n {8}", " ", section[1] if section else "")
    return {name: markdown(text) for name, text in re.findall(r"^    (\w+): (.*)$", lines, re.MULTILINE)}


PARTS = {
    "performance": performance,
    "shapes-columns": shapes_columns,
    "support-matrix": support_matrix,
    "gpu-matrix": gpu_matrix,
    "public-names": public_names,
    "commands": command_table,
    "settings": settings,
    "demo-output": demo_output,
}


def render(text: str) -> str:
    """A page with every generated part made anew."""
    return MARKED.sub(lambda found: f"{found[1]}{PARTS[found['name']]()}{found[3]}", text)


def stale() -> Iterator[tuple[Path, str]]:
    """The pages that are out of date, with what they should say."""
    for name in PAGES:
        page = ROOT / name
        text = page.read_text()
        if (fresh := render(text)) != text:
            yield page, fresh


def stale_figures() -> Iterator[tuple[Path, Chart | None]]:
    """The figures that are out of date, with what they should show; None for one that no run gives."""
    wanted = {FIGURES / f"{chart.name}.svg": chart for run in runs() for chart in charts.charts(run)}
    for file, chart in wanted.items():
        if not file.exists() or not drawing.is_current(file.read_text(encoding="utf-8"), chart):
            yield file, chart
    yield from ((file, None) for file in sorted(FIGURES.glob("*.svg")) if file not in wanted)


def draw(figures: Sequence[tuple[Path, Chart | None]]) -> None:
    """Write figures, and remove those that show nothing."""
    for file, chart in figures:
        if chart is None:
            file.unlink()
        else:
            file.parent.mkdir(exist_ok=True)
            file.write_text(drawing.svg(chart), encoding="utf-8")


def main() -> int:
    """Write, or check, every page and figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a page is out of date")
    parser.add_argument("--demo", action="store_true", help="run the demo first and keep its output")
    args = parser.parse_args()
    if args.demo:
        done = subprocess.run([sys.executable, "-m", "kvscout", "demo"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            return done.returncode
        DEMO_OUTPUT.write_text(done.stdout)
    pages, figures = list(stale()), list(stale_figures())
    if not args.check:
        if any(chart for _, chart in figures) and (sentence := drawing.missing()):
            print(sentence, file=sys.stderr)
            return 1
        draw(figures)
        for page, fresh in pages:
            page.write_text(fresh)
    for file in [*(page for page, _ in pages), *(figure for figure, _ in figures)]:
        print(f"{file.relative_to(ROOT)}: {'out of date; run: make docs' if args.check else 'written'}")
    return int(args.check and bool(pages or figures))


if __name__ == "__main__":
    sys.exit(main())
