"""How many clusters run at once: asked of the driver where there is one that may be asked."""

from types import SimpleNamespace

import pytest
import torch
import triton
from triton.runtime import driver

from kvscout.kernels import clusters

SHARED = 227 << 10


@pytest.fixture(autouse=True)
def asked_anew():
    clusters._counted.cache_clear()
    yield
    clusters._counted.cache_clear()


@pytest.fixture
def two_gpus(monkeypatch):
    """Two Hopper GPUs, as torch and the driver would tell of them: the second has half as many multiprocessors."""
    machine = SimpleNamespace(current=0, is_capturing=False, asked=[])

    def load_binary(name, cubin, shared, index):
        assert cubin == b"made"
        return "module", ("function", index), 0, 0, 1024

    def count(function, shared, blocks):
        machine.asked.append((function, shared, blocks))
        return (132 >> function[1]) // blocks

    utils = SimpleNamespace(load_binary=load_binary, cuOccupancyMaxActiveClusters=count)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: machine.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: machine.is_capturing)
    monkeypatch.setattr("kvscout.device._arch_of_index", lambda index: "sm_90")
    monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=utils), raising=False)
    monkeypatch.setattr(triton, "compile", lambda source: SimpleNamespace(name=source.name, asm={"cubin": b"made"}))
    return machine


def test_the_driver_is_asked_once_for_each_gpu(two_gpus):
    assert [clusters.resident("sm_90", blocks) for blocks in (2, 8, 2)] == [66, 16, 66]
    assert two_gpus.asked == [(("function", 0), SHARED, 2), (("function", 0), SHARED, 8)]
    # None have room for so many: that is an answer.
    assert clusters.resident("sm_90", 256) == 0
    two_gpus.current = 1
    assert clusters.resident("sm_90", 2) == 33
    assert two_gpus.asked[3:] == [(("function", 1), SHARED, 2)]


def test_nobody_is_asked_of_another_gpu_in_a_capture_or_where_nothing_is_compiled(two_gpus, monkeypatch):
    assert clusters.resident("sm_100", 2) is None
    two_gpus.is_capturing = True
    assert clusters.resident("sm_90", 2) is None
    two_gpus.is_capturing = False
    monkeypatch.setenv("KVSCOUT_AOT_ONLY", "all")
    assert clusters.resident("sm_90", 2) is None
    assert two_gpus.asked == []
    monkeypatch.setenv("KVSCOUT_AOT_ONLY", "1")
    assert clusters.resident("sm_90", 2) == 66


def test_a_driver_that_does_not_answer_leaves_it_open(two_gpus, monkeypatch):
    monkeypatch.setattr(driver.active, "utils", SimpleNamespace())
    assert clusters.resident("sm_90", 2) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_open():
    assert clusters.resident("sm_90", 2) is None


@pytest.mark.gpu
def test_an_h200_runs_as_many_as_were_measured():
    if not torch.cuda.is_available() or torch.cuda.get_device_name() != "NVIDIA H200":
        pytest.skip("needs an H200")
    assert {blocks: clusters.resident("sm_90", blocks) for blocks in (2, 4, 8, 16)} == {2: 66, 4: 30, 8: 15, 16: 7}
