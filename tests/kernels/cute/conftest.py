"""A cache of a test's own, and the file of a kernel that is compiled once."""

import pytest

from kvscout.kernels.cute import cuda_runtime, program, runtime, store, toolchain
from kvscout.kernels.cute.program import Program

MODULE = "tests.kernels.cute.cute_add"
MEMOISED = (
    cuda_runtime.refusal,
    program.fingerprint,
    program._sources_digest,
    runtime.load,
    runtime._refusal,
    runtime._warn_of_cache,
    store.temporary,
    toolchain.has_loader,
    toolchain.dsl_version,
    toolchain.c_compiler,
)


@pytest.fixture(autouse=True)
def forget():
    """What is found out once per process is found out once per test."""
    _forget()
    yield
    _forget()


def _forget():
    for function in MEMOISED:
        function.cache_clear()
    runtime._FAILED.clear()


@pytest.fixture(scope="session")
def spec():
    from tests.kernels.cute.cute_add import Spec

    return Spec


@pytest.fixture
def add(spec):
    return Program("add", f"{MODULE}:build", spec())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder that KVSCOUT_CACHE_DIR names; it does not exist yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVSCOUT_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="session")
def library(spec, tmp_path_factory):
    """The bytes of the compiled kernel."""
    from kvscout.kernels.cute.compiler import compile_to

    path = tmp_path_factory.mktemp("library") / "add.so"
    compile_to(Program("add", f"{MODULE}:build", spec()), path)
    return path.read_bytes()[: -store.SEAL_BYTES]


@pytest.fixture
def compiled(monkeypatch, library):
    """The compiler gives that library at once; the list has what it was asked for."""
    from kvscout.kernels.cute import compiler

    asked = []

    def compile_to(program, path):
        asked.append((program, path))
        store.write(path, library)

    monkeypatch.setattr(compiler, "compile_to", compile_to)
    return asked
