"""What is compiled ahead of time is what calls ask for: no kernel less, no kernel more, under their keys."""

import json
import shutil

import pytest

from kvscout.kernels.cute import store, toolchain

pytestmark = [
    pytest.mark.xdist_group("aot"),
    pytest.mark.slow,
    pytest.mark.skipif(toolchain.cannot_compile() is not None, reason="needs CuTe DSL and a C compiler"),
]

CALLS = """
with compiling_for(arch):
    call()
# Triton's hooks are for all kernels of a process, and fail where one takes a function as a constant.
assert knobs.runtime.jit_cache_hook is None
print(len(hits), all(hits))
print(*sorted(asked), sep="\\n")
"""


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_every_kernel_is_made_and_what_cannot_be_is_said(prepared):
    folder, done = prepared
    assert done.returncode == 1
    assert done.stderr.startswith("gfx1250: ") and "FAILED" not in done.stderr
    assert files(folder)
    assert all(map(store.is_whole, files(folder)))
    states = [line.split()[4] for line in done.stdout.splitlines() if "_" in line]
    assert states == ["compiled"] * len(files(folder))


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_calls_ask_for_exactly_what_was_made_and_compile_nothing(prepared, engine, arch, tmp_path):
    # Copied, as to another machine.
    folder = shutil.copytree(prepared[0], tmp_path / "elsewhere")
    first, *asked = engine(CALLS, folder, arch).stdout.splitlines()
    number, every_one_a_hit = first.split()
    # sm_90a-x86_64/... and triton/sm_90/..., or triton/gfx942/...
    made = [str(path) for path in files(folder) if arch in "/".join(path.relative_to(folder).parts[:2])]
    assert asked == sorted(made)
    triton = [path for path in made if "/triton/" in path]
    assert (int(number), every_one_a_hit) == (len(triton), "True")
    assert len(triton) >= 5


REPLAY = """
import sys
from pathlib import Path
from kvscout.aot import models, replay
from kvscout.device import StandIn
from kvscout.testing.case import ops
from kvscout.variants import observe

with observe() as chosen:
    found = replay.kernels_of(models.read(Path(sys.argv[1])), StandIn("sm_80", 108))
assert {op for op, _ in chosen} == set(ops()), chosen
assert not [variant for op, variant in chosen if variant.startswith("torch") and op != "topk"], chosen
print(*sorted({f"{kernel.module.split('.')[2]} {kernel.function}" for kernel in found}), sep="\\n")
"""


def test_a_replay_calls_every_op(run_python, tmp_path):
    attend = {"query_heads": 8, "kv_heads": 1, "head_dim": 64, "pages": 16, "layouts": "nhd", "batches": 1}
    models = {
        "blocks": {"score": {"heads": 8, "head_dim": 512, "rows": 1, "keys": 64}, "select": {"k": 4, "block_size": 16}},
        "tokens": {"select": {"k": 4, "rows": 1, "keys": 64}, "attend": attend | {"scales": "token"}},
    }
    models["blocks"]["attend"] = attend
    (tmp_path / "models.json").write_text(json.dumps(models))
    assert run_python("-c", REPLAY, str(tmp_path / "models.json")).stdout.splitlines() == [
        "kv_cache _scatter",
        "mqa_logits _kernel",
        "pa_decode _merge_kernel",
        "pa_decode _tile_kernel",
        "pa_plan _plan",
        "selection_gather _find",
        "selection_gather copy",
        "selection_tables _tables",
    ]


TILES = """
from kvscout.aot import models, replay
from kvscout.device import StandIn

for arch in ("sm_80", "sm_90"):
    for tile in (None, 128, 256):
        attend = models.Attend(8, 1, 192, (16,), layouts=("nhd",), caches=("e4m3",), batches=(1,), tile=tile)
        found = replay.kernels_of({"a": models.Model(attend=attend)}, StandIn(arch, 132))
        described = [kernel.described() for kernel in found if kernel.function in ("_plan", "_tile_kernel")]
        assert len(described) >= 2
        print(arch, tile, *{size for size in (128, 256) for text in described if f" TILE={size}," in text})
try:
    replay.kernels_of({"a": models.Model(attend=models.Attend(8, 1, 64, (16,), tile=64))}, StandIn("sm_80", 108))
except models.WrongModel as error:
    print(error)
"""


def test_plans_have_the_tiles_that_the_gpu_or_the_model_says(run_python):
    assert run_python("-c", TILES).stdout.splitlines() == [
        "sm_80 None 256", "sm_80 128 128", "sm_80 256 256", "sm_90 None 128", "sm_90 128 128", "sm_90 256 256",
        "a: tile: expected one of 128, 256, got 64",
    ]  # fmt: skip
