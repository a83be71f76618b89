"""``kvscout info``."""

import json

import torch

from kvscout import env
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


def test_nothing_set_shows_no_table_of_what_is_set(run, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "set now" not in run("info")[1]
