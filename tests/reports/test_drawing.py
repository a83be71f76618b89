"""Drawings: that they are drawn the same every time, hold what they should, and that an old one is told."""

import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from kvscout.reports import drawing
from kvscout.reports.charts import Chart, Panel, Series

LINES = Panel(
    "what all share",
    "batch (sequences)",
    "time (µs)",
    (Series("ours", False, ((1, 9.5), (8, 30.0), (8192, 400.0))), Series("theirs", True, ((1, 20.0), (8, 25.0)))),
    log_x=True,
    log_y=True,
    lines=True,
)
DOTS = Panel("op", "bytes", "TB/s", LINES.series, log_x=True, roof=(500.0, "measured roof"))
SHAPES = Panel(
    "heads", "TFLOPS", "shape", (Series("ours", False, ((3.0, 0), (5.0, 1))),), shapes=("1x2", "3x4"), roof=(9.0, "top")
)
CHART = Chart("a-name", "A <title> & more", "How to read it.", "GPU, 2030-01-02", (LINES, DOTS, SHAPES))

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawn():
    return drawing.svg(CHART)


def texts(svg):
    return ["".join(text.itertext()) for text in ET.fromstring(svg).iter(f"{SVG}text")]


def test_all_that_is_to_be_read_is_text(drawn):
    found = texts(drawn)
    for panel in CHART.panels:
        assert {panel.title, panel.x_label, panel.y_label, *panel.shapes} <= set(found)
    assert {"ours", "theirs (peer)", "measured roof", "top"} <= set(found)
    assert any("A <title> & more" in text for text in found)
    assert any("GPU, 2030-01-02" in text for text in found)
    assert found.count("ours") == 1
    assert {"1", "8", "8k"} <= set(found)


def test_every_point_is_drawn(drawn):
    marks = [use for use in ET.fromstring(drawn).iter(f"{SVG}use") if "xlink" in "".join(use.attrib)]
    colours = re.findall(r"fill: (#\w{6})", drawn)
    assert colours.count(drawing.OUR_COLOURS[0]) >= 8
    assert len(marks) > 13


def test_the_bytes_are_the_same_every_time_and_whatever_the_reader_has_set(drawn):
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": None, "font.size": 30, "lines.linewidth": 9, "svg.fonttype": "path"}):
        assert drawing.svg(CHART) == drawn
    assert not re.search(r"dc:date|[Mm]atplotlib v", drawn)


def test_dark_pages_have_colours_of_their_own(drawn):
    (style,) = re.findall(r"<style>(@media \(prefers-color-scheme:dark\).*?)</style>", drawn)
    for light, dark in drawing.DARK.items():
        assert f'[style*="fill: {light}"]{{fill:{dark}!important}}' in style
        assert f": {light}" in drawn.replace(style, "")


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("colour", [*drawing.OUR_COLOURS, *drawing.PEER_COLOURS])
def test_series_stand_out_on_both_pages(colour):
    """By the contrast that is asked of graphics, 3 to 1."""
    for page in (drawing.PAGE, drawing.DARK[drawing.PAGE]):
        low, high = sorted((luminance(colour), luminance(page)))
        assert (high + 0.05) / (low + 0.05) >= 3


def test_a_drawing_knows_its_chart(drawn):
    assert drawing.is_current(drawn, CHART)
    assert not drawing.is_current(drawn, replace(CHART, caption="GPU, 2030-01-03"))
    moved = replace(LINES.series[0], points=((1, 9.5), (8, 30.0), (8192, 401.0)))
    assert not drawing.is_current(drawn, replace(CHART, panels=(replace(LINES, series=(moved,)), DOTS, SHAPES)))


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace("theirs", "others"),
        lambda text: text.replace("</svg>", "</svg> "),
        lambda text: text + "more",
        lambda text: text.rstrip("\n"),
        lambda text: re.sub("<!-- drawn from .*", "", text),
        lambda text: "",
    ],
)
def test_a_drawing_that_was_edited_is_not_current(drawn, edit):
    assert edit(drawn) != drawn
    assert not drawing.is_current(edit(drawn), CHART)


def test_a_change_of_this_file_makes_every_drawing_old(drawn, tmp_path, monkeypatch):
    changed = tmp_path / "drawing.py"
    changed.write_text("another way to draw")
    monkeypatch.setattr(drawing, "__file__", str(changed))
    assert not drawing.is_current(drawn, CHART)


def test_without_matplotlib_there_is_a_sentence(monkeypatch):
    assert drawing.missing() is None
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "install kvscout[plot]" in drawing.missing()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "0.5"), (1, "1"), (8192, "8k"), (131072, "128k"), (220_000, "220,000"), (2e6, "2M"), (1000, "1,000")],
)
def test_numbers_of_an_axis(value, text):
    assert drawing._number(value) == text
