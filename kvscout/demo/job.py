"""The timed part of the demo: prefill, then greedy decode, with what ran, how long it took and what memory it used."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..variants import observe
from .engine import CHUNK, EVERY_ROW, Engine
from .model import Decoder, Shape

OpCounts = Counter[tuple[str, str]]
"""Calls by op and variant."""


@dataclass(frozen=True)
class Settings:
    """What makes a run; the same settings and prompt give the same tokens on the same machine."""

    shape: Shape
    steps: int
    top_pages: int
    seed: int


@dataclass(frozen=True)
class Job:
    """A finished run.

    Attributes:
        engine: the caches and the history that the checks look at.
        prompt_tokens: tokens that were prefilled.
        generated: the bytes that were decoded.
        prefill_s: seconds for the prompt.
        step_s: seconds for each decoded token.
        prefill_ops: variants that prefill ran.
        decode_ops: variants that decode ran.
        memory: bytes by what holds them, "peak" last; the peak of a GPU's allocator, or of this process.
    """

    engine: Engine
    prompt_tokens: int
    generated: bytes
    prefill_s: float
    step_s: list[float]
    prefill_ops: OpCounts
    decode_ops: OpCounts
    memory: dict[str, int]


class Clock:
    """Times marks on the device's own time line, so that marking never waits for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] | None = [] if device.type == "cuda" else None
        self._seconds: list[float] = []

    def mark(self) -> None:
        """Note the time at which the work so far is done."""
        if self._events is None:
            self._seconds.append(time.perf_counter())
        else:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)

    def seconds(self) -> list[float]:
        """Seconds between successive marks."""
        if self._events is None:
            return [after - before for before, after in zip(self._seconds, self._seconds[1:], strict=False)]
        self._events[-1].synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def run(
    decoder: Decoder,
    settings: Settings,
    prompt: bytes,
    report: Callable[[str, int], None] = lambda phase, count: None,
    prompt_rows: int = 64,
) -> Job:
    """Prefill the prompt and decode ``settings.steps`` tokens.

    A step takes the likeliest next byte and puts it through the decoder, so that every generated token is scored,
    selected and attended for. ``report("prefill" | "decode", n)`` is told of every ``n`` more tokens. Kept for the
    checks are all decoded tokens and at most ``prompt_rows`` of the prompt, evenly spread, the last one included.
    """
    device = decoder.device
    engine = Engine(decoder, len(prompt) + settings.steps, settings.top_pages, settings.seed)
    tokens = torch.frombuffer(bytearray(prompt), dtype=torch.uint8).long().to(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    stride = -(-len(tokens) // prompt_rows)
    clock = Clock(device)
    clock.mark()
    with observe() as prefill_ops:
        for first in range(0, len(tokens), CHUNK):
            chunk = tokens[first : first + CHUNK]
            keep = slice((len(tokens) - 1 - first) % stride, None, stride) if stride > 1 else EVERY_ROW
            hidden = engine.forward(chunk, first, keep)
            report("prefill", len(chunk))
    clock.mark()
    generated = []
    with observe() as decode_ops:
        for position in range(len(tokens), len(tokens) + settings.steps):
            token = decoder.next_token(hidden)
            generated.append(token)
            hidden = engine.forward(token, position)
            clock.mark()
            report("decode", 1)
    prefill_s, *step_s = clock.seconds()
    return Job(
        engine=engine,
        prompt_tokens=len(tokens),
        generated=bytes(torch.cat(generated).tolist()),
        prefill_s=prefill_s,
        step_s=step_s,
        prefill_ops=prefill_ops,
        decode_ops=decode_ops,
        memory=_memory(engine),
    )


def _memory(engine: Engine) -> dict[str, int]:
    used = {
        "weights": engine.decoder.num_bytes,
        "KV cache": sum(cache.kv_bytes for cache in engine.caches),
        "index cache": sum(cache.index_bytes for cache in engine.caches),
        "logits": engine.logits.nbytes,
        "kept for the checks": sum(history.num_bytes for history in engine.history),
    }
    peak = _peak(engine.decoder.device)
    return used if peak is None else used | {"peak": peak}


def _peak(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not a POSIX system
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
