"""Prefill and decode by score, select, attend. Nothing here waits for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import fp8
from ..ops.mqa_logits.api import fp8_mqa_logits
from ..ops.pa_decode.api import pa_decode
from ..ops.pa_plan.api import get_recommended_splits, plan_pa_decode
from ..ops.pa_plan.plan import PADecodePlan
from ..ops.topk.api import topk_indices
from .caches import PAGE, LayerCache
from .model import Decoder, Projected

CHUNK = 256
"""Rows of a prefill that go through the decoder together."""


class Rows(NamedTuple):
    """What ``n`` successive tokens see; the same in every layer.

    Attributes:
        first: position of the first token.
        positions: int64 ``[n]``.
        slots: int64 ``[n]``, each token's place in the pages.
        starts: int32 ``[n]``, zeros: the first token that is seen.
        ends: int32 ``[n]``, one past the last token that is seen, which is the row's own.
        full_pages: int32 ``[n]``, pages before the row's newest one: those that can be selected.
        chosen: int32 ``[n]``, how many of them will be.
        lengths: int32 ``[n]``, tokens in the selected pages and the newest one.
    """

    first: int
    positions: Tensor
    slots: Tensor
    starts: Tensor
    ends: Tensor
    full_pages: Tensor
    chosen: Tensor
    lengths: Tensor


EVERY_ROW = slice(None)


class Attention(NamedTuple):
    """What the checks need of some rows' attention in one layer.

    ``block_tables`` holds blocks of the pool; the first ``chosen + 1`` entries of a row count. For the others see
    :class:`Rows` and :class:`~kvscout.demo.model.Projected`.
    """

    positions: Tensor
    full_pages: Tensor
    chosen: Tensor
    lengths: Tensor
    q: Tensor
    index_q: Tensor
    index_weights: Tensor
    block_tables: Tensor
    output: Tensor


class History(NamedTuple):
    """What the checks need of one layer: its attentions, and (k, v, index k) of all tokens before quantisation."""

    attentions: list[Attention]
    written: list[tuple[Tensor, Tensor, Tensor]]

    @property
    def num_bytes(self) -> int:
        """Memory that this takes."""
        return sum(int(tensor.nbytes) for group in (*self.attentions, *self.written) for tensor in group)


class Engine:
    """One sequence's caches, and the way of its tokens through the decoder.

    Attributes:
        top_pages: pages that a row attends to: the best ones and its newest, which may be partly filled.
        block_of_page: int32 ``[pages]``: where each page of the sequence lies in the pools. Shuffled, as after a while
            in a pool that many sequences share.
        logits: float32 ``[rows, tokens]``, the scores, written anew by every layer.
        history: what is kept for the checks, by layer.
    """

    def __init__(self, decoder: Decoder, max_tokens: int, top_pages: int, seed: int) -> None:
        device, shape, pages = decoder.device, decoder.shape, -(-max_tokens // PAGE)
        self.decoder = decoder
        self.top_pages = top_pages
        self.block_of_page = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).int().to(device)
        self.caches = [LayerCache(shape, pages, device) for _ in range(shape.num_layers)]
        self.logits = torch.empty(min(CHUNK, max_tokens), pages * PAGE, device=device)
        self.history = [History([], []) for _ in range(shape.num_layers)]
        self._plans: dict[int, PADecodePlan] = {}

    def forward(self, tokens: Tensor, first: int, keep: slice = EVERY_ROW) -> Tensor:
        """Hidden state ``[1, hidden]`` after the last of ``tokens``, which begin at position ``first``.

        ``keep`` says which rows the checks will want: of every row as it is, of some rows a copy.
        """
        rows = self._rows(first, len(tokens))
        plan, rotation = self._plan(rows), self.decoder.rotation(rows.positions)
        x = self.decoder.embed(tokens)
        for layer in range(self.decoder.shape.num_layers):
            projected = self.decoder.project(layer, x, rotation)
            x = self.decoder.finish(layer, x, self._attend(layer, projected, rows, plan, keep))
        return x[-1:]

    def _rows(self, first: int, count: int) -> Rows:
        positions = torch.arange(first, first + count, device=self.decoder.device)
        pages = positions // PAGE
        chosen = pages.clamp(max=self.top_pages - 1)
        return Rows(
            first=first,
            positions=positions,
            slots=self.block_of_page[pages] * PAGE + positions % PAGE,
            starts=torch.zeros_like(positions, dtype=torch.int32),
            ends=(positions + 1).int(),
            full_pages=pages.int(),
            chosen=chosen.int(),
            lengths=(chosen * PAGE + positions % PAGE + 1).int(),
        )

    def _plan(self, rows: Rows) -> PADecodePlan:
        """Every row is a sequence of its own. All layers share the plan, and calls of as many rows its memory."""
        count, heads = len(rows.lengths), self.decoder.shape.num_kv_heads
        splits = get_recommended_splits(count, heads)
        plan = plan_pa_decode(rows.lengths, heads, max_partitions=splits, plan=self._plans.get(count))
        self._plans[count] = plan
        return plan

    def _attend(self, layer: int, tokens: Projected, rows: Rows, plan: PADecodePlan, keep: slice) -> Tensor:
        """Remember the tokens, then score, select, attend: bfloat16 ``[n, Hq, D]``."""
        cache = self.caches[layer]
        cache.append(tokens, rows.first, rows.slots)
        block_tables = self._select(self._score(tokens, rows, cache), rows)
        output = torch.empty_like(tokens.q, memory_format=torch.contiguous_format)
        pa_decode(
            output,
            tokens.q,
            cache.key_cache,
            cache.value_cache,
            rows.lengths,
            block_tables,
            self.decoder.shape.head_dim**-0.5,
            work_plan=plan,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
        )
        self._remember(layer, rows, tokens, block_tables, output, keep)
        return output

    def _score(self, tokens: Projected, rows: Rows, cache: LayerCache) -> Tensor:
        """Logits of every token in the pages so far; those that a row does not see are left as they were."""
        count = len(rows.positions)
        seen = -(-(rows.first + count) // PAGE) * PAGE
        q_scale = fp8.amax_scale(tokens.index_q, 2)
        return fp8_mqa_logits(
            fp8.quantize(tokens.index_q, q_scale[..., None]),
            (cache.index_keys[:seen], cache.index_scale[:seen]),
            tokens.index_weights,
            rows.starts,
            rows.ends,
            clean_logits=False,
            q_scale=q_scale,
            out=self.logits[:count, :seen],
        )

    def _select(self, logits: Tensor, rows: Rows) -> Tensor:
        """Block tables: the best of each row's full pages, then its newest page.

        Their order is free, because keys carry their position, but for the last place: only there can a page be partly
        filled.
        """
        pages = torch.full((len(logits), self.top_pages), -1, dtype=torch.int32, device=logits.device)
        topk_indices(page_scores(logits), self.top_pages - 1, ends=rows.full_pages, out=pages[:, :-1])
        pages.scatter_(1, rows.chosen[:, None].long(), rows.full_pages[:, None])
        return torch.take(self.block_of_page, pages.clamp_(min=0).long())

    def _remember(
        self, layer: int, rows: Rows, tokens: Projected, block_tables: Tensor, output: Tensor, keep: slice
    ) -> None:
        seen = (rows.positions, rows.full_pages, rows.chosen, rows.lengths)
        everything = Attention(*seen, tokens.q, tokens.index_q, tokens.index_weights, block_tables, output)
        if keep != EVERY_ROW:
            everything = Attention(*(tensor[keep].clone() for tensor in everything))
        if len(everything.output):
            self.history[layer].attentions.append(everything)
        self.history[layer].written.append((tokens.k, tokens.v, tokens.index_k))


def page_scores(logits: Tensor) -> Tensor:
    """The best logit of each page: ``[n, pages * PAGE]`` to ``[n, pages]``."""
    return torch.amax(logits.unflatten(1, (-1, PAGE)), dim=2)
