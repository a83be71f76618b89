"""Numbers and names of GPU architectures; the only place that holds either."""

from __future__ import annotations

import functools
from dataclasses import dataclass

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


@functools.cache
def _arch_of_index(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def arch_of(device: torch.device) -> str:
    """``"cpu"``, ``"sm_90"``, ``"gfx942"``, ...: what variants and tuned tables are keyed by."""
    if device.type != "cuda":
        return device.type
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
        return DEFAULT_NUM_SMS
    return _sms_of_index(torch.cuda.current_device() if device.index is None else device.index)


def gpu_of(device: torch.device) -> Gpu | None:
    """Measured ceilings of ``device``, or None where nobody has measured that model yet."""
    if device.type != "cuda":
        return None
    return GPUS.get(torch.cuda.get_device_name(device))
