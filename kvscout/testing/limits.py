"""Which cases run where: what would take too long or too much memory is left out here and nowhere else."""

from __future__ import annotations

import torch

from ..roofline import Cost
from .case import BENCH, FULL, SUITE, VERIFY

# The reference holds its dot products in float64: 5e10 FLOPs at D = 32 are 6 GB of them. Two CPU cores take about
# a tenth of a second for 2e9.
TORCH_FLOPS = {"cpu": 2e9, "cuda": 5e10}
TORCH_BYTES = 2e9


def levels(device: torch.device, full: bool) -> tuple[str, ...]:
    """Levels of the cases that ``verify`` runs on a device."""
    if device.type == "cpu":
        return (SUITE, VERIFY) if full else (SUITE,)
    return (SUITE, VERIFY, FULL, BENCH) if full else (SUITE, VERIFY)


def bench_levels(device: torch.device) -> tuple[str, ...]:
    """Levels of the cases that ``bench`` times on a device."""
    return (SUITE,) if device.type == "cpu" else (BENCH,)


def repeats(device: torch.device) -> int:
    """Launches that must give the bits of the first."""
    return 2 if device.type == "cpu" else 20


def too_large(variant: str, cost: Cost | None, device_type: str) -> str | None:
    """Why a variant is not run on a case that it would serve, or None where it is run.

    Only torch variants are spared: the other backends must cope with every case that they do not refuse.
    """
    if cost is None or not variant.startswith("torch_"):
        return None
    most = TORCH_FLOPS[device_type]
    if cost.flops <= most and cost.bytes <= TORCH_BYTES:
        return None
    return f"too large: torch variants run up to {most / 1e9:.0f} GFLOP and {TORCH_BYTES / 1e9:.0f} GB per case here"
