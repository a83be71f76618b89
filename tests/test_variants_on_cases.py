"""Every variant on every small case, from the families: the one test that a new variant must pass."""

import pytest
import torch

from kvscout.testing.case import SUITE, cases, family, ops
from kvscout.testing.verify import verify
from kvscout.variants import Choice

CPU = torch.device("cpu")
# Cases of each op on which every config of a variant is tried; on the others, its default one.
EVERY_CONFIG = 3

MATRIX = [
    pytest.param(case, name, index < EVERY_CONFIG, id=f"{op}-{name}-{case.name}")
    for op in ops()
    for index, case in enumerate(cases(op, (SUITE,)))
    for name in family(op).names
]


@pytest.mark.parametrize(("case", "name", "every_config"), MATRIX)
def test_variant_on_case(case, name, every_config):
    prepared = case.prepare(CPU)
    refusal = family(case.op).refusal(name, prepared.problem)
    if refusal is not None:
        pytest.skip(refusal)
    variant = family(case.op).load(name)
    configs = variant.configs(prepared.problem) if every_config else [variant.default_config(prepared.problem)]
    for config in configs:
        result = verify(case, Choice(variant, config), prepared, repeats=1, graph=False)
        assert result.ok, result.message
