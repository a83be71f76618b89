"""kvscout: score, select, attend. Attention kernels for long-context LLM inference with sparse attention."""

import os
import sys

try:
    from . import paging as paging
    from . import selection as selection
    from .errors import UnsupportedProblem
    from .ops.kv_cache.api import write_kv_cache
    from .ops.mqa_logits.api import fp8_mqa_logits
    from .ops.pa_decode.api import pa_decode
    from .ops.pa_plan.api import get_recommended_splits, plan_pa_decode
    from .ops.pa_plan.plan import PADecodePlan
    from .ops.topk.api import topk_indices
except KeyboardInterrupt:
    # A command imports this, and torch with it, before it can catch anything. While "python -m" looks for what it is to
    # run, the name of the program is "-m".
    if os.path.basename(sys.argv[0]) not in ("-m", "kvscout"):
        raise
    sys.exit(130)

__version__ = "0.1.0"

__all__ = [
    "PADecodePlan",
    "UnsupportedProblem",
    "fp8_mqa_logits",
    "get_recommended_splits",
    "pa_decode",
    "plan_pa_decode",
    "topk_indices",
    "write_kv_cache",
]
