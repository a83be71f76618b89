"""What is called for a model: its sizes as its makers publish them, and the batches that a server makes of them.

A model is made of parts, each of which is there or not: ``score`` (``fp8_mqa_logits``), ``select`` (``topk_indices``,
and what makes tables or copies of its result) and ``attend`` (``write_kv_cache``, ``plan_pa_decode``, ``pa_decode``).
Where a field is a list, each of its values is combined with those of the other lists of its part.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import paging
from ..ops.mqa_logits.api import HEAD_DIMS, NUM_HEADS

DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFILL_ROWS = (512, 1024, 2048, 4096, 8192)

# Kernels know a number by whether 16 divides it: so each kind, at the lengths where choices change.
KEYS = (1000, 1024, 4096, 8191, 8192, 32767, 32768, 65536, 131071, 131072)

SCALES = ("none", "number", "tensor", "head", "token")


class WrongModel(ValueError):
    """What describes a model cannot be read; the message names the place and says what was expected."""


@dataclass(frozen=True)
class Score:
    """Calls of ``fp8_mqa_logits``: each number of query rows with each number of keys.

    Attributes:
        heads: indexer heads of one GPU.
        head_dim: their dimension.
        rows: query rows of a call.
        keys: keys of a call.
        clean_logits: whether what lies outside the windows is overwritten.
        q_scale: whether there is a scale per query row and head.
    """

    heads: int
    head_dim: int
    rows: tuple[int, ...] = (*DECODE_ROWS, *PREFILL_ROWS)
    keys: tuple[int, ...] = KEYS
    clean_logits: tuple[bool, ...] = (False,)
    q_scale: tuple[bool, ...] = (False,)


@dataclass(frozen=True)
class Select:
    """Calls of ``topk_indices``, and of the selection that follows where the model also attends.

    Attributes:
        k: entries that are selected per row.
        block_size: tokens that an entry stands for: with 1 they are gathered, with more, block tables are made.
        rows: rows of a call.
        keys: columns of a call.
        sorted: whether the result is sorted.
    """

    k: int
    block_size: int = 1
    rows: tuple[int, ...] = (*DECODE_ROWS, *PREFILL_ROWS)
    keys: tuple[int, ...] = KEYS
    sorted: tuple[bool, ...] = (False,)


@dataclass(frozen=True)
class Attend:
    """Calls of ``write_kv_cache``, ``plan_pa_decode`` and ``pa_decode``.

    Attributes:
        query_heads: query heads of one GPU.
        kv_heads: heads in its caches.
        head_dim: dimension of a head.
        pages: tokens per page.
        layouts: layouts of the caches.
        caches: what the caches hold: "e4m3" (of the kind that the GPU multiplies), "bfloat16" or "float16".
        dtype: of queries and outputs; 16-bit caches of another one are left out.
        scales: of keys and values beside e4m3 caches: "none", "number", "tensor" (of one element), "head" or "token".
        batches: sequences of a call.
        query_lengths: query tokens of a sequence.
        max_blocks: entries of a row of the block tables.
        pool: pages of a cache. AMD kernels know whether a cache has more than 2 GB.
        written_tokens: tokens of a call that writes.
        slot_dtype: dtype of the slot mapping, "int64" or "int32".
        sliding_window: tokens that a query sees; 0 is all.
        causal: whether queries see only what came before.
        sinks: whether there is a sink per head, of float32.
        lse: whether logarithms of the denominators are asked for.
        max_context_length: bounds that ``pa_decode`` is given; null is none.
        max_partitions: as for ``plan_pa_decode``; null takes its default.
        workgroup_budget: likewise.
        tile: likewise.
        batch_invariant: likewise.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    pages: tuple[int, ...]
    layouts: tuple[str, ...] = paging.LAYOUTS
    caches: tuple[str, ...] = ("e4m3", "bfloat16")
    dtype: str = "bfloat16"
    scales: tuple[str, ...] = ("number",)
    batches: tuple[int, ...] = DECODE_ROWS
    query_lengths: tuple[int, ...] = (1,)
    max_blocks: tuple[int, ...] = (1024,)
    pool: tuple[int, ...] = (1 << 16,)
    written_tokens: tuple[int, ...] = (*DECODE_ROWS, *PREFILL_ROWS)
    slot_dtype: str = "int64"
    sliding_window: int = 0
    causal: bool = True
    sinks: bool = False
    lse: tuple[bool, ...] = (False,)
    max_context_length: tuple[int | None, ...] = (None,)
    max_partitions: int | None = None
    workgroup_budget: int | None = None
    tile: int | None = None
    batch_invariant: bool = False


@dataclass(frozen=True)
class Model:
    """The parts of a model that kvscout serves."""

    score: Score | None = None
    select: Select | None = None
    attend: Attend | None = None


MODELS: dict[str, Model] = {
    # index_n_heads, index_head_dim and index_topk of transformers' DeepseekV32Config (deepseek-ai/DeepSeek-V3.2-Exp).
    # Its attention is MLA, whose keys (512 + 64) and values (512) differ, which pa_decode does not serve.
    "deepseek-v3.2": Model(score=Score(64, 128), select=Select(2048)),
    # The same of DeepseekV4Config (deepseek-ai/DeepSeek-V4-Flash-Base); what is selected stands for 4 tokens each.
    # Attention reads a window and what was selected in one softmax: left out here.
    "deepseek-v4": Model(score=Score(64, 128), select=Select(512)),
    # The same of zai-org/GLM-5's config.json, as xLLM's glm5.h has them; MLA like DeepSeek-V3.2.
    "glm-5": Model(score=Score(32, 128), select=Select(2048)),
    # num_attention_heads 64, num_key_value_heads 4 and head_dim 128 of transformers' MiniMaxM3VLTextConfig, for
    # MiniMaxAI/MiniMax-M3-preview; of each KV head, 16 blocks of 128 tokens are selected (arXiv 2606.13392). So this is
    # one of 4 GPUs. Pages of 128 are what vLLM is started with, of 16 what AITER's kernels take. Its indexer has 4
    # heads without weights, which fp8_mqa_logits does not serve.
    "minimax-m3": Model(
        select=Select(16, block_size=128, keys=(8, 64, 256, 1000, 1024)),
        attend=Attend(query_heads=16, kv_heads=1, head_dim=128, pages=(128, 16), layouts=("nhd", "chunked")),
    ),
}
"""Models by the name that ``kvscout aot --model`` takes."""


def read(file: Path) -> dict[str, Model]:
    """Models of a JSON file: ``{"name": {"score": {"heads": 64, ...}, "select": {...}, "attend": {...}}, ...}``.

    Raises:
        WrongModel: it cannot be read, or does not describe models.
    """
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise WrongModel(f"cannot read {str(file)!r}: {error.strerror}") from error
    except ValueError as error:
        raise WrongModel(f"{str(file)!r} is not JSON: {error}") from error
    if not isinstance(content, dict) or not content:
        raise WrongModel(f"{str(file)!r}: expected an object of at least one model by its name, got {_kind(content)}")
    return {name: _model(f"{file}: {name}", value) for name, value in content.items()}


def _model(place: str, value: object) -> Model:
    model: Model = _object(place, value, Model)
    if model == Model():
        raise WrongModel(f"{place}: expected at least one of {', '.join(f.name for f in dataclasses.fields(Model))}")
    if model.score is not None:
        _among(f"{place}: score: heads", model.score.heads, NUM_HEADS)
        _among(f"{place}: score: head_dim", model.score.head_dim, HEAD_DIMS)
    if model.attend is not None:
        _check_attend(f"{place}: attend", model.attend)
    return model


def _check_attend(place: str, attend: Attend) -> None:
    for name, values, accepted in (
        ("pages", attend.pages, paging.PAGE_SIZES),
        ("layouts", attend.layouts, paging.LAYOUTS),
        ("caches", attend.caches, ("e4m3", "bfloat16", "float16")),
        ("dtype", (attend.dtype,), ("bfloat16", "float16")),
        ("scales", attend.scales, SCALES),
        ("slot_dtype", (attend.slot_dtype,), ("int32", "int64")),
    ):
        for value in values:
            _among(f"{place}: {name}", value, accepted)


def _among(place: str, value: object, accepted: typing.Sequence[object]) -> None:
    if value not in accepted:
        raise WrongModel(f"{place}: expected one of {', '.join(map(str, accepted))}, got {value!r}")


def _object(place: str, value: object, kind: type[Any]) -> Any:
    """A dataclass of a JSON object."""
    if not isinstance(value, Mapping):
        raise WrongModel(f"{place}: expected an object, got {_kind(value)}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for name in value:
        if name not in fields:
            raise WrongModel(f"{place}: there is no {name!r}; there are {', '.join(fields)}")
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in value:
            raise WrongModel(f"{place}: {name!r} is missing")
    return kind(**{name: _value(f"{place}: {name}", value[name], hints[name]) for name in value})


def _value(place: str, value: object, hint: Any) -> Any:
    """A field's value, checked against its type."""
    if isinstance(hint, types.UnionType):
        wanted = next(kind for kind in hint.__args__ if kind is not type(None))
        return None if value is None else _value(place, value, wanted)
    if typing.get_origin(hint) is tuple:
        values = value if isinstance(value, list) else [value]
        if not values:
            raise WrongModel(f"{place}: expected at least one value, got an empty list")
        return tuple(_value(place, one, typing.get_args(hint)[0]) for one in values)
    if dataclasses.is_dataclass(hint):
        return _object(place, value, typing.cast("type[Any]", hint))
    if type(value) is not hint:
        raise WrongModel(f"{place}: expected {NAMES[hint]}, got {_kind(value)}")
    lowest = 0 if place.endswith("sliding_window") else 1
    if hint is int and not lowest <= typing.cast("int", value) < 1 << 31:
        raise WrongModel(f"{place}: expected a whole number from {lowest} to {(1 << 31) - 1}, got {value}")
    return value


NAMES = {int: "a whole number", bool: "true or false", str: "a string"}


def _kind(value: object) -> str:
    return f"{type(value).__name__} {value!r}" if isinstance(value, int | float | str) else type(value).__name__
