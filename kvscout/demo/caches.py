"""What one layer remembers of the tokens so far: FP8 paged keys and values, and the indexer's FP8 keys."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import fp8, paging
from ..ops.kv_cache.api import write_kv_cache
from .model import Projected, Shape

PAGE = 16
"""Tokens per page: the smallest page there is, because pages are what gets selected."""


class LayerCache:
    """The caches of one layer, for ``num_pages`` pages.

    Attributes:
        key_cache: e4m3 ``[pages, Hkv, D/16, PAGE, 16]``.
        value_cache: e4m3 ``[pages, Hkv, PAGE/16, D, 16]``.
        key_scale: float32 ``[pages, Hkv, PAGE]``: one scale per token and head.
        value_scale: likewise.
        index_keys: e4m3 ``[pages * PAGE, Di]``, in the order of the tokens.
        index_scale: float32 ``[pages * PAGE]``.
    """

    def __init__(self, shape: Shape, num_pages: int, device: torch.device) -> None:
        heads, tokens = shape.num_kv_heads, num_pages * PAGE
        self.key_cache, self.value_cache = paging.new_caches(
            paging.CHUNKED, num_pages, heads, PAGE, shape.head_dim, fp8.FN, device
        )
        self.key_scale, self.value_scale = (torch.ones(num_pages, heads, PAGE, device=device) for _ in "kv")
        self.index_keys = torch.zeros(tokens, shape.index_dim, dtype=fp8.FN, device=device)
        self.index_scale = torch.ones(tokens, device=device)

    @property
    def kv_bytes(self) -> int:
        """Memory for keys, values and their scales."""
        return sum(t.nbytes for t in (self.key_cache, self.value_cache, self.key_scale, self.value_scale))

    @property
    def index_bytes(self) -> int:
        """Memory for the indexer's keys and their scales."""
        return self.index_keys.nbytes + self.index_scale.nbytes

    def append(self, tokens: Projected, first: int, slots: Tensor) -> None:
        """Remember tokens: the one at position ``first`` and those after it, in the given slots of the pages."""
        write_kv_cache(
            tokens.k,
            tokens.v,
            self.key_cache,
            self.value_cache,
            slots,
            k_scale=self.key_scale,
            v_scale=self.value_scale,
        )
        scale = fp8.amax_scale(tokens.index_k, 1)
        rows = slice(first, first + len(scale))
        self.index_scale[rows] = scale
        self.index_keys[rows] = fp8.quantize(tokens.index_k, scale[:, None])
