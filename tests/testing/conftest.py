"""An op of the tests' own: it doubles a vector."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from kvscout.roofline import Cost
from kvscout.testing import measure, sweep, tune
from kvscout.testing.case import SUITE, Guarded, Prepared
from kvscout.testing.compare import Budget, close
from kvscout.variants import Family, Variant


@dataclass(frozen=True)
class Problem:
    arch: str

    def bucket(self):
        return frozenset({("size", 8)})


@dataclass
class DoublingCase:
    cost: Cost | None = None
    prepare_raises: BaseException | None = None
    op: str = "doubling"
    name: str = "eight"
    level: str = SUITE
    seeds: list[int] = field(default_factory=list)

    def prepare(self, device: torch.device, seed: int = 0) -> Prepared:
        if self.prepare_raises is not None:
            raise self.prepare_raises
        self.seeds.append(seed)
        x = torch.randn(8, generator=torch.Generator().manual_seed(seed))
        out = Guarded((8,), torch.float32, device)
        return Prepared(
            problem=Problem(device.type),
            args=(x, out.view),
            outputs={"out": out.view},
            check=lambda variant: [close("out", out.view, 2 * x.double(), Budget(1e-6, 1e-9))],
            guards=[out],
            cost=self.cost,
        )


def double(problem: Any, config: Any, args: Any) -> None:
    x, out = args
    out.copy_(2 * x)


def variant(launch=double, rank=10, refuses=lambda problem: None, space=None):
    return Variant(launch, lambda problem: "default", lambda problem: rank, refuses, space)


@pytest.fixture
def doubling(monkeypatch):
    """Makes the variants given by name the op's only ones."""

    def use(**variants):
        family = Family("doubling", "nowhere")
        family.__dict__["names"] = tuple(variants)
        for name, made in variants.items():
            family._loaded[name] = replace(made, name=name)
        for module in (sweep, measure, tune):
            monkeypatch.setattr(module, "family", lambda op: family)

    use.case, use.variant, use.double = DoublingCase, variant, double
    return use


@dataclass
class MadeTimes:
    """A clock that knows what every config takes: a number, a sample a round, or these by length of the input.

    ``rounds`` are the finals: for each, the configs that were timed together.
    """

    us: dict[str, Any]
    rounds: list[list[str]] = field(default_factory=list)

    @property
    def clock(self):
        return tune.Clock(self._time, lambda launch: 0.0)

    def _time(self, launches, target_s, least):
        configs = [launch.func.__self__.config for launch in launches]
        if target_s == tune.FINAL_S:
            self.rounds.append(configs)
        return [self._samples(config, launch.args[1], least) for config, launch in zip(configs, launches, strict=True)]

    def _samples(self, config, args, least):
        us = self.us[config]
        if isinstance(us, dict):
            us = us[len(args[0])]
        if isinstance(us, list):
            return us if len(us) == least else us[:1] * least
        return [us] * least


@pytest.fixture
def made_times():
    """``made_times({config: us})``: see :class:`MadeTimes`."""
    return MadeTimes
