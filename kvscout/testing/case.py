"""What a case is, and how an output is laid out so that a stray write shows."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

from .. import checks
from ..roofline import Cost
from ..variants import Family
from .compare import Comparison, equal

SUITE, VERIFY, FULL, BENCH = "suite", "verify", "full", "bench"
LEVELS = (SUITE, VERIFY, FULL, BENCH)
"""Who runs a case: the test suite and everyone; ``verify``; ``verify --full``; ``bench`` (and ``verify --full``)."""

GUARD = 64
"""Elements on each side of a poisoned output that must keep their value."""


@dataclass
class Prepared:
    """A case made real on a device.

    Attributes:
        problem: what variants decide on.
        args: what ``Variant.launch`` takes; its outputs are poisoned.
        outputs: the tensors that a launch writes, by name.
        check: ``check(variant_name)`` compares ``outputs`` with the reference.
        guards: elements around the outputs.
        cost: what the call must do at least.
        restore: puts inputs that a launch changes (caches, counters) back before another launch.
    """

    problem: Any
    args: Any
    outputs: dict[str, torch.Tensor]
    check: Callable[[str], Sequence[Comparison]]
    guards: list[Guarded] = field(default_factory=list)
    cost: Cost | None = None
    restore: Callable[[], None] | None = None

    def poison(self) -> None:
        """Fill every output and guard with values that a launch must overwrite, or must not touch."""
        for guarded in self.guards:
            guarded.poison()
        if self.restore is not None:
            self.restore()


class Case(Protocol):
    """One set of shapes and inputs of an op; ``str`` of it is its name.

    Attributes:
        ACCEPTED: the values that a field may have, by the field's name; of a tuple, those of its elements.
        LEAST: likewise the lowest value of a whole number.
    """

    ACCEPTED: ClassVar[Mapping[str, Sequence[Any]]]
    LEAST: ClassVar[Mapping[str, int]]

    @property
    def op(self) -> str:
        """The op's name."""
        ...

    @property
    def name(self) -> str:
        """A short name that is unique within the op."""
        ...

    @property
    def level(self) -> str:
        """One of :data:`LEVELS`."""
        ...

    def prepare(self, device: torch.device, seed: int = 0) -> Prepared:
        """Make inputs and poisoned outputs; the same seed gives the same inputs."""
        ...


def check_fields(case: Case) -> None:
    """Check each field of a case against ``ACCEPTED`` and ``LEAST``.

    Raises:
        TypeError, ValueError: a field has a value that it cannot have; the message begins with the field's name.
    """
    for name, accepted in case.ACCEPTED.items():
        for value in _elements(getattr(case, name)):
            checks.one_of(name, value, accepted)
    for name, least in case.LEAST.items():
        for value in _elements(getattr(case, name)):
            checks.integer(name, value, least)


def _elements(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple) else (value,)


class Guarded:
    """An output inside a larger buffer, with guard elements before, after and in the gaps between its rows."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, row_gap: int = 0) -> None:
        *outer, columns = shape
        rows = 1
        for size in outer:
            rows *= size
        self.buffer = torch.empty(GUARD + rows * (columns + row_gap) + GUARD, dtype=dtype, device=device)
        self._rows = rows, columns + row_gap
        self._body = self.buffer[GUARD : self.buffer.numel() - GUARD].view(self._rows)[:, :columns]
        self.view = self._body.unflatten(0, outer) if len(outer) > 1 else self._body if outer else self._body[0]
        self.poison()

    def poison(self) -> None:
        """NaN everywhere; for integers the lowest value, or the highest where the lowest is 0."""
        dtype = self.buffer.dtype
        self.buffer.fill_(float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min or torch.iinfo(dtype).max)

    def check(self, name: str) -> Comparison:
        """Whether everything around the output still holds its poison."""
        expected = Guarded.__new__(Guarded)
        expected.buffer = torch.empty_like(self.buffer)
        expected.poison()
        inside = expected.buffer[GUARD : self.buffer.numel() - GUARD].view(self._rows)
        inside[:, : self._body.shape[1]] = self._body
        return equal(f"guards of {name}", self.buffer, expected.buffer)


def family(op: str) -> Family:
    """The family of an op, by its name."""
    found: Family = importlib.import_module(f"kvscout.ops.{op}.api").FAMILY
    return found


def ops() -> list[str]:
    """Every op that has cases, in the order of the way of the data."""
    folder = importlib.import_module("kvscout.testing.cases")
    return sorted((module.name for module in pkgutil.iter_modules(folder.__path__)), key=_place)


def _place(op: str) -> tuple[int, str]:
    order = ("mqa_logits", "topk", "selection_tables", "selection_gather", "kv_cache", "pa_plan", "pa_decode")
    return (order.index(op) if op in order else len(order), op)


def cases(op: str, levels: Sequence[str] = LEVELS) -> list[Case]:
    """The cases of an op at any of the given levels."""
    module = importlib.import_module(f"kvscout.testing.cases.{op}")
    return [case for case in module.CASES if case.level in levels]


def groups(op: str) -> dict[str, frozenset[str]]:
    """Named groups of an op's cases: the names of the cases of each."""
    module = importlib.import_module(f"kvscout.testing.cases.{op}")
    found: dict[str, Sequence[Case]] = getattr(module, "GROUPS", {})
    return {name: frozenset(case.name for case in members) for name, members in found.items()}
