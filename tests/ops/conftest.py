"""Hopper kernels without a GPU: calls that say they are on one, and what has been found out before forgotten."""

from dataclasses import replace

import pytest
import torch

from kvscout.kernels.cute import cuda_runtime, runtime, toolchain
from kvscout.ops.mqa_logits import api as mqa_logits
from kvscout.ops.mqa_logits.variants import cute_wgmma as mqa_logits_wgmma
from kvscout.ops.pa_decode import api as pa_decode
from kvscout.ops.pa_decode.variants import cute_wgmma as pa_decode_wgmma

MEMOISED = (
    cuda_runtime.refusal,
    runtime._refusal,
    runtime.load,
    toolchain.has_loader,
    toolchain.dsl_version,
    toolchain.c_compiler,
    mqa_logits_wgmma._kernel,
    pa_decode_wgmma._kernel,
)


def _forget():
    for function in MEMOISED:
        function.cache_clear()
    runtime._FAILED.clear()
    for api in (mqa_logits, pa_decode):
        # The memo of choices, which other tests share.
        vars(api.FAMILY).pop("_choose", None)


@pytest.fixture
def forget():
    """Choices and kernels of other tests are not seen here, nor those of this one there; call it to forget again."""
    _forget()
    yield _forget
    _forget()


@pytest.fixture
def on_hopper(monkeypatch, forget):
    """Tensors on the CPU are taken for an H200's, and every kernel can be had."""
    check_logits, check_decode = mqa_logits.check, pa_decode.check

    def checked(*arguments):
        problem, args = check_decode(*arguments)
        return replace(problem, arch="sm_90"), args

    monkeypatch.setattr(mqa_logits, "check", lambda *arguments: replace(check_logits(*arguments), arch="sm_90"))
    monkeypatch.setattr(pa_decode, "check", checked)
    monkeypatch.setattr(runtime, "refusal", lambda program: None)
    monkeypatch.setattr(runtime, "load", lambda program: lambda *arguments: None)


@pytest.fixture
def on_the_gpu():
    """``on_the_gpu(function)``: names of everything that a function puts on the GPU: kernels, copies, fills."""

    def names(function):
        function()
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiled:
            function()
            torch.cuda.synchronize()
        return [event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]

    return names
