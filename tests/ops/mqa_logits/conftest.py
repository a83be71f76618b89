"""``cute_wgmma`` without a GPU: calls that say they are on Hopper, and what has been found out before forgotten."""

from dataclasses import replace

import pytest

from kvscout.kernels.cute import cuda_runtime, runtime, toolchain
from kvscout.ops.mqa_logits import api
from kvscout.ops.mqa_logits.variants import cute_wgmma

MEMOISED = (
    cuda_runtime.refusal,
    runtime._refusal,
    runtime.load,
    toolchain.has_loader,
    toolchain.dsl_version,
    toolchain.c_compiler,
    cute_wgmma._kernel,
)


def _forget():
    for function in MEMOISED:
        function.cache_clear()
    runtime._FAILED.clear()
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
    check = api.check
    monkeypatch.setattr(api, "check", lambda args, clean: replace(check(args, clean), arch="sm_90"))
    monkeypatch.setattr(runtime, "refusal", lambda program: None)
    monkeypatch.setattr(runtime, "load", lambda program: lambda *arguments: None)
