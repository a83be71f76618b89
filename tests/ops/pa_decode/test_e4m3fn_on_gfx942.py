"""Caches of e4m3fn where hardware knows e4m3fnuz alone: every byte of keys and of values, interpreted here."""

import pytest
import torch

from kvscout import fp8, pa_decode, plan_pa_decode
from kvscout.kernels.triton import INTERPRET
from kvscout.ops.pa_decode import api

pytestmark = pytest.mark.skipif(not INTERPRET, reason="needs Triton's interpreter: TRITON_INTERPRET=1")

DIM, PAGE = 64, 16


EVERY = torch.arange(256, dtype=torch.uint8)
# A NaN key may spoil its sequence.
KEYS = torch.where(EVERY.view(fp8.FN).float().isnan(), 0, EVERY)


def call(layout):
    """16 sequences of one token: its key begins with 16 bytes, one for each head to read, its values are 64 bytes."""
    keys = torch.zeros(16, 1, PAGE, DIM, dtype=torch.uint8)
    keys[:, 0, 0, :16] = KEYS.view(16, 16)
    values = torch.full((16, 1, PAGE, DIM), 0x7F, dtype=torch.uint8)
    values[:, 0, 0] = EVERY.view(4, DIM).repeat(4, 1)
    if layout == "nhd":
        keys, values = keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()
    query = torch.eye(16, DIM, dtype=torch.bfloat16).repeat(16, 1, 1)
    lengths = torch.ones(16, dtype=torch.int32)
    return {
        "output": torch.full_like(query, 7.0),
        "query": query,
        "key_cache": keys.view(fp8.FN),
        "value_cache": values.view(fp8.FN),
        "context_lengths": lengths,
        "block_tables": torch.arange(16).int()[:, None],
        "softmax_scale": 1.0,
        "work_plan": plan_pa_decode(lengths, 1),
        "kv_layout": layout,
        "lse": torch.full((16, 16), float("nan")),
    }


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_every_byte_of_keys_and_values(monkeypatch, layout):
    given = call(layout)
    monkeypatch.setattr(api, "arch_of", lambda device: "gfx942")
    pa_decode(**given, variant="triton_tile")
    torch.testing.assert_close(given["lse"].flatten(), KEYS.view(fp8.FN).float(), rtol=1e-6, atol=1e-7)
    values = EVERY.view(fp8.FN).to(torch.bfloat16).view(4, 1, DIM).repeat(4, 16, 1)
    torch.testing.assert_close(given["output"], values, rtol=0, atol=0, equal_nan=True)
