"""XQA, TensorRT-LLM's decode kernels, through FlashInfer (https://github.com/flashinfer-ai/flashinfer).

Timed: ``trtllm_batch_decode_with_kv_cache(backend="xqa")``, into an output made beforehand. With FP8 caches it rounds
queries and probabilities to e4m3.
Outside: building the kernel, zeroing its workspace, and the copies that :mod:`kvscout.testing.peers.pa_decode` names.
"""

from __future__ import annotations

import functools
import importlib

import torch

from .... import fp8
from ....ops.pa_decode.api import Problem
from ...case import Prepared
from ...compare import Budget
from .. import Launch, Peer, import_failure
from . import ROUNDED_PARTS, SINGLE_E4M3, deliver, inputs, one_scale, refusal

MODULE = "flashinfer.decode"
ARCHS = ("sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
HEAD_DIMS = (64, 128, 192, 256)
WORKSPACE_BYTES = 128 << 20


def _unavailable(arch: str) -> str | None:
    if arch not in ARCHS:
        return f"has kernels for {', '.join(ARCHS)}; this is {arch}"
    return import_failure(MODULE)


def _refuses(problem: Problem) -> str | None:
    if problem.query_length > 1:
        return f"decodes one token a sequence, not {problem.query_length}"
    return refusal(problem, HEAD_DIMS)


def _prepare(prepared: Prepared) -> Launch:
    problem, args, given = prepared.problem, prepared.args, inputs(prepared)
    return functools.partial(
        importlib.import_module(MODULE).trtllm_batch_decode_with_kv_cache,
        given.query,
        (given.keys, given.values),
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=given.query.device),
        given.block_tables,
        given.lengths,
        given.block_tables.shape[1] * problem.page,
        bmm1_scale=args.softmax_scale * one_scale(args.key_scale, args.key_factor),
        bmm2_scale=one_scale(args.value_scale, args.value_factor),
        # With one query the window's right half, where it has one, holds no token.
        window_left=problem.window - 1,
        out=torch.empty_like(given.query),
        sinks=None if args.sinks is None else args.sinks.float(),
        kv_layout="NHD",
        backend="xqa",
    )


def _tolerance(problem: Problem) -> Budget:
    return SINGLE_E4M3 if problem.cache_dtype in fp8.E4M3 else ROUNDED_PARTS


PEER = Peer(
    unavailable=_unavailable,
    refuses=_refuses,
    prepare=_prepare,
    deliver=deliver,
    tolerance=_tolerance,
    distributions=("flashinfer-python",),
    module="flashinfer",
)
