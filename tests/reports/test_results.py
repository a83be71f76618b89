"""Result files read back."""

import json

import pytest

from kvscout.reports.results import ResultsError, read
from kvscout.testing.case import BENCH, cases
from kvscout.testing.cases.topk import TopkCase
from kvscout.testing.compare import Budget
from kvscout.testing.sustained import Sustained

CASE = TopkCase(3, 70, 5, level=BENCH)


def test_a_run_is_what_was_written(result, timed):
    found = [
        timed(CASE, "auto", 2.0, chosen="torch_packed", sustained=Sustained(1.5, 100, 1900.0, None, 7)),
        timed(CASE, "rival", 4.0, peer=True, baseline=True, tolerance=Budget(0.1, 0.2)),
        timed(CASE, "broken", None, message="it was wrong"),
    ]
    run = read(result([CASE], found))
    assert list(run.measurements) == found
    assert run.cases == {("topk", CASE.name): CASE}
    assert run.missing == ("absent is not timed on op: it is not here",)
    assert (run.name, run.date, run.device) == ("made", "2030-01-02", "NVIDIA H200")
    assert run.origin == "NVIDIA H200, 2030-01-02, kvscout 9.8.7 at 0123456789ab"


def test_older_files_do_not_say_what_their_cases_were(result, timed):
    built_in = cases("topk", [BENCH])[0]
    run = read(result([], [timed(built_in, "auto", 2.0), timed(CASE, "auto", 1.0)], known=False))
    assert run.cases["topk", built_in.name] == built_in
    assert ("topk", CASE.name) not in run.cases


def test_a_run_of_no_checkout(result, timed):
    run = read(result([CASE], [timed(CASE, "auto", 2.0)], commit=None))
    assert run.origin == "NVIDIA H200, 2030-01-02, kvscout 9.8.7"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no JSON", "expected JSON: Expecting value"),
        (b"\xff\xfe\x00", "can't decode byte 0xff"),
        (b"[" * 100_000, "recursion|nesting"),
        (b"[]", "there are no measurements in it"),
        (b'{"outcomes": []}', "there are no measurements in it"),
        (b'{"measurements": []}', "there is no 'time'"),
        (b'{"measurements": 3}', "not iterable"),
        (b'{"measurements": [1]}', "no attribute"),
        (b'{"measurements": [1e400]}', "expected finite numbers, got 1e400"),
        (b'{"measurements": [NaN]}', "expected finite numbers, got NaN"),
        (b'{"measurements": [%d]}' % 10**400, "expected finite numbers, got 10{23}$"),
    ],
)
def test_a_file_that_is_none(tmp_path, content, message):
    file = tmp_path / "result.json"
    file.write_bytes(content)
    with pytest.raises(ResultsError, match=f"(?s)result.json: .*({message})"):
        read(file)


@pytest.mark.parametrize("name", [".", "no/such/file", "null\0byte"])
def test_a_file_that_cannot_be_read(tmp_path, name):
    with pytest.raises(ResultsError):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["measurements"][0].pop("status"), "status"),
        (lambda content: content["measurements"][0].update(cold={"median_us": 1}), "missing"),
        (lambda content: content["measurements"][0]["cold"].update(median_us=0), "auto takes 0 us on 3x70"),
        (lambda content: content["measurements"][0]["cold"].update(median_us=None), "'NoneType' and 'int'"),
        (lambda content: content["cases"]["topk"][CASE.name].update(k="x"), "column 'k': expected a whole number"),
        (lambda content: content.pop("machine"), "there is no 'machine'"),
        (lambda content: content.update(versions=None), "not iterable"),
    ],
)
def test_a_part_that_is_missing_or_wrong_is_named(result, timed, change, message):
    file = result([CASE], [timed(CASE, "auto", 2.0)])
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(ResultsError, match=f"made.json: expected what 'kvscout bench --json' writes, but .*{message}"):
        read(file)
