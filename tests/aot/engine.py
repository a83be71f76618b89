"""A small model, and what an engine of it does, as the code of a process."""

# Few kernels, of every op that has any, and of both compilers on Hopper, where Triton serves this head dimension.
MODELS = {
    "small": {
        "score": {"heads": 32, "head_dim": 64, "rows": [1, 16], "keys": [1000]},
        "select": {"k": 16, "block_size": 32, "rows": 4, "keys": 64},
        "attend": {
            "query_heads": 8,
            "kv_heads": 1,
            "head_dim": 192,
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

# Notes the files of kernels that are asked for, and whether Triton found each that it was to compile.
NOTES = """
import sys
from pathlib import Path
import torch
import kvscout
from kvscout import device, env, fp8, selection
from kvscout.kernels import triton_store
from triton import knobs

asked, hits = set(), []
offer = triton_store.Launch.offer

def noted(self, root):
    asked.add(self.kernel.file(root))
    return offer(self, root)

triton_store.Launch.offer = noted
knobs.compilation.listener = lambda *, src, cache_hit, **more: hits.append(cache_hit)

def call(rows=(1, 16), keys=1000, pages=64, batch=2):
    e4m3 = fp8.FNUZ if device.arch_of(torch.empty(0).device) == "gfx942" else fp8.FN
    for n in rows:
        q, k = torch.zeros(n, 32, 64).to(e4m3), torch.zeros(keys, 64).to(e4m3)
        windows = torch.zeros(n).int(), torch.full((n,), keys).int()
        kvscout.fp8_mqa_logits(q, (k, torch.ones(keys)), torch.rand(n, 32), *windows, False)
    selected = torch.zeros(batch, 16).int()
    key_cache, value_cache = (torch.zeros(pages, 16, 1, 192).to(e4m3) for _ in "kv")
    slots = torch.arange(2)
    new = torch.randn(2, 1, 192).bfloat16()
    kvscout.write_kv_cache(new, new, key_cache, value_cache, slots, k_scale=0.1, v_scale=0.1, kv_layout="nhd")
    lengths, tables = torch.tensor([40, 300][:batch]).int(), torch.zeros(batch, 32).int()
    found = selection.tables_of_blocks(selected, tables, lengths, 32, 16)
    for tables, lengths in ((tables, lengths), found):
        plan = kvscout.plan_pa_decode(lengths, 1)
        query = torch.randn(batch, 8, 192).bfloat16()
        kvscout.pa_decode(
            torch.empty_like(query), query, key_cache, value_cache, lengths, tables, 0.1,
            work_plan=plan, key_scale=0.1, value_scale=0.1, kv_layout="nhd",
        )
"""

# A process that believes that the CPU is a GPU.
GPU = """
arch, num_sms = sys.argv[1], int(sys.argv[2])
for function, said in ((device.arch_of, lambda device: arch), (device.num_sms, lambda device: num_sms)):
    for module in [module for name, module in sys.modules.items() if name.startswith("kvscout")]:
        for name in [name for name, value in vars(module).items() if value is function]:
            setattr(module, name, said)
"""

# What is asked for there is compiled, or found, and not launched. All else is real: tensors with memory, Triton's own
# way from a call to its cache, the functions' checks and choices.
FAKES = f"""
from kvscout.kernels.cute import runtime, store, toolchain
from kvscout.testing.compiled import compiling_for
{GPU}
def load(program):
    asked.add(store.file(env.cache_dir(), program, toolchain.DSL_VERSION))
    return lambda *arguments: None

runtime.load, runtime.refusal = load, lambda program: None
"""
