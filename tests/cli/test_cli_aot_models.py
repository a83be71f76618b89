"""``kvscout aot --model`` and ``--shapes``: what is said and returned. What is compiled is for ``tests/aot``."""

import importlib.metadata
import json
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext

import pytest

from kvscout import tuning
from kvscout.aot.models import WrongModel
from kvscout.cli import aot, replays
from kvscout.device import StandIn
from kvscout.kernels.cute import store, toolchain
from kvscout.kernels.triton_store import Kernel, Specialisation

MODULE = "kvscout.ops.pa_decode."
NONE = Specialisation({}, {}, {}, {})


@pytest.fixture(autouse=True)
def compiles(monkeypatch, tmp_path):
    """As in a process where Triton does not interpret, of a package without tuned tables."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(tuning, "PACKAGED", tmp_path / "none")


@pytest.fixture
def asked(monkeypatch):
    """The GPUs whose calls were made; each asks for a kernel of a variant, and one that variants share."""
    gpus = []

    def replay(wanted, found, jobs):
        for gpu in found:
            gpus.append(gpu)
            kernels = [("variants.triton_tile", "_tile", "a"), ("triton_merge", "_merge", "b")]
            yield gpu, [Kernel(MODULE + module, name, gpu.arch, 32 * key, NONE) for module, name, key in kernels]

    monkeypatch.setattr(replays, "_replays", replay)
    return gpus


@pytest.fixture
def at_once(monkeypatch):
    """Kernels are files with nothing in them, made in this process."""

    def results(kernels, folder, jobs):
        for kernel in kernels:
            store.write(kernel.file(folder), bytes(2048))
            yield kernel, aot.Built(1.25)

    monkeypatch.setattr(aot, "_results", results)


def test_each_gpu_s_kernels_are_made_and_told_apart(run, asked, at_once, tmp_path):
    words = ("aot", "--model", "glm-5", "--archs", "sm_90a, gfx942:80,sm_100:148", "--output", str(tmp_path))
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    assert asked == [StandIn("sm_90", 132), StandIn("gfx942", 80), StandIn("sm_100", 148)]
    assert [line.split() for line in out.splitlines() if line.startswith("pa_decode")] == [
        ["pa_decode", variant, arch, name, "compiled", "1.2", "2"]
        for arch in ("sm_90", "gfx942", "sm_100")
        for variant, name in (("triton_tile", "_tile-aaaaaaaa"), ("-", "_merge-bbbbbbbb"))
    ]
    assert run(*words)[1].count(" kept ") == 6


def test_the_same_kernel_for_two_gpus_of_an_architecture_is_made_once(run, asked, at_once, tmp_path):
    _, out, _ = run("aot", "--model", "glm-5", "--archs", "sm_90,sm_90:114,sm_90a:132", "--output", str(tmp_path))
    assert asked == [StandIn("sm_90", 132), StandIn("sm_90", 114)]
    assert out.count("compiled") == 2


def test_a_gpu_that_a_tuned_table_is_here_for_is_asked_too(run, asked, at_once, tmp_path, monkeypatch):
    content = {"format": tuning.FORMAT, "device": "NVIDIA H200", "ops": {}}
    content["runs"] = [{"machine": {"arch": "sm_90", "sms": 132}}]
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "nvidia_h200.json").write_text(json.dumps(content))
    monkeypatch.setenv("KVSCOUT_TUNED_DIR", str(tmp_path / "tuned"))
    words = ("aot", "--model", "glm-5", "--archs", "sm_90,sm_90:114,sm_80", "--output", str(tmp_path / "out"))
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    h200 = StandIn("sm_90", 132, "NVIDIA H200")
    assert asked == [StandIn("sm_90", 132), h200, StandIn("sm_90", 114), StandIn("sm_80", 108)]
    assert out.splitlines()[0] == "sm_90: what the rule chooses, and what is tuned for 'NVIDIA H200'"
    asked.clear()
    monkeypatch.setenv("KVSCOUT_TUNED", "0")
    assert run(*words)[0] == 0
    assert h200 not in asked
    monkeypatch.setenv("KVSCOUT_TUNED", "perhaps")
    code, _, err = run(*words)
    assert code == 2
    assert err.startswith("kvscout aot: KVSCOUT_TUNED: expected 0, 1, ")


def test_list_says_what_there_is(run, asked, tmp_path):
    kernel = Kernel(MODULE + "triton_merge", "_merge", "sm_90", 32 * "b", NONE)
    store.write(kernel.file(tmp_path), b"")
    other = kernel.file(tmp_path).parents[2] / "triton_tile._tile" / (32 * "a") / "kernel"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"cut short")
    code, out, err = run("aot", "--model", "glm-5", "--list", "--output", str(tmp_path))
    version = importlib.metadata.version("triton")
    assert (code, err) == (0, "")
    assert [line.split()[2:] for line in out.splitlines() if line.startswith("pa_decode")] == [
        ["sm_90", "_tile-aaaaaaaa", version, "(damaged)"],
        ["sm_90", "_merge-bbbbbbbb", version],
    ]


def test_what_triton_cannot_compile_for_is_said_and_the_rest_is_made(run, asked, at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.6.0")
    code, out, err = run("aot", "--model", "glm-5", "--archs", "gfx1250:256,sm_80", "--output", str(tmp_path))
    assert (code, asked) == (1, [StandIn("sm_80", 108)])
    assert err == "gfx1250: needs Triton 3.9 or newer, whose kernels fit its registers; 3.6.0 is installed\n"
    assert out.count("compiled") == 2
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.10.0+git1")
    assert run("aot", "--model", "glm-5", "--archs", "gfx1250:256", "--output", str(tmp_path))[0] == 0
    assert asked[-1] == StandIn("gfx1250", 256)


def test_a_gpu_whose_size_nobody_has_said_is_asked_for_it(run, asked, at_once, tmp_path):
    code, _, err = run("aot", "--model", "glm-5", "--archs", "sm_100,sm_90", "--output", str(tmp_path))
    assert (code, asked) == (1, [StandIn("sm_90", 132)])
    assert err.endswith("its number of multiprocessors N; name it as sm_100:N\n")


def test_without_cute_dsl_triton_s_kernels_are_made(run, asked, at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "cannot_compile", lambda: toolchain.NO_DSL)
    assert run("aot", "--model", "glm-5", "--output", str(tmp_path))[0] == 0
    program = aot.select(["pa_decode"])[0].program
    monkeypatch.setattr(replays, "_replays", lambda wanted, gpus, jobs: [(gpus[0], [program])])
    code, _, err = run("aot", "--model", "glm-5", "--output", str(tmp_path))
    assert (code, err) == (
        1,
        f"1 of 1 kernels are missing in {tmp_path}, and none can be compiled here: {toolchain.NO_DSL}\n",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("topk", "--model", "glm-5"), "OP: goes without --model and --shapes"),
        (("--archs", "sm_90"), "--archs: goes with --model or --shapes"),
        (("--model", "glm-6"), "--model: invalid choice: 'glm-6'"),
        (("--shapes", ""), "--shapes: expected the name of a file, got an empty one"),
        (("--shapes", "/nothing.json"), "--shapes: cannot read '/nothing.json': No such file or directory"),
        (("--model", "glm-5", "--archs", "h100"), "--archs: expected architectures like sm_90a, gfx942 or gfx942:80"),
        (("--model", "glm-5", "--archs", "sm_90,"), "separated by commas, got ''"),
        (("--model", "glm-5", "--archs", "sm_90:0"), "separated by commas, got 'sm_90:0'"),
    ],
)
def test_what_cannot_be_is_said(run, asked, words, message, tmp_path):
    code, out, err = run("aot", *words, "--output", str(tmp_path))
    assert (code, out, asked) == (2, "", [])
    assert message in err


def test_an_interpreting_triton_compiles_nothing(run, asked, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run("aot", "--model", "glm-5")[::2] == (
        2,
        "kvscout aot: TRITON_INTERPRET: is set, so that Triton compiles nothing\n",
    )


def test_without_triton_there_is_nobody_to_ask(run, asked, monkeypatch):
    monkeypatch.setattr(replays.importlib.util, "find_spec", lambda name: None)
    assert "need the Python package 'triton', which is not installed" in run("aot", "--model", "glm-5")[2]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (WrongModel("a: k: expected 1"), "kvscout aot: --model, --shapes: a: k: expected 1\n"),
        (BrokenProcessPool("it ended"), "kvscout aot: --archs: the process that stood for sm_90 has ended: it ended\n"),
    ],
)
def test_calls_that_fail_are_said(run, monkeypatch, error, message, tmp_path):
    class Pool:
        def submit(self, *work):
            return self

        def result(self):
            raise error

    monkeypatch.setattr(replays.workers, "pool", lambda number: nullcontext(Pool()))
    assert run("aot", "--model", "glm-5", "--output", str(tmp_path)) == (2, "", message)
