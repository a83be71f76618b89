"""What the demo found, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from .caches import PAGE
from .checks import ERROR_BUDGET, Row, Summary, summary
from .job import Job, OpCounts, Settings

FIGURES = ("page recall", "token recall", "kernel error", "FP8 error")
MEANING = f"""
page recall    how many of the best pages by unquantised float32 scores were selected, not counting a row's newest page
token recall   the same by tokens: what selecting whole pages of {PAGE} leaves of it
kernel error   worst row of pa_decode against float64 attention over the selected keys and values in the FP8 cache
FP8 error      worst row of pa_decode against float64 attention over the same keys and values before quantisation
""".strip()
"""What the columns of the tables say."""


class Table(NamedTuple):
    """Arguments of :func:`kvscout.cli.console.table`."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


class Results(NamedTuple):
    """A job and its checks, by phase."""

    job: Job
    prefill: Sequence[Row]
    decode: Sequence[Row]


def by_phase(job: Job, rows: Sequence[Row]) -> Results:
    """Part the checked rows at the end of the prompt."""
    prefill = [row for row in rows if row.position < job.prompt_tokens]
    return Results(job, prefill, [row for row in rows if row.position >= job.prompt_tokens])


def steps(results: Results, every: int) -> Table:
    """Decode, a line for every few steps."""
    job, lines = results.job, []
    for first in range(0, len(job.step_s), every):
        seconds = job.step_s[first : first + every]
        last = first + len(seconds)
        rows = [row for row in results.decode if first <= row.position - job.prompt_tokens < last]
        name = str(last) if len(seconds) == 1 else f"{first + 1}..{last}"
        lines.append([name, *_rate(len(seconds), sum(seconds)), *_figures(summary(rows))])
    return Table("decode", ("step", "ms", "tokens/s", *FIGURES), lines)


def totals(results: Results) -> Table:
    """Both phases as a whole."""
    job = results.job
    phases = (
        ("prefill", job.prompt_tokens, job.prefill_s, results.prefill),
        ("decode", len(job.step_s), sum(job.step_s), results.decode),
    )
    lines = [
        [name, tokens, *_rate(tokens, seconds), len({row.position for row in rows}), *_figures(summary(rows))]
        for name, tokens, seconds, rows in phases
    ]
    return Table("in total", ("phase", "tokens", "ms", "tokens/s", "checked", *FIGURES), lines)


def _rate(tokens: int, seconds: float) -> tuple[str, str]:
    return f"{seconds * 1e3:.1f}", f"{tokens / seconds:.1f}"


def _figures(found: Summary) -> list[str]:
    recalls = [f"{value:.3f}" for value in (found.page_recall, found.token_recall)]
    return recalls + [f"{value:.1e}" for value in (found.kernel_error, found.quantisation_error)]


def variants(job: Job) -> Table:
    """What each op ran."""
    ops = dict.fromkeys(op for op, _ in (*job.prefill_ops, *job.decode_ops))
    lines = [[op, _ran(job.prefill_ops, op), _ran(job.decode_ops, op)] for op in ops]
    return Table("variants that ran (calls)", ("op", "prefill", "decode"), lines)


def _ran(counts: OpCounts, op: str) -> str:
    return ", ".join(f"{variant} ({count})" for (of, variant), count in sorted(counts.items()) if of == op)


def memory(job: Job) -> Table:
    """What holds memory, in MiB."""
    device = job.engine.decoder.device.type
    peak = "peak allocated on the GPU" if device == "cuda" else "peak of the whole process"
    lines = [[peak if name == "peak" else name, f"{used / 2**20:.2f}"] for name, used in job.memory.items()]
    return Table("memory", ("held by", "MiB"), lines)


def failures(results: Results) -> list[str]:
    """A sentence for every row that is not right."""
    return [
        f"FAILED position {row.position}, layer {row.layer}: " + _why(row)
        for row in (*results.prefill, *results.decode)
        if not row.ok
    ]


def _why(row: Row) -> str:
    if not row.valid:
        return "the selected pages are not distinct pages before the row's own, which must come last"
    return f"attention is {row.kernel_error:.1e} off, more than {ERROR_BUDGET:.0e}"


def content(results: Results, settings: Settings) -> dict[str, Any]:
    """Everything, for a result file."""
    job = results.job
    return {
        "settings": asdict(settings),
        "prompt_tokens": job.prompt_tokens,
        "generated": list(job.generated),
        "prefill_s": job.prefill_s,
        "step_s": job.step_s,
        "variants": {
            phase: {op: {v: n for (of, v), n in sorted(counts.items()) if of == op} for op, _ in counts}
            for phase, counts in (("prefill", job.prefill_ops), ("decode", job.decode_ops))
        },
        "memory_bytes": job.memory,
        "summary": {"prefill": asdict(summary(results.prefill)), "decode": asdict(summary(results.decode))},
        "rows": [asdict(row) for row in (*results.prefill, *results.decode)],
    }
