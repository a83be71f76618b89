"""kvscout: score, select, attend. Attention kernels for long-context LLM inference with sparse attention."""

from .errors import UnsupportedProblem
from .ops.mqa_logits.api import fp8_mqa_logits

__version__ = "0.1.0"

__all__ = [
    "UnsupportedProblem",
    "fp8_mqa_logits",
]
