"""Peers of ``fp8_mqa_logits``. All of them return the logits in a tensor of their own."""

from __future__ import annotations

import torch

from ....ops.mqa_logits.api import Problem
from ....ops.mqa_logits.variants.torch_reference import window
from ...case import Prepared


def deliver(prepared: Prepared, logits: torch.Tensor) -> None:
    """Copy a peer's logits to where the case looks for them.

    With ``clean_logits=False`` nothing is said of what lies outside the windows, and peers write anything there: what
    lies inside is copied alone.
    """
    args, problem = prepared.args, prepared.problem
    if problem.clean_logits:
        args.out.copy_(logits)
    else:
        torch.where(window(args.ks, args.ke, problem.num_keys), logits, args.out, out=args.out)


def common_refusal(problem: Problem) -> str | None:
    """What no peer of this op takes."""
    return "takes no q_scale: its users multiply it into the weights" if problem.has_q_scale else None
