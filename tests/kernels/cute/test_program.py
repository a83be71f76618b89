"""What names a kernel, and what its fingerprint follows."""

import importlib
import sys
from dataclasses import dataclass

import pytest

from kvscout.kernels.cute import program, toolchain
from kvscout.kernels.cute.program import Program, fingerprint


@dataclass(frozen=True)
class Size:
    n: int


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder of a builder's, on the path."""
    folder = tmp_path / "somewhere"
    folder.mkdir()
    for name in ("builder", "cute_part", "other"):
        (folder / f"{name}.py").write_text("raise AssertionError('only to compile is this imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "somewhere"]:
        del sys.modules[name]


def of(name="k", function="build", n=1):
    fingerprint.cache_clear()
    program._sources_digest.cache_clear()
    return fingerprint(Program(name, f"somewhere.builder:{function}", Size(n)))


def test_equal_programs_have_one_fingerprint_and_others_another(package):
    assert of() == of()
    assert len({of(), of(name="k2"), of(function="build2"), of(n=2)}) == 4
    assert len(of()) == 16


@pytest.mark.parametrize("name", ["builder", "cute_part"])
def test_the_sources_are_part_of_it(package, name):
    before = of()
    with (package / f"{name}.py").open("a") as file:
        file.write("# changed\n")
    assert of() != before


def test_a_new_source_changes_it_and_other_files_do_not(package):
    before = of()
    (package / "other.py").write_text("changed = True\n")
    (package / "new.py").write_text("")
    assert of() == before
    (package / "cute_new.py").write_text("")
    assert of() != before


def test_what_moves_from_one_source_to_another_changes_it(package):
    (package / "builder.py").write_text("a\nb\n")
    (package / "cute_part.py").write_text("c\n")
    before = of()
    (package / "builder.py").write_text("a\n")
    (package / "cute_part.py").write_text("b\nc\n")
    assert of() != before


def test_the_code_that_makes_files_of_programs_is_a_source(package):
    names = [path.name for path in program.sources("somewhere.builder")]
    assert names == sorted(names)
    assert {"builder.py", "cute_part.py", "compiler.py", "store.py"} <= set(names)
    assert "other.py" not in names


def test_a_builder_that_is_not_there_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"kvscout\.nothing"):
        fingerprint(Program("k", "kvscout.nothing:build", Size(1)))


@pytest.mark.parametrize(
    ("name", "builder", "spec", "message"),
    [
        ("a-b", "m:f", Size(1), "name: expected letters, digits and underscores, got 'a-b'"),
        ("../x", "m:f", Size(1), "name"),
        ("1k", "m:f", Size(1), "name"),
        ("ké", "m:f", Size(1), "name"),
        ("k", "m.f", Size(1), "builder: expected 'package.module:function', got 'm.f'"),
        ("k", "m:f", object(), "spec: its repr names an address"),
    ],
)
def test_what_cannot_name_a_kernel_is_refused(name, builder, spec, message):
    with pytest.raises(ValueError, match=message):
        Program(name, builder, spec)


@pytest.mark.skipif(toolchain.cannot_compile() is not None, reason="needs CuTe DSL and a C compiler")
def test_asking_loads_neither_cute_dsl_nor_tvm_ffi(run_python, tmp_path):
    code = """
import sys
from kvscout.kernels.cute import program, runtime, store, toolchain
print(runtime.refusal(program.Program("add", "tests.kernels.cute.cute_add:build", 1)))
print(sorted({name.partition(".")[0] for name in sys.modules} & {"cutlass", "tvm_ffi", "triton"}))
"""
    done = run_python("-c", code, env={"KVSCOUT_CACHE_DIR": str(tmp_path)})
    assert done.stdout.splitlines()[-1] == "[]"
