"""AITER's portable Triton kernel for ``fp8_mqa_logits`` (https://github.com/ROCm/aiter): one query row a program.

Timed: making the output, filling it with -inf where ``clean_logits=True`` (the kernel writes inside the windows alone),
and the kernel. On AMD that is AITER's own function; on NVIDIA, whose Triton takes none of that function's options for
AMD, the same steps are done here, with the tile that the function has everywhere but on gfx942.
Outside: compiling the kernel.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from ....ops.mqa_logits.api import Problem
from ...case import Prepared
from .. import Launch, Peer, import_failure
from . import common_refusal, deliver

FUNCTION = "aiter.ops.triton.attention.fp8_mqa_logits"
KERNEL = "aiter.ops.triton._triton_kernels.attention.fp8_mqa_logits"

ROW_MULTIPLE = 256
"""Rows of its output start this many floats apart or a multiple of it."""


def _is_amd(arch: str) -> bool:
    return arch.startswith("gfx")


def _unavailable(arch: str) -> str | None:
    if arch == "cpu":
        return "a Triton kernel needs a GPU; these tensors are on cpu"
    return import_failure(FUNCTION if _is_amd(arch) else KERNEL)


def _refuses(problem: Problem) -> str | None:
    if problem.fnuz and not _is_amd(problem.arch):
        return "takes e4m3fnuz on AMD alone"
    return common_refusal(problem)


def _prepare(prepared: Prepared) -> Launch:
    arguments = (*prepared.args[:6], prepared.problem.clean_logits)
    if _is_amd(prepared.problem.arch):
        return functools.partial(importlib.import_module(FUNCTION).fp8_mqa_logits, *arguments)
    return functools.partial(_call, importlib.import_module(KERNEL)._fp8_mqa_logits_kernel, *arguments)


def _call(
    kernel: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    clean_logits: bool,
) -> torch.Tensor:
    num_rows, num_heads, head_dim = q.shape
    num_keys = k.shape[0]
    logits = torch.empty(num_rows, -(-num_keys // ROW_MULTIPLE) * ROW_MULTIPLE, device=q.device)
    if clean_logits:
        logits.fill_(float("-inf"))
    logits = logits[:, :num_keys]
    kernel[(num_rows,)](
        Q_ptr=q,
        KV_ptr=k,
        kv_scales_ptr=k_scale,
        weights_ptr=weights,
        cu_start_ptr=ks,
        cu_end_ptr=ke,
        logits_ptr=logits,
        seq_len=num_rows,
        seq_len_kv=num_keys,
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_dim,
        stride_q_s=q.stride(0),
        stride_q_h=q.stride(1),
        stride_q_d=q.stride(2),
        stride_kv_s=k.stride(0),
        stride_kv_d=k.stride(1),
        stride_w_s=weights.stride(0),
        stride_w_h=weights.stride(1),
        stride_logits_s=logits.stride(0),
        stride_logits_k=logits.stride(1),
        BLOCK_KV=128,
        num_warps=4,
        num_stages=2,
    )
    return logits


PEER = Peer(
    unavailable=_unavailable,
    refuses=_refuses,
    prepare=_prepare,
    deliver=deliver,
    distributions=("amd-aiter", "aiter"),
    module="aiter",
)
