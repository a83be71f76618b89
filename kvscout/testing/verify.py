"""Running one variant on one case, the way both the tests and ``kvscout verify`` do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..variants import Choice
from .case import Case, Prepared
from .compare import Comparison, equal


@dataclass(frozen=True)
class Result:
    """Outcome of one variant and config on one case."""

    op: str
    case: str
    variant: str
    config: str
    comparisons: tuple[Comparison, ...]

    @property
    def ok(self) -> bool:
        """Whether every comparison held."""
        return all(comparison.ok for comparison in self.comparisons)

    @property
    def message(self) -> str:
        """What went wrong, or an empty string."""
        return "; ".join(f"{c.name}: {c.message}" for c in self.comparisons if not c.ok)

    @property
    def max_rel(self) -> float:
        """The largest relative error among the outputs."""
        return max((c.max_rel for c in self.comparisons), default=0.0)


def verify(case: Case, choice: Choice, prepared: Prepared, repeats: int, graph: bool) -> Result:
    """Launch into poisoned outputs, compare with the reference, then repeat and demand the same bits.

    Args:
        case: where ``prepared`` came from.
        choice: the variant and config under test.
        prepared: inputs and outputs; poisoned again before every launch.
        repeats: launches that must give the bits of the first.
        graph: also capture a launch in a CUDA graph and demand the same bits from its replays.
    """
    prepared.poison()
    choice.launch(prepared.problem, prepared.args)
    found = list(prepared.check(choice.variant.name))
    found += [g.check(f"output {i}") for i, g in enumerate(prepared.guards)]
    first = {name: output.clone() for name, output in prepared.outputs.items()}

    def repeat(label: str, launch: Any, times: int) -> None:
        for _ in range(times):
            prepared.poison()
            launch()
            again = [equal(f"{name} {label}", prepared.outputs[name], value) for name, value in first.items()]
            if not all(c.ok for c in again):
                found.extend(again)
                return

    repeat("repeated", lambda: choice.launch(prepared.problem, prepared.args), repeats)
    if graph:
        captured = torch.cuda.CUDAGraph()
        if prepared.restore is not None:
            prepared.restore()
        with torch.cuda.graph(captured):
            choice.launch(prepared.problem, prepared.args)
        repeat("replayed", captured.replay, 3)
    return Result(case.op, case.name, choice.variant.name, str(choice.config), tuple(found))
