"""Timing: how samples are taken and summed up."""

import time

import pytest
import torch

from kvscout.testing import timing
from kvscout.testing.timing import Timing

CPU = torch.device("cpu")


def test_median_min_and_spread():
    found = Timing.of([float(n) for n in range(101, 0, -1)])
    assert found == Timing(min_us=1.0, median_us=51.0, spread=80 / 51, runs=101)


def test_the_median_shrugs_at_one_slow_sample():
    assert Timing.of([10.0] * 99 + [1e6]).median_us == 10.0


def test_clock_measures_what_the_launch_takes():
    found = timing.hot(lambda: time.sleep(0.01), CPU)
    assert 10_000 <= found.min_us <= found.median_us < 100_000
    assert timing.MIN_RUNS <= found.runs <= 10


@pytest.mark.parametrize(("seconds", "runs"), [(1e-6, 200), (1e-3, 100), (0.01, 10), (0.1, 5), (3.0, 5), (0.0, 200)])
def test_runs_fill_the_target_within_bounds(seconds, runs):
    assert timing._runs(seconds) == runs


def test_the_first_launch_is_not_timed():
    calls = []

    def launch():
        calls.append(time.sleep(0.3 if not calls else 0.001))

    assert timing.hot(launch, CPU).median_us < 100_000


class TestInTurn:
    """What a GPU is asked for, by graphs and events that stand in for its own."""

    @pytest.fixture
    def asked(self, monkeypatch):
        """Everything that is replayed, by name; a graph takes its launch's time as often as it holds it."""
        done = []

        class Graph:
            def __init__(self, launch, calls):
                self.launch, self.calls = launch, calls

            def replay(self):
                done.append(self.launch.__name__)
                return self.launch() * self.calls

        def replay_us(replays, runs, before=None):
            samples = []
            for run in range(runs):
                if before is not None:
                    before()
                samples.append(replays[run % len(replays)]())
            return samples

        monkeypatch.setattr(timing, "capture", Graph)
        monkeypatch.setattr(timing, "rough_seconds", lambda launch: launch() * 1e-6)
        monkeypatch.setattr(timing, "replay_us", replay_us)
        monkeypatch.setattr(timing, "_flush", lambda device: lambda: done.append("flush"))
        return done

    @staticmethod
    def short():
        return 5.0

    @staticmethod
    def long():
        return 2000.0

    def test_hot(self, asked):
        """Ten short calls a graph; the host gets ahead first."""
        found = timing.interleaved([self.short, self.long], torch.device("cuda"), 1e-9, 4)
        assert found == [[5.0] * 4, [2000.0] * 4]
        assert asked == ["short", "long", *["flush"] * timing.BACKLOG, "long", *["short", "long"] * 4]

    def test_cold(self, asked):
        found = timing.interleaved([self.short, self.long], torch.device("cuda"), 1e-9, 3, cold=True)
        assert found == [[5.0] * 3, [2000.0] * 3]
        assert asked == ["flush", "short", "flush", "long"] * 4

    @pytest.mark.parametrize(("target_s", "rounds"), [(0.01, 5), (0.02, 10), (1e3, 200)])
    def test_as_many_rounds_as_fit(self, asked, target_s, rounds):
        found = timing.interleaved([self.short, self.long], torch.device("cuda"), target_s, 5)
        assert [len(samples) for samples in found] == [rounds, rounds]


@pytest.mark.gpu
class TestOnGpu:
    DEVICE = torch.device("cuda")

    def test_cold_reads_are_slower_than_hot_ones(self):
        """8 MB stay in L2 between hot replays, and come from memory after a flush."""
        inputs = [torch.randn(2 << 20, device=self.DEVICE) for _ in range(2)]
        out = torch.empty_like(inputs[0])
        launches = [lambda x=x: torch.mul(x, 2, out=out) for x in inputs]
        assert timing.cold(launches, self.DEVICE).median_us > 1.2 * timing.hot(launches[0], self.DEVICE).median_us

    def test_hot_time_of_almost_nothing_is_near_a_graph_node(self):
        one = torch.ones(1, device=self.DEVICE)
        assert 0.3 < timing.hot(lambda: one.add_(1), self.DEVICE).median_us < 5

    def test_a_long_launch_is_captured_once(self):
        x = torch.randn(8192, 8192, device=self.DEVICE)
        out = torch.empty_like(x)
        found = timing.hot(lambda: torch.mm(x, x, out=out), self.DEVICE)
        assert found.median_us > 1000 and found.runs >= timing.MIN_RUNS

    def test_every_input_of_a_cold_timing_is_launched(self):
        counts = torch.zeros(3, device=self.DEVICE)
        timing.cold([lambda i=i: counts[i : i + 1].add_(1) for i in range(3)], self.DEVICE)
        assert counts.gt(0).all()
