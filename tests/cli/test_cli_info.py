"""``kvscout info``."""

import json

import torch

from kvscout import env, tuning
from kvscout.cli import info
from kvscout.device import model_of
from kvscout.kernels.cute import cuda_runtime, runtime, toolchain
from kvscout.testing.case import family, ops


def test_json_from_a_process_of_its_own(run_python):
    done = run_python("-m", "kvscout", "info", "--json", env={"KVSCOUT_TOPK_VARIANT": "torch_reference"})
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["machine"]["cores"] >= 1
    assert list(found["ops"]) == ops()
    for op, variants in found["ops"].items():
        assert [variant["name"] for variant in variants] == list(family(op).names)
        assert all(variant["summary"] for variant in variants)
    by_name = {variant["name"]: variant for variant in found["ops"]["mqa_logits"]}
    assert by_name["torch_chunked"]["unavailable"] is None
    if not torch.cuda.is_available():
        assert "Triton kernels need a GPU" in by_name["triton_direct"]["unavailable"]
    assert found["environment"]["KVSCOUT_TOPK_VARIANT"] == "torch_reference"
    assert found["environment"]["KVSCOUT_MQA_LOGITS_VARIANT"] is None


def test_tables_name_everything(run, monkeypatch):
    monkeypatch.setenv("KVSCOUT_TOPK_VARIANT", "torch_reference")
    code, out, err = run("info")
    assert (code, err) == (0, "")
    for op in ops():
        assert f"\n{op}\n" in out
        for name in family(op).names:
            assert f"\n{name} " in out
    for setting in env.SETTINGS:
        assert setting.name in out
    assert "set now" in out
    assert "KVSCOUT_TOPK_VARIANT  torch_reference" in out


def test_variables_that_are_wrong_are_marked(run, monkeypatch):
    for name, value in (("TOPK_VARIANT", "nonsense"), ("PA_PLAN_VARIANT", "auto"), ("TOKP_VARIANT", "x")):
        monkeypatch.setenv(f"KVSCOUT_{name}", value)
    found = json.loads(run("info", "--json")[1])
    assert found["unread"] == {"KVSCOUT_TOKP_VARIANT": "x"}
    assert sorted(found["wrong"]) == ["KVSCOUT_TOKP_VARIANT", "KVSCOUT_TOPK_VARIANT"]
    lines = {cells[0]: cells[1:] for line in run("info")[1].splitlines() if (cells := line.split(maxsplit=2))}
    assert lines["KVSCOUT_TOPK_VARIANT"][0] == "nonsense"
    assert lines["KVSCOUT_TOPK_VARIANT"][1].startswith("topk has no variant 'nonsense'; it has torch_")
    assert lines["KVSCOUT_TOKP_VARIANT"] == ["x", "nothing reads it: is it misspelt?"]
    assert lines["KVSCOUT_PA_PLAN_VARIANT"] == ["auto", "-"]


def test_tuned_tables_in_use_and_not(run, tuned, monkeypatch):
    def states():
        title = f"tuned tables of {model_of('cpu')}"
        lines = run("info")[1].partition(title)[2].partition("\n\n")[0].splitlines()[3:]
        own, packaged = [line.split(maxsplit=1) for line in lines]
        assert packaged == [str(tuning.PACKAGED / tuning.file_name(model_of("cpu"))), "there is none"]
        assert own[0] == str(file)
        return own[1]

    monkeypatch.setattr(info.torch.cuda, "is_available", lambda: False)
    entry = ({("num_rows", 8)}, "torch_chunked", "")
    file = tuned("mqa_logits", entry)
    assert states() == "1 entry of mqa_logits in use"
    monkeypatch.setenv("KVSCOUT_TUNED", "0")
    assert states() == "not used: KVSCOUT_TUNED is off"
    monkeypatch.delenv("KVSCOUT_TUNED")
    file = tuned("mqa_logits", entry, fingerprint="0" * 16)
    assert states().startswith("was tuned with other kernels of mqa_logits than these")
    file = tuned("mqa_logits", entry, ops={"gone": {"fingerprint": "", "entries": []}})
    assert states().startswith("was tuned with other kernels of gone than these")
    file = tuned("mqa_logits", device="NVIDIA H800")
    assert states() == f"not used: it was tuned on 'NVIDIA H800', and this is {model_of('cpu')}"
    file = tuned("mqa_logits", ops={})
    assert states() == "it is empty"
    file.unlink()
    assert states() == "there is none"
    monkeypatch.setenv("KVSCOUT_TUNED_DIR", "~no-such-user")
    assert "has no home folder" in run("info")[1].partition("tuned tables")[2]


def test_what_keeps_the_hopper_kernels_from_running_is_said(run, monkeypatch, tmp_path):
    monkeypatch.setattr(info, "arch_of", lambda device: "sm_90")
    monkeypatch.setattr(cuda_runtime, "refusal", lambda: "the CUDA runtime is too old")

    def said():
        runtime._refusal.cache_clear()
        variants = json.loads(run("info", "--json")[1])["ops"]["mqa_logits"]
        return {variant["name"]: variant["unavailable"] for variant in variants}["cute_wgmma"]

    monkeypatch.setattr(toolchain, "has_loader", lambda: False)
    assert said() == toolchain.NO_LOADER
    monkeypatch.setattr(toolchain, "has_loader", lambda: True)
    assert said() == "the CUDA runtime is too old"
    monkeypatch.setattr(cuda_runtime, "refusal", lambda: None)
    monkeypatch.setattr(toolchain, "cannot_compile", lambda: None)
    assert said() is None
    monkeypatch.setattr(toolchain, "cannot_compile", lambda: toolchain.NO_DSL)
    monkeypatch.setenv("KVSCOUT_CACHE_DIR", str(tmp_path))
    assert f"kernels can be had: {tmp_path} holds no mqa_logits_" in said()
    assert said().endswith(toolchain.NO_DSL)
    monkeypatch.setenv("KVSCOUT_AOT_ONLY", "yes")
    assert said().endswith("KVSCOUT_AOT_ONLY is set")
    monkeypatch.setenv("KVSCOUT_AOT_ONLY", "perhaps")
    assert said().startswith("KVSCOUT_AOT_ONLY: expected 0, 1, true")
    runtime._refusal.cache_clear()


def test_values_that_mean_nothing_are_marked(run, monkeypatch):
    for name, value in (("KVSCOUT_AOT_ONLY", "2"), ("CC", 'cc "'), ("KVSCOUT_CACHE_DIR", "~no-such-user")):
        monkeypatch.setenv(name, value)
    code, out, err = run("info")
    assert (code, err) == (0, "")
    lines = {cells[0]: cells[1:] for line in out.partition("set now")[2].splitlines() if (cells := line.split())}
    assert " ".join(lines["KVSCOUT_AOT_ONLY"]).startswith("2 expected 0, 1, true")
    assert " ".join(lines["CC"]).startswith('cc " expected a command')
    assert " ".join(lines["KVSCOUT_CACHE_DIR"]).startswith("~no-such-user '~no-such-user' has no home folder")
    code, out, err = run("verify", "topk", "--device", "cpu")
    assert (code, out) == (2, "")
    assert "KVSCOUT_AOT_ONLY: expected 0, 1" in err


def test_nothing_set_shows_no_table_of_what_is_set(run, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "set now" not in run("info")[1]
