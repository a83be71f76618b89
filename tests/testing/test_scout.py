"""What is found out about a case before anything is compiled: its bucket, and its kernels on a GPU that is not here."""

import json

import pytest
import torch

from kvscout.testing import scout
from tests.aot.engine import FAKES, GPU, NOTES

CPU = torch.device("cpu")


def test_one_process_finds_out_the_bucket_or_what_is_wrong(doubling):
    doubling(torch_a=doubling.variant())
    known = scout.bucket_of(doubling.case(), CPU)
    assert known == scout.Scouted(frozenset({("size", 8)}))
    assert known.needs(known.own) == []
    assert scout.bucket_of(doubling.case(prepare_raises=ValueError("no")), CPU) == "ValueError: no"


SCOUT = """
import json, pickle
from kvscout.testing import scout
from kvscout.testing.cases.mqa_logits import MqaLogitsCase
from kvscout.testing.cases.pa_decode import PaDecodeCase

cpu, found = torch.device("cpu"), {}
for name, case in (
    ("plain", MqaLogitsCase(32, 128, 32, 64)),
    ("again", MqaLogitsCase(32, 160, 32, 64)),
    ("decode", PaDecodeCase((40, 300), group=16, kv_heads=1, layout="nhd", splits=(4, 8))),
    ("wrong", MqaLogitsCase(1, 1, 32, 64, fnuz=True, values="nan")),
):
    # As from another process.
    known = pickle.loads(pickle.dumps(scout.scout(case, cpu, arch)))
    kernels = {key.variant: [] for key in known.kernels}
    for key, of in known.kernels.items():
        kernels[key.variant].append([kernel.name for kernel in of])
    found[name] = {
        "own": [key.variant for key in known.own],
        "inputs": [kernel.name.partition("-")[0] for kernel in known.inputs],
        "kernels": kernels,
        "dim": dict(known.bucket)["head_dim"],
    }
print(json.dumps(found))
"""


def test_every_kernel_of_every_choice_is_known_and_none_is_made(run_python, tmp_path):
    """Also that of a launch which asks for what an earlier one has asked for."""
    env = {"KVSCOUT_CACHE_DIR": str(tmp_path / "cache"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    done = run_python("-c", NOTES + GPU + SCOUT, "sm_90", "132", env=env)
    found = json.loads(done.stdout)
    assert not list(tmp_path.iterdir())
    plain, again, decode, wrong = (found[name] for name in ("plain", "again", "decode", "wrong"))
    assert [known["dim"] for known in found.values()] == [64, 64, 128, 64]
    assert plain["own"] == ["cute_wgmma", "triton_staged", "triton_direct", "torch_chunked"]
    assert plain["inputs"] == []
    assert again["kernels"] == plain["kernels"]
    for variant, of in plain["kernels"].items():
        assert all(len(names) == (0 if variant == "torch_chunked" else 1) for names in of)
        assert len(of) > 1
    # A config that only changes how many tiles a program walks asks for the same kernel.
    assert len({name for names in plain["kernels"]["triton_staged"] for name in names}) >= 3
    assert decode["inputs"] == ["_plan"]
    merged = [len(names) for names in decode["kernels"]["triton_tile"]]
    assert 2 in merged
    assert wrong["own"][0].startswith("torch_")


PREPARE = """
from kvscout.testing.cases.mqa_logits import MqaLogitsCase
from kvscout.testing.case import family
case, cpu = MqaLogitsCase(32, 128, 32, 64), torch.device("cpu")
"""

COMPILE = """
from kvscout.cli import builds
from kvscout.testing import scout
known = scout.scout(case, cpu, arch)
keys = [key for key in known.kernels if key.variant == "triton_staged"][:3]
for kernel in dict.fromkeys(known.needs(keys)):
    path = builds.file_of(env.cache_dir(), kernel)
    assert builds.compile_one(kernel, path).error is None
    print(path)
"""

LAUNCH = """
from kvscout.variants import Choice
prepared = case.prepare(cpu)
staged = family("mqa_logits").load("triton_staged")
with compiling_for(arch):
    for config in staged.configs(prepared.problem)[:3]:
        Choice(staged, config).launch(prepared.problem, prepared.args)
assert hits and all(hits)
print(*asked, sep="\\n")
"""


@pytest.mark.slow
def test_what_was_compiled_is_what_launches_look_for(run_python, tmp_path):
    env = {"KVSCOUT_CACHE_DIR": str(tmp_path / "cache"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    made = run_python("-c", NOTES + GPU + PREPARE + COMPILE, "sm_90", "132", env=env).stdout.splitlines()
    assert len(made) > 1
    env["KVSCOUT_AOT_ONLY"] = "all"
    asked = run_python("-c", NOTES + FAKES + PREPARE + LAUNCH, "sm_90", "132", env=env).stdout.splitlines()
    assert sorted(asked) == sorted(made)
