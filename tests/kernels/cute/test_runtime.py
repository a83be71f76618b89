"""Finding, making and loading kernels; what becomes of it where something is missing or broken.

No kernel can be launched without a GPU. What a loaded one does without it is to check its arguments, and to say that
they are not on a CUDA device: that is how these tests know that it is the right function.
"""

import shutil
import threading
import tomllib
import warnings

import pytest
import torch

from kvscout.kernels.cute import runtime, store, toolchain
from kvscout.kernels.cute.program import KernelUnavailable, Program
from kvscout.variants import Required

pytestmark = [
    pytest.mark.xdist_group("cute"),
    pytest.mark.skipif(toolchain.cannot_compile() is not None, reason="needs CuTe DSL and a C compiler"),
    pytest.mark.skipif(not toolchain.has_loader(), reason="needs tvm-ffi"),
]


@pytest.fixture
def compiler():
    """Imported late: where it cannot be, these tests are skipped."""
    from kvscout.kernels.cute import compiler

    return compiler


def works(function):
    """Whether this is the loaded kernel, as far as can be told without a GPU."""
    vector = torch.zeros(4)
    with pytest.raises(
        ValueError, match=r"argument #0 .*`add\(a: Tensor\(\[n0\], float32\).* expected device_type=cuda"
    ):
        function(vector, vector, vector, 4)
    return True


@pytest.fixture
def path(cache, add):
    """Where this compiler's file goes."""
    return store.file(cache, add, toolchain.dsl_version())


@pytest.fixture
def no_dsl(monkeypatch):
    toolchain.dsl_version.cache_clear()
    monkeypatch.setattr(toolchain, "dsl_version", lambda: None)


def test_a_kernel_is_compiled_into_the_cache_and_loaded(add, path, cache):
    assert runtime.refusal(add) is None
    assert not cache.exists()
    assert works(runtime.load(add))
    assert store.is_whole(path)
    assert [file for file in cache.rglob("*") if file.is_file()] == [path]


def test_it_is_compiled_once_and_loaded_once_per_process(add, path, compiled):
    first = runtime.load(add)
    assert works(first)
    assert compiled == [(add, path)]
    assert runtime.load(add) is first
    runtime.load.cache_clear()
    assert works(runtime.load(add))
    assert len(compiled) == 1


def test_another_spec_or_other_sources_are_another_file(add, path, cache, spec, compiled):
    runtime.load(add)
    other = Program(add.name, add.builder, spec(threads=64))
    runtime.load(other)
    assert [program for program, _ in compiled] == [add, other]
    assert len(set(cache.rglob("*.so"))) == 2


@pytest.mark.parametrize("kept", [0, 5000, -1])
def test_a_truncated_file_is_compiled_again(add, path, library, compiled, kept):
    store.write(path, library)
    path.write_bytes(path.read_bytes()[:kept])
    assert works(runtime.load(add))
    assert len(compiled) == 1


def test_garbage_is_compiled_again(add, path, compiled):
    path.parent.mkdir(parents=True)
    path.write_bytes(b"garbage" * 10000)
    assert works(runtime.load(add))
    assert len(compiled) == 1


def test_a_kernel_of_other_sources_in_its_place_is_compiled_again(add, path, cache, spec, library, compiled):
    older = store.file(cache, Program(add.name, add.builder, spec(threads=64)), toolchain.dsl_version())
    store.write(older, library)
    shutil.copytree(older.parent, path.parent)
    assert works(runtime.load(add))
    assert compiled == [(add, path)]
    assert store.is_whole(path)


def test_a_folder_that_vanishes_while_it_is_compiled_is_made_again(add, path, cache, library, monkeypatch, compiler):
    def compile_to(program, path):
        shutil.rmtree(cache)
        store.write(path, library)

    monkeypatch.setattr(compiler, "compile_to", compile_to)
    assert works(runtime.load(add))
    assert store.is_whole(path)


def test_a_file_that_vanishes_once_it_is_written_is_said_and_done_without(add, cache, library, monkeypatch, compiler):
    asked = []

    def compile_to(program, path):
        asked.append(path)
        store.write(path, library)
        if path.is_relative_to(cache):
            shutil.rmtree(cache)

    monkeypatch.setattr(compiler, "compile_to", compile_to)
    with pytest.warns(UserWarning, match=rf"^{cache} cannot be written \(cute-.*so is gone, or was changed, since it "):
        assert works(runtime.load(add))
    assert [path.is_relative_to(cache) for path in asked] == [True, False]


def test_a_folder_in_the_file_s_place_is_said_and_done_without(add, path, cache, compiled):
    path.mkdir(parents=True)
    with pytest.warns(UserWarning, match=rf"^{cache} cannot be written \(Is a directory\)"):
        assert works(runtime.load(add))
    assert len(compiled) == 2


def test_ahead_of_time_only_a_file_that_vanishes_is_named(add, path, cache, library, monkeypatch):
    monkeypatch.setenv("KVSCOUT_AOT_ONLY", "1")
    store.write(path, library)
    assert runtime.refusal(add) is None
    shutil.rmtree(cache)
    with pytest.raises(KernelUnavailable, match=rf"^add: {cache} holds no add of these sources .* KVSCOUT_AOT_ONLY is"):
        runtime.load(add)
    assert isinstance(runtime.refusal(add), Required)


def test_while_kernels_are_recorded_every_one_can_be_had_and_none_is_made(add, cache, spec, no_dsl, monkeypatch):
    monkeypatch.setattr(toolchain, "has_loader", lambda: False)
    other = Program(add.name, add.builder, spec(threads=64))
    with runtime.recording() as asked:
        assert [runtime.refusal(add), runtime.refusal(other)] == [None, None]
        for program in (add, other, add):
            assert runtime.load(program)(torch.zeros(1), 5) is None
    assert asked == [add, other]
    with runtime.recording() as asked:
        launch = runtime.load(add)
    with runtime.recording() as asked_again:
        launch(torch.zeros(1), 5)
    assert asked_again == [add]
    assert not cache.exists()
    assert runtime.refusal(add) == toolchain.NO_LOADER


def test_what_can_be_made_is_what_a_call_would_compile(add, cache, monkeypatch):
    monkeypatch.setattr(runtime, "_cannot_load", lambda: None)
    assert runtime.can_make(add)
    monkeypatch.setattr(toolchain, "cannot_compile", lambda: toolchain.NO_DSL)
    runtime._refusal.cache_clear()
    assert not runtime.can_make(add)
    monkeypatch.setattr(toolchain, "cannot_compile", lambda: None)
    runtime._refusal.cache_clear()
    monkeypatch.setenv("KVSCOUT_AOT_ONLY", "1")
    assert not runtime.can_make(add)
    monkeypatch.delenv("KVSCOUT_AOT_ONLY")
    monkeypatch.setattr(runtime, "_cannot_load", lambda: toolchain.NO_LOADER)
    runtime._refusal.cache_clear()
    assert not runtime.can_make(add)


def test_a_file_that_does_not_load_is_compiled_again_and_said(add, path, compiled):
    store.write(path, b"no library")
    with pytest.warns(UserWarning, match=f"compiled again: add: {path} does not load"):
        assert works(runtime.load(add))
    assert len(compiled) == 1


def test_a_library_without_the_function_does_not_load(add, cache, compiled):
    other = Program("subtract", add.builder, add.spec)
    with pytest.raises(KernelUnavailable, match=r"subtract: .* does not load"):
        runtime.load(other)


def test_without_a_compiler_a_broken_file_is_named(add, path, no_dsl):
    store.write(path, b"no library")
    with pytest.raises(
        KernelUnavailable, match=f"add: {path} does not load: .*; the Python package 'nvidia-cutlass-dsl'"
    ):
        runtime.load(add)


def test_without_cute_dsl_a_file_of_any_version_serves(add, path, library, no_dsl):
    store.write(path.with_name("cute-3.0.so"), library)
    store.write(path.with_name("cute-11.0.so"), b"no library")
    assert runtime.refusal(add) is None
    assert works(runtime.load(add))


def test_with_cute_dsl_only_its_own_version_does(add, path, library, compiled):
    store.write(path.with_name("cute-3.0.so"), library)
    runtime.load(add)
    assert compiled == [(add, path)]


def test_another_version_of_cute_dsl_compiles_nothing_and_files_of_any_version_serve(add, path, library, monkeypatch):
    monkeypatch.setattr(toolchain, "dsl_version", lambda: "4.0.0")
    reason = f"kernels are compiled by 'nvidia-cutlass-dsl' {toolchain.DSL_VERSION}, not by 4.0.0, which is installed"
    assert runtime.refusal(add).endswith(f" of these sources (see 'kvscout aot'), and {reason}")
    runtime._refusal.cache_clear()
    store.write(path.with_name("cute-3.0.so"), library)
    assert works(runtime.load(add))


def test_the_version_is_the_one_that_the_extra_installs(root):
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = [word for word in extras["hopper"] if word.startswith("nvidia-cutlass-dsl")]
    assert [word.partition("==")[2] for word in pinned] == [toolchain.DSL_VERSION]


def test_a_damaged_file_is_not_called_absent(add, path, library, no_dsl):
    store.write(path, library)
    path.write_bytes(path.read_bytes()[:5000])
    assert runtime.refusal(add).startswith(f"{path}: damaged or not readable, and the Python package")


def test_without_cute_dsl_and_without_a_file_it_refuses(add, cache, no_dsl):
    reason = f"{cache} holds no add of these sources (see 'kvscout aot'), and the Python package 'nvidia-cutlass-dsl'"
    assert runtime.refusal(add).startswith(reason)
    with pytest.raises(KernelUnavailable) as raised:
        runtime.load(add)
    assert str(raised.value) == f"add: {runtime.refusal(add)}"


@pytest.mark.parametrize("variable", ["CC", "PATH"])
def test_without_a_c_compiler_it_refuses(add, cache, monkeypatch, variable):
    monkeypatch.setenv(variable, "/nothing/here")
    assert "there is no C compiler" in runtime.refusal(add)
    with pytest.raises(KernelUnavailable, match=r"add: .* there is no C compiler"):
        runtime.load(add)


def test_a_c_compiler_that_fails_is_quoted(add, cache, monkeypatch):
    monkeypatch.setenv("CC", "cc -fno-such-option")
    with pytest.raises(
        KernelUnavailable, match=r"add: linking failed: cc -fno-such-option -shared (.|\n)*fno-such-option"
    ) as first:
        runtime.load(add)
    assert not list(cache.rglob("*.so"))
    # The process remembers.
    monkeypatch.delenv("CC")
    with pytest.raises(KernelUnavailable) as second:
        runtime.load(add)
    assert str(second.value) == str(first.value) == f"add: {runtime.refusal(add)}"
    assert not isinstance(runtime.refusal(add), Required)


def test_cc_that_is_no_command_is_no_c_compiler(add, cache, monkeypatch):
    monkeypatch.setenv("CC", 'cc "')
    assert "and CC: expected a command as in a shell, got 'cc \"'" in runtime.refusal(add)


def test_threads_that_want_a_kernel_that_fails_try_once(add, cache, monkeypatch, compiler):
    tried, failures, barrier = [], [], threading.Barrier(3)

    def load():
        barrier.wait()
        try:
            runtime.load(add)
        except KernelUnavailable as error:
            failures.append(str(error))

    def compile_to(program, path):
        tried.append(program)
        raise ArithmeticError("no")

    monkeypatch.setattr(compiler, "compile_to", compile_to)
    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == ["add: it does not compile: ArithmeticError: no"] * 3
    assert tried == [add]


def test_without_tvm_ffi_it_refuses(add, cache, monkeypatch):
    monkeypatch.setattr(toolchain, "has_loader", lambda: False)
    assert runtime.refusal(add) == "needs the Python package 'apache-tvm-ffi', which is not installed"


def test_ahead_of_time_only_takes_files_and_makes_none(add, path, library, compiled, monkeypatch):
    monkeypatch.setenv("KVSCOUT_AOT_ONLY", "1")
    with pytest.raises(KernelUnavailable, match=r"holds no add of these sources .*, and KVSCOUT_AOT_ONLY is set"):
        runtime.load(add)
    runtime._refusal.cache_clear()
    store.write(path, library)
    assert works(runtime.load(add))
    assert compiled == []


def test_ahead_of_time_only_what_is_missing_is_required(add, path, monkeypatch):
    monkeypatch.setenv("KVSCOUT_AOT_ONLY", "1")
    assert isinstance(runtime.refusal(add), Required)
    runtime._refusal.cache_clear()
    store.write(path, b"no library")
    with pytest.raises(KernelUnavailable, match="does not load"):
        runtime.load(add)
    assert isinstance(runtime.refusal(add), Required)
    runtime._refusal.cache_clear()
    runtime._FAILED.clear()
    monkeypatch.setattr(toolchain, "has_loader", lambda: False)
    assert not isinstance(runtime.refusal(add), Required)


def test_some_of_many_will_do(add, path, spec, library, no_dsl):
    other = Program("add", add.builder, spec(threads=64))
    assert runtime.unavailable([other, add]) == f"none of its 2 kernels can be had: {runtime.refusal(other)}"
    runtime._refusal.cache_clear()
    store.write(path, library)
    assert runtime.unavailable([other, add]) is None


def test_nothing_will_do_without_tvm_ffi(add, cache, monkeypatch):
    assert runtime.unavailable([add]) is None
    monkeypatch.setattr(toolchain, "has_loader", lambda: False)
    assert runtime.unavailable([add]) == toolchain.NO_LOADER


def test_a_cache_whose_place_is_unknown_is_done_without(add, compiled, monkeypatch):
    monkeypatch.setenv("KVSCOUT_CACHE_DIR", "~no-such-user/cache")
    with pytest.warns(UserWarning, match="^KVSCOUT_CACHE_DIR: '~no-such-user/cache' has no home folder; .* alone;"):
        assert works(runtime.load(add))
    runtime.load.cache_clear()
    runtime._refusal.cache_clear()
    monkeypatch.setattr(toolchain, "cannot_compile", lambda: toolchain.NO_DSL)
    assert runtime.refusal(add).startswith("KVSCOUT_CACHE_DIR: '~no-such-user/cache' has no home folder; ")


def test_a_builder_that_raises_is_seen_with_the_kernel_s_name(spec, cache):
    broken = Program("broken", "tests.kernels.cute.cute_add:build_nothing", spec())
    with pytest.raises(
        KernelUnavailable,
        match=r"^broken: it does not compile: ArithmeticError: there .* while broken was compiled",
    ) as raised:
        runtime.load(broken)
    assert isinstance(raised.value.__cause__, ArithmeticError)


def test_a_cache_that_cannot_be_written_is_said_once_and_done_without(add, cache, spec, compiled):
    cache.write_text("a file, not a folder")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert works(runtime.load(add))
        assert works(runtime.load(Program("add", add.builder, spec(threads=64))))
    assert len(said) == 1
    assert str(said[0].message).startswith(f"{cache} cannot be written (Not a directory)")
    assert len(compiled) == 2
    assert all(str(path).startswith(store.temporary().name) for _, path in compiled)


def test_where_no_folder_can_be_written_the_kernel_is_named(add, cache, compiled, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "replace", full)
    with (
        pytest.warns(UserWarning, match="No space left"),
        pytest.raises(KernelUnavailable, match=r"add: no folder takes its file: .*No space left"),
    ):
        runtime.load(add)


def test_threads_that_want_one_kernel_compile_it_once(add, path, compiled):
    barrier = threading.Barrier(4)
    found = []

    def load():
        barrier.wait()
        found.append(runtime.load(add))

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(compiled) == 1


LOAD = """
import sys
from kvscout.kernels.cute import runtime
from kvscout.kernels.cute.program import Program
from tests.kernels.cute.cute_add import Spec
print(runtime.load(Program("add", "tests.kernels.cute.cute_add:build", Spec(builds=sys.argv[1]))))
"""


@pytest.mark.slow
def test_processes_that_want_one_kernel_compile_it_once(run_python, tmp_path):
    builds = tmp_path / "builds"
    done = []

    def load():
        done.append(
            run_python("-c", LOAD, str(builds), env={"KVSCOUT_CACHE_DIR": str(tmp_path / "cache")}, check=False)
        )

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(process.returncode, process.stdout) for process in done] == [(0, "ffi.Function\n")] * 3, done
    assert builds.read_text() == "built\n"


def test_the_environment_stays_as_it_was(run_python, tmp_path):
    """CuTe DSL is told what it is to compile for, needs no variable, and changes nothing of the process for good."""
    code = """
import os, sys, kvscout
before = dict(os.environ), sys.excepthook
from kvscout.kernels.cute.compiler import compile_to
from kvscout.kernels.cute.program import Program
from tests.kernels.cute.cute_add import Spec
from pathlib import Path
compile_to(Program("add", "tests.kernels.cute.cute_add:build", Spec()), Path(sys.argv[1]))
assert (dict(os.environ), sys.excepthook) == before
"""
    run_python("-c", code, str(tmp_path / "add.so"), env={"CUTE_DSL_ARCH": "sm_100a"})
    assert store.is_whole(tmp_path / "add.so")
