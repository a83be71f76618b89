"""GPUs that are not here: what tensors without memory stand for."""

import torch

from kvscout import device
from kvscout.device import StandIn, arch_of, num_sms, stand_in

META, CPU = torch.device("meta"), torch.device("cpu")


def test_meta_tensors_lie_on_the_gpu_that_they_stand_for():
    assert (arch_of(META), num_sms(META)) == ("meta", device.DEFAULT_NUM_SMS)
    with stand_in(StandIn("gfx942", 304)):
        assert (arch_of(META), num_sms(META)) == ("gfx942", 304)
        with stand_in(StandIn("sm_80", 108)):
            assert (arch_of(META), num_sms(META)) == ("sm_80", 108)
        assert arch_of(META) == "gfx942"
        assert (arch_of(CPU), num_sms(CPU)) == ("cpu", device.DEFAULT_NUM_SMS)
    assert arch_of(META) == "meta"


def test_a_stand_in_has_the_name_that_it_is_given(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with stand_in(StandIn("sm_90", 132, "NVIDIA H200")):
        assert [device.model_of(arch) for arch in ("sm_90", "sm_80")] == ["NVIDIA H200", None]
        assert device.model_of("cpu") == device.name_of(CPU)
        with stand_in(StandIn("sm_90", 132)):
            assert device.model_of("sm_90") is None
    assert device.model_of("sm_90") is None


def test_the_gpu_that_was_measured_has_as_many_multiprocessors_as_plans_assume():
    assert device.NUM_SMS["sm_90"] == device.DEFAULT_NUM_SMS
