"""What ``kvscout aot`` makes for a small model, once, and processes that make the model's calls."""

import json

import pytest

from tests.aot.engine import FAKES, MODELS, NOTES

GPUS = {"sm_90": 132, "gfx942": 304}


@pytest.fixture(scope="session")
def shapes(tmp_path_factory):
    """The file that describes the model."""
    path = tmp_path_factory.mktemp("shapes") / "models.json"
    path.write_text(json.dumps(MODELS))
    return path


@pytest.fixture(scope="session")
def prepared(run_python, shapes, tmp_path_factory):
    """The folder that ``kvscout aot`` fills for these GPUs, and what it says; tuned tables are left alone."""
    folder = tmp_path_factory.mktemp("prepared")
    words = ("aot", "--shapes", str(shapes), "--archs", "sm_90a,gfx942,gfx1250", "--output", str(folder))
    return folder, run_python("-m", "kvscout", *words, env={"KVSCOUT_TUNED": "0"}, check=False, timeout=600)


@pytest.fixture
def engine(run_python, tmp_path):
    """``engine(code, cache=folder)``: what a process that makes the calls prints, and what it says to stderr."""

    def run(code, cache, arch="sm_90", aot_only="all", check=True):
        env = {
            "KVSCOUT_CACHE_DIR": str(cache),
            "KVSCOUT_AOT_ONLY": aot_only,
            "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        }
        return run_python("-c", NOTES + FAKES + code, arch, str(GPUS[arch]), env=env, check=check)

    return run
