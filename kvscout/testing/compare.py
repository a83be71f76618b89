"""Judging a result: where it is -inf, inf and NaN first, then how far it is from float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Budget:
    """How far a result may be from the float64 reference.

    Attributes:
        max_rel: bound on the largest absolute difference over the largest reference magnitude.
        cosine: bound on one minus the cosine similarity.
    """

    max_rel: float
    cosine: float

    @classmethod
    def from_same_precision(cls, same: torch.Tensor, reference: torch.Tensor, extra: float) -> Budget:
        """Twice the error that plain torch makes in the precision under test, plus ``extra`` for the reduction.

        ``extra`` is a relative error: what summing in another order, or in a matrix unit's narrower accumulator, may
        add. The cosine gap grows with the square of the relative error; single precision limits it from below.
        """
        max_rel = 2 * errors(same, reference)[0] + extra
        return cls(max_rel=max_rel, cosine=max(max_rel**2, 1e-9))


@dataclass(frozen=True)
class Comparison:
    """Verdict on one output; ``message`` is empty where it is right.

    ``budget`` is what the errors were judged by, None where no budget could excuse what was found.
    """

    name: str
    message: str
    max_rel: float = 0.0
    cosine: float = 0.0
    budget: Budget | None = None

    @property
    def ok(self) -> bool:
        """Whether the output is right."""
        return not self.message

    def under(self, budget: Budget) -> Comparison:
        """The verdict on the same errors under another budget; one that no budget decided stays."""
        return self if self.budget is None else _judged(self.name, self.max_rel, self.cosine, budget)


def errors(got: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Largest difference over largest magnitude, and one minus cosine similarity, over what is finite in both."""
    finite = got.isfinite() & reference.isfinite()
    a, b = got[finite].double(), reference[finite].double()
    if a.numel() == 0:
        return 0.0, 0.0
    difference, scale = (a - b).abs().max(), b.abs().max()
    if scale == 0:
        return (0.0, 0.0) if difference == 0 else (float("inf"), float("inf"))
    norms = a.norm() * b.norm()
    cosine = 1 - float(a @ b / norms) if norms > 0 else 1.0
    return float(difference / scale), max(cosine, 0.0)


def close(name: str, got: torch.Tensor, reference: torch.Tensor, budget: Budget) -> Comparison:
    """Compare a floating-point output with its float64 reference.

    NaN in the reference stands for "must not be written": the caller poisons outputs with NaN before the call.
    """
    if got.shape != reference.shape:
        return Comparison(name, f"shape {list(got.shape)}, expected {list(reference.shape)}")
    for kind, is_kind in (("NaN", torch.isnan), ("-inf", torch.isneginf), ("inf", torch.isposinf)):
        wrong = is_kind(got) != is_kind(reference)
        if wrong.any():
            where = tuple(wrong.nonzero()[0].tolist())
            return Comparison(
                name,
                f"{kind} positions differ in {int(wrong.sum())} of {wrong.numel()} places, "
                f"first at {where}: got {float(got[where])}, expected {float(reference[where])}",
            )
    return _judged(name, *errors(got, reference), budget)


def _judged(name: str, max_rel: float, cosine: float, budget: Budget) -> Comparison:
    message = ""
    if not max_rel <= budget.max_rel:
        message = f"largest relative difference {max_rel:.2e} exceeds {budget.max_rel:.2e}"
    elif not cosine <= budget.cosine:
        message = f"cosine gap {cosine:.2e} exceeds {budget.cosine:.2e}"
    return Comparison(name, message, max_rel, cosine, budget)


def equal(name: str, got: torch.Tensor, expected: torch.Tensor) -> Comparison:
    """Compare bit for bit (NaN equals NaN of the same bits)."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return Comparison(name, f"{got.dtype} {list(got.shape)}, expected {expected.dtype} {list(expected.shape)}")
    wrong = bits(got) != bits(expected)
    if not wrong.any():
        return Comparison(name, "")
    where = tuple(wrong.nonzero()[0].tolist())
    return Comparison(
        name,
        f"{int(wrong.sum())} of {wrong.numel()} differ, first at {where}: got {got[where]}, expected {expected[where]}",
    )


def bits(x: torch.Tensor) -> torch.Tensor:
    """The tensor's bit patterns as integers, so that NaN compares."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x if x.dtype == torch.bool else x.contiguous().view(integers[x.element_size()])
