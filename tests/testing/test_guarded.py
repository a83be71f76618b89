"""Outputs between guards: a write beside the output shows."""

import pytest
import torch

from kvscout.testing.case import GUARD, Guarded

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (0, 4), (3, 0), (2, 0, 4), (0,)])
@pytest.mark.parametrize("gap", [0, 2])
def test_the_view_has_the_shape_and_may_be_written(shape, gap):
    guarded = Guarded(shape, torch.float32, CPU, row_gap=gap)
    assert guarded.view.shape == shape
    assert guarded.view.isnan().all()
    guarded.view.fill_(1.5)
    assert guarded.check("out").ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8])
@pytest.mark.parametrize("where", [0, GUARD - 1, GUARD + 3, GUARD + 4, -GUARD, -1])
def test_one_stray_write_is_caught(dtype, where):
    """Before the output, in the gap after its first row, after it; each at both ends."""
    guarded = Guarded((2, 3), dtype, CPU, row_gap=2)
    guarded.view.fill_(1)
    assert guarded.check("out").ok
    guarded.buffer[where] = 0
    found = guarded.check("out")
    assert not found.ok
    assert found.name == "guards of out"


def test_poison_comes_back():
    guarded = Guarded((2, 3), torch.int32, CPU)
    guarded.view.fill_(1)
    guarded.poison()
    assert guarded.view.eq(torch.iinfo(torch.int32).min).all()
