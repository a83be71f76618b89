"""What a call must do at least, and how long that takes at the ceilings of a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from .device import Gpu


@dataclass(frozen=True)
class Cost:
    """Floating-point operations and the fewest bytes that must cross device memory.

    Attributes:
        flops: operations, a multiply-add counting two.
        bytes: each input read once and each output written once.
        fp8: whether the operations can run at the FP8 matrix rate (otherwise the bf16 one is assumed).
    """

    flops: int
    bytes: int
    fp8: bool = True

    def floor_s(self, gpu: Gpu) -> float:
        """Seconds that no implementation runs much below: the larger of the arithmetic's and the memory's time."""
        rate = gpu.fp8_flops_per_s if self.fp8 else gpu.bf16_flops_per_s
        return max(self.flops / rate, self.bytes / gpu.hbm_bytes_per_s)
