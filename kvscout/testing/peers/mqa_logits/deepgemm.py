"""DeepGEMM's ``fp8_mqa_logits`` (https://github.com/deepseek-ai/DeepGEMM), for Hopper and Blackwell.

Timed: the whole call. It makes its own output; with ``clean_logits=True`` a second kernel writes the -inf.
Outside: building its kernels, which the first call for a number of heads does, and contiguous copies of q, k and the
scales where the case has them strided, since it takes no others.
"""

from __future__ import annotations

import functools
import importlib

from ....ops.mqa_logits.api import Problem
from ...case import Prepared
from .. import Launch, Peer, import_failure
from . import common_refusal, deliver

NUM_HEADS = {"sm_90": (32, 64), "sm_100": (8, 16, 32, 64)}
HEAD_DIMS = (32, 64, 128)


def _unavailable(arch: str) -> str | None:
    if arch not in NUM_HEADS:
        return f"has kernels for {' and '.join(NUM_HEADS)}; this is {arch}"
    return import_failure("deep_gemm")


def _refuses(problem: Problem) -> str | None:
    if problem.fnuz:
        return "takes e4m3fn alone"
    if problem.num_heads not in NUM_HEADS[problem.arch]:
        return f"has kernels for {', '.join(map(str, NUM_HEADS[problem.arch]))} heads, not for {problem.num_heads}"
    if problem.head_dim not in HEAD_DIMS:
        return f"has kernels for head dimensions {', '.join(map(str, HEAD_DIMS))}, not for {problem.head_dim}"
    return common_refusal(problem)


def _prepare(prepared: Prepared) -> Launch:
    q, k, k_scale, weights, ks, ke, _, _ = prepared.args
    return functools.partial(
        importlib.import_module("deep_gemm").fp8_mqa_logits,
        q.contiguous(),
        (k.contiguous(), k_scale.contiguous()),
        weights,
        ks,
        ke,
        clean_logits=prepared.problem.clean_logits,
    )


PEER = Peer(
    unavailable=_unavailable,
    refuses=_refuses,
    prepare=_prepare,
    deliver=deliver,
    distributions=("deep-gemm", "tokenspeed-deepgemm"),
    module="deep_gemm",
)
