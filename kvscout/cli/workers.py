"""Processes that commands hand their work to."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor


@contextlib.contextmanager
def pool(number: int, start: Callable[[], object] | None = None) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes that end with the block: at once, whatever they are at, if it ends early.

    Each calls ``start`` first. Ctrl-C is for the process that made the pool to answer.
    """
    before = set(multiprocessing.active_children())
    processes = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(number, processes, initializer=_start, initargs=(start,))
    try:
        yield executor
    except BaseException:
        with _no_interrupt():
            for process in set(multiprocessing.active_children()) - before:
                process.kill()
            executor.shutdown(cancel_futures=True)
        raise
    executor.shutdown()


def _start(start: Callable[[], object] | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if start is not None:
        start()


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """A second Ctrl-C must not leave processes behind that nobody ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
