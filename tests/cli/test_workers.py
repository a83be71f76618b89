"""The processes of a command end with it."""

import signal
import subprocess
import sys
import time

import pytest

INTERRUPTED = """
import multiprocessing, os, signal, threading, time
from kvscout.cli import workers

if __name__ == "__main__":
    try:
        with workers.pool(2) as pool:
            # Both processes are there by then, however long they took to start.
            for future in [pool.submit(time.sleep, 0.5) for _ in range(2)]:
                future.result()
            assert len(multiprocessing.active_children()) == 2
            for seconds in (1.0, 1.02):
                threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
            for future in [pool.submit(time.sleep, 600) for _ in range(5)]:
                future.result()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(1)
        print("processes left:", len(multiprocessing.active_children()))
"""

LEFT_EARLY = """
import multiprocessing, time
from kvscout.cli import workers

def results():
    with workers.pool(2, print) as pool:
        yield from (future.result() for future in [pool.submit(abs, -3), pool.submit(time.sleep, 600)])

if __name__ == "__main__":
    print(next(results()), len(multiprocessing.active_children()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "said"),
    [(INTERRUPTED, "processes left: 0\n"), (LEFT_EARLY, "3 0\n")],
    ids=["interrupted", "left_early"],
)
def test_nobody_waits_for_what_is_running(tmp_path, program, said):
    file = tmp_path / "program.py"
    file.write_text(program)
    started = time.monotonic()
    run = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=120)
    assert time.monotonic() - started < 100
    assert run.stdout.endswith(said), (run.stdout, run.stderr)
    assert "Traceback" not in run.stderr.replace("KeyboardInterrupt", ""), run.stderr
    assert run.returncode in (0, -signal.SIGINT)
