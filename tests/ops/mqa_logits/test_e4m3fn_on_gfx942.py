"""Scores of e4m3fn where the matrix unit knows e4m3fnuz alone: bytes are patched and count half, interpreted here."""

from dataclasses import replace

import pytest
import torch

from kvscout import fp8, fp8_mqa_logits
from kvscout.kernels.triton import INTERPRET
from kvscout.ops.mqa_logits import api
from kvscout.ops.mqa_logits.triton_parts import HALVED, NATIVE, WIDENED, e4m3_way
from kvscout.ops.mqa_logits.variants.torch_reference import reference
from kvscout.testing.case import family
from kvscout.testing.cases.mqa_logits import MqaLogitsCase
from kvscout.testing.verify import verify
from kvscout.variants import Choice

VARIANTS = ("triton_direct", "triton_staged")
CPU = torch.device("cpu")

interpreted = pytest.mark.skipif(not INTERPRET, reason="needs Triton's interpreter: TRITON_INTERPRET=1")


@pytest.fixture
def on_gfx942(monkeypatch):
    """Tensors on the CPU are taken for a gfx942's."""
    check = api.check
    monkeypatch.setattr(api, "check", lambda *arguments: replace(check(*arguments), arch="gfx942"))


# Zeros, NaN, the largest and the smallest of either sign.
PECULIAR = (0x00, 0x80, 0x7F, 0xFF, 0x7E, 0xFE, 0x01, 0x81)


@interpreted
@pytest.mark.parametrize(
    ("variant", "of_queries"), [("triton_direct", (*PECULIAR, *range(3, 256, 16))), ("triton_staged", range(256))]
)
def test_bytes_times_every_byte(on_gfx942, variant, of_queries):
    """Head 1 is head 0 negated, so that what relu drops of one is what it keeps of the other: exact, and NaN is NaN."""
    chosen, every = torch.tensor(of_queries, dtype=torch.uint8), torch.arange(256, dtype=torch.uint8)
    rows = len(chosen)
    q, k = torch.zeros(rows, 8, 32, dtype=torch.uint8), torch.zeros(256, 32, dtype=torch.uint8)
    q[:, 0, 3], q[:, 1, 3], k[:, 3] = chosen, chosen ^ 0x80, every
    q, k = q.view(fp8.FN), k.view(fp8.FN)
    weights = torch.zeros(rows, 8)
    weights[:, 0], weights[:, 1] = 1, -1
    window = torch.zeros(rows).int(), torch.full((rows,), 256).int()
    found = fp8_mqa_logits(q, (k, torch.ones(256)), weights, *window, variant=variant)
    expected = q[:, 0, 3, None].float() * k[:, 3].float()
    assert expected.isnan().sum() == 2 * rows + 2 * (256 - 2)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@interpreted
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "case",
    [
        MqaLogitsCase(9, 70, 8, 32, windows="cp"),
        MqaLogitsCase(5, 70, 32, 64, windows="misaligned", values="nan"),
        MqaLogitsCase(6, 90, 16, 128, False, "misaligned", q_scale=True, strided=True),
        MqaLogitsCase(6, 40, 64, 256, windows="past_end"),
        MqaLogitsCase(3, 40, 8, 512),
    ],
    ids=str,
)
def test_cases_are_right(case, variant):
    prepared = case.prepare(CPU)
    prepared.problem = replace(prepared.problem, arch="gfx942")
    of_op = family("mqa_logits")
    if refusal := of_op.refusal(variant, prepared.problem):
        pytest.skip(refusal)
    loaded = of_op.load(variant)
    for config in loaded.configs(prepared.problem):
        result = verify(case, Choice(loaded, config), prepared, repeats=1, graph=False)
        assert result.ok, result.message


@interpreted
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_stride_of_a_single_row_may_be_any(on_gfx942, variant):
    q = torch.randn(8 * 32).to(fp8.FN).as_strided((1, 8, 32), (7, 32, 1))
    k, weights = torch.randn(1, 32).to(fp8.FN).as_strided((1, 32), (5, 1)), torch.rand(1, 8)
    window = torch.zeros(1).int(), torch.ones(1).int()
    found = fp8_mqa_logits(q, (k, torch.ones(1)), weights, *window, variant=variant)
    torch.testing.assert_close(found.double(), reference(q, k, torch.ones(1), weights, *window), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arch", "fnuz", "way"),
    [
        ("gfx942", False, HALVED),
        ("gfx942", True, NATIVE),
        ("gfx950", False, NATIVE),
        ("gfx950", True, WIDENED),
        ("sm_80", False, WIDENED),
        ("sm_89", False, NATIVE),
        ("cpu", False, WIDENED),
        ("cpu", True, WIDENED),
    ],
)
def test_how_each_gpu_multiplies_each_format(arch, fnuz, way):
    assert e4m3_way(api.Problem(arch, 5, 70, 16, 64, clean_logits=True, fnuz=fnuz)) == way
