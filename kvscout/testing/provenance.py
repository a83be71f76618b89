"""Where a figure comes from: machine, versions, commit, command. Found out without importing what is asked about."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..device import arch_of, name_of, num_sms

DISTRIBUTIONS: dict[str, Sequence[str]] = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton", "pytorch-triton-rocm"),
    "cutlass_dsl": ("nvidia-cutlass-dsl",),
    "tvm_ffi": ("apache-tvm-ffi",),
}
"""What each package may be called where it is installed; the first one found counts."""

# The checkout that this package lies in, if it lies in one.
CHECKOUT = Path(__file__).resolve().parents[2]

NVIDIA_SMI = {"driver": "driver_version", "sm_clock_mhz": "clocks.sm", "max_sm_clock_mhz": "clocks.max.sm"}


def record(
    device: torch.device,
    command: str,
    packages: Mapping[str, Sequence[str]] | None = None,
    modules: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Everything that a stored figure must be read with; ``packages`` adds to :data:`DISTRIBUTIONS`.

    ``modules`` are those of packages that may lie on the path as plain folders (:func:`versions`).
    """
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit(),
        "versions": versions(DISTRIBUTIONS | dict(packages or {}), modules),
        "machine": machine(device),
    }


def machine(device: torch.device) -> dict[str, Any]:
    """The device and its host; None for what cannot be found out."""
    system = f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}"
    host = {"system": system, "cores": os.cpu_count()}
    if device.type != "cuda":
        return {"device": name_of(device), "arch": arch_of(device), **host}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": name_of(device),
        "arch": arch_of(device),
        "sms": num_sms(device),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "runtime": torch.version.cuda or torch.version.hip,
        **nvidia_smi(device, NVIDIA_SMI),
        **host,
    }


def nvidia_smi(device: torch.device, fields: Mapping[str, str]) -> dict[str, str | None]:
    """What nvidia-smi says of a GPU, by the names that ``fields`` gives to its own; None for what it does not say."""
    answer = None
    if device.type == "cuda":
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        query = f"--query-gpu={','.join(fields.values())}"
        answer = _output("nvidia-smi", "-i", uuid, query, "--format=csv,noheader,nounits")
    values = answer.split(",") if answer else [None] * len(fields)
    return {name: value and value.strip() for name, value in zip(fields, values, strict=True)}


def versions(
    packages: Mapping[str, Sequence[str]] = DISTRIBUTIONS, modules: Mapping[str, str] | None = None
) -> dict[str, str | None]:
    """Versions of Python, kvscout and other packages; None for one that is not installed or says nothing of it.

    Where nothing is installed under a package's names, its module in ``modules`` tells, if it is loaded.
    """
    found = {package: next(filter(None, map(_version, names)), None) for package, names in packages.items()}
    for package, module in (modules or {}).items():
        found[package] = found[package] or _of_module(module)
    return {"python": platform.python_version(), "kvscout": __version__} | found


def _of_module(module: str) -> str | None:
    """The version that a loaded module has, or that a dist-info on the path has whose files the module is among."""
    if module not in sys.modules:
        return None
    version = getattr(sys.modules[module], "__version__", None)
    if isinstance(version, str):
        return version
    names = importlib.metadata.packages_distributions().get(module, ())
    return next(filter(None, map(_version, names)), None)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The checkout's commit, with ``-dirty`` where files differ from it; None for an installed package."""
    if not (CHECKOUT / ".git").exists():
        return None
    return _output("git", "-C", str(CHECKOUT), "describe", "--always", "--abbrev=40", "--match=", "--dirty")


def _output(*command: str) -> str | None:
    """What a program prints, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def dumps(content: Any) -> str:
    """JSON that every reader takes: NaN and infinities, which JSON does not have, become null."""
    return json.dumps(_finite(content), indent=1)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
