"""Triton kernels that were compiled ahead of time: what names one, where its file lies, and how Triton comes to it.

``<cache>/triton/<arch>/<module>.<function>/<key>/kernel``, each a zip archive of what Triton's own cache holds for it,
sealed as :mod:`.cute.store` seals its files. Triton's cache itself cannot be copied: it names its files by absolute
paths, and its keys change with the build of Triton's library, with the order in which a process first calls kernels
that share functions and, on AMD, with the folder that Triton is installed in. The key here is made of what decides the
machine code: the versions of Triton and of its assembler, the sources of kvscout's kernels, the types and constants
that one is specialised for, and its options. Before Triton compiles a kernel of kvscout, the file of that key is put
into its cache, under the key that Triton will look for.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import json
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.driver import driver

from .. import env
from .cute import store
from .cute.program import KernelUnavailable

FOLDER = "triton"
PACKAGE = __package__.partition(".")[0]

# Triton cuts the names of its files, so that file systems take them.
NAME_CHARACTERS = 150


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel with all that decides what is compiled.

    Attributes:
        module: where its function is defined.
        function: the function's name there.
        arch: what :func:`kvscout.device.arch_of` calls the GPU.
        specialisation: types, constants and options, as Triton writes them down.
        key: 32 hex digits that change with any of these, with the source, and with Triton's version.
    """

    module: str
    function: str
    arch: str
    specialisation: str
    key: str

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
        parts = json.loads(self.specialisation)
        names, options = list(parts["signature"]), parts["options"]
        pairs = zip(parts["constant_keys"], parts["constant_vals"], strict=True)
        constants = {names[key[0]]: f"{names[key[0]]}={value!r}" for key, value in pairs}
        aligned = {names[key[0]] for key in parts["attrs_keys"]}
        words = [
            constants.get(name, f"{name}: {kind}{' by 16' if name in aligned else ''}")
            for name, kind in parts["signature"].items()
        ]
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
    """What Triton is about to compile, as it tells its hooks."""

    def __init__(self, call: Mapping[str, Any]) -> None:
        self._call = call
        self._target: GPUTarget = driver.active.get_current_target()
        self._backend = make_backend(self._target)
        specialisation = call["compile"]["specialization_data"]
        parts = json.loads(specialisation)
        self._options = parts["options"]
        # The libraries that kernels are linked with, which come with Triton, lie somewhere else on another machine.
        libraries = [(name, _file_digest(path)) for name, path in self._options.get("extern_libs") or ()]
        parts["options"] = self._options | {"extern_libs": libraries}
        made_of = (
            triton.__version__, sources_digest(), self._backend.hash(), json.dumps(parts, sort_keys=True),
            sorted(get_cache_invalidating_env_vars().items()),
        )  # fmt: skip
        key = hashlib.sha256(repr(made_of).encode()).hexdigest()[:32]
        about = call["fn"]
        self.kernel = Kernel(about.module, about.name, arch_of(self._target), specialisation, key)

    def offer(self, root: Path) -> str | None:
        """Put the kernel into Triton's cache where it is not there; a sentence why it could not be."""
        of = self._call["compile"]
        source = ASTSource(self._call["fn"].jit_function, of["signature"], of["constants"], of["configs"][0])
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in self._options.items()}
        environment = get_cache_invalidating_env_vars()
        key = get_cache_key(source, self._backend, self._backend.parse_options(options), environment)
        manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        metadata = f"{source.name[:NAME_CHARACTERS]}.json"
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


def install() -> None:
    """Have every kernel of kvscout looked for among those compiled ahead of time before Triton compiles it."""
    hook = knobs.runtime.jit_cache_hook
    if not (isinstance(hook, functools.partial) and hook.func is _before_compiling):
        knobs.runtime.jit_cache_hook = functools.partial(_before_compiling, hook)


def _before_compiling(before: Callable[..., bool | None] | None, **call: Any) -> bool:
    """What Triton calls before it compiles; True would keep it from that."""
    if before is not None and before(**call):
        return True
    if call["fn"].module.partition(".")[0] == PACKAGE:
        _look_up(call)
    return False


def _look_up(call: Mapping[str, Any]) -> None:
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
    launch = Launch(call)
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
    found: list[Kernel] = []

    def before_compiling(**call: Any) -> bool:
        found.append(Launch(call).kernel)
        return found[-1].key != kernel.key

    active = driver._active
    with tempfile.TemporaryDirectory(prefix="kvscout-") as folder, knobs.cache.scope(), knobs.runtime.scope():
        knobs.cache.dir = folder
        knobs.runtime.jit_cache_hook = before_compiling
        driver.set_active(AbsentGpu(target_of(kernel.arch)))
        try:
            compiled = function.preload(kernel.specialisation)
        finally:
            # Not driver.reset_active(): without a GPU there is no default driver to go back to.
            driver._active = active
        if compiled is None:
            raise KernelUnavailable(f"{kernel.name}: its sources, or Triton, have changed since it was asked for")
        archive = _packed(compiled)
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
