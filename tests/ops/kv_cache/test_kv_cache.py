"""``write_kv_cache``: quantisation, skipped tokens, its checks, and compiled calls."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvscout import fp8, paging, write_kv_cache
from kvscout.ops.kv_cache.api import FAMILY
from kvscout.ops.kv_cache.cost import cost
from kvscout.testing.cases.kv_cache import e4m3
from kvscout.testing.compare import bits

NAMES = [name for name in FAMILY.names if FAMILY.unavailable(name, "cpu") is None]
VARIANTS = pytest.mark.parametrize("variant", NAMES)
FORMATS = pytest.mark.parametrize("dtype", fp8.E4M3)


def caches(dtype=fp8.FN, layout=paging.HND, blocks=3, heads=2, page=16, dim=16):
    return paging.new_caches(layout, blocks, heads, page, dim, dtype, "cpu")


def tokens(*values, heads=2, dim=16, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)[:, None, None].repeat(1, heads, dim)


@FORMATS
def test_the_judge_rounds_as_the_format_says(dtype):
    """Every number of the format stands for itself, every middle goes to the even neighbour, the rest saturates."""
    numbers = torch.arange(128, dtype=torch.uint8)
    numbers = numbers[numbers.view(dtype).float().isfinite()]
    values = numbers.view(dtype).float()
    assert e4m3(values, dtype).view(torch.uint8).equal(numbers)
    middles = (values[1:] + values[:-1]) / 2
    even = torch.where(numbers[:-1] % 2 == 0, numbers[:-1], numbers[1:])
    assert e4m3(middles, dtype).view(torch.uint8).equal(even)
    above = torch.nextafter(middles, torch.tensor(math.inf))
    assert e4m3(above, dtype).view(torch.uint8).equal(numbers[1:])
    assert e4m3(torch.tensor([math.inf, -1e9]), dtype).float().tolist() == [float(values[-1]), -float(values[-1])]


@VARIANTS
@FORMATS
@pytest.mark.parametrize("scale", [0.3, 1.0, 7.7])
def test_rounding_is_exact(variant, dtype, scale):
    """Around every number of the format and every middle between two, on both sides, after a division."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()].sort().values
    around = torch.cat([values, (values[1:] + values[:-1]) / 2]) * scale
    up, down = (torch.nextafter(around, torch.tensor(limit)) for limit in (math.inf, -math.inf))
    x = torch.cat([around, up, down, torch.tensor([0.0, -0.0, 1e9, -1e9, math.inf, -math.inf])])
    x = torch.nn.functional.pad(x, (0, -len(x) % 512)).reshape(1, -1, 512)
    key_cache, value_cache = caches(dtype, heads=x.shape[1], dim=512)
    write_kv_cache(x, x, key_cache, value_cache, torch.tensor([5]), k_scale=scale, variant=variant)
    assert bits(key_cache[0, :, 5]).equal(bits(e4m3(x[0] / torch.tensor(scale), dtype)))
    assert bits(value_cache[0, :, 5]).equal(bits(e4m3(x[0], dtype)))


@VARIANTS
def test_nan_stays_and_infinities_saturate(variant):
    x = tokens(math.nan, math.inf, -math.inf)
    key_cache, value_cache = caches()
    write_kv_cache(x, x, key_cache, value_cache, torch.arange(3), k_scale=0.5, variant=variant)
    for cache in (key_cache, value_cache):
        stored = cache[0, :, :3].float()
        assert stored[:, 0].isnan().all()
        assert stored[:, 1:].unique().tolist() == [-448.0, 448.0]


@VARIANTS
def test_computed_scales(variant):
    """The largest finite magnitude decides; a token of zeros, or of numbers too small to divide, takes 1."""
    x = torch.zeros(5, 2, 16)
    x[0, 0, 3], x[0, 1, 4] = -896.0, 2.0
    x[2, :, 0], x[2, :, 1], x[2, :, 2] = math.inf, math.nan, 44.8
    x[3] = 2.0**-149
    x[4] = 448 * 2.0**-140
    scale = torch.full((3, 2, 16), 9.0)
    key_cache, value_cache = caches()
    write_kv_cache(x, x, key_cache, value_cache, torch.arange(16, 21), k_scale=scale, variant=variant)
    expected = torch.tensor([[2.0, 2 / 448], [1, 1], [0.1, 0.1], [1, 1], [2.0**-140, 2.0**-140]])
    assert torch.allclose(scale[1, :, :5], expected.T, rtol=1e-7, atol=0)
    assert (scale[1, :, 5:] == 9).all()
    assert (scale[::2] == 9).all()
    stored = key_cache[1, :, :5].float()
    assert stored[0, 0, 3] == -448
    assert stored[1, 0, 4] == 448
    assert stored[:, 2, 0].tolist() == [448.0, 448.0]
    assert stored[:, 2, 1].isnan().all()
    assert not stored[:, 3].any()
    assert (stored[:, 4] == 448).all()


@VARIANTS
@pytest.mark.parametrize("slots", [[-1, -1, -1], [48, 2**40, -(2**62)]])
def test_all_skipped_leaves_every_bit(variant, slots):
    """NaN patterns included, which a copy through floating-point arithmetic might replace."""
    key_cache, value_cache = (torch.arange(256).repeat(6).to(torch.uint8).view(fp8.FN) for _ in "kv")
    key_cache, value_cache = key_cache.view(3, 2, 16, 16), value_cache.view(3, 2, 16, 16)
    scale = torch.full((3, 2, 16), math.nan)
    before = [bits(x).clone() for x in (key_cache, value_cache, scale)]
    x = tokens(1.0, 2.0, 3.0)
    write_kv_cache(x, x, key_cache, value_cache, torch.tensor(slots), v_scale=scale, variant=variant)
    for former, now in zip(before, (key_cache, value_cache, scale), strict=True):
        assert former.equal(bits(now))


@VARIANTS
def test_no_tokens_and_no_blocks(variant):
    key_cache, value_cache = caches()
    nothing = torch.zeros(0, 2, 16)
    write_kv_cache(nothing, nothing, key_cache, value_cache, torch.arange(0), variant=variant)
    x = tokens(1.0)
    write_kv_cache(x, x, *caches(blocks=0), torch.tensor([0]), variant=variant)
    assert not key_cache.float().any()


@VARIANTS
def test_same_slot_twice_holds_one_of_the_tokens(variant):
    key_cache, value_cache = caches(torch.bfloat16)
    x = tokens(1.0, 2.0)
    write_kv_cache(x, x, key_cache, value_cache, torch.tensor([4, 4]), variant=variant)
    assert key_cache[0, :, 4].unique().tolist() in ([1.0], [2.0], [1.0, 2.0])


@VARIANTS
def test_slice_of_a_fused_projection(variant):
    """Rows of query, key and value heads side by side, in a bfloat16 model that is being trained."""
    qkv = torch.randn(3, (4 + 2 + 2) * 16, dtype=torch.bfloat16, requires_grad=True)
    _, k, v = (part.unflatten(1, (-1, 16)) for part in qkv.split([64, 32, 32], dim=1))
    key_cache, value_cache = caches(torch.bfloat16)
    write_kv_cache(k, v, key_cache, value_cache, torch.tensor([0, 20, 40]), variant=variant)
    for x, cache in ((k, key_cache), (v, value_cache)):
        assert not cache.requires_grad
        for token, (block, position) in enumerate([(0, 0), (1, 4), (2, 8)]):
            assert torch.equal(cache[block, :, position], x[token].detach())


@given(st.lists(st.integers(-3, 50), min_size=1, max_size=12, unique=True), st.sampled_from(paging.LAYOUTS))
def test_as_much_changes_as_is_written(slots, layout):
    key_cache, value_cache = caches(torch.float16, layout)
    x = torch.rand(len(slots), 2, 16) + 1
    write_kv_cache(x, -x, key_cache, value_cache, torch.tensor(slots), kv_layout=layout)
    written = sum(0 <= slot < 48 for slot in slots)
    assert int((key_cache > 0).sum()) == int((value_cache < 0).sum()) == written * 2 * 16


def run_twice(function, *inputs):
    """What a function leaves in clones of its inputs, eager and compiled."""
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    found = []
    for call in (function, compiled):
        clones = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        call(*clones)
        found.append([x for x in clones if isinstance(x, torch.Tensor)])
    return found


@pytest.mark.parametrize("dtype", [fp8.FN, torch.bfloat16])
@pytest.mark.parametrize("layout", paging.LAYOUTS)
def test_compiled_equals_eager(dtype, layout):
    def write(k, v, key_cache, value_cache, slots):
        write_kv_cache(k + 1, v * 2, key_cache, value_cache, slots, kv_layout=layout)

    for count in (3, 7):
        k, v = torch.randn(2, count, 2, 16)
        slots = torch.randperm(48)[:count]
        slots[0] = -1
        eager, compiled = run_twice(write, k, v, *caches(dtype, layout), slots)
        assert all(bits(a).equal(bits(b)) for a, b in zip(eager, compiled, strict=True))
        assert eager[2].float().any()


@pytest.mark.parametrize("scale", [0.3, 2, torch.tensor([0.7]), torch.tensor(0.7), torch.tensor([0.5, 3.0])])
def test_compiled_with_scales(scale):
    def write(k, v, key_cache, value_cache, slots, k_scale, v_scale):
        write_kv_cache(k, v, key_cache, value_cache, slots, k_scale=k_scale, v_scale=v_scale)

    k, v = torch.randn(2, 4, 2, 16)
    per_token = torch.zeros(3, 2, 16, 1)
    eager, compiled = run_twice(write, k, v, *caches(), torch.tensor([1, -1, 33, 2]), scale, per_token)
    assert all(bits(a).equal(bits(b)) for a, b in zip(eager, compiled, strict=True))
    assert eager[-1].count_nonzero() == 3 * 2


def test_compiled_with_an_interleaved_pool():
    def write(k, v, pool, slots):
        write_kv_cache(k, v, pool[:, 0], pool[:, 1], slots, kv_layout="nhd")
        return pool * 2

    eager, compiled = run_twice(write, *torch.randn(2, 4, 2, 16), torch.zeros(3, 2, 16, 2, 16).half(), torch.arange(4))
    assert eager[2].equal(compiled[2])
    assert eager[2][0].count_nonzero() > 200


FP8_KEYS, FP8_VALUES = caches()
HALF_KEYS, HALF_VALUES = caches(torch.float16)
K = torch.zeros(4, 2, 16)
GOOD = {"k": K, "v": K, "key_cache": FP8_KEYS, "value_cache": FP8_VALUES, "slot_mapping": torch.arange(4)}
HALF = {"key_cache": HALF_KEYS, "value_cache": HALF_VALUES}
META = torch.zeros(3, 2, 16, 16, device="meta", dtype=fp8.FN)
BAD = [
    ({"k": [1.0]}, TypeError, "k: expected a torch.Tensor, got list"),
    ({"k": K.double()}, TypeError, "k: expected dtype .* got torch.float64"),
    ({"k": K[0]}, ValueError, r"k: expected shape \[T, Hkv, D\], got \[2, 16\]"),
    ({"v": K.half()}, TypeError, "v: expected dtype torch.float32, got torch.float16"),
    ({"v": K[:3]}, ValueError, r"v: expected shape \[4, 2, 16\], got \[3, 2, 16\]"),
    ({"k": K.transpose(1, 2).contiguous().transpose(1, 2)}, ValueError, "k: expected a contiguous last dimension"),
    ({"v": torch.zeros(4, 2, 32)[..., ::2]}, ValueError, "v: expected a contiguous last dimension"),
    ({"k": K[..., :8], "v": K[..., :8]}, ValueError, "k: expected the head dimension of the caches, 16, got 8"),
    ({"k": K[:, :1], "v": K[:, :1]}, ValueError, "key_cache: no dimension of .* holds the 1 KV heads"),
    ({"key_cache": FP8_KEYS.float()}, TypeError, "key_cache: expected dtype .* got torch.float32"),
    ({"value_cache": HALF_VALUES}, TypeError, "value_cache: expected dtype torch.float8_e4m3fn, got torch.float16"),
    ({"value_cache": FP8_VALUES[:2]}, ValueError, r"value_cache: expected shape \[3, 2, 16, 16\], got"),
    ({"key_cache": META, "value_cache": META}, ValueError, "key_cache: expected on cpu, .* got meta"),
    ({"slot_mapping": torch.arange(3)}, ValueError, r"slot_mapping: expected shape \[4\], got \[3\]"),
    ({"slot_mapping": torch.zeros(4)}, TypeError, "slot_mapping: expected dtype torch.int32 or torch.int64"),
    ({"slot_mapping": torch.arange(8)[::2]}, ValueError, "slot_mapping: expected a contiguous last dimension"),
    ({"k_scale": "1"}, TypeError, "k_scale: expected a torch.Tensor, a number or None, got str"),
    ({"v_scale": True}, TypeError, "v_scale: expected a torch.Tensor, a number or None, got bool"),
    ({"k_scale": 0.0}, ValueError, "k_scale: expected a positive number that float32 can hold, got 0.0"),
    ({"v_scale": -1}, ValueError, "v_scale: expected a positive number that float32 can hold, got -1.0"),
    ({"k_scale": 1e-60}, ValueError, "k_scale: expected a positive number that float32 can hold, got 1e-60"),
    ({"k_scale": 1e60}, ValueError, "k_scale: expected a positive number that float32 can hold, got 1e[+]60"),
    ({"k_scale": math.nan}, ValueError, "k_scale: expected a positive number that float32 can hold, got nan"),
    ({"v_scale": torch.ones(2).double()}, TypeError, "v_scale: expected dtype torch.float32, got torch.float64"),
    ({"k_scale": torch.ones(3)}, ValueError, r"k_scale: expected shape \[1\], \[2\] \(per head\) or \[3, 2, 16\]"),
    ({"v_scale": torch.ones(3, 16, 2)}, ValueError, r"v_scale: expected shape .* \(per token\), got \[3, 16, 2\]"),
    ({"v_scale": torch.ones(2, device="meta")}, ValueError, "v_scale: expected on cpu, like the other tensors, got"),
    ({"k_scale": 1.0, **HALF}, ValueError, "k_scale: expected None with caches of torch.float16"),
    ({"v_scale": torch.ones(1), **HALF}, ValueError, "v_scale: expected None with caches of torch.float16"),
    ({"kv_layout": "bhsd"}, ValueError, "kv_layout: expected one of auto, chunked, plain_v, nhd, hnd, got bhsd"),
    ({"kv_layout": "nhd"}, ValueError, r"key_cache: expected shape \[blocks, page, 2, D\], got"),
    ({"variant": "fast"}, ValueError, "variant: kv_cache has no variant 'fast'; it has torch_scatter"),
]


@pytest.mark.parametrize(("changed", "error", "message"), BAD, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_bad_input(changed, error, message):
    with pytest.raises(error, match=message):
        write_kv_cache(**GOOD | changed)


def test_cost():
    found = cost(num_written=10, num_kv_heads=2, head_dim=64, input_bytes=2, cache_bytes=1, scales_per_token=1)
    assert found.bytes == 2 * 10 * 2 * 64 * 3 + 10 * 8 + 10 * 2 * 4
