"""Entry of the command line: finding commands, exit codes, running from a bare checkout."""

import argparse
import importlib
import sys

import pytest

import kvscout
from kvscout import cli
from kvscout.cli import main as entry
from kvscout.cli import selection

HELLO = '''"""Say hello.

At length.
"""


def add_arguments(parser):
    parser.add_argument("name")


def run(args):
    print(f"hello {args.name}, from {args.command_line}")
    return 7
'''


def test_help_lists_every_command_with_the_first_line_of_its_docstring(run):
    code, out, _ = run("--help")
    assert code == 0
    for name, module in entry.commands().items():
        assert name in out
        assert " ".join(module.__doc__.splitlines()[0].split()[:3]) in out


def test_these_are_the_commands():
    assert {"bench", "info", "verify"} <= set(entry.commands())
    assert not {"main", "console", "selection"} & set(entry.commands())


def test_adding_a_command_is_adding_a_file(run, tmp_path, monkeypatch):
    (tmp_path / "hello.py").write_text(HELLO)
    monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "kvscout.cli.hello", raising=False)
    importlib.invalidate_caches()
    try:
        assert run("hello", "you there") == (7, "hello you there, from kvscout hello 'you there'\n", "")
        assert "Say hello." in run("--help")[1]
        assert "At length." in run("hello", "--help")[1]
    finally:
        sys.modules.pop("kvscout.cli.hello", None)
        if hasattr(cli, "hello"):
            del cli.hello


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "arguments are required: COMMAND"),
        (("nope",), "invalid choice: 'nope'"),
        (("verify", "--seed", "x"), "invalid int value: 'x'"),
        (("bench", "--hot", "--cold"), "not allowed with argument"),
    ],
)
def test_bad_usage(run, words, message):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert message in err


def test_version(run):
    assert run("--version") == (0, f"kvscout {kvscout.__version__}\n", "")


def test_ctrl_c(run, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(entry.commands()["info"], "run", interrupted)
    assert run("info") == (130, "", "kvscout info: interrupted\n")


def test_a_gpu_that_is_not_there(run, monkeypatch):
    monkeypatch.setattr(selection.torch.cuda, "is_available", lambda: False)
    for command in ("verify", "bench"):
        code, _, err = run(command, "--device", "cuda")
        assert code == 2
        assert "torch sees no GPU here" in err
    assert selection.device(argparse.Namespace(device=None)).type == "cpu"


def test_python_m_kvscout_needs_torch_alone(run_python):
    """With every optional package out of reach, numpy too."""
    code = """
import runpy, sys
sys.modules |= dict.fromkeys(("rich", "numpy", "triton", "cutlass", "tvm_ffi", "transformers"))
sys.argv = ["kvscout", "verify", "mqa_logits", "--device", "cpu", "--case", "1x1-h8"]
runpy.run_module("kvscout", run_name="__main__")
"""
    out = run_python("-c", code).stdout
    (line,) = (line for line in out.splitlines() if "torch_chunked" in line)
    assert line.split()[2:6] == ["1", "0", "0", "0"]


def test_output_that_nobody_reads_is_no_error_of_ours(run_python):
    code = """
import subprocess, sys
shown = subprocess.Popen([sys.executable, "-m", "kvscout", "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
shown.stdout.close()
print(shown.stderr.read().decode(), shown.wait())
"""
    assert run_python("-c", code).stdout.split() == ["141"]
