"""Every variant on a case, come what may: a variant that raises fails its case and the next one runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..variants import Choice, Variant
from . import limits
from .case import Case, Prepared, family
from .verify import verify

PASSED, REFUSED, SKIPPED, FAILED = "passed", "refused", "skipped", "failed"

INPUTS = "(inputs)"
"""Stands for the variant where a case's inputs could not be made."""

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """What became of one variant and config on one case.

    Attributes:
        status: :data:`PASSED`, :data:`FAILED`, :data:`REFUSED` (the variant does not serve the problem) or
            :data:`SKIPPED` (it would take too long here).
        message: why it is not passed.
        max_rel: the largest relative error.
    """

    op: str
    case: str
    variant: str
    status: str
    config: str = ""
    message: str = ""
    max_rel: float = 0.0


class ContextLost(RuntimeError):
    """A kernel broke the GPU's context: nothing runs on it any more in this process."""


def attempt(device: torch.device, action: Callable[..., T], *args: Any) -> tuple[T | None, str]:
    """The result of an action and an empty string, or None and what it raised.

    Raises:
        ContextLost: the exception left the GPU unusable.
    """
    try:
        return action(*args), ""
    except torch.OutOfMemoryError as error:
        first_line = str(error).partition("\n")[0]
        return None, f"not enough GPU memory: {first_line}"
    except Exception as error:
        sentence = _sentence(error)
        if device.type == "cuda":
            try:
                torch.cuda.synchronize(device)
            except Exception:
                raise ContextLost(sentence) from error
        return None, sentence


def _sentence(error: BaseException) -> str:
    """What was raised, after what caused it in the first place."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    raised = f"{type(error).__name__}: {error}"
    return raised if cause is error else f"{type(cause).__name__}: {cause}; it caused {raised}"


def standing(case: Case, prepared: Prepared, name: str, device: torch.device) -> tuple[str, str]:
    """:data:`REFUSED` or :data:`SKIPPED` with the reason, or two empty strings where ``name`` is to run."""
    refusal = family(case.op).refusal(name, prepared.problem)
    if refusal is not None:
        return REFUSED, refusal
    reason = limits.too_large(name, prepared.cost, device.type)
    return (SKIPPED, reason) if reason is not None else ("", "")


def _choices(case: Case, prepared: Prepared, name: str, every_config: bool) -> list[Choice]:
    """What to run: the config that a call would get, and with ``every_config`` the rest of the space."""
    chosen = family(case.op).choose(prepared.problem, name)
    variant: Variant = chosen.variant
    others = variant.configs(prepared.problem) if every_config else []
    return [chosen, *(Choice(variant, config) for config in others if config != chosen.config)]


def verify_case(
    case: Case, device: torch.device, names: Sequence[str], *, seed: int = 0, every_config: bool = False
) -> Iterator[Outcome]:
    """Verify the named variants on a case.

    Raises:
        ContextLost: after the outcome of the variant that broke the GPU's context.
    """
    name = INPUTS
    try:
        prepared, error = attempt(device, case.prepare, device, seed)
        if prepared is None:
            yield Outcome(case.op, case.name, name, FAILED, message=f"cannot be prepared: {error}")
        else:
            for name in names:
                yield from _verify_variant(case, prepared, device, name, every_config)
    except ContextLost as lost:
        yield Outcome(case.op, case.name, name, FAILED, message=str(lost))
        raise
    prepared = None
    free(device)


def _verify_variant(
    case: Case, prepared: Prepared, device: torch.device, name: str, every_config: bool
) -> Iterator[Outcome]:
    found, error = attempt(device, standing, case, prepared, name, device)
    status, message = found or (FAILED, error)
    if status:
        yield Outcome(case.op, case.name, name, status, message=message)
        return
    choices, error = attempt(device, _choices, case, prepared, name, every_config)
    if choices is None:
        yield Outcome(case.op, case.name, name, FAILED, message=error)
    for choice in choices or []:
        graph = device.type == "cuda"
        result, error = attempt(device, verify, case, choice, prepared, limits.repeats(device), graph)
        config = str(choice.config)
        if result is None:
            yield Outcome(case.op, case.name, name, FAILED, config, error)
        else:
            status = PASSED if result.ok else FAILED
            yield Outcome(case.op, case.name, name, status, config, result.message, result.max_rel)


def free(device: torch.device) -> None:
    """Give unused memory back, so that the next case can have it in any sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
