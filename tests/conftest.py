"""Where the suite runs: under Triton's interpreter on a machine without a GPU, in as many processes as pytest has."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from hypothesis import settings

from kvscout import tuning
from kvscout.device import model_of
from kvscout.testing.case import family, ops

if "PYTEST_XDIST_WORKER" in os.environ:
    # Processes that share the cores must not each start a thread per core, nor must the processes that they start.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Triton reads it when it is imported, which is why it is set before any test module is.
    assert "triton" not in sys.modules
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = pathlib.Path(__file__).parent.parent

# A case may need a kernel to be interpreted or compiled, so only the count of examples bounds the time. Without a
# random seed a failure in CI is the same failure everywhere.
settings.register_profile("kvscout", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("kvscout")


def pytest_collection_modifyitems(config, items):
    if "exhaustive" not in config.option.markexpr:
        kept = [item for item in items if not item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    if not HAS_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def no_overrides(monkeypatch):
    """Variant overrides of the developer's own shell must not steer the tests."""
    for name in list(os.environ):
        if name.startswith("KVSCOUT_"):
            monkeypatch.delenv(name)


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """``tuned(op, (bucket, variant, config), ...)``: a table of one's own for this CPU with these entries.

    ``changed`` replaces parts of the table, ``fingerprint`` that of the op. Nothing is remembered of other tables, nor
    of these once the test is over. Returns the file.
    """
    _forget_tables()

    def write(op, *entries, fingerprint=None, **changed):
        made = [{"bucket": dict(b), "variant": v, "config": str(c)} for b, v, c in entries]
        section = {"fingerprint": fingerprint or tuning.fingerprint(family(op).package), "entries": made}
        model = model_of("cpu")
        content = {"format": tuning.FORMAT, "device": model, "runs": [], "ops": {op: section}} | changed
        file = tmp_path / "tables" / tuning.file_name(model)
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))
        monkeypatch.setenv("KVSCOUT_TUNED_DIR", str(file.parent))
        _forget_tables()
        return file

    yield write
    _forget_tables()


def _forget_tables():
    for memo in (tuning.entries, tuning._tables, tuning.warn):
        memo.cache_clear()
    for op in ops():
        vars(family(op)).pop("_choose", None)


@pytest.fixture(scope="session")
def root():
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def run_python():
    """``run_python("-c", code)`` or ``run_python("-m", "kvscout", "info")``: Python in a process of its own.

    The process sees neither this one's ``TRITON_INTERPRET`` nor any ``KVSCOUT_`` variable, so Triton can compile there
    for a GPU that the machine does not have. It imports kvscout from ``cwd``, the checkout unless told otherwise.
    ``env`` adds variables. A non-zero exit fails the test with what the process printed, unless ``check=False``.
    """

    def run(*arguments, cwd=ROOT, env=None, check=True, timeout=300):
        own = ("TRITON_INTERPRET", "PYTHONSAFEPATH", "PYTHONPATH")
        inherited = {k: v for k, v in os.environ.items() if k not in own and not k.startswith("KVSCOUT_")}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            env=inherited | {"PYTHONPATH": str(cwd)} | (env or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        if check and done.returncode:
            pytest.fail(f"{' '.join(arguments)}\nexit {done.returncode}\n{done.stdout}\n{done.stderr}", pytrace=False)
        return done

    return run
