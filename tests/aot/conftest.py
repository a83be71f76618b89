"""A small model, what ``kvscout aot`` makes for it once, and the calls that an engine would make, on real tensors."""

import json

import pytest

# Few kernels, of every op that has any, and of both compilers on Hopper.
MODELS = {
    "small": {
        "score": {"heads": 32, "head_dim": 64, "rows": [1, 16], "keys": [1000]},
        "select": {"k": 16, "block_size": 32, "rows": 4, "keys": 64},
        "attend": {
            "query_heads": 8,
            "kv_heads": 1,
            "head_dim": 64,
            "pages": [16],
            "layouts": ["nhd"],
            "caches": ["e4m3"],
            "batches": [2],
            "written_tokens": [2],
            "pool": 64,
            "max_blocks": 32,
        },
    }
}

# A process that believes that the CPU is a GPU: what is asked for is compiled, or found, and not launched. All else is
# real: tensors with memory, Triton's own way from a call to its cache, the functions' checks and choices.
ENGINE = """
import sys
from pathlib import Path
import torch
import kvscout
from kvscout import device, env, fp8, selection

arch, num_sms = sys.argv[1], int(sys.argv[2])
for function, said in ((device.arch_of, lambda device: arch), (device.num_sms, lambda device: num_sms)):
    for module in [module for name, module in sys.modules.items() if name.startswith("kvscout")]:
        for name in [name for name, value in vars(module).items() if value is function]:
            setattr(module, name, said)

from kvscout.kernels import triton_store
from kvscout.kernels.cute import runtime, store, toolchain
from kvscout.testing.compiled import compiling_for
from triton import knobs

asked, hits = set(), []
offer, launch = triton_store.Launch.offer, lambda *arguments: None

def noted(self, root):
    asked.add(self.kernel.file(root))
    return offer(self, root)

def load(program):
    asked.add(store.file(env.cache_dir(), program, toolchain.DSL_VERSION))
    return launch

triton_store.Launch.offer = noted
runtime.load, runtime.refusal = load, lambda program: None
knobs.compilation.listener = lambda *, src, cache_hit, **more: hits.append(cache_hit)

def call(rows=(1, 16), keys=1000, pages=64, batch=2):
    e4m3 = fp8.FNUZ if arch == "gfx942" else fp8.FN
    for n in rows:
        q, k = torch.zeros(n, 32, 64).to(e4m3), torch.zeros(keys, 64).to(e4m3)
        windows = torch.zeros(n).int(), torch.full((n,), keys).int()
        kvscout.fp8_mqa_logits(q, (k, torch.ones(keys)), torch.rand(n, 32), *windows, False)
    selected = torch.zeros(batch, 16).int()
    key_cache, value_cache = (torch.zeros(pages, 16, 1, 64).to(e4m3) for _ in "kv")
    slots = torch.arange(2)
    new = torch.randn(2, 1, 64).bfloat16()
    kvscout.write_kv_cache(new, new, key_cache, value_cache, slots, k_scale=0.1, v_scale=0.1, kv_layout="nhd")
    lengths, tables = torch.tensor([40, 300][:batch]).int(), torch.zeros(batch, 32).int()
    found = selection.tables_of_blocks(selected, tables, lengths, 32, 16)
    for tables, lengths in ((tables, lengths), found):
        plan = kvscout.plan_pa_decode(lengths, 1)
        query = torch.randn(batch, 8, 64).bfloat16()
        kvscout.pa_decode(
            torch.empty_like(query), query, key_cache, value_cache, lengths, tables, 0.1,
            work_plan=plan, key_scale=0.1, value_scale=0.1, kv_layout="nhd",
        )
"""

GPUS = {"sm_90": 132, "gfx942": 304}


@pytest.fixture(scope="session")
def shapes(tmp_path_factory):
    """The file that describes the model."""
    path = tmp_path_factory.mktemp("shapes") / "models.json"
    path.write_text(json.dumps(MODELS))
    return path


@pytest.fixture(scope="session")
def prepared(run_python, shapes, tmp_path_factory):
    """The folder that ``kvscout aot`` fills for these GPUs, and what it says."""
    folder = tmp_path_factory.mktemp("prepared")
    words = ("aot", "--shapes", str(shapes), "--archs", "sm_90a,gfx942,gfx1250", "--output", str(folder))
    return folder, run_python("-m", "kvscout", *words, check=False, timeout=600)


@pytest.fixture
def engine(run_python, tmp_path):
    """``engine(code, cache=folder)``: what a process that makes the calls prints, and what it says to stderr."""

    def run(code, cache, arch="sm_90", aot_only="all", check=True):
        env = {
            "KVSCOUT_CACHE_DIR": str(cache),
            "KVSCOUT_AOT_ONLY": aot_only,
            "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        }
        return run_python("-c", ENGINE + code, arch, str(GPUS[arch]), env=env, check=check)

    return run
