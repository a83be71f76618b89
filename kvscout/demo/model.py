"""A small decoder with seeded random weights, without its attention: what comes before it and what comes after."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

VOCABULARY = 256
"""Tokens are bytes."""

SCORE_SPREAD = 2.0
"""Standard deviation of the scaled attention scores: some keys then matter, and none takes all the weight."""

ROPE_BASE = 10000.0
NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class Shape:
    """Sizes of the decoder."""

    num_layers: int = 4
    hidden: int = 256
    mlp: int = 768
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    index_heads: int = 16
    index_dim: int = 64

    @property
    def parts(self) -> tuple[int, ...]:
        """Columns of a layer's input projection: q, k, v, index q, index k, index head weights."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return q, kv, kv, self.index_heads * self.index_dim, self.index_dim, self.index_heads


class LayerWeights(NamedTuple):
    """Weights of one layer, ``[fan in, fan out]``; ``gate_up`` holds both halves of SwiGLU."""

    project: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


class Projected(NamedTuple):
    """What a layer's attention takes of ``n`` tokens; RoPE applied, nothing quantised yet.

    Attributes:
        q: bfloat16 ``[n, Hq, D]``.
        k: bfloat16 ``[n, Hkv, D]``.
        v: bfloat16 ``[n, Hkv, D]``.
        index_q: float32 ``[n, H, Di]``.
        index_k: float32 ``[n, Di]``, shared by the index heads.
        index_weights: float32 ``[n, H]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    index_q: Tensor
    index_k: Tensor
    index_weights: Tensor


class Decoder:
    """RMSNorm, RoPE, grouped-query attention with an indexer, SwiGLU. The same seed gives the same weights anywhere."""

    def __init__(self, shape: Shape, seed: int, device: torch.device) -> None:
        self.shape, self.device = shape, device
        generator = torch.Generator().manual_seed(seed)

        def weight(fan_in: int, fan_out: int) -> Tensor:
            return (torch.randn(fan_in, fan_out, generator=generator) / math.sqrt(fan_in)).to(device)

        def layer() -> LayerWeights:
            return LayerWeights(
                project=weight(shape.hidden, sum(shape.parts)),
                output=weight(shape.num_heads * shape.head_dim, shape.hidden),
                gate_up=weight(shape.hidden, 2 * shape.mlp),
                down=weight(shape.mlp, shape.hidden),
            )

        self.embedding = torch.randn(VOCABULARY, shape.hidden, generator=generator).to(device)
        self.layers = [layer() for _ in range(shape.num_layers)]
        self.head = weight(shape.hidden, VOCABULARY)

    @property
    def num_bytes(self) -> int:
        """Memory that the weights take."""
        weights = (self.embedding, self.head, *(weight for layer in self.layers for weight in layer))
        return sum(int(weight.nbytes) for weight in weights)

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states ``[n, hidden]`` of tokens ``[n]``."""
        return torch.index_select(self.embedding, 0, tokens)

    def project(self, layer: int, x: Tensor, positions: Tensor) -> Projected:
        """What a layer's attention takes."""
        shape = self.shape
        parts = (_norm(x) @ self.layers[layer].project).split(shape.parts, dim=1)
        q, k, v = (part.unflatten(1, (-1, shape.head_dim)) for part in parts[:3])
        index_q, index_k = parts[3].unflatten(1, (-1, shape.index_dim)), parts[4]
        return Projected(
            q=_rope(q * SCORE_SPREAD, positions).bfloat16(),
            k=_rope(k, positions).bfloat16(),
            v=v.bfloat16(),
            index_q=_rope(index_q, positions),
            index_k=_rope(index_k[:, None], positions)[:, 0],
            index_weights=parts[5] * (shape.index_heads * shape.index_dim) ** -0.5,
        )

    def finish(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's hidden states, from its input and from what it attended to, ``[n, Hq, D]``."""
        weights = self.layers[layer]
        x = x + attended.flatten(1).float() @ weights.output
        gate, up = (_norm(x) @ weights.gate_up).chunk(2, dim=1)
        return torch.addmm(x, torch.nn.functional.silu(gate) * up, weights.down)

    def next_token(self, x: Tensor) -> Tensor:
        """The likeliest next token after each of the hidden states ``[n, hidden]``."""
        return torch.argmax(_norm(x) @ self.head, dim=1)


def _norm(x: Tensor) -> Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + NORM_EPSILON).rsqrt()


def _rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate each head's halves ``[n, heads, d]`` by angles that grow with the position."""
    half = x.shape[-1] // 2
    frequency = ROPE_BASE ** (-torch.arange(half, device=x.device) / half)
    angle = positions[:, None, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
