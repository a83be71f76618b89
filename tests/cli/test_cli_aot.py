"""``kvscout aot``: what it compiles, keeps, prints and returns."""

import errno
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvscout.cli import aot, builds
from kvscout.kernels.cute import store, toolchain
from kvscout.kernels.cute.program import Program
from kvscout.variants import Variant

pytestmark = [
    pytest.mark.xdist_group("cute"),
    pytest.mark.skipif(toolchain.cannot_compile() is not None, reason="needs CuTe DSL and a C compiler"),
]

MODULE = "tests.kernels.cute.cute_add"
VARIANT = Variant(launch=print, default_config=print, rank=print)


@pytest.fixture
def programs(monkeypatch):
    """What the variants of ``topk`` may ask for; no other op has any."""
    from tests.kernels.cute.cute_add import Spec

    found = [Program("add128", f"{MODULE}:build", Spec()), Program("add64", f"{MODULE}:build", Spec(threads=64))]

    def family(op):
        if op != "topk":
            return SimpleNamespace(names=["torch_a", "cute_plain"], load=lambda name: VARIANT)
        return SimpleNamespace(
            names=["torch_a", "cute_a", "cute_b"], load=lambda name: replace(VARIANT, programs=lambda: found)
        )

    monkeypatch.setattr(aot, "family", family)
    return found


@pytest.fixture
def at_once(monkeypatch):
    """Kernels are files with nothing in them, made in this process."""

    def results(programs, folder, jobs):
        for program in programs:
            path = builds.file_of(folder, program)
            if program.builder.endswith("build_nothing"):
                yield program, aot.Built(0.5, "ArithmeticError: no")
            else:
                store.write(path, bytes(10 << 10))
                yield program, aot.Built(1.25)

    monkeypatch.setattr(aot, "_results", results)


def rows(out):
    return {line.split()[2]: line.split()[3:] for line in out.splitlines() if line.startswith("topk")}


def files(folder):
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


@pytest.mark.slow
def test_kernels_are_compiled_in_processes_and_nothing_but_their_files_is_left(run, programs, tmp_path):
    programs.append(Program("nothing", f"{MODULE}:build_nothing", programs[0].spec))
    code, out, err = run("aot", "topk", "--output", str(tmp_path / "out"), "--jobs", "2")
    assert code == 1
    assert err == "FAILED nothing: ArithmeticError: there is no such kernel\n" + (
        f"while nothing was compiled for sm_90a with CuTe DSL {toolchain.dsl_version()}\n"
    )
    found = rows(out)
    assert [found[name][0] for name in ("add128", "add64", "nothing")] == ["compiled", "compiled", "failed"]
    assert float(found["add64"][1]) > 0
    assert 20 < int(found["add64"][2]) < 200
    assert files(tmp_path / "out") == sorted(builds.file_of(tmp_path / "out", program) for program in programs[:2])
    assert all(map(store.is_whole, files(tmp_path / "out")))


def test_what_the_folder_has_is_kept_and_what_is_broken_made_again(run, programs, tmp_path, at_once):
    kept, broken = (builds.file_of(tmp_path, program) for program in programs)
    store.write(kept, b"kept")
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"cut short")
    code, out, err = run("aot", "--output", str(tmp_path))
    assert (code, err) == (0, "")
    assert rows(out) == {"add128": ["kept", "-", "0"], "add64": ["compiled", "1.2", "10"]}
    assert kept.read_bytes().startswith(b"kept")


def test_a_program_of_two_variants_is_compiled_once(run, programs, tmp_path, at_once):
    _, out, _ = run("aot", "--output", str(tmp_path))
    assert [line.split()[:3] for line in out.splitlines() if line.startswith("topk")] == [
        ["topk", "cute_a", "add128"],
        ["topk", "cute_a", "add64"],
    ]


def test_the_cache_is_where_they_go_unless_told_otherwise(run, programs, tmp_path, at_once, monkeypatch):
    monkeypatch.setenv("KVSCOUT_CACHE_DIR", str(tmp_path / "cache"))
    assert run("aot")[0] == 0
    assert len(files(tmp_path / "cache")) == 2


def test_list_says_what_there_is_and_compiles_nothing(run, programs, tmp_path):
    store.write(builds.file_of(tmp_path, programs[1]), b"")
    store.write(builds.file_of(tmp_path, programs[1]).with_name("cute-4.0.so"), b"")
    before = files(tmp_path)
    code, out, err = run("aot", "--list", "--output", str(tmp_path))
    assert (code, err) == (0, "")
    assert rows(out) == {"add128": ["-"], "add64": [f"{toolchain.dsl_version()},", "4.0"]}
    assert files(tmp_path) == before


def test_without_a_compiler_it_says_so(run, programs, tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "cannot_compile", lambda: toolchain.NO_DSL)
    code, out, err = run("aot", "--output", str(tmp_path))
    assert (code, out) == (1, "")
    assert err == f"2 of 2 kernels are missing in {tmp_path}, and none can be compiled here: {toolchain.NO_DSL}\n"
    for program in programs:
        store.write(builds.file_of(tmp_path, program).with_name("cute-3.0.so"), b"")
    assert run("aot", "--output", str(tmp_path)) == (0, f"all 2 kernels are in {tmp_path}\n", "")


def test_a_kernel_that_another_run_has_just_made_is_kept(programs, tmp_path):
    path = builds.file_of(tmp_path, programs[0])
    store.write(path, b"theirs")
    built = builds.compile_one(programs[0], path)
    assert (built.error, built.kept) == (None, True)
    assert path.read_bytes().startswith(b"theirs")
    assert aot._state(True, True, built) == "kept"


def test_a_disk_that_is_full_fails_one_kernel(programs, tmp_path, monkeypatch):
    def full(*names):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.os, "replace", full)
    built = builds.compile_one(programs[0], builds.file_of(tmp_path, programs[0]))
    assert built.error == "OSError: [Errno 28] No space left on device"
    assert files(tmp_path) == []


def test_a_damaged_file_is_listed_as_such(run, programs, tmp_path):
    path = builds.file_of(tmp_path, programs[0])
    path.parent.mkdir(parents=True)
    path.write_bytes(b"cut short")
    _, out, _ = run("aot", "--list", "--output", str(tmp_path))
    assert rows(out) == {"add128": [toolchain.DSL_VERSION, "(damaged)"], "add64": ["-"]}


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_compiled(run, programs, tmp_path, monkeypatch):
    def read_only(dir):
        raise OSError(errno.EROFS, "Read-only file system")

    def never(*arguments):
        raise AssertionError("compiled")

    monkeypatch.setattr(aot.tempfile, "TemporaryFile", read_only)
    monkeypatch.setattr(aot, "_results", never)
    monkeypatch.setenv("KVSCOUT_CACHE_DIR", str(tmp_path))
    for words, blamed in (((), "KVSCOUT_CACHE_DIR"), (("--output", str(tmp_path)), "--output")):
        code, out, err = run("aot", *words)
        assert (code, out) == (2, "")
        assert f"{blamed}: cannot write into '{tmp_path}': Read-only file system" in err


def test_a_folder_that_has_all_need_not_be_written(run, programs, tmp_path, monkeypatch):
    for program in programs:
        store.write(builds.file_of(tmp_path, program), b"")
    monkeypatch.setattr(aot, "_check_writable", None)
    assert run("aot", "--output", str(tmp_path))[0] == 0


@pytest.mark.parametrize("words", [(), ("--list",)])
def test_a_file_is_no_folder(run, programs, tmp_path, words, monkeypatch):
    (tmp_path / "file").write_text("")
    code, out, err = run("aot", *words, "--output", str(tmp_path / "file"))
    assert (code, out) == (2, "")
    assert f"--output: '{tmp_path / 'file'}' is not a folder" in err
    monkeypatch.setenv("KVSCOUT_CACHE_DIR", str(tmp_path / "file"))
    assert "KVSCOUT_CACHE_DIR: " in run("aot", *words)[2]


def test_a_variable_that_means_nothing_is_bad_usage(run, programs, monkeypatch):
    monkeypatch.setenv("KVSCOUT_CACHE_DIR", "~no-such-user/x")
    code, out, err = run("aot", "--list")
    assert (code, out) == (2, "")
    assert "KVSCOUT_CACHE_DIR: '~no-such-user/x' has no home folder" in err


def test_ctrl_c_keeps_what_was_compiled(run, programs, tmp_path, at_once, monkeypatch):
    one = aot._results

    def interrupted(programs, folder, jobs):
        yield from one(programs[:1], folder, jobs)
        # One that was under way and is finished, without its result being seen.
        store.write(builds.file_of(folder, programs[1]), bytes(20 << 10))
        raise KeyboardInterrupt

    programs.append(replace(programs[0], name="add32"))
    monkeypatch.setattr(aot, "_results", interrupted)
    code, out, err = run("aot", "--output", str(tmp_path))
    assert code == 130
    assert rows(out) == {
        "add128": ["compiled", "1.2", "10"],
        "add64": ["compiled", "-", "20"],
        "add32": ["not", "reached", "-", "-"],
    }
    assert err == "interrupted; 1 of 3 kernels were not reached\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nope",), "OP: there is no op 'nope'; there are mqa_logits, "),
        (("kv_cache",), "OP: no variant of kv_cache has kernels that are compiled ahead of time"),
        (("--jobs", "0"), "--jobs: expected a whole number from 1"),
        (("--output", ""), "--output: expected the name of a file, got an empty one"),
        (("--output", "/dev/null/x"), "--output: cannot make the folder '/dev/null/x': Not a directory"),
    ],
)
def test_what_cannot_be_is_said(run, programs, words, message):
    code, out, err = run("aot", *words)
    assert (code, out) == (2, "")
    assert message in err
