"""On a real GPU: calls find what was made for it by processes that did not ask it."""

import pytest
import torch

from kvscout.device import arch_of, num_sms
from tests.aot.engine import NOTES

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("aot")]

CALLS = """
torch.set_default_device("cuda")
call()
torch.cuda.synchronize()
print(len(hits), all(hits))
print(*sorted(asked), sep="\\n")
"""

# What Triton serves everywhere, so that no package is needed beside it.
ENV = {"KVSCOUT_MQA_LOGITS_VARIANT": "triton_staged", "KVSCOUT_PA_DECODE_VARIANT": "triton_tile"}


def test_calls_find_what_was_made_for_this_gpu(run_python, shapes, tmp_path):
    folder, gpu = tmp_path / "out", torch.device("cuda", 0)
    archs = f"{arch_of(gpu)}:{num_sms(gpu)}"
    run_python("-m", "kvscout", "aot", "--shapes", str(shapes), "--archs", archs, "--output", str(folder), env=ENV)
    caches = {"KVSCOUT_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    first, *asked = run_python("-c", NOTES + CALLS, env=ENV | caches | {"KVSCOUT_AOT_ONLY": "all"}).stdout.splitlines()
    made = sorted(str(path) for path in folder.rglob("kernel"))
    assert (first, asked) == (f"{len(made)} True", made)
