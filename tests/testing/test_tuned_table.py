"""What a tuned table's file holds: new winners beside old ones, each with its run, and cases that can be made again."""

import json

import pytest

from kvscout import tuning
from kvscout.testing import provenance, tuned_table
from kvscout.testing.case import BENCH, cases, family
from kvscout.testing.tune import CaseTimes, Key, Tuned, Winner

CASE, OTHER = cases("mqa_logits", [BENCH])[:2]
TOPK = cases("topk")[0]
FRESH = tuning.fingerprint(family("mqa_logits").package)


def bucket(size):
    return frozenset({("size", size), ("clean", True)})


def tuned(size, us=10.0, case=CASE, won=True, runner_up=None):
    key = Key("torch_chunked", f"Config({size})")
    times = {case.name: CaseTimes(us, None if runner_up is None else 2 * us, None)}
    winner = Winner(bucket(size), key, runner_up, runner_up and 1.0, None, False, times)
    return Tuned(case.op, bucket(size), [case], winner if won else None)


def through_a_file(table, tmp_path):
    file = tmp_path / "gpu.json"
    file.write_text(provenance.dumps(table))
    return tuning.read(file, "GPU")


def merged(old, run, *found):
    return tuned_table.merged(old, "GPU", {"run": run}, found)


def entries(table, op="mqa_logits"):
    """Config and run of each entry, by its bucket's size."""
    section = table["ops"].get(op, {"entries": []})
    return {made["bucket"]["size"]: (made["config"], table["runs"][made["run"]]["run"]) for made in section["entries"]}


def test_a_new_table(tmp_path):
    table = through_a_file(merged(None, "first", tuned(8), tuned(16, won=False), tuned(4, case=TOPK)), tmp_path)
    assert (table["format"], table["device"], table["runs"]) == (tuning.FORMAT, "GPU", [{"run": "first"}])
    assert {op: section["fingerprint"] for op, section in table["ops"].items()} == {
        "mqa_logits": FRESH,
        "topk": tuning.fingerprint(family("topk").package),
    }
    assert entries(table) == {8: ("Config(8)", "first")}
    assert entries(table, "topk") == {4: ("Config(4)", "first")}


def test_other_buckets_stay_with_their_run(tmp_path):
    old = through_a_file(merged(None, "first", tuned(8), tuned(16), tuned(4, case=TOPK)), tmp_path)
    table = merged(old, "second", tuned(16, 5.0), tuned(32))
    assert entries(table) == {8: ("Config(8)", "first"), 16: ("Config(16)", "second"), 32: ("Config(32)", "second")}
    assert entries(table, "topk") == {4: ("Config(4)", "first")}
    (again,) = [entry for entry in table["ops"]["mqa_logits"]["entries"] if entry["bucket"]["size"] == 16]
    assert again["cases"][CASE.name]["us"] == 5.0


def test_a_bucket_that_lost_its_winner_has_no_entry():
    table = merged(merged(None, "first", tuned(8), tuned(16)), "second", tuned(16, won=False))
    assert entries(table) == {8: ("Config(8)", "first")}
    assert table["runs"] == [{"run": "first"}]


def test_an_op_without_entries_is_left_out():
    assert merged(merged(None, "first", tuned(8)), "second", tuned(8, won=False))["ops"] == {}


def test_runs_that_nothing_comes_from_go():
    table = merged(merged(merged(None, "a", tuned(8)), "b", tuned(16)), "c", tuned(8))
    assert [run["run"] for run in table["runs"]] == ["b", "c"]
    assert entries(table) == {16: ("Config(16)", "b"), 8: ("Config(8)", "c")}


def test_entries_of_other_kernels_go_when_these_are_tuned(tmp_path):
    old = merged(None, "first", tuned(8), tuned(4, case=TOPK))
    for section in old["ops"].values():
        section["fingerprint"] = "0" * 16
    table = merged(through_a_file(old, tmp_path), "second", tuned(16))
    assert entries(table) == {16: ("Config(16)", "second")}
    assert table["ops"]["mqa_logits"]["fingerprint"] == FRESH
    assert table["ops"]["topk"]["fingerprint"] == "0" * 16
    assert entries(table, "topk") == {4: ("Config(4)", "first")}


def test_the_order_of_entries_is_that_of_their_buckets():
    sizes = (64, 8, 16)
    tables = [merged(None, "run", *map(tuned, order)) for order in (sizes, sizes[::-1])]
    assert tables[0] == tables[1]


@pytest.mark.parametrize("runner_up", [None, Key("torch_reference", "Config()")])
@pytest.mark.parametrize("case", [CASE, cases("pa_decode", [BENCH])[0], TOPK], ids=str)
def test_entries_come_back_with_their_cases(tmp_path, runner_up, case):
    found = tuned(8, case=case, runner_up=runner_up)
    (kept,) = tuned_table.kept(through_a_file(merged(None, "run", found), tmp_path))
    assert (kept.op, kept.winner) == (case.op, found.winner)
    (again,) = kept.cases.values()
    assert (again.name, str(again)) == (case.name, str(case))


def test_a_case_that_cannot_be_made_any_more(tmp_path):
    table = merged(None, "run", tuned(8))
    table["ops"]["mqa_logits"]["entries"][0]["cases"][CASE.name]["shape"]["heads"] = "7"
    (kept,) = tuned_table.kept(through_a_file(table, tmp_path))
    assert kept.cases == {CASE.name: None}


def without(name):
    def change(table, entry):
        del entry[name]

    return change


def change_time(us):
    def change(table, entry):
        entry["cases"][CASE.name]["us"] = us

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *((without(name), f"KeyError: '{name}'") for name in ("runner_up", "margin", "cold", "cases", "run")),
        (lambda table, entry: table.update(runs=[]), "IndexError: list index out of range"),
        (lambda table, entry: table.pop("runs"), "KeyError: 'runs'"),
        (lambda table, entry: entry.update(run="first"), "TypeError: list indices must be integers"),
        (lambda table, entry: entry.update(cases=[]), "AttributeError: "),
        (lambda table, entry: entry.update(runner_up={}), "KeyError: 'variant'"),
        (change_time(None), "TypeError: float"),
        (change_time(0), f"ValueError: {CASE.name}: a time of 0.0 us"),
    ],
)
def test_what_calls_need_may_be_there_and_the_rest_not(tmp_path, change, said):
    table = merged(None, "run", tuned(8))
    change(table, table["ops"]["mqa_logits"]["entries"][0])
    with pytest.raises(tuning.WrongTable) as raised:
        tuned_table.kept(through_a_file(table, tmp_path))
    assert str(raised.value).startswith(f"is no whole table ({said}")


def test_the_file_is_json_for_people():
    text = provenance.dumps(merged(None, "run", tuned(8)))
    assert json.loads(text)["ops"]["mqa_logits"]["entries"][0]["variant"] == "torch_chunked"
    assert len(text.splitlines()) > 20
