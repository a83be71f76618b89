"""Triton kernels that were compiled ahead of time: what names one, where its file lies, and how Triton comes to it.

``<cache>/triton/<arch>/<module>.<function>/<key>/kernel``, each a zip archive of what Triton's own cache holds for it,
sealed as :mod:`.cute.store` seals its files. Triton's cache itself cannot be copied: it names its files by absolute
paths, and its keys change with the build of Triton's library, with the order in which a process first calls kernels
that share functions and, on AMD, with the folder that Triton is installed in. The key here is made of what decides the
machine code: the versions of Triton and of its assembler, the sources of kvscout's kernels, the types and constants
that one is specialised for, and its options. Before Triton compiles a kernel of kvscout (:func:`install`), the file of
that key is put into its cache, under the key that Triton will look for.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import json
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from .. import env
from .cute import store
from .cute.program import KernelUnavailable

FOLDER = "triton"
PACKAGE = __package__.partition(".")[0]

# Triton cuts the names of its files, so that file systems take them.
NAME_CHARACTERS = 150


class Specialisation(NamedTuple):
    """What Triton compiles a function for, in its own terms: arguments are numbered, and constants have no type."""

    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel with all that decides what is compiled.

    Attributes:
        module: where its function is defined.
        function: the function's name there.
        arch: what :func:`kvscout.device.arch_of` calls the GPU.
        key: 32 hex digits that change with the specialisation, the sources, and Triton's version.
        specialisation: types, constants and options.
    """

    module: str
    function: str
    arch: str
    key: str
    specialisation: Specialisation = field(compare=False)

    @property
    def name(self) -> str:
        """The function, and enough of the key to tell its kernels apart."""
        return f"{self.function}-{self.key[:8]}"

    def file(self, root: Path) -> Path:
        """Where it lies within a cache."""
        place = f"{self.module.rpartition('.')[2]}.{self.function}"
        return root / FOLDER / self.arch / place / self.key / "kernel"

    def described(self) -> str:
        """Its function, types (and which are multiples of 16), constants and options, for people."""
        signature, constants, attributes, options = self.specialisation
        words = []
        for i, (name, kind) in enumerate(signature.items()):
            aligned = " by 16" if (i,) in attributes else ""
            words.append(f"{name}={constants[i,]!r}" if (i,) in constants else f"{name}: {kind}{aligned}")
        words += [f"{name}={options[name]}" for name in ("num_warps", "num_stages")]
        return f"{self.module}.{self.function} for {self.arch} ({', '.join(words)})"


def target_of(arch: str) -> GPUTarget:
    """What Triton calls an architecture; a wave of CDNA GPUs (gfx9) has 64 lanes.

    Raises:
        ValueError: it is neither sm_NN nor gfxNNN.
    """
    if arch.startswith("sm_") and arch[3:].isdigit():
        return GPUTarget("cuda", int(arch[3:]), 32)
    if arch.startswith("gfx") and arch[3:].isalnum():
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    raise ValueError(f"expected an architecture like sm_90 or gfx942, got {arch!r}")


def arch_of(target: GPUTarget) -> str:
    """The other way round."""
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


class AbsentGpu:
    """What Triton asks its driver for at a launch, answered for a GPU that is not here."""

    def __init__(self, target: GPUTarget) -> None:
        self.get_current_target = lambda: target
        self.get_current_device = lambda: hash((target.backend, target.arch))
        self.get_current_stream = lambda device: 0


@functools.cache
def sources_digest() -> str:
    """Changes with every file that a Triton kernel may be made of."""
    digest = hashlib.sha256()
    package = Path(__file__).parent.parent
    files = [*package.glob("kernels/*.py"), *package.glob("ops/**/*.py")]
    for file in sorted(file for file in files if not file.name.startswith("cute_")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@functools.cache
def _file_digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


class Launch:
    """What Triton is about to compile."""

    def __init__(self, source: ASTSource, target: GPUTarget, options: Mapping[str, Any]) -> None:
        self._source = source
        self._options = dict(options)
        self._backend = make_backend(target)
        made_for = Specialisation(source.signature, source.constants, source.attrs, self._options)
        # The libraries that kernels are linked with, which come with Triton, lie somewhere else on another machine.
        libraries = [(name, _file_digest(path)) for name, path in self._options.get("extern_libs") or ()]
        made_of = (
            triton.__version__, sources_digest(), self._backend.hash(),
            made_for._replace(options=self._options | {"extern_libs": libraries}),
            sorted(get_cache_invalidating_env_vars().items()),
        )  # fmt: skip
        function = source.fn
        key = hashlib.sha256(repr((function.module, function.__name__, *made_of)).encode()).hexdigest()[:32]
        self.kernel = Kernel(function.module, function.__name__, arch_of(target), key, made_for)

    def offer(self, root: Path) -> str | None:
        """Put the kernel into Triton's cache where it is not there; a sentence why it could not be."""
        environment = get_cache_invalidating_env_vars()
        options = self._backend.parse_options(dict(self._options))
        key = get_cache_key(self._source, self._backend, options, environment)
        manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        metadata = f"{self._source.name[:NAME_CHARACTERS]}.json"
        # A list of files that is no JSON is replaced, where it can be.
        with contextlib.suppress(json.JSONDecodeError):
            if metadata in (manager.get_group(metadata) or {}):
                return None
        path = self.kernel.file(root)
        archive = store.read(path)
        if archive is None:
            return f"{path} is damaged or not readable" if path.exists() else f"{root} holds no such kernel"
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            group = {name: manager.put(files.read(name), name) for name in files.namelist()}
        manager.put_group(metadata, group)
        return None


_recorded: dict[str, Kernel] | None = None


@contextlib.contextmanager
def recording(arch: str) -> Iterator[dict[str, Kernel]]:
    """Within the context calls launch for ``arch``, and nothing is compiled or run: their kernels are noted by key.

    A kernel is noted by each context in which it is launched. For a process that does nothing else: Triton keeps what
    it was given.
    """
    global _recorded
    before, _recorded = _recorded, {}
    try:
        with absent_gpu(arch):
            yield _recorded
    finally:
        _recorded = before


class _NoKernel:
    """What stands for a compiled kernel while they are recorded, and notes that it is launched."""

    function = packed_metadata = None

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def launch_metadata(self, *arguments: object) -> None:
        """There is none."""

    def run(self, *arguments: object) -> None:
        """Launch nothing."""
        if _recorded is not None:
            _recorded.setdefault(self._kernel.key, self._kernel)


@contextlib.contextmanager
def absent_gpu(arch: str) -> Iterator[None]:
    """Within the context Triton believes that its GPU is one of ``arch``."""
    active = driver._active
    driver.set_active(AbsentGpu(target_of(arch)))
    try:
        yield
    finally:
        # Not driver.reset_active(): without a GPU there is no default driver to go back to.
        driver._active = active


def install() -> None:
    """Have every kernel of kvscout looked for among those compiled ahead of time before Triton compiles it.

    Not by Triton's hooks, which are for all kernels of a process: to call them it writes down what it compiles, which
    it cannot of each.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == PACKAGE:
            for function in vars(module).values():
                if isinstance(function, JITFunction) and function.module.partition(".")[0] == PACKAGE:
                    _wrap(function)


def _wrap(function: JITFunction[Any]) -> None:
    """Have a function's kernels compiled by :func:`_compile`, which Triton asks anew on each device."""
    caches = function.device_caches
    if isinstance(caches.default_factory, functools.partial):
        return
    if hasattr(function, "compile"):
        function.compile = functools.partial(_compile, function.compile)
    caches.default_factory = functools.partial(_new_cache, function, caches.default_factory)


def _new_cache(function: JITFunction[Any], new: Callable[[], Any]) -> Any:
    cache = new()
    function.compile = functools.partial(_compile, function.compile)
    return cache


def _compile(
    compile: Callable[..., Any], source: ASTSource, target: GPUTarget, options: Mapping[str, Any], **more: Any
) -> Any:
    """What Triton calls to compile a kernel."""
    if _recorded is not None:
        return _NoKernel(Launch(source, target, options).kernel)
    _look_up(source, target, options)
    return compile(source, target=target, options=options, **more)


def _look_up(source: ASTSource, target: GPUTarget, options: Mapping[str, Any]) -> None:
    required = env.triton_aot_only()
    try:
        root = env.cache_dir()
    except env.WrongVariable:
        if required:
            raise
        return
    # Nobody pays for what nobody prepared.
    if not required and not (root / FOLDER).is_dir():
        return
    launch = Launch(source, target, options)
    try:
        missing = launch.offer(root)
    except OSError as error:
        raise KernelUnavailable(
            f"{launch.kernel.name}: Triton's cache {knobs.cache.dir} cannot be written "
            f"({error.strerror or error}); TRITON_CACHE_DIR names another folder"
        ) from error
    if missing and required:
        raise KernelUnavailable(
            f"{launch.kernel.described()}: {missing}, and KVSCOUT_AOT_ONLY is all; 'kvscout aot --shapes FILE "
            f"--archs {launch.kernel.arch}' compiles what the shapes of FILE ask for"
        )
    if missing and launch.kernel.file(root).exists():
        warnings.warn(f"compiled again: {missing}", stacklevel=2)


def compile_to(kernel: Kernel, path: Path) -> None:
    """Compile a kernel, for which no GPU is needed, into the file ``path``, which is replaced in one step.

    Raises:
        KernelUnavailable: what would be compiled here is another kernel.
        OSError: the file cannot be written.
    """
    function = getattr(importlib.import_module(kernel.module), kernel.function)
    target = target_of(kernel.arch)
    signature, constants, attributes, options = kernel.specialisation
    source = ASTSource(function, signature, constants, attributes)
    if Launch(source, target, options).kernel != kernel:
        raise KernelUnavailable(f"{kernel.name}: its sources, or Triton, have changed since it was asked for")
    with tempfile.TemporaryDirectory(prefix="kvscout-") as folder, knobs.cache.scope(), absent_gpu(kernel.arch):
        knobs.cache.dir = folder
        archive = _packed(triton.compile(source, target=target, options=options))
    store.write(path, archive)


def _packed(compiled: Any) -> bytes:
    """The machine code of a compiled kernel and what Triton must know of it, as an archive without dates."""
    needed = (".json", f".{make_backend(compiled.metadata.target).binary_ext}")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as files:
        for name, path in sorted(compiled.metadata_group.items()):
            if name.endswith(needed):
                files.writestr(zipfile.ZipInfo(name), Path(path).read_bytes())
    return packed.getvalue()
