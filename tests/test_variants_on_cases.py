"""Every variant on every small case, from the families: the one test that a new variant must pass."""

import pytest
import torch

from kvscout.testing.case import SUITE, cases, family, ops
from kvscout.testing.verify import Choice, verify

CPU = torch.device("cpu")
MATRIX = [
    pytest.param(case, name, id=f"{op}-{name}-{case.name}") for op in ops() for case in cases(op, (SUITE,)) for name in family(op).names
]


@pytest.mark.parametrize(("case", "name"), MATRIX)
def test_variant_on_case(case, name):
    prepared = case.prepare(CPU)
    refusal = family(case.op).refusal(name, prepared.problem)
    if refusal is not None:
        pytest.skip(refusal)
    variant = family(case.op).load(name)
    configs = variant.configs(prepared.problem)
    for config in configs:
        result = verify(case, Choice(variant, config), prepared, repeats=1, graph=False)
        assert result.ok, result.message
