"""What the demo's selection and attention are worth: compared, after the clock has stopped, with what they stand for.

Everything is computed anew in float32 or float64, on the CPU, from the float tokens that the decoder projected and from
the bytes that the caches hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import paging
from ..ops.mqa_logits.variants.torch_reference import reference as score
from .caches import PAGE, LayerCache
from .engine import Attention, Engine, History, page_scores

ERROR_BUDGET = 4e-3
"""What a row's attention may be off by, relative to its norm: twice what bfloat16 alone makes of the worst row."""


@dataclass(frozen=True)
class Row:
    """The figures of one row in one layer.

    Attributes:
        layer: the layer.
        position: the row's token.
        had_choice: there were more full pages than were selected.
        valid: the selected pages are distinct pages before the row's own, and its own is the last.
        page_recall: part of the k best pages that was selected, by the unquantised float32 scores; its own not counted.
        token_recall: part of the best tokens, as many as were selected, that lies in the selected pages; likewise.
        kernel_error: of the output, against float64 attention over the selected keys and values as they are cached.
        quantisation_error: against float64 attention over the same keys and values before they were quantised.
    """

    layer: int
    position: int
    had_choice: bool
    valid: bool
    page_recall: float
    token_recall: float
    kernel_error: float
    quantisation_error: float

    @property
    def ok(self) -> bool:
        """Whether the selection is a legal one and the kernel computed what it should; false for NaN."""
        return self.valid and self.kernel_error <= ERROR_BUDGET


@dataclass(frozen=True)
class Summary:
    """Figures of many rows: recalls on average over those that had a choice, or all if none had; errors at worst."""

    rows: int
    page_recall: float
    token_recall: float
    kernel_error: float
    quantisation_error: float


def summary(rows: Sequence[Row]) -> Summary:
    """Sum up one row or more."""
    choosing = [row for row in rows if row.had_choice] or rows
    return Summary(
        rows=len(rows),
        page_recall=sum(row.page_recall for row in choosing) / len(choosing),
        token_recall=sum(row.token_recall for row in choosing) / len(choosing),
        kernel_error=_worst([row.kernel_error for row in rows]),
        quantisation_error=_worst([row.quantisation_error for row in rows]),
    )


def _worst(errors: Sequence[float]) -> float:
    return float(torch.tensor(errors, dtype=torch.float64).max())  # NaN where there is one


def check(engine: Engine, report: Callable[[int], None] = lambda count: None) -> list[Row]:
    """The figures of every row that was kept, in every layer; ``report`` is told how many more are done."""
    rows: list[Row] = []
    for layer, (cache, history) in enumerate(zip(engine.caches, engine.history, strict=True)):
        past = _Past(layer, history, cache, engine.block_of_page)
        for attention in history.attentions:
            rows += past.check(Attention(*(tensor.cpu() for tensor in attention)))
            report(len(attention.output))
    return rows


class _Past:
    """One layer's whole sequence: as it was projected, and as it is cached. It only grew, so any row can be checked."""

    def __init__(self, layer: int, history: History, cache: LayerCache, block_of_page: Tensor) -> None:
        self.layer = layer
        self.keys, self.values, self.index_keys = (
            torch.cat(parts).cpu() for parts in zip(*history.written, strict=True)
        )
        self.page_of_block = block_of_page.cpu().argsort()
        kv = paging.pages(cache.key_cache.cpu(), cache.value_cache.cpu(), self.keys.shape[1])
        self.cached_keys = _by_slot(kv.keys.flatten(3), cache.key_scale.cpu())
        self.cached_values = _by_slot(kv.values.flatten(2, 3), cache.value_scale.cpu())

    def check(self, rows: Attention) -> list[Row]:
        """The figures of the rows of one attention."""
        pages = self.page_of_block[rows.block_tables.long()]
        kernel, quantisation = self._errors(rows, pages)
        scores = self._scores(rows)
        found = []
        numbers = (t.tolist() for t in (rows.positions, rows.full_pages, rows.chosen))
        for i, (position, full, chosen) in enumerate(zip(*numbers, strict=True)):
            selected = pages[i, :chosen]
            valid = len(selected.unique()) == chosen and bool((selected < full).all()) and int(pages[i, chosen]) == full
            page_recall, token_recall = _recall(scores[i], selected[selected < full], chosen)
            found.append(
                Row(
                    layer=self.layer,
                    position=position,
                    had_choice=full > chosen,
                    valid=valid,
                    page_recall=page_recall,
                    token_recall=token_recall,
                    kernel_error=kernel[i],
                    quantisation_error=quantisation[i],
                )
            )
        return found

    def _errors(self, rows: Attention, pages: Tensor) -> tuple[list[float], list[float]]:
        """Errors against the cache, and against what was written into it."""
        slots, positions = (
            (first[..., None] * PAGE + torch.arange(PAGE)).flatten(1) for first in (rows.block_tables.long(), pages)
        )
        visible = torch.arange(slots.shape[1]) < rows.lengths[:, None]
        positions = positions.clamp(max=len(self.keys) - 1)
        cached = _attend(rows.q, self.cached_keys[slots], self.cached_values[slots], visible)
        original = _attend(rows.q, self.keys[positions].double(), self.values[positions].double(), visible)
        return _relative(rows.output.double(), cached), _relative(rows.output.double(), original)

    def _scores(self, rows: Attention) -> Tensor:
        """Float32 logits ``[n, tokens in full pages]``, nothing quantised; -inf past a row's own full pages."""
        ends = rows.full_pages * PAGE
        seen = int(ends.max())
        keys, ones, starts = self.index_keys[:seen], torch.ones(seen), torch.zeros_like(ends)
        return score(rows.index_q, keys, ones, rows.index_weights, starts, ends, dtype=torch.float32)


def _by_slot(pages: Tensor, scale: Tensor) -> Tensor:
    """float64 ``[slots, Hkv, D]`` of e4m3 ``[blocks, Hkv, PAGE, D]`` and float32 ``[blocks, Hkv, PAGE]``."""
    return (pages.double() * scale[..., None].double()).transpose(1, 2).flatten(0, 1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Dense float64 attention from queries ``[n, Hq, D]`` to ``[n, N, Hkv, D]``, where ``visible [n, N]``."""
    grouped = query.double().unflatten(1, (keys.shape[2], -1))
    scores = torch.einsum("rhgd,rnhd->rhgn", grouped, keys) * query.shape[2] ** -0.5
    weights = scores.masked_fill(~visible[:, None, None], float("-inf")).softmax(dim=3)
    return torch.einsum("rhgn,rnhd->rhgd", weights, values).flatten(1, 2)


def _relative(output: Tensor, reference: Tensor) -> list[float]:
    """Norm of each row's error, over the norm of what is right."""
    errors: list[float] = ((output - reference).flatten(1).norm(dim=1) / reference.flatten(1).norm(dim=1)).tolist()
    return errors


def _recall(scores: Tensor, selected: Tensor, count: int) -> tuple[float, float]:
    """Recall of the ``count`` best pages, and of as many tokens as those hold. Equal scores are equally good."""
    if count == 0:
        return 1.0, 1.0
    best = page_scores(scores[None])[0]
    inside = scores.unflatten(0, (-1, PAGE))[selected]
    pages = best[selected] >= best.topk(count).values[-1]
    tokens = inside >= scores.topk(count * PAGE).values[-1]
    return int(pages.sum()) / count, int(tokens.sum()) / (count * PAGE)
