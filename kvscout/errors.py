"""A legal call that no variant can serve: the exception, and a reason that "auto" must not pass over."""

from __future__ import annotations

from collections.abc import Mapping


class Required(str):
    """A refusal that "auto" must not pass over: it raises, and does not take a variant of a lower rank."""

    __slots__ = ()


class UnsupportedProblem(NotImplementedError):
    """The arguments are legal, but the requested variant (or, for "auto", every variant) refuses them.

    Attributes:
        op: name of the operation, for example ``"mqa_logits"``.
        problem: the frozen description of what was asked.
        requested: the variant that was asked for by argument or environment, or ``"auto"``.
        reasons: one sentence per refusing variant, keyed by the variant's name.
    """

    def __init__(self, op: str, problem: object, requested: str, reasons: Mapping[str, str]) -> None:
        self.op = op
        self.problem = problem
        self.requested = requested
        self.reasons = dict(reasons)
        lines = "\n".join(f"  {name}: {sentence}" for name, sentence in self.reasons.items())
        super().__init__(f"no variant of {op} serves {problem} (variant={requested!r}):\n{lines}")

    def __reduce__(self) -> tuple[type[UnsupportedProblem], tuple[str, object, str, dict[str, str]]]:
        return type(self), (self.op, self.problem, self.requested, self.reasons)
