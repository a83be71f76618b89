"""Where figures come from."""

import json
import math
import platform
import re
import subprocess

import torch

from kvscout.testing import provenance

CPU = torch.device("cpu")


def test_a_record_says_who_what_when_where():
    found = provenance.record(CPU, "kvscout bench topk")
    assert found["command"] == "kvscout bench topk"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["time"])
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["machine"]["arch"] == "cpu"
    assert found["machine"]["cores"] >= 1


def test_a_missing_package_has_no_version(monkeypatch):
    monkeypatch.setitem(provenance.DISTRIBUTIONS, "nothing", ("a-package-that-nobody-has",))
    assert provenance.versions()["nothing"] is None


def test_a_record_may_name_more_packages():
    found = provenance.record(CPU, "kvscout bench", {"rival": ("a-package-that-nobody-has", "torch")})["versions"]
    assert found["rival"] == found["torch"]
    assert "rival" not in provenance.versions()


def test_a_cpu_has_nothing_that_nvidia_smi_says():
    assert provenance.nvidia_smi(CPU, {"clock": "clocks.sm"}) == {"clock": None}


def test_the_commit_of_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "CHECKOUT", tmp_path)
    assert provenance.commit() is None

    def git(*words):
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    git("tag", "v1")
    commit = git("rev-parse", "HEAD").strip()
    assert provenance.commit() == commit
    (tmp_path / "file").write_text("two")
    assert provenance.commit() == f"{commit}-dirty"


def test_a_program_that_is_missing_or_fails_answers_nothing():
    assert provenance._output("a-program-that-nobody-has") is None
    assert provenance._output("git", "no-such-command") is None


def test_json_has_no_infinities():
    written = provenance.dumps({"a": [math.inf, math.nan, 1.5], "b": (1, "inf")})
    assert json.loads(written) == {"a": [None, None, 1.5], "b": [1, "inf"]}
