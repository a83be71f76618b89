"""What the public functions accept, keep and refuse."""

from dataclasses import fields

import pytest
import torch

from kvscout import PADecodePlan, UnsupportedProblem, get_recommended_splits, plan_pa_decode
from kvscout.ops.pa_plan import api
from kvscout.ops.pa_plan.api import MAX_SLOTS, Args, check
from kvscout.testing import oracles

LENGTHS = torch.tensor([1000, 0, 300], dtype=torch.int32)
OTHERS = torch.tensor([4000, 257, 0], dtype=torch.int32)


def tensors(plan):
    return plan.work_info, plan.reduce_info, plan.arrival_counters


def test_a_plan_keeps_what_it_was_made_with():
    plan = plan_pa_decode(LENGTHS, 2, max_partitions=5, workgroup_budget=64, sliding_window=2**40, query_length=3)
    assert isinstance(plan, PADecodePlan)
    assert (plan.num_kv_heads, plan.max_partitions, plan.sliding_window, plan.query_length) == (2, 5, 2**40, 3)
    assert (plan.capacity, plan.num_sequences, plan.tile) == (15, 3, 256)
    assert [t.dtype for t in tensors(plan)] == [torch.int32] * 3
    assert list(plan.arrival_counters.shape) == [3, 2, 32]
    assert not plan.arrival_counters.any()


def test_defaults_fill_the_gpu_twice():
    plan = plan_pa_decode(LENGTHS, 3)
    assert (plan.max_partitions, plan.capacity) == (132, 2 * 132 // 3)


@pytest.mark.parametrize(("kv_heads", "slots"), [(1, 132), (4, 33), (8, 16), (5, 26), (132, 3), (200, 3)])
def test_defaults_fill_hopper_once_and_no_more(monkeypatch, kv_heads, slots):
    monkeypatch.setattr(api, "arch_of", lambda device: "sm_90")
    plan = plan_pa_decode(LENGTHS, kv_heads, variant="torch_vectorised")
    # No less than a slot for each of the three sequences.
    assert plan.capacity == slots
    assert slots * kv_heads <= 132 or slots == 3


@pytest.mark.parametrize(
    ("arch", "tile"), [("sm_80", 256), ("sm_90", 128), ("sm_100", 256), ("gfx942", 256), ("cpu", 256)]
)
def test_tiles_are_small_on_hopper_unless_told_otherwise(monkeypatch, arch, tile):
    monkeypatch.setattr(api, "arch_of", lambda device: arch)
    plan = plan_pa_decode(LENGTHS, 1, variant="torch_vectorised")
    assert plan.tile == tile
    assert plan.reduce_info[:, 1].tolist() == [-(-length // tile) for length in LENGTHS.tolist()]
    for other in (128, 256):
        assert plan_pa_decode(LENGTHS, 1, tile=other, variant="torch_vectorised").tile == other


@pytest.mark.parametrize("tile", [128, 256])
def test_a_refresh_keeps_the_tile(monkeypatch, tile):
    plan = plan_pa_decode(LENGTHS, 1, tile=tile)
    for arch in ("cpu", "sm_90"):
        monkeypatch.setattr(api, "arch_of", lambda device, arch=arch: arch)
        for same in ({}, {"tile": tile}):
            plan.work_info.fill_(-1)
            assert plan_pa_decode(OTHERS, 1, plan=plan, variant="torch_vectorised", **same).tile == tile
            assert plan.reduce_info[:, 1].tolist() == [-(-length // tile) for length in OTHERS.tolist()]
        with pytest.raises(ValueError, match=f"^tile: expected {tile}, .* got {384 - tile}"):
            plan_pa_decode(OTHERS, 1, plan=plan, tile=384 - tile)


def test_tuned_tables_tell_tiles_apart():
    plan = plan_pa_decode(LENGTHS, 1)
    args = Args(LENGTHS, plan.work_info, plan.reduce_info)
    buckets = {check(args, plan.max_partitions, 0, 1, tile, 0).bucket() for tile in (128, 256)}
    assert {dict(bucket)["tile"] for bucket in buckets} == {128, 256}


def test_small_tiles_give_a_sequence_more_tasks():
    lengths = torch.tensor([8192], dtype=torch.int32)
    plans = [plan_pa_decode(lengths, 1, tile=tile) for tile in (128, 256)]
    assert [plan.reduce_info[0, 1] for plan in plans] == [64, 32]


def test_refresh_in_place(variant, device):
    plan = plan_pa_decode(LENGTHS.to(device), 2, max_partitions=7, workgroup_budget=40, variant=variant)
    addresses = [t.data_ptr() for t in tensors(plan)]
    scratch = plan.scratch(4, 64)
    plan.arrival_counters.fill_(3)
    again = plan_pa_decode(OTHERS.to(device), 2, plan=plan, variant=variant)
    assert again is plan
    assert [t.data_ptr() for t in tensors(plan)] == addresses
    assert plan.scratch(4, 64) is scratch
    assert bool((plan.arrival_counters == 3).all()), "counters are the decode's to reset"
    expected = oracles.pa_plan(OTHERS.tolist(), plan.capacity, 7, 0, 1, plan.tile)
    assert [tuple(row) for row in plan.work_info.tolist()] == expected.work
    assert [tuple(row) for row in plan.reduce_info.tolist()] == expected.reduce


def test_refresh_with_the_arguments_of_the_plan():
    arguments = {"max_partitions": 7, "workgroup_budget": 40, "sliding_window": 300, "query_length": 2}
    plan = plan_pa_decode(LENGTHS, 2, **arguments)
    assert plan_pa_decode(OTHERS, 2, **arguments, plan=plan) is plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context_lengths": LENGTHS[:2]}, "context_lengths: number of sequences: expected 3, .* got 2"),
        ({"num_kv_heads": 4}, "num_kv_heads: expected 2, .* got 4"),
        ({"max_partitions": 8}, "max_partitions: expected 7, .* got 8"),
        ({"workgroup_budget": 30}, "workgroup_budget: expected .* the plan's 20 slots, got 30, which gives 15"),
        ({"sliding_window": 0}, "sliding_window: expected 300, .* got 0"),
        ({"query_length": 1}, "query_length: expected 3, .* got 1"),
        ({"tile": 128}, "tile: expected 256, .* got 128"),
        ({"batch_invariant": True}, "batch_invariant: expected False, .* got True"),
        ({"context_lengths": LENGTHS.to("meta")}, "plan: expected on meta, like context_lengths, got cpu"),
    ],
)
def test_a_plan_is_not_used_with_other_arguments(change, message):
    same = {"context_lengths": LENGTHS, "num_kv_heads": 2, "sliding_window": 300, "query_length": 3}
    plan = plan_pa_decode(**same, max_partitions=7, workgroup_budget=40)
    before = plan.work_info.clone()
    with pytest.raises(ValueError, match=message):
        plan_pa_decode(**(same | change), plan=plan)
    assert torch.equal(plan.work_info, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_invariant": False}, "batch_invariant: expected True, .* got False"),
        ({"tiles_per_partition": 2}, "tiles_per_partition: expected 3, .* got 2"),
        ({"tile": 256}, "tile: expected 128, .* got 256"),
        ({"workgroup_budget": 12}, "workgroup_budget: expected .* the plan's 21 slots, got 12, which gives 18"),
    ],
)
def test_a_batch_invariant_plan_is_not_used_with_other_arguments(change, message):
    made = {"max_partitions": 7, "workgroup_budget": 40, "tile": 128, "batch_invariant": True, "tiles_per_partition": 3}
    plan = plan_pa_decode(LENGTHS, 2, **made)
    assert (plan.batch_invariant, plan.tiles_per_partition) == (True, 3)
    for arguments in (made, {"batch_invariant": True}):
        assert plan_pa_decode(OTHERS, 2, **arguments, plan=plan) is plan
    expected = oracles.pa_plan(OTHERS.tolist(), plan.capacity, 7, 0, 1, 128, 3)
    assert [tuple(row) for row in plan.work_info.tolist()] == expected.work
    with pytest.raises(ValueError, match=message):
        plan_pa_decode(LENGTHS, 2, **({"batch_invariant": True} | change), plan=plan)
    assert [tuple(row) for row in plan.work_info.tolist()] == expected.work


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"context_lengths": [1, 2]}, TypeError, "context_lengths: expected a torch.Tensor, got list"),
        ({"context_lengths": LENGTHS.long()}, TypeError, "context_lengths: expected dtype torch.int32, got .*int64"),
        ({"context_lengths": LENGTHS[:, None]}, ValueError, r"context_lengths: expected shape \[B\], got \[3, 1\]"),
        ({"context_lengths": LENGTHS[::2]}, ValueError, r"context_lengths: .* contiguous tensor, got strides \(2,\)"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads: expected from 1 to 2147483647, got 0"),
        ({"num_kv_heads": 1.0}, TypeError, "num_kv_heads: expected an int, got float"),
        ({"max_partitions": 0}, ValueError, "max_partitions: expected from 1 to 2147483647, got 0"),
        ({"workgroup_budget": 0}, ValueError, "workgroup_budget: expected from 1 to 2147483647, got 0"),
        ({"sliding_window": -2}, ValueError, "sliding_window: expected from -1 to 9223372036854775807, got -2"),
        ({"sliding_window": None}, TypeError, "sliding_window: expected an int, got NoneType"),
        ({"query_length": 0}, ValueError, "query_length: expected from 1 to 2147483647, got 0"),
        ({"tile": 64}, ValueError, "^tile: expected one of 128, 256, got 64"),
        ({"tile": 0}, ValueError, "^tile: expected at least 1, got 0"),
        ({"tile": 128.0}, TypeError, "^tile: expected an int, got float"),
        ({"tile": True}, TypeError, "^tile: expected an int, got bool"),
        ({"batch_invariant": 1}, TypeError, "batch_invariant: expected a bool, got int"),
        ({"tiles_per_partition": 2}, ValueError, "tiles_per_partition: expected None without batch_invariant, got 2"),
        ({"batch_invariant": True, "tiles_per_partition": 0}, ValueError, "tiles_per_partition: expected from 1 to .*"),
        ({"plan": LENGTHS}, TypeError, "plan: expected a PADecodePlan, got Tensor"),
        ({"variant": "torch_none"}, ValueError, "variant: pa_plan has no variant 'torch_none'"),
    ],
)
def test_bad_arguments(change, error, message):
    with pytest.raises(error, match=message):
        plan_pa_decode(**({"context_lengths": LENGTHS, "num_kv_heads": 2} | change))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("sequences", [1, 4])
def test_more_slots_than_contexts_have_tiles(sequences, batch_invariant):
    """As many as 32 bits count would take all memory."""
    lengths = torch.empty(sequences, dtype=torch.int32, device="meta")
    most = MAX_SLOTS // sequences if batch_invariant else MAX_SLOTS
    for slots in (most, most + 1, 2**31 - 1):
        made_with = {"max_partitions": slots, "workgroup_budget": slots, "batch_invariant": batch_invariant}
        if slots == most:
            assert plan_pa_decode(lengths, 1, **made_with).capacity == MAX_SLOTS
        else:
            with pytest.raises(ValueError, match=r"^max_partitions, workgroup_budget: expected at most 2\*\*24 slots "):
                plan_pa_decode(lengths, 1, **made_with)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"work_info": torch.empty(5, 3, dtype=torch.int32)}, ValueError, r"work_info: expected shape \[capacity, 4\]"),
        ({"work_info": torch.empty(4, 5, dtype=torch.int32).T}, ValueError, "work_info: expected a contiguous tensor"),
        ({"reduce_info": torch.empty(4, 2, dtype=torch.int32)}, ValueError, r"reduce_info: expected shape \[3, 2\]"),
        ({"reduce_info": torch.empty(3, 2)}, TypeError, "reduce_info: expected dtype torch.int32, got torch.float32"),
        ({"reduce_info": torch.empty(3, 2, dtype=torch.int32, device="meta")}, ValueError, "reduce_info: .* on cpu"),
    ],
)
def test_bad_tensors_of_a_plan(change, error, message):
    plan = plan_pa_decode(LENGTHS, 2)
    args = Args(LENGTHS, plan.work_info, plan.reduce_info)._replace(**change)
    with pytest.raises(error, match=message):
        check(args, plan.max_partitions, 0, 1, 256, 0)


@pytest.mark.parametrize(("tile", "most"), [(128, 39), (256, 40)])
def test_products_past_64_bits_are_refused(tile, most):
    def checked(slots, sequences):
        shapes = ((sequences,), (slots, 4), (sequences, 2))
        args = Args(*(torch.empty(shape, dtype=torch.int32, device="meta") for shape in shapes))
        return check(args, 1, 0, 1, tile, 0)

    sequences, slots = 2**20, 2 ** (most - 20)
    checked(slots, sequences)
    # All sequences' tiles, were each as long as can be, times the slots that are not each one's first.
    assert sequences * -(-(2**31 - 1) // tile) * (slots - sequences) < 2**63
    message = rf"context_lengths: .* 2\*\*{most} .* tiles of {tile} tokens, got 1048577 sequences x {slots} slots"
    with pytest.raises(ValueError, match=message):
        checked(slots, sequences + 1)


def test_a_named_variant_never_falls_back(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedProblem, match="triton_single_block: Triton kernels need a GPU"):
        # A shape of its own, since choices are remembered.
        plan_pa_decode(torch.zeros(77, dtype=torch.int32), 1, variant="triton_single_block")


def test_scratch_is_made_once_for_each_shape():
    plan = plan_pa_decode(LENGTHS, 2, workgroup_budget=10)
    out, stats = plan.scratch(16, 128)
    assert (list(out.shape), list(stats.shape)) == ([5, 2, 16, 128], [5, 2, 16, 2])
    assert out.dtype == stats.dtype == torch.float32
    assert plan.scratch(16, 128)[0] is out
    assert plan.scratch(16, 64)[0].shape[-1] == 64
    assert plan_pa_decode(LENGTHS, 2).scratch(16, 128)[0] is not out


def test_a_fork_shares_the_work_and_owns_its_memory():
    plan = plan_pa_decode(LENGTHS, 2, sliding_window=300, query_length=3, batch_invariant=True, tiles_per_partition=2)
    scratch = plan.scratch(4, 64)
    plan.arrival_counters.fill_(3)
    fork = plan.fork()
    for field in fields(PADecodePlan):
        if field.name not in ("arrival_counters", "_scratch"):
            assert getattr(fork, field.name) is getattr(plan, field.name), field.name
    assert fork.arrival_counters.shape == plan.arrival_counters.shape
    assert fork.arrival_counters.dtype == torch.int32
    assert not fork.arrival_counters.any()
    assert bool((plan.arrival_counters == 3).all())
    owned = [memory.data_ptr() for p in (plan, fork, fork.fork()) for memory in (p.arrival_counters, *p.scratch(4, 64))]
    assert len(set(owned)) == 9
    assert plan.scratch(4, 64) is scratch


@pytest.mark.parametrize("refreshed", ["plan", "fork"])
def test_a_refresh_is_one_of_the_plan_and_its_forks(variant, device, refreshed):
    plan = plan_pa_decode(LENGTHS.to(device), 2, max_partitions=7, workgroup_budget=40)
    fork = plan.fork()
    target = plan if refreshed == "plan" else fork
    counters = [p.arrival_counters.fill_(5) for p in (plan, fork)]
    assert plan_pa_decode(OTHERS.to(device), 2, plan=target, variant=variant) is target
    expected = oracles.pa_plan(OTHERS.tolist(), plan.capacity, 7, 0, 1, plan.tile)
    for p in (plan, fork):
        assert [tuple(row) for row in p.work_info.tolist()] == expected.work
        assert [tuple(row) for row in p.reduce_info.tolist()] == expected.reduce
    assert all(bool((c == 5).all()) for c in counters)


def test_plans_compare_by_identity():
    plan = plan_pa_decode(LENGTHS, 2)
    assert plan == plan
    assert plan != plan_pa_decode(LENGTHS, 2)
    assert plan != plan.fork()
    assert len({plan, plan_pa_decode(LENGTHS, 2)}) == 2


@pytest.mark.parametrize(
    ("num_sequences", "num_kv_heads", "num_sms", "splits"),
    [(1, 1, 132, 8), (33, 1, 132, 8), (34, 1, 132, 8), (38, 1, 132, 7), (64, 1, 132, 5), (8, 8, 132, 5),
     (264, 1, 132, 1), (200, 8, 132, 1), (3, 2, 6, 2), (0, 1, 132, 8)],
)  # fmt: skip
def test_recommended_splits(num_sequences, num_kv_heads, num_sms, splits):
    assert get_recommended_splits(num_sequences, num_kv_heads, num_sms=num_sms) == splits


def test_recommended_splits_of_this_machine():
    if not torch.cuda.is_available():
        assert get_recommended_splits(64, 1) == get_recommended_splits(64, 1, num_sms=132)
    else:
        sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        assert get_recommended_splits(64, 1) == get_recommended_splits(64, 1, num_sms=sms)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((-1, 1), "num_sequences: expected at least 0"), ((1, 0), "num_kv_heads: expected at least 1")],
)
def test_recommended_splits_of_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        get_recommended_splits(*arguments)
    with pytest.raises(ValueError, match="num_sms: expected at least 1, got 0"):
        get_recommended_splits(1, 1, num_sms=0)
