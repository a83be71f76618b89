"""The device and the variants that the tests of this folder run on."""

import pytest
import torch

from kvscout.device import arch_of
from kvscout.ops.pa_plan.api import FAMILY


@pytest.fixture(scope="session")
def device():
    """The GPU where there is one: Triton's interpreter, which takes CPU tensors, is off there."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=FAMILY.names)
def variant(request, device):
    """Name of each variant that runs here."""
    refusal = FAMILY.unavailable(request.param, arch_of(device))
    if refusal is not None:
        pytest.skip(refusal)
    return request.param
