"""``cute_wgmma`` on a Hopper GPU: what a call launches, what a graph replays, and calls that overlap."""

import pytest
import torch

from kvscout import fp8_mqa_logits
from kvscout.device import arch_of
from kvscout.ops.mqa_logits.api import FAMILY, Problem
from kvscout.testing.windows import windows

pytestmark = pytest.mark.gpu

NAME = "cute_wgmma"
DEVICE = torch.device("cuda")
# Few rows, a small problem, and one of several tasks per thread block.
SHAPES = [(1, 9000, 64), (61, 1024, 32), (1024, 4096, 64)]


@pytest.fixture(autouse=True)
def on_hopper():
    refusal = FAMILY.refusal(NAME, Problem(arch_of(DEVICE), 64, 2048, 64, 128, clean_logits=True))
    if refusal is not None:
        pytest.skip(refusal)


def make(rows, keys, heads, kind="causal", dim=128):
    generator = torch.Generator(DEVICE).manual_seed(rows + keys)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE)

    ks, ke = (bound.to(DEVICE) for bound in windows(kind, rows, keys))
    return {
        "q": normal(rows, heads, dim).to(torch.float8_e4m3fn),
        "kv": (normal(keys, dim).to(torch.float8_e4m3fn), normal(keys).abs()),
        "weights": normal(rows, heads),
        "cu_seq_len_k_start": ks,
        "cu_seq_len_k_end": ke,
        "out": torch.full((rows, keys), float("nan"), device=DEVICE),
        "variant": NAME,
    }


def same_bits(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("own_out", [True, False])
def test_a_call_is_one_kernel_and_nothing_else(shape, clean, own_out, on_the_gpu):
    call = make(*shape)
    call |= {"q_scale": torch.rand_like(call["weights"]), **({} if own_out else {"out": None})}
    (name,) = on_the_gpu(lambda: fp8_mqa_logits(**call, clean_logits=clean))
    assert "mqa_logits" in name


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_replays_are_one_kernel_and_follow_windows_that_change(shape, clean, on_the_gpu):
    call = make(*shape)
    out = call["out"]
    # A kernel is loaded by its first launch, which cannot be captured.
    fp8_mqa_logits(**call, clean_logits=clean)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp8_mqa_logits(**call, clean_logits=clean)
    for kind in ("causal", "misaligned", "empty", "extreme", "full", "past_end"):
        for name, bound in zip(("start", "end"), windows(kind, *shape[:2]), strict=True):
            call[f"cu_seq_len_k_{name}"].copy_(bound)
        out.fill_(float("nan"))
        graph.replay()
        replayed = out.clone()
        out.fill_(float("nan"))
        fp8_mqa_logits(**call, clean_logits=clean)
        assert same_bits(replayed, out), kind
        expected = fp8_mqa_logits(**call | {"out": torch.empty_like(out), "variant": "triton_staged"})
        assert torch.equal(out.isneginf(), expected.isneginf() if clean else torch.zeros_like(out, dtype=torch.bool))
        assert torch.equal(out.isnan(), torch.zeros_like(out, dtype=torch.bool) if clean else expected.isneginf())
        inside = expected.isfinite()
        scale = expected[inside].abs().max() if inside.any() else 1
        assert ((out - expected)[inside].abs() <= 2e-3 * scale).all(), kind
    assert len(on_the_gpu(graph.replay)) == 1


def test_rows_that_repeat_and_rows_with_odd_strides_give_the_same_bits():
    call = make(64, 2048, 32, "misaligned")
    again = call | {"q": call["q"][:1].expand(64, -1, -1), "weights": call["weights"][:1].expand(64, -1)}
    plain = again | {"q": again["q"].contiguous(), "weights": again["weights"].contiguous()}
    assert same_bits(fp8_mqa_logits(**again).clone(), fp8_mqa_logits(**plain))
    call = make(1, 2048, 32)
    odd = call | {
        "q": call["q"].as_strided(call["q"].shape, (7, *call["q"].stride()[1:])),
        "weights": call["weights"].as_strided(call["weights"].shape, (3, 1)),
        "cu_seq_len_k_end": call["cu_seq_len_k_end"].as_strided((1,), (2,)),
    }
    assert same_bits(fp8_mqa_logits(**odd).clone(), fp8_mqa_logits(**call))


@pytest.mark.parametrize("shape", [(61, 1024, 32), (1024, 1024, 64)])
def test_calls_that_start_while_the_one_before_ends_see_all_that_it_wrote(shape):
    """Each call's weights and windows are what the call before wrote, and it writes over what that one read."""
    rows, _, heads = shape
    call = make(*shape, "full")
    k, k_scale = call["kv"]
    # The logits stay of one magnitude.
    call |= {"kv": (k, torch.full_like(k_scale, 0.02))}
    first = torch.randn(call["out"].shape, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE)

    def chain(between):
        read, written = first.clone(), first.flip(0)
        for _ in range(20):
            # By the sign of a logit its bits are an end past all keys or before the first.
            ends = read.view(torch.int32)[0, :rows]
            given = {"weights": read[:, :heads], "cu_seq_len_k_end": ends, "out": written}
            fp8_mqa_logits(**call | given, clean_logits=False)
            between()
            read, written = written, read
        return read, written

    slowly = chain(torch.cuda.synchronize)
    assert all(x.isfinite().all() for x in slowly)
    for _ in range(5):
        assert all(same_bits(a, b) for a, b in zip(chain(lambda: None), slowly, strict=True))
    # Without the host between them the calls follow each other at once.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = chain(lambda: None)
    for _ in range(5):
        graph.replay()
        assert all(same_bits(a, b) for a, b in zip(replayed, slowly, strict=True))
