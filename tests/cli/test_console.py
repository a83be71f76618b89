"""What the commands print, with rich and without, on a terminal and off it."""

import io
import sys

import pytest

from kvscout.cli import console

RICH = ("rich", "rich.console", "rich.table", "rich.progress", "rich.box", "rich.text")
TABLE = ("sizes", ("name", "size", "what"), [("a", 1.5, "one of [them]"), ("bcd", None, "none"), ("e", "12x", "many")])
PLAIN = """
sizes
name  size  what
----  ----  -------------
a      1.5  one of [them]
bcd      -  none
e      12x  many
"""


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def on_terminal(monkeypatch):
    """Once called, stdout and stderr are a terminal that is 80 wide; returns both."""

    def use():
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setenv("TERM", "xterm")
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, Terminal())
        return sys.stdout, sys.stderr

    return use


@pytest.fixture
def no_rich(monkeypatch):
    for name in RICH:
        monkeypatch.setitem(sys.modules, name, None)


def test_plain_where_there_is_no_terminal(capsys):
    console.table(*TABLE)
    assert capsys.readouterr().out == PLAIN


@pytest.mark.usefixtures("no_rich")
def test_plain_without_rich(on_terminal):
    stdout, stderr = on_terminal()
    console.table(*TABLE)
    with console.Progress(2, "work") as progress:
        progress.show("first")
        progress.advance()
    assert stdout.getvalue() == PLAIN
    assert stderr.getvalue() == ""


def test_a_table_without_rows(capsys):
    console.table("nothing", ("a", "bc"), [])
    assert capsys.readouterr().out == "\nnothing\na  bc\n-  --\n"


def test_a_table_on_a_terminal(on_terminal):
    pytest.importorskip("rich")
    stdout, _ = on_terminal()
    console.table(*TABLE)
    printed = stdout.getvalue()
    assert "\x1b[1m" in printed
    for word in ("sizes", "name", "bcd", "12x", "one of [them]"):
        assert word in printed


def test_a_table_too_wide_for_the_terminal_keeps_every_character(on_terminal):
    stdout, _ = on_terminal()
    wide = ["x" * 50, "y" * 50]
    console.table("wide", ("a", "b"), [wide])
    assert all(cell in stdout.getvalue() for cell in wide)


def test_a_bar_on_a_terminal(on_terminal):
    pytest.importorskip("rich")
    stdout, stderr = on_terminal()
    with console.Progress(3, "work") as progress:
        progress.show("case [one]")
        progress.advance(2)
        console.error("FAILED in between")
        console.out("printed in between")
        progress._bar.refresh()
    printed = stderr.getvalue()
    for word in ("work", "2/3", "case [one]", "FAILED in between", "printed in between"):
        assert word in printed
    assert sys.stdout is stdout


def test_a_line_now_and_then_off_a_terminal(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with console.Progress(50, "verify") as progress:
        for i in range(25):
            progress.show(f"case {i}")
            now[0] += 1
            progress.advance()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["verify: 10 of 50 case 9", "verify: 20 of 50 case 19"]


def test_short_work_prints_no_progress(capsys):
    with console.Progress(2, "verify") as progress:
        progress.advance(2)
    assert capsys.readouterr() == ("", "")


def test_errors_go_to_stderr(capsys):
    console.error("no")
    assert capsys.readouterr() == ("", "no\n")
