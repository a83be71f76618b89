"""What is compiled for GPUs whether or not they are there, and looked at: one table for the tests and for the docs.

Every Triton variant that serves a case is compiled for every architecture, with the Triton that ``requirements/`` pins
for it, and what came out is held to :data:`ARCHS`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from .. import fp8, paging
from ..variants import Choice, Variant
from .case import Case, family
from .cases.kv_cache import KvCacheCase
from .cases.mqa_logits import MqaLogitsCase
from .cases.pa_decode import PaDecodeCase
from .cases.pa_plan import PaPlanCase
from .cases.selection_gather import SelectionGatherCase
from .cases.selection_tables import SelectionTablesCase


@dataclass(frozen=True)
class Arch:
    """An architecture that kernels are compiled for.

    Attributes:
        gpus: what has it.
        triton: the file of ``requirements/`` that pins the Triton for it.
        e4m3: its matrix instruction for e4m3, as a regular expression; None where it has none.
        half: those for 16 bits.
        relu: what it makes a maximum of that keeps NaN.
    """

    gpus: str
    triton: str
    e4m3: str | None
    half: str
    relu: str


PINNED, GFX1250 = "triton.txt", "triton-gfx1250.txt"

NAN_MAX = r"FMNMX\d?\.NAN"

ARCHS = {
    "sm_80": Arch("A100", PINNED, None, "HMMA", NAN_MAX),
    "sm_89": Arch("L40S, RTX 4090", PINNED, "QMMA", "HMMA", NAN_MAX),
    "sm_90": Arch("H100, H200", PINNED, "QGMMA", "HG?MMA", NAN_MAX),
    "sm_100": Arch("B200", PINNED, "UTCQMMA", "HMMA|UTCHMMA", NAN_MAX),
    "gfx942": Arch("MI300X", PINNED, r"v_mfma_f32_\w+_fp8_fp8", r"v_mfma_f32_\w+_b?f16", "v_cmp_ngt_f32"),
    # Formats of this one are e4m3 unless its line says otherwise.
    "gfx950": Arch(
        "MI355X", PINNED, r"v_mfma_f32_\w+_f8f6f4(?!.*(?:cbsz|blgp))", r"v_mfma_f32_\w+_b?f16", "v_maximum3_f32"
    ),
    "gfx1250": Arch("MI450", GFX1250, r"v_wmma_f32_\w+_fp8_fp8", r"v_wmma_f32_\w+_b?f16", "v_maximum_f32"),
}

BF16 = torch.bfloat16

# One KV head of 16 query heads, as in the model shapes.
_decode = functools.partial(PaDecodeCase, (300, 2000), group=16, kv_heads=1)

CASES: Sequence[Case] = (
    MqaLogitsCase(64, 2048, 64, 128, False, "packed", sequences=3),
    MqaLogitsCase(64, 2048, 64, 256, q_scale=True),
    MqaLogitsCase(64, 2048, 64, 512),
    MqaLogitsCase(64, 2048, 64, 128, fnuz=True),
    _decode(page=128, tile=128),
    _decode(page=16, cache="bf16", layout="nhd", window=100, causal=False),
    _decode(page=32, layout="plain_v", scales="token", query_length=4, sinks="ends"),
    _decode(page=64, layout="hnd", dim=512),
    PaPlanCase(300, "random", 8),
    PaPlanCase(300, "random", 8, tile=128),
    KvCacheCase(8, 2, 128, 16, paging.CHUNKED, fp8.FN, BF16, "token", "head"),
    SelectionTablesCase(2, 512, 128, 16, 2, 100),
    SelectionGatherCase(1, 512, 1, 576, 64, paging.NHD, fp8.FN, 1, 100, "both"),
)
"""A telling few, which the suite compiles."""


def _more() -> Iterator[Case]:
    for heads in (8, 16, 32, 64, 128):
        for dim in (32, 64, 128, 256, 512):
            yield MqaLogitsCase(64, 2048, heads, dim, q_scale=True)
            if heads in (16, 128) and dim >= 128:
                yield MqaLogitsCase(64, 2048, heads, dim, q_scale=True, fnuz=True)
    pages, windows, sinks = (16, 128, 64, 32), (0, 100), ("plain", "ends")
    number = 0
    for dim in (64, 128, 192, 256, 512):
        for layout in paging.LAYOUTS:
            for cache, scales in (("e4m3", "none"), ("e4m3", "token"), ("bf16", "none")):
                for query_length in (1, 4):
                    number += 1
                    yield _decode(
                        dim=dim, layout=layout, cache=cache, scales=scales, query_length=query_length,
                        page=pages[number % 4], window=windows[number // 3 % 2], sinks=sinks[number % 2],
                    )  # fmt: skip
    for layout in paging.LAYOUTS:
        for k, heads, dim, page in ((2048, 1, 576, 64), (2048, 8, 128, 16), (4096, 1, 1024, 32)):
            yield SelectionGatherCase(1, k, heads, dim, page, layout, BF16, 1, 100)
    for k in (16, 2048, 4096):
        yield SelectionTablesCase(2, k, 128, 16, 2, 100)


EXHAUSTIVE: Sequence[Case] = tuple(_more())
"""Every size that decides a config, which only the tests that are marked so compile."""


def serving(case: Case, problem: Any, arch: str) -> Iterator[tuple[Variant, Any]]:
    """The Triton variants that serve a case's problem on ``arch``, each with the problem there.

    Scores of e4m3fnuz are left to gfx942: other GPUs refuse it or multiply it as float16, and nobody has it there.
    """
    problem = replace(problem, arch=arch)
    if case.op == "mqa_logits" and problem.fnuz and arch != "gfx942":
        return
    of_op = family(case.op)
    for name in of_op.names:
        if name.startswith("triton_") and of_op.refusal(name, problem) is None:
            variant = of_op.load(name)
            assert isinstance(variant, Variant)
            yield variant, problem


def compiled() -> set[tuple[str, str, str]]:
    """Every op, variant and architecture that :data:`CASES` have compiled for."""
    problems = [(case, case.prepare(torch.device("cpu")).problem) for case in CASES]
    return {
        (case.op, variant.name, arch)
        for case, problem in problems
        for arch in ARCHS
        for variant, _ in serving(case, problem, arch)
    }


def compile_all(archs: Sequence[str], cases: Sequence[Case], every_config: bool = False) -> Iterator[dict[str, Any]]:
    """Compile default configs, or every one, and say of each kernel what came out.

    Triton must not be in its interpreter mode.
    """
    import triton

    from .compiled import compile_launch

    for case in cases:
        prepared = case.prepare(torch.device("cpu"))
        for arch in archs:
            for variant, problem in serving(case, prepared.problem, arch):
                configs = variant.configs(problem)
                for config in configs if every_config else configs[:1]:
                    launch = compile_launch(prepared, Choice(variant, config), arch)
                    of_launch = {
                        "op": case.op,
                        "variant": variant.name,
                        "arch": arch,
                        "case": case.name,
                        "config": str(config),
                        "default": config == configs[0],
                        "triton": triton.__version__,
                        "kernels": len(launch.kernels),
                        "torch_ops": launch.torch_ops,
                    }
                    for kernel in launch.kernels:
                        numbers = asdict(kernel)
                        text = numbers.pop("sass")
                        found = {word: _count(getattr(ARCHS[arch], word), text) for word in ("e4m3", "half", "relu")}
                        yield of_launch | numbers | found


def _count(instruction: str | None, text: str) -> int:
    return 0 if instruction is None else len(re.findall(rf"\b(?:{instruction})", text))
