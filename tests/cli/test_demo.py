"""``kvscout demo``: what it prints and writes, and how it answers to bad usage."""

import json
import os
import re
import threading

import pytest
import torch

from kvscout.cli import console, demo
from kvscout.cli.main import main
from kvscout.demo import report
from kvscout.testing.case import family

TEXT = "Score, select, attend.\n" * 8
SMALL = ["--steps", "4", "--layers", "1", "--topk-pages", "4"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def ran(text):
    """Exit code and result file of a small run."""
    target = text.with_suffix(".json")
    code = main(["demo", str(text), *SMALL, "--json", str(target)])
    return code, json.loads(target.read_text())


@pytest.fixture
def printed(text, capsys):
    """``printed("--steps", "1")``: what a run with these arguments prints."""

    def printed(*arguments):
        assert main(["demo", str(text), *SMALL, *arguments]) == 0
        return capsys.readouterr().out

    return printed


def table(output, title):
    """Rows of a printed table, as lists of cells, its column names first."""
    lines = output.split(f"\n{title}\n", 1)[1].split("\n\n")[0].splitlines()
    return [re.split(r"\s{2,}", line.strip()) for line in lines if not set(line) <= set("- ")]


def test_output(printed):
    output = printed()
    assert "text.txt: 184 bytes are as many tokens\n" in output
    assert "sparse   a token attends to 4 pages of 16 tokens at most, of 12 at the end\n" in output
    columns, *lines = table(output, "decode")
    assert columns == ["step", "ms", "tokens/s", *report.FIGURES]
    assert [line[0] for line in lines] == ["1", "2", "3", "4"]
    columns, prefill, decode = table(output, "in total")
    assert columns == ["phase", "tokens", "ms", "tokens/s", "checked", *report.FIGURES]
    assert prefill[:2] == ["prefill", "184"]
    assert decode[:2] == ["decode", "4"]
    for line in (prefill, decode):
        milliseconds, rate, checked, page_recall, token_recall, kernel_error, fp8_error = map(float, line[2:])
        assert rate == pytest.approx(int(line[1]) / milliseconds * 1e3, rel=0.1)
        assert checked > 0
        assert 0 < token_recall <= 1
        assert 0.5 < page_recall <= 1
        assert 0 < kernel_error < 3e-3 < fp8_error < 0.1
    ops = {line[0]: line[1:] for line in table(output, "variants that ran (calls)")[1:]}
    assert set(ops) == {"pa_plan", "kv_cache", "mqa_logits", "topk", "pa_decode"}
    assert all(cell.split(" (")[0] in family(op).names for op, cells in ops.items() for cell in cells)
    held = [line[0] for line in table(output, "memory")[1:]]
    assert held[:5] == ["weights", "KV cache", "index cache", "logits", "kept for the checks"]
    assert "its weights are random" in output
    assert output.splitlines()[-1].startswith(("b'", 'b"'))


def test_a_line_sums_up_as_many_steps_as_asked(printed):
    assert [line[0] for line in table(printed("--every", "3"), "decode")[1:]] == ["1..3", "4"]


def test_recall_is_whole_when_every_page_is_selected(printed):
    decode = table(printed("--topk-pages", "1000"), "in total")[2]
    assert decode[5:7] == ["1.000", "1.000"]


def test_long_text_is_cut_with_a_notice(printed):
    output = printed("--max-tokens", "50")
    assert "50 bytes are as many tokens; the rest is left out (--max-tokens)\n" in output
    assert table(output, "in total")[1][:2] == ["prefill", "50"]


def test_threads_are_those_asked_for_and_only_for_the_run(printed):
    before = torch.get_num_threads()
    if not torch.cuda.is_available():
        cores = os.cpu_count()
        assert f"(CPU, {console.count(cores, 'thread')})\n" in printed("--threads", str(cores))
        assert "(CPU, 1 thread)\n" in printed()
    assert torch.get_num_threads() == before


def test_result_file(ran):
    code, content = ran
    assert code == 0
    assert content["settings"] == {
        "shape": content["settings"]["shape"],
        "steps": 4,
        "top_pages": 4,
        "seed": 0,
    }
    assert content["settings"]["shape"]["num_layers"] == 1
    assert content["prompt_tokens"] == len(TEXT)
    assert content["text"] == "text.txt"
    assert len(content["generated"]) == len(content["step_s"]) == 4
    assert {row["position"] for row in content["rows"]} >= {len(TEXT) - 1, *range(len(TEXT), len(TEXT) + 4)}
    assert content["command"].startswith("kvscout demo")
    assert content["variants"]["decode"]["pa_decode"]


def test_same_seed_same_result(ran, text, tmp_path):
    def result(seed):
        target = tmp_path / "again.json"
        assert main(["demo", str(text), *SMALL, "--json", str(target), "--seed", seed]) == 0
        content = json.loads(target.read_text())
        return content["generated"], content["rows"]

    first = ran[1]["generated"], ran[1]["rows"]
    assert result("0") == first
    assert result("1") != first


def test_bytes_that_are_no_text(tmp_path, capsys):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(256)))
    assert main(["demo", str(path), *SMALL]) == 0
    assert capsys.readouterr().out.isascii()


def test_one_byte_is_enough(tmp_path, capsys):
    path = tmp_path / "byte"
    path.write_bytes(b"x")
    assert main(["demo", str(path), *SMALL]) == 0
    output = capsys.readouterr().out
    assert table(output, "in total")[1][:2] == ["prefill", "1"]
    first, decoder, sparse, *_ = output.splitlines()
    assert first.endswith("byte: 1 byte is one token")
    assert decoder.startswith("decoder  1 layer of 8 ")
    assert sparse == "sparse   a token attends to every page of 16 tokens so far, 1 at the end"


def test_a_pipe_is_read_with_a_notice(tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"some text",))
    writer.start()
    assert demo._read(pipe, 99) == ("pipe", b"some text", False)
    writer.join()
    assert capsys.readouterr().err.startswith(f"reading '{pipe}', a pipe or device, ")


def test_default_text_is_the_readme_or_the_packaged_one(monkeypatch, tmp_path):
    monkeypatch.setattr(demo.provenance, "CHECKOUT", tmp_path)
    assert demo._read(None, 99).name == "sample.txt"
    (tmp_path / "README.md").write_text("A readme")
    assert demo._read(None, 99).name == "sample.txt"  # another project's
    (tmp_path / "pyproject.toml").touch()
    assert demo._read(None, 99) == ("README.md", b"A readme", False)


@pytest.mark.parametrize(
    ("name", "said"), [("missing", "No such file"), (".", "directory"), ("empty", "is empty"), ("nul\0", "null")]
)
def test_unreadable_text(name, said, tmp_path, capsys):
    (tmp_path / "empty").touch()
    assert main(["demo", f"{tmp_path}/{name}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvscout demo: TEXT_FILE: ")
    assert said in error


@pytest.mark.parametrize(
    "arguments",
    [
        ("--steps", "0"),
        ("--steps", "many"),
        ("--topk-pages", "1"),
        ("--max-tokens", "0"),
        ("--layers", "-1"),
        ("--seed", "-1"),
        ("--seed", "9223372036854775808"),
        ("--device", "tpu"),
    ],
)
def test_bad_options(arguments, text, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["demo", str(text), *arguments])
    assert exit.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_an_empty_name_of_a_text(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["demo", ""])
    assert exit.value.code == 2
    assert "TEXT_FILE: expected the name of a file, got an empty one" in capsys.readouterr().err


def test_more_threads_than_cores(text, capsys):
    cores = os.cpu_count()
    assert main(["demo", str(text), "--threads", str(cores + 1)]) == 2
    assert f"--threads: this machine has {console.count(cores, 'core')}, got {cores + 1}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(text, capsys):
    assert main(["demo", str(text), "--device", "cuda"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_a_failed_check_is_an_exit_code(text, capsys, monkeypatch):
    monkeypatch.setattr("kvscout.demo.checks.ERROR_BUDGET", 0.0)
    assert main(["demo", str(text), *SMALL]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith("FAILED position ")
    assert errors[-1].startswith("... and ")
