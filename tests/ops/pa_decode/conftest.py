"""Calls of ``pa_decode`` to start from, and the variants that the tests of this folder run on."""

import pytest
import torch

from kvscout import plan_pa_decode
from kvscout.ops.pa_decode.api import FAMILY
from kvscout.testing import paged_inputs


@pytest.fixture(params=FAMILY.names)
def variant(request):
    """Name of each variant that runs here."""
    refusal = FAMILY.unavailable(request.param, "cpu")
    if refusal is not None:
        pytest.skip(refusal)
    return request.param


def _make(
    lengths=(5, 0, 300),
    group=2,
    kv_heads=2,
    dim=64,
    page=16,
    layout="hnd",
    cache=torch.bfloat16,
    query_length=1,
    sliding_window=0,
    tile=None,
    seed=0,
):
    generator = torch.Generator().manual_seed(seed)
    tables = paged_inputs.tables(lengths, page, generator)
    key_cache, value_cache = paged_inputs.caches(layout, tables, kv_heads, page, dim, cache, generator)
    query = torch.randn(len(lengths) * query_length, group * kv_heads, dim, generator=generator).bfloat16()
    context_lengths = torch.tensor(lengths, dtype=torch.int32)
    options = {"query_length": query_length, "sliding_window": sliding_window}
    split = {"max_partitions": 4, "workgroup_budget": 8, "tile": tile}
    return {
        "output": torch.full_like(query, float("nan")),
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "context_lengths": context_lengths,
        "block_tables": tables.block_tables,
        "softmax_scale": dim**-0.5,
        "work_plan": plan_pa_decode(context_lengths, kv_heads, **split, **options),
        "kv_layout": layout,
        **options,
    }


@pytest.fixture
def make():
    """``make(lengths=(5, 0, 300), ...)``: the arguments of a call, its output full of NaN."""
    return _make
