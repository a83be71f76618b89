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
        """Columns of a layer's input projection: q and k, v, index q and the one index k, index head weights."""
        kv = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim + kv, kv, (self.index_heads + 1) * self.index_dim, self.index_heads


class LayerWeights(NamedTuple):
    """Weights of one layer, ``[fan in, fan out]``; ``gate_up`` holds both halves of SwiGLU."""

    project: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


class Rotation(NamedTuple):
    """Cosines and sines, float32 ``[n, 1, d / 2]``, that RoPE turns heads by; they depend on the positions alone."""

    heads: tuple[Tensor, Tensor]
    index_heads: tuple[Tensor, Tensor]


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

        def project() -> Tensor:
            columns = weight(shape.hidden, sum(shape.parts))
            columns[:, : shape.num_heads * shape.head_dim] *= SCORE_SPREAD
            columns[:, -shape.index_heads :] *= (shape.index_heads * shape.index_dim) ** -0.5
            return columns

        def layer() -> LayerWeights:
            return LayerWeights(
                project=project(),
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

    def rotation(self, positions: Tensor) -> Rotation:
        """What :meth:`project` turns the heads of tokens at these positions by."""
        return Rotation(_angles(self.shape.head_dim, positions), _angles(self.shape.index_dim, positions))

    def project(self, layer: int, x: Tensor, rotation: Rotation) -> Projected:
        """What a layer's attention takes."""
        shape = self.shape
        qk, v, index_qk, index_weights = (_norm(x) @ self.layers[layer].project).split(shape.parts, dim=1)
        qk = _rope(qk.unflatten(1, (-1, shape.head_dim)), rotation.heads).bfloat16()
        index_qk = _rope(index_qk.unflatten(1, (-1, shape.index_dim)), rotation.index_heads)
        # Keys are kept for all tokens, queries are not: no key may be a view that keeps the queries beside it alive.
        return Projected(
            q=qk[:, : shape.num_heads],
            k=qk[:, shape.num_heads :].contiguous(),
            v=v.unflatten(1, (-1, shape.head_dim)).bfloat16(),
            index_q=index_qk[:, :-1],
            index_k=index_qk[:, -1].contiguous(),
            index_weights=index_weights,
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


def _angles(dim: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    half = dim // 2
    frequency = ROPE_BASE ** (-torch.arange(half, device=positions.device) / half)
    angle = positions[:, None, None] * frequency
    return angle.cos(), angle.sin()


def _rope(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each head's halves ``[n, heads, d]``."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
