"""Numbers and names of GPU architectures; the only place that holds either."""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Gpu:
    """Ceilings of one GPU model, as measured, not as printed in its datasheet.

    Attributes:
        arch: architecture name as :func:`arch_of` gives it.
        hbm_bytes_per_s: best measured read rate of device memory.
        l2_bytes_per_s: best measured read rate of data that stays in L2.
        fp8_flops_per_s: best measured dense e4m3 matrix rate.
        bf16_flops_per_s: best measured dense bf16 matrix rate.
        l2_bytes: size of the L2 cache.
        source: where and when the figures were read.
    """

    arch: str
    hbm_bytes_per_s: float
    l2_bytes_per_s: float
    fp8_flops_per_s: float
    bf16_flops_per_s: float
    l2_bytes: int
    source: str


GPUS = {
    "NVIDIA H200": Gpu(
        arch="sm_90",
        hbm_bytes_per_s=4.46e12,
        l2_bytes_per_s=8.4e12,
        fp8_flops_per_s=1559e12,
        bf16_flops_per_s=790e12,
        l2_bytes=60 << 20,
        source="measured 2026-11-30, driver 580, torch 2.11: max over 2 GB; 8192^3 cuBLAS products on random data",
    ),
}

NUM_SMS = {
    # A100: NVIDIA A100 Tensor Core GPU Architecture, table of SMs. H100 SXM and H200: as the driver counts them.
    "sm_80": 108,
    "sm_90": 132,
    # MI300X and MI325X; MI350X and MI355X: AMD's data sheets, compute units.
    "gfx942": 304,
    "gfx950": 256,
}
"""Streaming multiprocessors (compute units on AMD) of the GPU that an architecture is usually served on."""

SHARED_BYTES = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_87": 163 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_103": 227 << 10,
    "sm_120": 99 << 10,
    "sm_121": 99 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
    "gfx1250": 320 << 10,
}
"""Shared memory (LDS on AMD) that one program can have: CUDA's programming guide and LLVM's table, 2026-11."""

# Streaming multiprocessors assumed for plans that are made where there is no GPU (tests, CPU runs): an H200's.
DEFAULT_NUM_SMS = 132


@dataclass(frozen=True)
class StandIn:
    """A GPU that is not here.

    Attributes:
        arch: its architecture, as :func:`arch_of` would give it.
        num_sms: its multiprocessors.
        model: its name, as :func:`name_of` would give it, by which it finds its tuned tables; None for one without any.
    """

    arch: str
    num_sms: int
    model: str | None = None


_stand_in: StandIn | None = None


@contextlib.contextmanager
def stand_in(gpu: StandIn) -> Iterator[None]:
    """Within the context, tensors on the "meta" device count as lying on this GPU: they have shapes and no memory.

    For a process that does nothing else: checks and choices that were made for one GPU are remembered.
    """
    global _stand_in
    before, _stand_in = _stand_in, gpu
    try:
        yield
    finally:
        _stand_in = before


@functools.cache
def _arch_of_index(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def arch_of(device: torch.device) -> str:
    """``"cpu"``, ``"sm_90"``, ``"gfx942"``, ...: what variants and tuned tables are keyed by."""
    if device.type != "cuda":
        return _stand_in.arch if _stand_in is not None and device.type == "meta" else device.type
    return _arch_of_index(torch.cuda.current_device() if device.index is None else device.index)


def shared_bytes(arch: str) -> int:
    """Bytes of shared memory that one program can have on ``arch``; the least of all where it is not known."""
    return SHARED_BYTES.get(arch, min(SHARED_BYTES.values()))


@functools.cache
def _sms_of_index(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors (compute units on AMD) of ``device``; an H200's 132 for the CPU."""
    if device.type != "cuda":
        return _stand_in.num_sms if _stand_in is not None and device.type == "meta" else DEFAULT_NUM_SMS
    return _sms_of_index(torch.cuda.current_device() if device.index is None else device.index)


def gpu_of(device: torch.device) -> Gpu | None:
    """Measured ceilings of ``device``, or None where nobody has measured that model yet."""
    if device.type != "cuda":
        return None
    return GPUS.get(torch.cuda.get_device_name(device))


def name_of(device: torch.device) -> str:
    """Name of a GPU's model, or of the CPU's: ``"NVIDIA H200"``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def model_of(arch: str) -> str | None:
    """Name of this machine's device of an architecture, None without one; a stand-in's where that is of it.

    Of several models the one that torch uses now is taken, or else the first.
    """
    if _stand_in is not None and arch == _stand_in.arch:
        return _stand_in.model
    if arch == "cpu":
        return _cpu_name()
    if not torch.cuda.is_available():
        return None
    indices = (torch.cuda.current_device(), *range(torch.cuda.device_count()))
    devices = (torch.device("cuda", index) for index in indices)
    return next((name_of(device) for device in devices if arch_of(device) == arch), None)
