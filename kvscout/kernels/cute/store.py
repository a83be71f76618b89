"""Where the files of kernels lie, and how they are written and checked.

``<cache>/<arch>-<machine>/<kernel>/<fingerprint>/cute-<version>.so``: a folder that holds nothing else, and that can be
copied to another machine. A file ends in the SHA-256 of the rest and of its place, the last four names of its path: to
load a truncated library would kill the process, and one that was made of other sources would be a wrong kernel.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .program import ARCH, Program, fingerprint

SEAL = b"\nkvscout kernel, sha256: "
SEAL_BYTES = len(SEAL) + hashlib.sha256().digest_size

PLACE = 4
"""Names at the end of a file's path that say what it is for."""


def folder(root: Path, program: Program) -> Path:
    """The folder of a kernel's files within a cache."""
    return root / f"{ARCH}-{platform.machine()}" / program.name / fingerprint(program)


def file(root: Path, program: Program, version: str) -> Path:
    """The file that this version of the compiler makes."""
    return folder(root, program) / f"cute-{version}.so"


def files(root: Path, program: Program) -> list[Path]:
    """Every whole file of a kernel, by any version of the compiler, the newest version first."""
    return [path for path in _all(root, program) if is_whole(path)]


def damaged(root: Path, program: Program) -> list[Path]:
    """Every file of a kernel that is there and cannot be used: cut short, changed, or not readable."""
    return [path for path in _all(root, program) if not is_whole(path)]


def _all(root: Path, program: Program) -> list[Path]:
    return sorted(folder(root, program).glob("cute-*.so"), key=_version, reverse=True)


def _version(path: Path) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", path.stem)))


def write(path: Path, library: bytes) -> None:
    """Write a library and its seal; a reader sees all of it or what was there before.

    Raises:
        OSError: the folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(library + _seal(path, library))
            # mkstemp's files are for their owner alone; a cache may be shared.
            os.fchmod(stream.fileno(), 0o755)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def read(path: Path) -> bytes | None:
    """What was written into a file; None where it is not there, not readable, changed, or in another's place."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    library, seal = content[:-SEAL_BYTES], content[-SEAL_BYTES:]
    return library if seal == _seal(path, library) else None


def is_whole(path: Path) -> bool:
    """Whether a file is there, readable, as it was written, and where it was written."""
    return read(path) is not None


def _seal(path: Path, library: bytes) -> bytes:
    digest = hashlib.sha256("/".join(path.parts[-PLACE:]).encode())
    digest.update(library)
    return SEAL + digest.digest()


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make a folder, and hold it against other processes and threads while the block runs.

    On a file system without such locks the block runs all the same: files are replaced whole.
    """
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@functools.cache
def temporary() -> tempfile.TemporaryDirectory[str]:
    """A folder of this process alone, for kernels that the cache cannot take; it goes when the process ends."""
    return tempfile.TemporaryDirectory(prefix="kvscout-")
