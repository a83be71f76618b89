"""What a call of ``cute_wgmma`` puts on a GPU: one launch of one kernel, on the caller's own tensors."""

import json

import pytest
import torch

from kvscout import fp8_mqa_logits
from kvscout.device import DEFAULT_NUM_SMS
from kvscout.kernels.cute import runtime, toolchain
from kvscout.ops.mqa_logits.cute_tile import THREADS
from kvscout.testing.compiled import _HostOps

CALL = ("q", "k", "k_scale", "weights", "q_scale", "ks", "ke", "out")
SHARED_MEMORY = 227 << 10
PROGRAMMATIC_STREAM_SERIALIZATION = 6


def make(rows=9, keys=300, heads=16, dim=64, gap=0, q_scale=False):
    """A call's tensors. ``gap`` elements lie between rows, and as many heads between those of queries."""
    q = torch.zeros(rows, heads + gap, dim + 16 * gap).to(torch.float8_e4m3fn)[:, :heads, :dim]
    k = torch.zeros(keys, dim + 16 * gap).to(torch.float8_e4m3fn)[:, :dim]
    wide = torch.zeros(2, rows, heads + gap)[..., :heads]
    return {
        "q": q,
        "kv": (k, torch.ones(keys)),
        "weights": wide[0],
        "cu_seq_len_k_start": torch.zeros(rows).int(),
        "cu_seq_len_k_end": torch.full((rows,), keys).int(),
        "q_scale": wide[1] if q_scale else None,
        "out": torch.empty(rows, keys + gap)[:, :keys],
    }


def one_row_with_an_odd_stride():
    call = make(rows=1)
    return call | {"q": call["q"].as_strided(call["q"].shape, (7, *call["q"].stride()[1:]))}


def one_key_with_odd_strides():
    call = make(keys=1)
    k, k_scale = call["kv"]
    return call | {"kv": (k.as_strided(k.shape, (5, 1)), k_scale.as_strided((1,), (3,)))}


def repeated_rows():
    call = make()
    return call | {"q": call["q"][:1].expand(9, -1, -1), "weights": call["weights"][:1].expand(9, -1)}


CALLS = {
    "plain": make,
    "q_scale": lambda: make(q_scale=True),
    "strided": lambda: make(gap=3, q_scale=True),
    "one row": lambda: make(rows=1),
    "one row with an odd stride": one_row_with_an_odd_stride,
    "one key": lambda: make(keys=1),
    "one key with odd strides": one_key_with_odd_strides,
    "repeated rows": repeated_rows,
    "many heads": lambda: make(rows=300, heads=128, dim=128),
}


@pytest.fixture
def launches(monkeypatch, on_hopper):
    """The arguments of every kernel call; none is compiled."""
    found = []
    monkeypatch.setattr(runtime, "load", lambda program: lambda *arguments: found.append((program.spec, arguments)))
    return found


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_one_launch_on_the_caller_s_own_tensors(name, clean, launches):
    call = CALLS[name]()
    with _HostOps() as host:
        found = fp8_mqa_logits(**call, clean_logits=clean)
    assert found is call["out"]
    # Whatever is neither a view nor free of data would be a kernel, a copy or a wait.
    assert host.names == []
    ((tile, arguments),) = launches
    assert (tile.heads, tile.dim) == tuple(call["q"].shape[1:])
    k, k_scale = call["kv"]
    own = {
        **{"q": call["q"], "k": k, "k_scale": k_scale, "weights": call["weights"], "out": call["out"]},
        # Not read where there is none.
        "q_scale": call["weights"] if call["q_scale"] is None else call["q_scale"],
        **{"ks": call["cu_seq_len_k_start"], "ke": call["cu_seq_len_k_end"]},
    }
    for word, got in zip(CALL, arguments, strict=False):
        assert got.data_ptr() == own[word].data_ptr(), word
        assert (got.shape, got.dtype) == (own[word].shape, own[word].dtype), word
        for size, stride, mine in zip(got.shape, got.stride(), own[word].stride(), strict=True):
            assert size == 1 or stride == mine, word
    q, k = arguments[:2]
    assert all(stride % 16 == 0 for stride in (*q.stride()[:-1], *k.stride()[:-1]))
    has_q_scale, has_clean, thread_blocks = arguments[len(CALL) :]
    assert (has_q_scale, has_clean) == (call["q_scale"] is not None, clean)
    rows, keys = found.shape
    assert thread_blocks == min(-(-rows // tile.block_rows) * -(-keys // tile.stage_keys), DEFAULT_NUM_SMS)


def test_a_new_result_is_all_that_a_call_allocates(launches):
    call = make() | {"out": None}
    with _HostOps() as host:
        found = fp8_mqa_logits(**call)
    assert all(name.startswith("aten.empty") for name in host.names)
    assert len(host.names) == 1
    ((_, arguments),) = launches
    assert arguments[CALL.index("out")].data_ptr() == found.data_ptr()


def test_weights_that_need_a_gradient_are_read_like_others(launches):
    call = make()
    call["weights"].requires_grad_()
    assert not fp8_mqa_logits(**call).requires_grad
    assert len(launches) == 1


@pytest.mark.parametrize("calls", [1, 3])
def test_a_kernel_is_loaded_once(calls, monkeypatch, on_hopper):
    loaded = []

    def load(program):
        loaded.append(program)
        return lambda *arguments: None

    monkeypatch.setattr(runtime, "load", load)
    for _ in range(calls):
        fp8_mqa_logits(**make())
    assert len(loaded) == 1


# What `tests/kernels/cute/fake_cudart.py` writes down of a launch, and which attributes of it are set, in the order of
# the launches.
RECORD = """
#include <string.h>
struct launch { struct config config; int attributes[8][2]; } launches[64];
int launch_count = 0;
static void record(const struct config *config) {
    struct launch *launch = &launches[launch_count++ % 64];
    launch->config = *config;
    for (unsigned i = 0; i < config->count && i < 8; i++) {
        const char *attribute = (const char *)config->attributes + 72 * i;
        memcpy(&launch->attributes[i][0], attribute, 4);
        memcpy(&launch->attributes[i][1], attribute + 8, 4);
    }
}
"""

HOST_CODE = """
import ctypes, json, sys
from pathlib import Path
import torch, tvm_ffi
from kvscout.kernels.cute import runtime, store, toolchain
from kvscout.kernels.cute.compiler import compile_to
from kvscout.ops.mqa_logits.variants import cute_wgmma
from tests.kernels.cute import fake_cudart
from tests.ops.mqa_logits import test_cute_launch as test

folder = Path(sys.argv[1])
program = cute_wgmma._program(16, 64, cute_wgmma.Config(1, "keys"))
library = store.file(folder, program, toolchain.dsl_version())
compile_to(program, library)
first, then = fake_cudart.LAUNCH.split("struct config launched;")
fake_cudart.LAUNCH = first + test.RECORD + "struct config launched;" + then.replace(
    "launched = *config;", "launched = *config; record(config);")
cuda = ctypes.CDLL(str(fake_cudart.build(library, folder)), mode=ctypes.RTLD_LOCAL)

class Launch(ctypes.Structure):
    _fields_ = (("config", fake_cudart.Config), ("attributes", ctypes.c_int * 2 * 8))

class OnGpu:
    "A tensor that by what DLPack says lies on the first CUDA device, with the strides that it has."
    CODES = {torch.float32: (2, 32), torch.int32: (0, 32), torch.float8_e4m3fn: (10, 8)}

    def __init__(self, tensor):
        self.own = tensor
        self.shape, self.strides = ((ctypes.c_int64 * tensor.dim())(*x) for x in (tensor.shape, tensor.stride()))
        shape, strides = map(ctypes.addressof, (self.shape, self.strides))
        self.tensor = fake_cudart._Tensor(tensor.data_ptr(), 2, 0, tensor.dim(), *self.CODES[tensor.dtype], 1, shape,
                                          strides, 0, None, None)
    __dlpack_device__ = fake_cudart.Vector.__dlpack_device__
    __dlpack__ = fake_cudart.Vector.__dlpack__

torch.cuda.is_available, torch.cuda.init, torch.version.cuda = lambda: True, lambda: None, "99.0"
load = runtime.load

def loaded(program):
    kernel = load(program)
    def launch(*arguments):
        held = [OnGpu(x) for x in arguments[:8]]
        tensors = [tvm_ffi.from_dlpack(x) for x in held]
        with tvm_ffi.use_raw_stream(tensors[0].device, 4711):
            kernel(*tensors, *arguments[8:])
    return launch

runtime.load = loaded
found = {}
for name, make in test.CALLS.items():
    call = make()
    if call["q"].shape[1:] == (16, 64):
        q, kv, weights, ks, ke, q_scale, out = call.values()
        problem = cute_wgmma.Problem("sm_90", *out.shape, 16, 64, True, q_scale is not None)
        count = ctypes.c_int.in_dll(cuda, "launch_count")
        before = count.value
        args = cute_wgmma.Args(q, *kv, weights, ks, ke, q_scale, out)
        cute_wgmma.VARIANT.launch(problem, cute_wgmma.Config(1, "keys"), args)
        launch = (Launch * 64).in_dll(cuda, "launches")[before]
        found[name] = {
            "launches": count.value - before, "grid": list(launch.config.grid), "block": list(launch.config.block),
            "shared": launch.config.shared, "stream": launch.config.stream,
            "attributes": dict(map(list, launch.attributes[:launch.config.count])),
        }
print(json.dumps(found))
"""


@pytest.mark.xdist_group("cute")
@pytest.mark.skipif(toolchain.cannot_compile() is not None, reason="needs CuTe DSL and a C compiler")
@pytest.mark.skipif(not toolchain.has_loader(), reason="needs tvm-ffi")
def test_the_compiled_host_code_takes_every_layout_and_launches_once(run_python, tmp_path):
    """The kernel is real, the CUDA runtime under it launches nothing."""
    found = json.loads(run_python("-c", HOST_CODE, str(tmp_path), env={"KVSCOUT_CACHE_DIR": str(tmp_path)}).stdout)
    assert set(found) == set(CALLS) - {"many heads"}
    for name, launch in found.items():
        rows, keys = CALLS[name]()["out"].shape
        assert launch["launches"] == 1, name
        assert launch["grid"] == [min(rows * -(-keys // 128), DEFAULT_NUM_SMS), 1, 1], name
        assert launch["block"] == [THREADS, 1, 1], name
        assert 0 < launch["shared"] <= SHARED_MEMORY, name
        assert launch["stream"] == 4711, name
        # It may start while the kernel before it ends.
        assert launch["attributes"][str(PROGRAMMATIC_STREAM_SERIALIZATION)] == 1, name
