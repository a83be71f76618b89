"""Tables of a run."""

import pytest

from kvscout.reports.results import read
from kvscout.reports.tables import sections, table
from kvscout.testing.case import BENCH, cases, groups
from kvscout.testing.cases.topk import TopkCase
from kvscout.testing.compare import Budget

A, B, C = (TopkCase(rows, 70, 5, level=BENCH) for rows in (1, 2, 3))


@pytest.fixture
def text(result):
    def write(measurements, of=(A, B, C), meanings=()):
        return "\n".join(sections(read(result(of, measurements)), dict(meanings)))

    return write


def cells(text, start):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_table():
    assert table(("a", "b"), [("1", "x|y")]) == "| a | b |\n| --- | --- |\n| 1 | x\\|y |\n"


def test_against_peers(text, timed):
    found = text(
        [
            timed(A, "theirs", 4.0, peer=True, baseline=True, tolerance=Budget(0.1, 0.1)),
            timed(A, "auto", 2.0, chosen="torch_packed"),
            timed(A, "slow", 5.0),
            timed(A, "coarse", 3.0, peer=True),
            timed(B, "theirs", 4.0, peer=True, baseline=True),
            timed(B, "auto", 8.0, chosen="torch_packed"),
            timed(B, "slow", 16.0),
            timed(B, "coarse", 1.0, peer=True, refused=True),
            timed(C, "theirs", None, peer=True),
            timed(C, "auto", 1.0, chosen="torch_packed"),
            timed(C, "slow", None),
        ]
    )
    assert cells(found, "case | auto") == [
        *("case", "auto, µs", "slow, µs", "theirs, µs", "coarse, µs"),
        *("auto over fastest peer", "slow over fastest peer"),
    ]
    assert cells(found, f"`{A.name}`")[1:] == [
        *("2.00 (torch_packed)", "5.00", r"4.00\*", "3.00", "1.50x", "**0.60x**"),
    ]
    assert cells(found, f"`{C.name}`")[1:] == ["1.00 (torch_packed)", "failed", "failed", "-", "-", "-"]
    assert "\\* computes with less precision" in found
    assert cells(found, "geometric") == [
        *("geometric means of", "variant", "cases", "over theirs (least)", "over coarse (least)", "roof"),
    ]
    assert cells(found, "all | auto") == ["all", "auto", "3", "1.00x (0.50x)", "1.50x (1.50x)", "-"]
    assert "Slower than the fastest peer: auto in 1 of 2; slow in 2 of 2 cases." in found
    behind = found[found.index("These are the cases") :]
    assert A.name not in behind
    assert cells(behind, f"`{B.name}`")[1:] == [
        *("auto", "8.00 (torch_packed)", "theirs", "4.00", "**0.50x**"),
    ]


def test_ahead_everywhere(text, timed):
    found = text([timed(A, "theirs", 4.0, peer=True, baseline=True), timed(A, "auto", 2.0)], of=[A])
    assert "Slower than the fastest peer: auto in 0 of 1 cases.\nIn no case are all" in found
    assert "**" not in found


def test_without_peers_the_baseline_is_compared_with(text, timed):
    found = text([timed(A, "torch_packed", 4.0, baseline=True), timed(A, "auto", 8.0)], of=[A])
    assert cells(found, "case | auto")[1:] == ["auto, µs", "torch_packed, µs", "auto over torch_packed"]
    assert cells(found, f"`{A.name}`")[1:] == ["8.00", "4.00", "**0.50x**"]
    assert cells(found, "all | auto") == ["all", "auto", "1", "0.50x (0.50x)", "-"]
    assert "fastest peer" not in found


def test_groups_that_were_run_whole_come_first(text, timed):
    few = [case for case in cases("mqa_logits", [BENCH]) if case.name in groups("mqa_logits")["few-rows"]]
    other = next(case for case in cases("mqa_logits", [BENCH]) if case not in few)
    found = text(
        [timed(case, "auto", 1.0, baseline=True) for case in (other, *few)],
        of=[other, *few],
        meanings={"few-rows": "some rows", "squares": "not run"},
    )
    assert found.startswith("`--few-rows`: some rows\n")
    assert "not run" not in found
    assert found.index(f"`{few[0].name}`") < found.index(f"`{other.name}`")
    assert all(found.count(f"| `{case.name}` |") == 1 for case in (other, *few))
