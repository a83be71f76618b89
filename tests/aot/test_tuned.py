"""What a tuned table makes calls choose is compiled ahead of time, for the GPU that the table is of."""

import json
from pathlib import Path

import pytest

from kvscout import tuning
from kvscout.kernels.cute import toolchain
from kvscout.ops.mqa_logits import api
from tests.aot.engine import FAKES, NOTES

pytestmark = [
    pytest.mark.xdist_group("aot"),
    pytest.mark.slow,
    pytest.mark.skipif(toolchain.cannot_compile() is not None, reason="needs CuTe DSL and a C compiler"),
]

# What the engine of tests/aot/engine.py calls, and no other op.
SCORE = {"small": {"score": {"heads": 32, "head_dim": 64, "rows": [1, 16], "keys": [1000]}}}

# No default for either, and one of each compiler.
TUNED = {
    1: ("triton_staged", "Config(rows_per_wave=2, block_kv=64, num_warps=4, num_stages=3, least_tiles=8)"),
    16: ("cute_wgmma", "Config(rows=4, split='rows', stage_keys=64, kv_stages=8, block_cost=3)"),
}

CALLS = """
from kvscout import tuning
tuning.model_of = lambda arch: sys.argv[3]

def score(rows):
    q, k = torch.zeros(rows, 32, 64).to(fp8.FN), torch.zeros(1000, 64).to(fp8.FN)
    windows = torch.zeros(rows).int(), torch.full((rows,), 1000).int()
    kvscout.fp8_mqa_logits(q, (k, torch.ones(1000)), torch.rand(rows, 32), *windows, False)

with compiling_for(arch):
    score(1)
    score(16)
assert all(hits)
print(*sorted(asked), sep="\\n")
"""


@pytest.fixture
def tables(tmp_path):
    """A folder with a table of an H200."""
    problems = {rows: api.Problem("sm_90", rows, 1000, 32, 64, False) for rows in TUNED}
    entries = [
        {"bucket": dict(problems[rows].bucket()), "variant": variant, "config": config}
        for rows, (variant, config) in TUNED.items()
    ]
    content = {
        "format": tuning.FORMAT,
        "device": "NVIDIA H200",
        "runs": [{"machine": {"arch": "sm_90", "sms": 132}}],
        "ops": {"mqa_logits": {"fingerprint": tuning.fingerprint(api.FAMILY.package), "entries": entries}},
    }
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "nvidia_h200.json").write_text(json.dumps(content))
    return folder


def test_calls_with_the_table_and_without_find_what_they_ask_for(run_python, tables, tmp_path):
    folder, env = tmp_path / "cache", {"KVSCOUT_TUNED_DIR": str(tables)}
    (tmp_path / "models.json").write_text(json.dumps(SCORE))
    run_python(
        "-m", "kvscout", "aot", "--shapes", str(tmp_path / "models.json"), "--output", str(folder), env=env, timeout=600
    )  # fmt: skip
    made = sorted(str(path) for path in folder.rglob("*") if path.is_file())
    env |= {
        "KVSCOUT_CACHE_DIR": str(folder), "KVSCOUT_AOT_ONLY": "all", "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }  # fmt: skip
    by_model = {
        model: run_python("-c", NOTES + FAKES + CALLS, "sm_90", "132", model, env=env).stdout.splitlines()
        for model in ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
    }
    asked = by_model["NVIDIA H200"]
    assert sum("/triton/" in path for path in asked) == 1
    assert len(asked) == 2
    assert not [path for path in by_model["NVIDIA H100 80GB HBM3"] if "/triton/" in path]
    assert sorted({*asked, *by_model["NVIDIA H100 80GB HBM3"]}) == made
    assert all(map(Path.exists, map(Path, asked)))
