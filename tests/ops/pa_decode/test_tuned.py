"""What ``pa_decode`` takes from a tuned table, and from none: the bits of batch-invariant plans stay as they are."""

from dataclasses import replace

import pytest
import torch

from kvscout import pa_decode, plan_pa_decode, tuning
from kvscout.kernels.cute import runtime
from kvscout.ops.pa_decode import api
from kvscout.ops.pa_decode.api import FAMILY, Problem
from kvscout.variants import Choice

PROBLEM = Problem(
    arch="sm_90", num_sequences=4, query_length=1, num_heads=16, num_kv_heads=1, head_dim=128, dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16, layout="chunked", page=128, capacity=264, max_partitions=132, tile=256,
)  # fmt: skip
BATCHES = (1, 3, 4, 64, 132, 264, 5000)


class Every(dict):
    """A table that has the same for every bucket."""

    def __init__(self, choice):
        super().__init__(any=None)
        self.entry = tuning.Entry(choice.variant.name, str(choice.config))

    def get(self, bucket):
        assert isinstance(bucket, frozenset)
        return self.entry


@pytest.fixture(autouse=True)
def on_hopper(forget, monkeypatch):
    """Every kernel can be had."""
    monkeypatch.setattr(runtime, "refusal", lambda program: None)
    monkeypatch.setattr(runtime, "load", lambda program: print)


def problem(batch, **more):
    return replace(PROBLEM, num_sequences=batch, capacity=max(batch, 264), **more)


def tuned_choices(cache=torch.bfloat16):
    """All that a table could have for the problem, but what the rule takes."""
    found = replace(PROBLEM, cache_dtype=cache)
    return [
        Choice(variant, config)
        for variant in FAMILY.candidates(found)
        for config in variant.configs(found)
        if Choice(variant, config) != FAMILY._best(found, "auto")
    ]


def test_other_plans_follow_the_table(forget, monkeypatch):
    assert len(tuned_choices()) > 5
    for choice in tuned_choices():
        monkeypatch.setattr(tuning, "entries", lambda *_, choice=choice: Every(choice))
        forget()
        assert FAMILY.choose(PROBLEM) == choice


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("batch", BATCHES)
def test_batch_invariant_plans_do_not(forget, monkeypatch, cache, batch):
    found = problem(batch, cache_dtype=cache, batch_invariant=True)
    by_rule = FAMILY.choose(found)
    for choice in tuned_choices(cache):
        monkeypatch.setattr(tuning, "entries", lambda *_, choice=choice: Every(choice))
        forget()
        assert FAMILY.choose(found) == by_rule


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_call_with_such_a_plan_asks_no_table(make, forget, monkeypatch, batch_invariant):
    """The whole way of a call, on a table that gives what no rule would."""
    asked = []
    reference = FAMILY.load("torch_reference")
    monkeypatch.setitem(
        FAMILY._loaded,
        "torch_reference",
        replace(
            reference,
            space=lambda problem: ["tuned"],
            launch=lambda problem, config, args: asked.append(config),
        ),
    )
    monkeypatch.setattr(tuning, "entries", lambda *_: Every(Choice(reference, "tuned")))
    forget()
    call = make((5, 300))
    plan = plan_pa_decode(call["context_lengths"], 2, batch_invariant=batch_invariant, variant="torch_vectorised")
    pa_decode(**call | {"work_plan": plan})
    assert asked == [reference.default_config(replace(PROBLEM, arch="cpu")) if batch_invariant else "tuned"]


def test_what_costs_next_to_nothing_does_not_count():
    assert replace(PROBLEM, has_lse=True, has_sinks=True).bucket() == PROBLEM.bucket()
    assert api.SIZES == ("num_sequences", "capacity", "max_partitions", "window")
    assert replace(PROBLEM, num_sequences=3, capacity=257).bucket() == PROBLEM.bucket()
    assert replace(PROBLEM, num_sequences=5).bucket() != PROBLEM.bucket()
