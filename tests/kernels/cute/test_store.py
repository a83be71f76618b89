"""Files of kernels: whole or not there at all."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

from kvscout.kernels.cute import store
from kvscout.kernels.cute.program import Program


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some" / "folder" / "cute-1.0.so"
    store.write(path, b"library" * 100)
    return path


def test_what_was_written_is_whole(file):
    assert store.is_whole(file)
    assert file.read_bytes().startswith(b"library")
    assert file.stat().st_mode & 0o777 == 0o755
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("kept", [0, 1, store.SEAL_BYTES - 1, store.SEAL_BYTES, 300, 699, 700 + store.SEAL_BYTES - 1])
def test_a_truncated_file_is_not(file, kept):
    file.write_bytes(file.read_bytes()[:kept])
    assert not store.is_whole(file)


@pytest.mark.parametrize("where", [0, 350, 699, 700, -1])
def test_a_changed_byte_is_seen(file, where):
    content = bytearray(file.read_bytes())
    content[where] ^= 1
    file.write_bytes(content)
    assert not store.is_whole(file)


def test_neither_is_what_is_not_a_file(file):
    assert not store.is_whole(file.parent)
    assert not store.is_whole(file.parent / "missing")
    assert not store.is_whole(file / "below")


def test_a_file_in_another_s_place_is_not(file, tmp_path):
    """A kernel of other sources would load, and be wrong."""
    other = tmp_path / "some" / "other" / file.name
    other.parent.mkdir()
    shutil.copy(file, other)
    assert not store.is_whole(other)
    # A cache that is copied as a whole is as good as before.
    copy = shutil.copytree(tmp_path, tmp_path.parent / "copies" / "of" / tmp_path.name)
    assert store.read(copy / file.relative_to(tmp_path)) == b"library" * 100


def test_a_folder_in_its_place_is_an_error_of_writing(file):
    file.unlink()
    file.mkdir()
    with pytest.raises(IsADirectoryError):
        store.write(file, b"library")
    assert list(file.parent.iterdir()) == [file]


WRITE = """
import resource, sys
from pathlib import Path
from kvscout.kernels.cute import store
if limit := int(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
while True:
    store.write(Path(sys.argv[1]), sys.argv[3].encode() * (1 << 20))
"""


def writer(root, file, letter, limit=0):
    words = [sys.executable, "-c", WRITE, str(file), str(limit), letter]
    return subprocess.Popen(words, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, stderr=subprocess.PIPE)


def test_a_disk_that_is_full_leaves_what_was_there(root, file):
    """A limit on the size of files stands for the disk."""
    before = file.read_bytes()
    process = writer(root, file, "a", limit=10000)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"File too large" in error
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.slow
def test_while_processes_write_and_are_killed_a_reader_sees_whole_files(root, file):
    processes = [writer(root, file, letter) for letter in "ab"]
    seen, deadline = set(), time.monotonic() + 60
    try:
        while not {b"a", b"b"} <= seen and time.monotonic() < deadline:
            content = store.read(file)
            assert content is not None
            seen.add(content[:1])
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert {b"a", b"b"} <= seen
    assert store.is_whole(file)


def test_a_write_that_fails_leaves_what_was_there(file, monkeypatch):
    before = file.read_bytes()

    def full(*names):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        store.write(file, b"other")
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_the_newest_whole_file_comes_first(tmp_path):
    program = Program("k", "tests.kernels.cute.cute_add:build", 1)
    for version in ("4.8.1", "4.10.0", "4.9.0", "5.0"):
        store.write(store.file(tmp_path, program, version), version.encode())
    store.file(tmp_path, program, "5.0").write_bytes(b"cut short")
    assert [path.name for path in store.files(tmp_path, program)] == [
        "cute-4.10.0.so",
        "cute-4.9.0.so",
        "cute-4.8.1.so",
    ]


def test_a_path_names_what_a_file_is_for(tmp_path):
    path = store.file(tmp_path, Program("k", "tests.kernels.cute.cute_add:build", 1), "4.8.1")
    architecture, kernel, fingerprint, name = path.relative_to(tmp_path).parts
    assert architecture.startswith("sm_90a-")
    assert (kernel, len(fingerprint), name) == ("k", 16, "cute-4.8.1.so")


def test_a_lock_keeps_others_out(tmp_path):
    inside, most = [], []

    def hold():
        with store.locked(tmp_path / "kernel"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.05)
            inside.pop()

    threads = [threading.Thread(target=hold) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]
    assert list((tmp_path / "kernel").iterdir()) == []


def test_a_file_system_without_locks_will_do(tmp_path, monkeypatch):
    def unsupported(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(store.fcntl, "flock", unsupported)
    with store.locked(tmp_path / "kernel"):
        store.write(tmp_path / "kernel" / "cute-1.so", b"")
    assert store.is_whole(tmp_path / "kernel" / "cute-1.so")
