"""Launches back to back, and what is read of the GPU meanwhile."""

import threading
import time

import pytest
import torch

from kvscout.testing import sustained
from kvscout.testing.sustained import _median, _Reading, _Watch

CPU = torch.device("cpu")


def test_calls_fill_the_time(monkeypatch):
    monkeypatch.setattr(sustained, "SUSTAINED_S", 0.1)
    found = sustained.sustained(lambda: time.sleep(0.01), CPU)
    assert 1 <= found.calls <= 10
    assert found.us >= 10_000
    assert found.us * found.calls >= 100_000
    assert (found.sm_clock_mhz, found.power_w, found.readings) == (None, None, 0)


def test_one_call_at_least(monkeypatch):
    monkeypatch.setattr(sustained, "SUSTAINED_S", 0.0)
    assert sustained.sustained(lambda: None, CPU).calls == 1


def test_the_gpu_is_read_until_the_end():
    read_twice = threading.Event()
    answers = iter(("1980", "1970"))

    def read(device, fields):
        time.sleep(0.001)
        clock = next(answers, None)
        if clock is None:
            read_twice.set()
        return {"sm_clock_mhz": clock or "1960", "power_w": "[N/A]"}

    start = time.perf_counter()
    with _Watch(CPU, read) as watch:
        assert read_twice.wait(60)
    clocks = [reading["sm_clock_mhz"] for reading in watch.between(start, time.perf_counter())]
    assert clocks[:3] == ["1980", "1970", "1960"]


def test_what_is_read_before_or_after_does_not_count():
    watch = _Watch(CPU)
    watch._readings += [_Reading(at, {"power_w": str(at)}) for at in (1.0, 2.0, 3.0, 4.0)]
    assert [reading["power_w"] for reading in watch.between(1.5, 3.5)] == ["2.0", "3.0"]


def test_a_machine_that_tells_nothing_is_asked_once():
    asked = []
    with _Watch(CPU, lambda device, fields: asked.append(device) or dict.fromkeys(fields)) as watch:
        watch._thread.join(60)
    assert asked == [CPU]
    assert watch.between(0, time.perf_counter()) == []


@pytest.mark.parametrize(
    ("answers", "median"), [(["3", "1", "2"], 2.0), ([None, "5", "[N/A]"], 5.0), ([None, "[Unknown Error]"], None)]
)
def test_median_of_what_is_a_number(answers, median):
    assert _median(answers) == median


@pytest.mark.gpu
def test_on_a_gpu():
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    found = sustained.sustained(lambda: torch.mm(x, x, out=out), device)
    assert 0.8e6 < found.us * found.calls < 2e6
    if found.readings:
        assert 300 < found.sm_clock_mhz < 4000
        assert 50 < found.power_w < 2000
