"""Entry of the command line: finding commands, exit codes, running from a bare checkout."""

import argparse
import importlib
import os
import sys

import pytest

import kvscout
from kvscout import cli
from kvscout.cli import arguments, selection
from kvscout.cli import main as entry
from kvscout.testing import timing

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
        (("verify", "--seed", "x"), "expected a whole number from 0 to 9223372036854775807, got 'x'"),
        (("verify", "topk", "--seed", "9" * 20), "got '99999999999999999999'"),
        (("bench", "topk", "--seed", "-1"), "got '-1'"),
        (("bench", "topk", "--json", ""), "--json: expected the name of a file"),
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


def test_ctrl_c_while_the_commands_are_imported(run, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "commands", interrupted)
    assert run("info") == (130, "", "kvscout: interrupted\n")


def test_ctrl_c_while_the_entry_is_imported(run_python):
    code = """
import runpy, sys

class Interrupting:
    def find_spec(self, name, *others):
        if name == "kvscout.cli.main":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
runpy.run_module("kvscout", run_name="__main__")
"""
    done = run_python("-c", code, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.fixture
def interrupted_torch(tmp_path, root):
    """Variables with which the import of torch is interrupted."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}


def test_ctrl_c_while_torch_is_imported(run_python, interrupted_torch, tmp_path):
    script = tmp_path / "kvscout"
    script.write_text("from kvscout.cli.main import main")
    for words in (("-m", "kvscout", "info"), (str(script),)):
        done = run_python(*words, env=interrupted_torch, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_while_a_program_imports_kvscout_is_the_programs_own(run_python, interrupted_torch):
    code = "try: import kvscout\nexcept KeyboardInterrupt: print('raised')"
    assert run_python("-c", code, env=interrupted_torch).stdout == "raised\n"


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


COMMANDS = ("verify", "bench", "demo")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_variable_that_names_no_variant(run, monkeypatch, command):
    monkeypatch.setenv("KVSCOUT_TOPK_VARIANT", "nonsense")
    code, out, err = run(command)
    assert (code, out) == (2, "")
    assert err.startswith(f"kvscout {command}: KVSCOUT_TOPK_VARIANT: topk has no variant 'nonsense'; it has torch_")


def test_a_call_that_no_variant_serves_is_no_traceback(run, monkeypatch):
    def refused(args):
        raise kvscout.UnsupportedProblem("topk", "a problem", "triton_a", {"triton_a": "needs a GPU"})

    monkeypatch.setattr(entry.commands()["demo"], "run", refused)
    code, _, err = run("demo")
    assert code == 1
    assert err.startswith("kvscout demo: no variant of topk serves a problem")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("", "directory"),
        ("none/x", "there is no folder"),
        ("x" * 300, "too long"),
        ("nul\0", "null"),
        ("loop", "ymlink"),
    ],
)
def test_a_result_file_that_cannot_be_written_is_refused_before_the_work(run, tmp_path, command, file, said):
    (tmp_path / "loop").symlink_to("loop")
    code, out, err = run(command, "--json", f"{tmp_path}/{file}")
    assert (code, out) == (2, "")
    assert err.startswith(f"kvscout {command}: --json: ")
    assert said in err


def test_trying_a_result_file_leaves_no_trace(tmp_path):
    new, old, link = (tmp_path / name for name in ("new", "old", "link"))
    old.write_text("earlier results")
    link.symlink_to("new")
    for file in (None, new, old, link):
        arguments.check_json(file)
    assert old.read_text() == "earlier results"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old"]


def test_trying_a_pipe_does_not_wait_for_its_reader(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    arguments.check_json(tmp_path / "pipe")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_result_file_that_fails_later_is_said_and_what_was_found_printed(run, tmp_path, monkeypatch, command):
    for module in (arguments, entry.commands()["demo"]):
        monkeypatch.setattr(module, "check_json", lambda file: None)
    monkeypatch.setattr(timing, "TARGET_S", 1e-4)
    (tmp_path / "text").write_text("some text")
    small = (str(tmp_path / "text"), "--steps", "1", "--layers", "1")
    words = small if command == "demo" else ("topk", "--device", "cpu", "--case", "1x1-", "--variant", "torch_packed")
    code, out, err = run(command, *words, "--json", str(tmp_path))
    assert code == 1
    assert err == f"--json: cannot write '{tmp_path}': Is a directory\n"
    assert "torch_packed" in out


def shell(run_python, words):
    """Exit code and stderr of ``kvscout`` with the shell's words, redirections among them."""
    code = f"""
import subprocess, sys
done = subprocess.run(f"'{{sys.executable}}' -m kvscout {words}", shell=True, capture_output=True, text=True)
print(done.returncode, done.stderr)
"""
    status, _, err = run_python("-c", code).stdout.partition(" ")
    return int(status), err.strip()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_finds_no_space(run_python):
    message = "kvscout info: cannot write to the standard output: No space left on device"
    assert shell(run_python, "info >/dev/full") == (1, message)


def test_output_that_is_closed(run_python):
    assert shell(run_python, "info >&-") == (
        1,
        "kvscout info: the standard output is closed, so nothing can be printed",
    )


def test_errors_that_cannot_be_said_change_nothing(run_python):
    assert shell(run_python, "verify nope 2>&-") == (2, "")


def test_output_that_nobody_reads_is_no_error_of_ours(run_python):
    code = """
import subprocess, sys
shown = subprocess.Popen([sys.executable, "-m", "kvscout", "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
shown.stdout.close()
print(shown.stderr.read().decode(), shown.wait())
"""
    assert run_python("-c", code).stdout.split() == ["141"]
