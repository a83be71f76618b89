"""``kvscout plot``: figures of real result files, and what cannot be drawn."""

import json
import re
import shutil
import sys

import pytest

from kvscout.reports import charts, drawing, results


@pytest.fixture
def kept(root):
    """The runs that the repository keeps."""
    return sorted((root / "benchmarks" / "results").glob("*/bench-*.json"))


def test_every_figure_of_every_file(run, kept, tmp_path):
    code, out, err = run("plot", *map(str, kept), "--output", str(tmp_path / "new" / "figures"))
    assert (code, err) == (0, "")
    wanted = [chart for file in kept for chart in charts.charts(results.read(file))]
    assert wanted
    for chart, line in zip(wanted, out.splitlines(), strict=True):
        file = tmp_path / "new" / "figures" / f"{chart.name}.svg"
        assert line == f"{file}: {chart.title} ({chart.caption})"
        assert drawing.is_current(file.read_text(), chart)


def test_what_bench_writes_can_be_drawn(run, short_timing, tmp_path, monkeypatch):
    """From shapes of one's own to figures, on the CPU and with peers, all for real."""
    monkeypatch.chdir(tmp_path)
    rows = [f"pa_decode,{batch}x40,3,64,no_lse,,," for batch in (2, 4, 8)]
    rows += [f"mqa_logits,,,32,,{keys},{keys},8" for keys in (5, 9, 17)]
    (tmp_path / "shapes.csv").write_text("\n".join(["op,lengths,group,dim,odd,rows,keys,heads", *rows]))
    words = ("--device", "cpu", "--shapes-csv", "shapes.csv", "--against", "sdpa,torch", "--json", "mine.json")
    assert run("bench", *words)[0] == 0
    code, _, err = run("plot", "mine.json")
    assert (code, err) == (0, "")
    latency, rates = sorted(tmp_path.glob("*-mine-*.svg"))
    assert latency.name.endswith("-mine-latency.svg")
    assert all(name in latency.read_text() for name in ("sdpa (peer)", "torch (peer)", "torch_reference"))
    assert all(name in rates.read_text() for name in ("17x17 clean", "torch (peer)", "torch_chunked"))


def test_nothing_to_draw(run, kept, tmp_path):
    file = tmp_path / "empty.json"
    file.write_text(json.dumps(json.loads(kept[0].read_text()) | {"measurements": []}))
    code, out, err = run("plot", str(file), "--output", str(tmp_path / "figures"))
    assert (code, out) == (1, "")
    assert err.startswith("nothing to draw: ")
    assert not (tmp_path / "figures").exists()


def test_without_matplotlib(run, kept, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run("plot", *map(str, kept), "--output", str(tmp_path / "figures"))
    assert (code, out) == (1, "")
    assert "install kvscout[plot]" in err
    assert not (tmp_path / "figures").exists()


def test_matplotlib_is_loaded_by_drawing_alone(run_python):
    code = "import sys; from kvscout.cli.main import main\nmain(['info']); print('matplotlib' in sys.modules)"
    assert run_python("-c", code).stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "the following arguments are required: FILE"),
        (("",), "expected the name of a file, got an empty one"),
        (("no.json",), "FILE: no.json: No such file or directory"),
        ((".",), "FILE: .: Is a directory"),
    ],
)
def test_bad_usage(run, words, message):
    code, out, err = run("plot", *words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_file_of_another_command(run, tmp_path):
    (tmp_path / "verify.json").write_text('{"outcomes": []}')
    code, _, err = run("plot", str(tmp_path / "verify.json"))
    assert code == 2
    assert "expected what 'kvscout bench --json' writes, but there are no measurements in it" in err


def test_a_time_that_is_no_finite_number(run, kept, tmp_path):
    text, replaced = re.subn(r'"median_us": [\d.e+-]+', '"median_us": 1e400', kept[0].read_text())
    assert replaced
    (tmp_path / "endless.json").write_text(text)
    code, out, err = run("plot", str(tmp_path / "endless.json"), "--output", str(tmp_path))
    assert (code, out) == (2, "")
    assert err.endswith(f"kvscout plot: FILE: {tmp_path / 'endless.json'}: expected finite numbers, got 1e400\n")


def test_two_files_of_one_name(run, kept, tmp_path):
    file = next(file for file in kept if charts.charts(results.read(file)))
    copy = tmp_path / file.name
    shutil.copy(file, copy)
    code, _, err = run("plot", str(file), str(copy), "--output", str(tmp_path))
    assert code == 2
    assert f"{file} and {copy} would both be drawn as " in err
    assert not list(tmp_path.glob("*.svg"))


def test_a_folder_that_cannot_be_written(run, kept, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text(json.dumps("kept"))
    file = next(file for file in kept if charts.charts(results.read(file)))
    code, out, err = run("plot", str(file), "--output", str(blocked))
    assert (code, out) == (2, "")
    assert f"--output: cannot write into {str(blocked)!r}: " in err
    assert blocked.read_text() == '"kept"'
