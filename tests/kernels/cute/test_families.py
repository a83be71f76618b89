"""What ``kvscout aot`` compiles is what calls ask for."""

from dataclasses import replace

import pytest
import torch

from kvscout.cli import aot
from kvscout.kernels.cute import runtime
from kvscout.testing.case import SUITE, cases, family, ops
from kvscout.variants import Variant

VARIANTS = [(op, name) for op in ops() for name in family(op).names if name.startswith("cute_")]


@pytest.mark.parametrize(("op", "name"), VARIANTS)
def test_every_kernel_that_a_launch_loads_is_among_the_variant_s_programs(op, name, monkeypatch):
    variant = family(op).load(name)
    assert isinstance(variant, Variant)
    assert variant.programs is not None, "VARIANT has no programs"
    loaded = []

    def load(program):
        loaded.append(program)
        return lambda *arguments: None

    monkeypatch.setattr(runtime, "load", load)
    monkeypatch.setattr(runtime, "refusal", lambda program: None)
    for case in cases(op, [SUITE]):
        prepared = case.prepare(torch.device("cpu"))
        problem = replace(prepared.problem, arch="sm_90")
        if variant.refuses(problem) is None:
            for config in variant.configs(problem):
                variant.launch(problem, config, prepared.args)
    assert loaded
    assert set(loaded) <= set(variant.programs())


def test_no_two_kernels_of_an_op_have_one_name():
    for op in {op for op, _ in VARIANTS}:
        names = [kernel.program.name for kernel in aot.select([op])]
        assert len(names) == len(set(names))
