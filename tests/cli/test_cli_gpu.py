"""``verify`` and ``bench`` on a GPU."""

import json
import shutil

import pytest

pytestmark = pytest.mark.gpu

BREAKS = '''"""Breaks the GPU's context."""

import torch

from ....variants import Variant


def _launch(problem, config, args):
    args.out.flatten()[torch.full((1,), 1 << 40, device=args.out.device)]


VARIANT = Variant(launch=_launch, default_config=lambda problem: "none", rank=lambda problem: 0)
'''


def test_verify(run, tmp_path):
    file = tmp_path / "out.json"
    code, _, err = run("verify", "mqa_logits", "--case", "17x76-h64", "--json", str(file))
    assert (code, err) == (0, "")
    found = json.loads(file.read_text())
    assert found["machine"]["sms"] > 0
    ran = {outcome["variant"] for outcome in found["outcomes"] if outcome["status"] == "passed"}
    assert {"torch_reference", "triton_direct"} <= ran


def test_bench(run, tmp_path):
    file = tmp_path / "out.json"
    code, _, err = run("bench", "mqa_logits", "--case", "64x8192-h64-d128-causal", "--json", str(file))
    assert (code, err) == (0, "")
    found = [m for m in json.loads(file.read_text())["measurements"] if m["status"] == "passed"]
    assert [m["variant"] for m in found if m["baseline"]] == ["torch_chunked"]
    assert len(found) >= 3
    for m in found:
        assert 1 < m["hot"]["min_us"] <= m["hot"]["median_us"]
        assert 1 < m["cold"]["min_us"] <= m["cold"]["median_us"]
        assert m["speedup"] > 0


def test_peers_are_right_and_timed_or_named_as_missing(run, tmp_path):
    file = tmp_path / "out.json"
    words = (
        "--case",
        "1023x1023-h64",
        "--variant",
        "auto",
        "--against",
        "deepgemm,aiter",
        "--sustained",
        "--json",
        str(file),
    )
    code, _, _ = run("bench", "mqa_logits", *words)
    assert code == 0
    found = json.loads(file.read_text())
    passed = {m["variant"]: m for m in found["measurements"] if m["status"] == "passed"}
    assert {*passed, *(key.split()[1] for key in found["peers_missing"])} >= {"auto", "deepgemm", "aiter"}
    for m in passed.values():
        assert m["sustained"]["us"] < 3 * m["cold"]["median_us"]


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_a_variant_that_breaks_the_context_ends_the_run_with_what_was_found(command, root, run_python, tmp_path):
    shutil.copytree(root / "kvscout", tmp_path / "kvscout", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "kvscout/ops/mqa_logits/variants/torch_zz_breaks.py").write_text(BREAKS)
    file = tmp_path / "out.json"
    words = ("-m", "kvscout", command, "mqa_logits", "--case", "64x8192-h64-d128", "--json", str(file))
    done = run_python(*words, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "broke the GPU's context" in done.stderr
    found = json.loads(file.read_text())
    assert found["stopped"].startswith("stopped: the last failure broke the GPU's context")
    outcomes = found["outcomes" if command == "verify" else "measurements"]
    assert (outcomes[-1]["variant"], outcomes[-1]["status"]) == ("torch_zz_breaks", "failed")
    assert outcomes[0]["status"] == "passed"
