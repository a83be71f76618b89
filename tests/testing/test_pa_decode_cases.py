"""The cases of decode: the groups that ``bench`` selects by."""

from kvscout.testing.case import BENCH, groups
from kvscout.testing.cases.pa_decode import CASES, GROUPS


def test_every_bench_case_is_in_one_group():
    grouped = [case for members in groups("pa_decode").values() for case in members]
    assert sorted(grouped) == sorted(case.name for case in CASES if case.level == BENCH)


def test_every_group_has_each_shape_with_fp8_and_with_bfloat16():
    assert {name: len(members) for name, members in GROUPS.items()} == {
        "decode": 12, "verify-mtp": 8, "sparse": 4, "sparse-prefill": 6,
    }  # fmt: skip
    for members in GROUPS.values():
        labels = {cache: {m.name.rpartition("-")[0] for m in members if m.cache == cache} for cache in ("e4m3", "bf16")}
        assert labels["e4m3"] == labels["bf16"]
        assert {m.query_length for m in members} == ({4} if members is GROUPS["verify-mtp"] else {1})


def test_no_case_is_named_twice():
    assert len({case.name for case in CASES}) == len(CASES)
