"""AITER's planned decode, argument by argument, against the definitions in float64 and in plain integers."""

import inspect
import itertools
import math
import re

import pytest
import torch

import kvscout
from kvscout import paging
from kvscout.device import num_sms
from kvscout.integrations import aiter
from kvscout.ops.pa_plan import api as planning
from kvscout.testing import oracles, paged_inputs

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz

NONE = inspect.Parameter.empty
POSITIONAL = {
    "plan_pa_decode": {"context_lengths": NONE, "num_kv_heads": NONE},
    "pa_decode": {
        "output": NONE, "query": NONE, "key_cache": NONE, "value_cache": NONE, "context_lengths": NONE,
        "block_tables": NONE, "softmax_scale": NONE, "query_length": NONE,
    },
    "get_recommended_splits": {"num_sequences": NONE, "num_kv_heads": NONE, "split_kv_blocks": 1},
}  # fmt: skip
BY_KEYWORD = {
    "plan_pa_decode": {
        "max_partitions": None, "workgroup_budget": None, "sliding_window": 0, "query_length": 1, "plan": None,
    },
    "pa_decode": {
        "context_partition_size": 256, "compute_type": torch.bfloat16, "query_scale": None, "key_scale": None,
        "value_scale": None, "exp_sums": None, "max_logits": None, "temporary_output": None, "alibi_slopes": None,
        "sinks": None, "sliding_window": 0, "work_plan": NONE, "max_context_length": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", POSITIONAL)
def test_arguments_have_the_original_s_names_order_and_defaults(name):
    found = inspect.signature(getattr(aiter, name)).parameters.values()
    for kind, expected in (
        (inspect.Parameter.POSITIONAL_OR_KEYWORD, POSITIONAL[name]),
        (inspect.Parameter.KEYWORD_ONLY, BY_KEYWORD.get(name, {})),
    ):
        assert [(p.name, p.default) for p in found if p.kind == kind] == list(expected.items())


LENGTHS = (700, 0, 5, 300)
KV_HEADS, DIM, PAGE = 2, 64, 16


class TestPlan:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"max_partitions": 2},
            {"workgroup_budget": 7},
            {"sliding_window": -1},
            {"sliding_window": 100},
            {"sliding_window": 200, "query_length": 3, "max_partitions": 3, "workgroup_budget": 9},
        ],
        ids=str,
    )
    def test_it_is_the_split_policy(self, options):
        lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        plan = aiter.plan_pa_decode(lengths, KV_HEADS, **options)
        sms = num_sms(lengths.device)
        most = options.get("max_partitions", sms)
        capacity = oracles.pa_capacity(len(LENGTHS), KV_HEADS, most, options.get("workgroup_budget", 2 * sms))
        window = max(options.get("sliding_window", 0), 0)
        expected = oracles.pa_plan(LENGTHS, capacity, most, window, options.get("query_length", 1), 256)
        assert plan.work_info.tolist() == [list(task) for task in expected.work]
        assert plan.reduce_info.tolist() == [list(slots) for slots in expected.reduce]
        assert isinstance(plan, kvscout.PADecodePlan)

    @pytest.mark.parametrize("arch", ["cpu", "sm_90", "gfx942"])
    def test_tiles_have_256_tokens_on_every_gpu(self, monkeypatch, arch):
        monkeypatch.setattr(planning, "arch_of", lambda device: arch)
        monkeypatch.setenv("KVSCOUT_PA_PLAN_VARIANT", "torch_vectorised")
        lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        plan = aiter.plan_pa_decode(lengths, KV_HEADS)
        assert plan.tile == 256
        assert aiter.plan_pa_decode(lengths, KV_HEADS, plan=plan).reduce_info[:, 1].tolist() == [3, 0, 1, 2]
        with pytest.raises(ValueError, match=r"^plan: expected tiles of 256 tokens, AITER's, got 128$"):
            aiter.plan_pa_decode(lengths, KV_HEADS, plan=kvscout.plan_pa_decode(lengths, KV_HEADS, tile=128))

    def test_a_refresh_is_in_place(self):
        lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        plan = aiter.plan_pa_decode(lengths, KV_HEADS, max_partitions=2)
        other = lengths.flip(0).contiguous()
        tasks = plan.work_info.data_ptr()
        assert aiter.plan_pa_decode(other, KV_HEADS, plan=plan) is plan
        assert plan.work_info.data_ptr() == tasks
        assert torch.equal(plan.work_info, aiter.plan_pa_decode(other, KV_HEADS, max_partitions=2).work_info)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_partitions": 0}, "max_partitions: expected from 1"),
            ({"workgroup_budget": 0}, "workgroup_budget: expected from 1"),
            ({"sliding_window": -2}, "sliding_window: expected from -1"),
            ({"sliding_window": 1.5}, "sliding_window: expected an int, got float"),
            ({"query_length": 0}, "query_length: expected from 1"),
            ({"plan": "a"}, "plan: expected a PADecodePlan, got str"),
        ],
    )
    def test_bad_options_are_named(self, options, message):
        with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
            aiter.plan_pa_decode(torch.ones(2).int(), 1, **options)
        with pytest.raises(TypeError, match=r"^context_lengths: expected dtype torch\.int32"):
            aiter.plan_pa_decode(torch.ones(2), 1)
        with pytest.raises(ValueError, match=r"^num_kv_heads: expected from 1"):
            aiter.plan_pa_decode(torch.ones(2).int(), 0)

    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({"query_length": 2}, "query_length"),
            ({"sliding_window": 9}, "sliding_window"),
            ({"max_partitions": 3}, "max_"),
        ],
    )
    def test_a_refresh_with_other_numbers_is_refused(self, options, name):
        lengths = torch.ones(2).int()
        with pytest.raises(ValueError, match=f"^{name}"):
            aiter.plan_pa_decode(lengths, 1, plan=aiter.plan_pa_decode(lengths, 1), **options)


def decode_call(layout="chunked", cache=torch.bfloat16, query_length=1, window=0, dtype=torch.bfloat16, page=PAGE):
    """A call of ``pa_decode`` and what its pages hold."""
    generator = torch.Generator().manual_seed(0)
    tables = paged_inputs.tables(LENGTHS, page, generator)
    caches = paged_inputs.caches(layout, tables, KV_HEADS, page, DIM, cache, generator)
    query = torch.randn(len(LENGTHS) * query_length, 2 * KV_HEADS, DIM, generator=generator).to(dtype)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    plan = aiter.plan_pa_decode(
        lengths, KV_HEADS, max_partitions=4, workgroup_budget=16, sliding_window=window, query_length=query_length
    )
    positional = [
        torch.full_like(query, float("nan")), query, *caches, lengths, tables.block_tables, DIM**-0.5, query_length
    ]  # fmt: skip
    return positional, {"work_plan": plan, "sliding_window": window}


def by_definition(positional, key_scale=1.0, value_scale=1.0, sinks=None, window=0):
    """Attention in float64, one query token and head at a time; the scales broadcast to ``[blocks, Hkv, page]``."""
    output, query, key_cache, value_cache, lengths, tables, softmax_scale, query_length = positional
    blocks, heads, _, page, _ = key_cache.shape
    keys = key_cache.double().permute(0, 1, 3, 2, 4).reshape(blocks, heads, page, DIM)
    plain = value_cache.dim() == 4
    values = value_cache.double().transpose(-1, -2) if plain else value_cache.double().transpose(-1, -2).flatten(2, 3)
    scaled = [
        x * torch.as_tensor(scale, dtype=torch.float64).expand(blocks, heads, page)[..., None]
        for x, scale in ((keys, key_scale), (values, value_scale))
    ]
    expected = torch.zeros(output.shape, dtype=torch.float64)
    for sequence, p, head in itertools.product(range(len(lengths)), range(query_length), range(query.shape[1])):
        last = int(lengths[sequence]) - query_length + p
        tokens = range(max(0, last - window + 1) if window else 0, last + 1)
        if not tokens:
            continue
        of_head = head // (query.shape[1] // heads)
        pages = tables[sequence].long()
        key, value = (torch.stack([x[pages[t // page], of_head, t % page] for t in tokens]) for x in scaled)
        row = sequence * query_length + p
        scores = key @ query[row, head].double() * softmax_scale
        sink = scores.new_full((1,), float("-inf")) if sinks is None else sinks[head : head + 1].double()
        expected[row, head] = torch.cat([scores, sink]).softmax(0)[:-1] @ value
    return expected


def assert_attends(positional, expected):
    output = positional[0]
    assert not output.isnan().any()
    torch.testing.assert_close(output.double(), expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max()))


BAD = {
    "output: expected dtype torch.bfloat16": ({0: lambda x: x.float()}, {}),
    "query: expected dtype torch.bfloat16 or torch.float16, got": ({1: lambda x: x.to(FN)}, {}),
    "key_cache: expected a torch.Tensor, got NoneType": ({2: lambda x: None}, {}),
    "key_cache: expected dtype": ({2: lambda x: x.float()}, {}),
    "key_cache: expected shape [blocks, 2, D/x, page, 8], got": ({2: lambda x: x.flatten(3)}, {}),
    "value_cache: expected shape": ({3: lambda x: x[1:]}, {}),
    "value_cache: expected a torch.Tensor": ({3: lambda x: 0}, {}),
    "context_lengths: expected dtype torch.int32": ({4: lambda x: x.long()}, {}),
    "block_tables: expected shape [4, max_blocks]": ({5: lambda x: x[1:]}, {}),
    "softmax_scale: expected a number": ({6: lambda x: None}, {}),
    "query_length: expected from 1": ({7: lambda x: 0}, {}),
    "query: expected 4 sequences x 2 query tokens": ({7: lambda x: 2}, {}),
    "key_scale: expected none with caches of torch.bfloat16": ({}, {"key_scale": 1.0}),
    "value_scale: expected none with caches of torch.bfloat16": ({}, {"value_scale": torch.ones(1)}),
    "sinks: expected dtype torch.float32 or torch.bfloat16, got torch.float16": (
        {}, {"sinks": torch.ones(4).half()}
    ),
    "sinks: expected shape [4], got [2]": ({}, {"sinks": torch.ones(2)}),
    "sliding_window: expected from -1": ({}, {"sliding_window": -2}),
    "work_plan: expected a plan made for a sliding_window of 9, got one made for 0": ({}, {"sliding_window": 9}),
    "work_plan: expected a PADecodePlan, got NoneType": ({}, {"work_plan": None}),
    "max_context_length: expected at least 0, got -1": ({}, {"max_context_length": -1}),
    "max_context_length: expected an int, got bool": ({}, {"max_context_length": True}),
}  # fmt: skip


class TestDecode:
    @pytest.mark.parametrize("layout", ["chunked", "plain_v"])
    @pytest.mark.parametrize("cache", [FN, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(("query_length", "window"), [(1, 0), (3, 0), (1, 40), (2, 300)])
    def test_it_is_the_definition(self, layout, cache, query_length, window):
        positional, options = decode_call(layout, cache, query_length, window)
        assert aiter.pa_decode(*positional, **options, compute_type=cache) is None
        assert_attends(positional, by_definition(positional, window=window))

    @pytest.mark.parametrize("kind", ["number", "one", "one in four dimensions", "heads", "tokens", "tokens in four"])
    def test_scales(self, kind):
        positional, options = decode_call(cache=FN)
        blocks = positional[2].shape[0]
        per_token = torch.rand(blocks, KV_HEADS, PAGE, generator=torch.Generator().manual_seed(1)) + 0.5
        scale = {
            "number": 0.5,
            "one": torch.tensor([0.5]),
            "one in four dimensions": torch.full((1, 1, 1, 1), 0.5),
            "heads": torch.tensor([0.5, 2.0]),
            "tokens": per_token,
            "tokens in four": per_token[..., None],
        }[kind]
        aiter.pa_decode(*positional, **options, key_scale=scale, value_scale=scale)
        wide = {"heads": torch.tensor([0.5, 2.0])[:, None], "tokens": per_token, "tokens in four": per_token}
        scale = wide.get(kind, 0.5)
        assert_attends(positional, by_definition(positional, scale, scale))

    def test_a_key_scale_without_a_value_scale(self):
        positional, options = decode_call(cache=FN)
        aiter.pa_decode(*positional, **options, key_scale=3.0)
        assert_attends(positional, by_definition(positional, key_scale=3.0))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_sinks(self, dtype):
        positional, options = decode_call()
        sinks = torch.tensor([0.0, 3.0, float("-inf"), -1.0]).to(dtype)
        aiter.pa_decode(*positional, **options, sinks=sinks)
        assert_attends(positional, by_definition(positional, sinks=sinks))

    @pytest.mark.parametrize("page", paging.PAGE_SIZES)
    def test_pages_and_half_precision_queries(self, page):
        positional, options = decode_call(page=page, cache=torch.float16, dtype=torch.float16)
        aiter.pa_decode(*positional, **options, compute_type=torch.float16)
        assert_attends(positional, by_definition(positional))

    @pytest.mark.parametrize("bound", [700, 1000])
    def test_a_bound_on_lengths_changes_nothing(self, bound):
        positional, options = decode_call()
        aiter.pa_decode(*positional, **options, max_context_length=bound)
        assert_attends(positional, by_definition(positional))

    def test_an_empty_window_is_spelt_in_two_ways(self):
        positional, options = decode_call()
        aiter.pa_decode(*positional, **options | {"sliding_window": -1})
        assert_attends(positional, by_definition(positional))

    def test_arguments_may_be_keywords(self):
        positional, options = decode_call()
        aiter.pa_decode(**dict(zip(POSITIONAL["pa_decode"], positional, strict=True)), **options)
        assert_attends(positional, by_definition(positional))

    @pytest.mark.parametrize("name", ["query_scale", "alibi_slopes", "exp_sums", "max_logits", "temporary_output"])
    def test_what_must_be_none_is_refused(self, name):
        positional, options = decode_call()
        with pytest.raises(NotImplementedError, match=f"^{name}: expected None"):
            aiter.pa_decode(*positional, **options, **{name: torch.ones(4)})
        assert positional[0].isnan().all()

    @pytest.mark.parametrize(
        ("size", "error", "message"),
        [(128, NotImplementedError, "expected 256, got 128"), (256.0, TypeError, "expected an int, got float")],
    )
    def test_another_partition_size_is_refused(self, size, error, message):
        positional, options = decode_call()
        with pytest.raises(error, match=f"^context_partition_size: {message}"):
            aiter.pa_decode(*positional, **options, context_partition_size=size)

    @pytest.mark.parametrize(
        ("cache", "compute_type"),
        [(FN, FNUZ), (FN, torch.float16), (torch.bfloat16, FN), (torch.float16, torch.bfloat16)],
    )
    def test_another_compute_type_is_refused(self, cache, compute_type):
        positional, options = decode_call(cache=cache)
        with pytest.raises(NotImplementedError, match=f"^compute_type: expected .*, got {compute_type}$"):
            aiter.pa_decode(*positional, **options, compute_type=compute_type)
        with pytest.raises(TypeError, match=r"^compute_type: expected a torch\.dtype, got str"):
            aiter.pa_decode(*positional, **options, compute_type="bf16")

    @pytest.mark.parametrize(("message", "changes"), BAD.items(), ids=BAD)
    def test_bad_arguments_are_named(self, message, changes):
        positional, options = decode_call()
        by_place, more = changes
        given = [by_place[i](x) if i in by_place else x for i, x in enumerate(positional)]
        with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
            aiter.pa_decode(*given, **options | more)

    def test_a_plan_for_another_query_length_is_refused_also_without_a_window(self):
        positional, options = decode_call(query_length=2)
        plan = aiter.plan_pa_decode(positional[4], KV_HEADS)
        with pytest.raises(ValueError, match=r"^work_plan: expected a plan made for a query_length of 2"):
            aiter.pa_decode(*positional, **options | {"work_plan": plan})

    def test_a_count_of_partitions_has_no_place(self):
        positional, options = decode_call()
        with pytest.raises(TypeError, match="positional arguments"):
            aiter.pa_decode(*positional, 8, **options)


class TestSplits:
    @pytest.mark.parametrize("blocks", [1, 2, 3, 8, 16])
    @pytest.mark.parametrize("heads", [1, 2, 8])
    @pytest.mark.parametrize("sequences", [1, 7, 33, 64, 200, 1000])
    def test_they_are_the_formula(self, sequences, heads, blocks):
        workgroups = 2 * num_sms(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        expected = min(8, blocks * math.ceil(workgroups / (sequences * heads * blocks)))
        assert aiter.get_recommended_splits(sequences, heads, blocks) == expected
        if blocks == 1:
            assert aiter.get_recommended_splits(num_sequences=sequences, num_kv_heads=heads) == expected

    def test_an_empty_batch_counts_as_one_sequence(self):
        assert aiter.get_recommended_splits(0, 2) == aiter.get_recommended_splits(1, 2)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ((-1, 1), "num_sequences: expected at least 0, got -1"),
            ((1, 0), "num_kv_heads: expected at least 1, got 0"),
            ((1, 1, 0), "split_kv_blocks: expected at least 1, got 0"),
            ((1, 1, 1.0), "split_kv_blocks: expected an int, got float"),
        ],
    )
    def test_bad_numbers_are_named(self, given, message):
        with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
            aiter.get_recommended_splits(*given)
