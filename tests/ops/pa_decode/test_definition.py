"""The reference itself, against the formula of the docstring one number at a time."""

import itertools
import math

import pytest
import torch

from kvscout import paging
from kvscout.ops.pa_decode.variants.torch_reference import reference

NAN = float("nan")


def key_at(cache, layout, block, head, place, dim):
    """An element of a key cache, by the table in the docstring of ``kvscout.paging``."""
    x = 16 // cache.element_size()
    return {
        "chunked": lambda: cache[block, head, dim // x, place, dim % x],
        "plain_v": lambda: cache[block, head, dim // x, place, dim % x],
        "nhd": lambda: cache[block, place, head, dim],
        "hnd": lambda: cache[block, head, place, dim],
    }[layout]()


def value_at(cache, layout, block, head, place, dim):
    """An element of a value cache, by the same table."""
    x = 16 // cache.element_size()
    return {
        "chunked": lambda: cache[block, head, place // x, dim, place % x],
        "plain_v": lambda: cache[block, head, dim, place],
        "nhd": lambda: cache[block, place, head, dim],
        "hnd": lambda: cache[block, head, place, dim],
    }[layout]()


def brute_force(call, query_length, window, causal, scales, sinks):
    """Outputs and lse with neither masks nor matrix products; ``scales`` are ``[blocks, Hkv, page]`` or numbers."""
    layout, query, tables = call["kv_layout"], call["query"], call["block_tables"]
    page = 16
    kv_heads = call["work_plan"].num_kv_heads
    group = query.shape[1] // kv_heads
    output, lse = torch.zeros(query.shape, dtype=torch.float64), torch.full(query.shape[:2], -math.inf).double()
    key_scale, value_scale = (s if isinstance(s, torch.Tensor) else None for s in scales)
    key_factor, value_factor = (1.0 if isinstance(s, torch.Tensor) else s for s in scales)
    for sequence, length in enumerate(call["context_lengths"].tolist()):
        for query_token, head in itertools.product(range(query_length), range(query.shape[1])):
            row, kv_head, position = (
                sequence * query_length + query_token,
                head // group,
                length - query_length + query_token,
            )
            logits, values = [], []
            for token in range(max(length, 0)):
                if causal and token > position:
                    continue
                if window and not (abs(token - position) < window):
                    continue
                block, place = int(tables[sequence, token // page]), token % page
                where = (layout, block, kv_head, place)
                q = query[row, head].tolist()
                dot = sum(q[d] * float(key_at(call["key_cache"], *where, d)) for d in range(len(q)))
                scale = key_factor if key_scale is None else float(key_scale[block, kv_head, place])
                logits.append(call["softmax_scale"] * scale * dot)
                scale = value_factor if value_scale is None else float(value_scale[block, kv_head, place])
                values.append([scale * float(value_at(call["value_cache"], *where, d)) for d in range(len(q))])
            if not logits:
                continue
            sink = -math.inf if sinks is None else float(sinks[head])
            if sink == math.inf:
                lse[row, head] = math.inf
                continue
            total = sum(map(math.exp, logits)) + math.exp(sink)
            lse[row, head] = math.log(total)
            for logit, value in zip(logits, values, strict=True):
                output[row, head] += math.exp(logit) / total * torch.tensor(value, dtype=torch.float64)
    return output, lse


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("layout", "cache", "window", "query_length", "scale", "with_sinks"),
    [
        ("chunked", torch.float8_e4m3fn, 3, 2, "token", True),
        ("plain_v", torch.float8_e4m3fn, 0, 3, "number", True),
        ("nhd", torch.bfloat16, 1, 2, None, False),
        ("hnd", torch.bfloat16, 0, 1, None, True),
    ],
)
def test_the_definition_is_the_formula(make, layout, cache, window, query_length, scale, with_sinks, causal):
    lengths = (1, 0, 18, 5)
    call = make(lengths, layout=layout, cache=cache, query_length=query_length, sliding_window=window)
    scales = {None: (1.0, 1.0), "number": (0.7, 1.3), "token": torch.rand(2, len(call["key_cache"]), 2, 16) + 0.5}[
        scale
    ]
    sinks = torch.tensor([0.3, -math.inf, math.inf, 2.0]) if with_sinks else None
    kv = paging.pages(call["key_cache"], call["value_cache"], 2, layout)
    found = reference(
        call["query"], kv, call["context_lengths"], call["block_tables"], call["softmax_scale"], query_length,
        key_scale=scales[0], value_scale=scales[1], sinks=sinks, window=window, causal=causal,
    )  # fmt: skip
    expected = brute_force(call, query_length, window, causal, scales, sinks)
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6 if scale == "token" else 1e-12, atol=1e-15)


def test_a_window_counts_the_query_itself(make, variant):
    """With a window of 1 a query attends to its own token alone, whose value is the result."""
    from kvscout import pa_decode

    call = make((40,), sliding_window=1, query_length=3)
    output = pa_decode(**call, variant=variant)
    values = paging.pages(call["key_cache"], call["value_cache"], 2, "hnd").values
    for query_token, token in enumerate((37, 38, 39)):
        own = values[int(call["block_tables"][0, token // 16]), :, 0, token % 16]
        assert torch.equal(output[query_token].view(2, 2, 64), own[:, None].expand(2, 2, 64))
