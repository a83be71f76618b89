"""What tuning for a case asks for: its bucket, and the kernels of each variant and config, none of which is compiled.

Kernels are found out as ``kvscout aot --model`` does it: launches are made, and what they ask for is noted instead of
served. Many cases and configs ask for the same kernels; each then needs to be compiled once, which takes no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch

from ..kernels.cute import runtime
from ..kernels.cute.program import Program
from ..tuning import Bucket
from ..variants import Choice
from .case import Case, Prepared
from .sweep import attempt, free
from .tune import Key, choices, key_of, own_choices

if TYPE_CHECKING:
    from ..kernels.triton_store import Kernel

T = TypeVar("T")


@dataclass(frozen=True)
class Scouted:
    """What is known of a case before anything is compiled.

    Attributes:
        bucket: the bucket of its problem, None where no table may have that.
        own: what each variant takes by itself, the rule's choice first.
        inputs: kernels that its inputs are made with.
        kernels: what each variant and config launches; torch's have none.
    """

    bucket: Bucket | None
    own: tuple[Key, ...] = ()
    inputs: tuple[Program | Kernel, ...] = ()
    kernels: Mapping[Key, tuple[Program | Kernel, ...]] = field(default_factory=dict)

    def needs(self, keys: Iterable[Key]) -> list[Program | Kernel]:
        """The kernels of its inputs and of these variants and configs."""
        return [*self.inputs, *(kernel for key in keys for kernel in self.kernels.get(key, ()))]


def bucket_of(case: Case, device: torch.device, seed: int = 0) -> Scouted | str:
    """The bucket of a case and no more, or why its inputs cannot be made."""
    return _freed(device, lambda: Scouted(case.prepare(device, seed).problem.bucket()))


def scout(case: Case, device: torch.device, arch: str, seed: int = 0) -> Scouted | str:
    """Everything that is to be known of a case, or why its inputs cannot be made.

    For a process that does nothing else, and in which Triton does not interpret its kernels. ``arch`` is the device's.

    Raises:
        ContextLost: the GPU's context broke.
    """
    return _freed(device, lambda: _scout(case, device, arch, seed))


def _freed(device: torch.device, action: Callable[[], Scouted]) -> Scouted | str:
    found, error = attempt(device, action)
    free(device)
    return error if found is None else found


def _scout(case: Case, device: torch.device, arch: str, seed: int) -> Scouted:
    prepared, inputs = _asked(arch, lambda: case.prepare(device, seed))
    bucket: Bucket | None = prepared.problem.bucket()
    if bucket is None:
        return Scouted(None)
    # Meanwhile every kernel can be had: without, a variant might refuse for want of one that is yet to be compiled.
    with runtime.recording():
        own, every = own_choices(case, prepared), choices(case, prepared)
    kernels = {key_of(choice): _kernels(choice, prepared, device, arch) for choice in every}
    return Scouted(bucket, tuple(map(key_of, own)), inputs, kernels)


def _kernels(choice: Choice, prepared: Prepared, device: torch.device, arch: str) -> tuple[Program | Kernel, ...]:
    """What a choice launches. What raises here raises again where it is reported."""
    if choice.variant.name.startswith("torch_"):
        return ()
    made, _ = attempt(device, _asked, arch, lambda: choice.launch(prepared.problem, prepared.args))
    return () if made is None else made[1]


def _asked(arch: str, action: Callable[[], T]) -> tuple[T, tuple[Program | Kernel, ...]]:
    """An action's result, and the kernels that it asks for."""
    from ..kernels import triton_store

    with runtime.recording() as programs, triton_store.recording(arch) as kernels:
        result = action()
        return result, (*programs, *kernels.values())
