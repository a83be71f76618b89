"""Run a small decoder over a text by score, select, attend, and check what it did.

The decoder has random weights and reads bytes, so what it writes is noise; its attention is the real thing. It takes in
the text and decodes greedily. In every layer a token's keys and values go to a paged FP8 cache, an FP8 indexer scores
the tokens so far, the best pages are selected, and attention reads those alone. Times are taken without the checks,
which come afterwards. Exit code: 0 all right, 1 a check failed, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import NamedTuple

import torch

from .. import demo
from ..demo import report
from ..demo.caches import PAGE
from ..demo.checks import Row, check
from ..demo.job import Job, Settings
from ..demo.job import run as run_job
from ..demo.model import Decoder, Shape
from ..testing import provenance
from . import console
from .arguments import UsageError, add_json, check_json, check_overrides, file_name, seed, whole_number, write_json
from .selection import device

PACKAGED = Path(demo.__file__).with_name("sample.txt")
"""Read where neither a text is given nor the README is there."""

FAILURES_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``demo``."""
    add = parser.add_argument
    add("text", nargs="?", metavar="TEXT_FILE", type=file_name, help="read as bytes (default: the project's README)")
    add("--steps", metavar="N", type=whole_number(1), default=64, help="tokens to decode (default: %(default)s)")
    add(
        "--topk-pages",
        metavar="N",
        type=whole_number(2),
        default=32,
        help=f"pages of {PAGE} tokens that a token attends to, its own included (default: %(default)s)",
    )
    add(
        "--max-tokens",
        metavar="N",
        type=whole_number(1),
        default=4096,
        help="read no more bytes (default: %(default)s)",
    )
    add("--layers", metavar="N", type=whole_number(1), default=Shape.num_layers, help="layers (default: %(default)s)")
    add("--seed", metavar="N", type=seed, default=0, help="seed of the weights (default: %(default)s)")
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to run (default: cuda where there is a GPU)",
    )
    add(
        "--threads",
        metavar="N",
        type=whole_number(1),
        default=1,
        help="CPU threads (default: %(default)s; more gain little here and lose much on a busy machine)",
    )
    add("--every", metavar="N", type=whole_number(1), default=1, help="decode steps that a line sums up (default: 1)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Read, run, check, report."""
    cores = os.cpu_count() or 1
    if args.threads > cores:
        raise UsageError(f"--threads: this machine has {console.count(cores, 'core')}, got {args.threads}")
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        return _demo(args)
    finally:
        torch.set_num_threads(threads)


def _demo(args: argparse.Namespace) -> int:
    check_overrides()
    check_json(args.json)
    args.device = None if args.device == "auto" else args.device
    where = device(args)
    prompt = _read(args.text, args.max_tokens)
    pages = -(-(len(prompt.content) + args.steps) // PAGE)
    settings = Settings(
        shape=Shape(num_layers=args.layers),
        steps=args.steps,
        top_pages=max(2, min(args.topk_pages, pages)),
        seed=args.seed,
    )
    _introduce(prompt, settings, where)
    job = _run(settings, prompt.content, where)
    results = report.by_phase(job, _check(job))
    source = {"text": prompt.name, "truncated": prompt.truncated, "threads": args.threads}
    record = provenance.record(where, args.command_line) | source | report.content(results, settings)
    written = write_json(args.json, record)
    for table in (
        report.steps(results, args.every),
        report.totals(results),
        report.variants(job),
        report.memory(job),
    ):
        console.table(*table)
    console.out(f"\n{report.MEANING}")
    console.out(f"\nThe decoder wrote (noise: its weights are random):\n{job.generated!r}")
    failures = report.failures(results)
    for failure in failures[:FAILURES_SHOWN]:
        console.error(failure)
    if len(failures) > FAILURES_SHOWN:
        console.error(f"... and {len(failures) - FAILURES_SHOWN} more")
    return int(not written or bool(failures))


class Prompt(NamedTuple):
    """The bytes to prefill, and where they come from."""

    name: str
    content: bytes
    truncated: bool


def _read(path: Path | None, limit: int) -> Prompt:
    """The first ``limit`` bytes of a file."""
    path = path or _default_text()
    try:
        if path.is_fifo() or path.is_char_device():
            console.error(f"reading {str(path)!r}, a pipe or device, to its end or for more than {limit} bytes")
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"TEXT_FILE: cannot read {str(path)!r}: {reason}") from error
    if not content:
        raise UsageError(f"TEXT_FILE: {str(path)!r} is empty; at least one byte is needed")
    return Prompt(path.name, content[:limit], len(content) > limit)


def _default_text() -> Path:
    """The README of the checkout that this package lies in, or the text that comes with the package."""
    readme = provenance.CHECKOUT / "README.md"
    return readme if readme.is_file() and (provenance.CHECKOUT / "pyproject.toml").is_file() else PACKAGED


def _introduce(prompt: Prompt, settings: Settings, where: torch.device) -> None:
    shape, tokens = settings.shape, len(prompt.content)
    rest = "; the rest is left out (--max-tokens)" if prompt.truncated else ""
    amount = "1 byte is one token" if tokens == 1 else f"{tokens} bytes are as many tokens"
    console.out(f"text     {prompt.name}: {amount}{rest}")
    layers = console.count(shape.num_layers, "layer")
    console.out(
        f"decoder  {layers} of {shape.num_heads} query and {shape.num_kv_heads} KV heads of {shape.head_dim}, "
        f"indexers of {shape.index_heads} heads of {shape.index_dim}, seed {settings.seed}"
    )
    pages = -(-(tokens + settings.steps) // PAGE)
    if settings.top_pages < pages:
        seen = f"{settings.top_pages} pages of {PAGE} tokens at most, of {pages} at the end"
    else:
        seen = f"every page of {PAGE} tokens so far, {pages} at the end"
    console.out(f"sparse   a token attends to {seen}")
    threads = f"CPU, {console.count(torch.get_num_threads(), 'thread')}"
    console.out(f"device   {provenance.machine(where)['device']} ({threads if where.type == 'cpu' else where.type})")


def _run(settings: Settings, prompt: bytes, where: torch.device) -> Job:
    """The job, timed; on a GPU once before, untimed, so that no kernel is compiled on the clock."""
    decoder = Decoder(settings.shape, settings.seed, where)
    if where.type == "cuda":
        start = time.perf_counter()
        _run_once(decoder, settings, prompt, "warm-up")
        console.out(f"warm-up  {time.perf_counter() - start:.1f} s for a first run, which compiles kernels")
    return _run_once(decoder, settings, prompt, "tokens")


def _run_once(decoder: Decoder, settings: Settings, prompt: bytes, label: str) -> Job:
    with console.Progress(len(prompt) + settings.steps, label) as progress:

        def report(phase: str, count: int) -> None:
            progress.show(phase)
            progress.advance(count)

        return run_job(decoder, settings, prompt, report)


def _check(job: Job) -> list[Row]:
    kept = sum(len(attention.output) for history in job.engine.history for attention in history.attentions)
    with console.Progress(kept, "check") as progress:
        return check(job.engine, progress.advance)
