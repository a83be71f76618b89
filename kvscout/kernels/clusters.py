"""How many clusters of thread blocks run at once on the GPU that torch uses now, as its driver counts them."""

from __future__ import annotations

import functools

import torch

from .. import device, env


def resident(arch: str, blocks: int) -> int | None:
    """Clusters of ``blocks`` thread blocks that run at once, where each block has a multiprocessor to itself.

    0 where there is no room for any. None where the driver cannot be asked: without a GPU of ``arch``, where nothing
    may be compiled, and while a CUDA graph is captured, which loading a function may end.
    """
    if env.triton_aot_only() or not torch.cuda.is_available() or torch.version.cuda is None:
        return None
    index = torch.cuda.current_device()
    if device.arch_of(torch.device("cuda", index)) != arch or torch.cuda.is_current_stream_capturing():
        return None
    return _counted(index, blocks)


@functools.cache
def _counted(index: int, blocks: int) -> int | None:
    """``None`` as above, where Triton is another than the one that this was written for."""
    try:
        import triton
        from triton.compiler import ASTSource
        from triton.runtime import driver

        # The driver counts by a function: any that a multiprocessor has no room for two blocks of.
        shared = device.shared_bytes(device.arch_of(torch.device("cuda", index)))
        made = triton.compile(ASTSource(triton.jit(_nothing), {}, {}))
        utils = driver.active.utils
        _, function, *_ = utils.load_binary(made.name, made.asm["cubin"], 0, index)
        return int(utils.cuOccupancyMaxActiveClusters(function, shared, blocks))
    except Exception:
        return None


def _nothing() -> None:
    pass
