"""Where figures come from."""

import importlib
import json
import math
import platform
import re
import subprocess
import sys

import pytest
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


class TestPlainFolders:
    """Libraries that were put on the path, not installed."""

    @pytest.fixture
    def version(self, tmp_path, monkeypatch):
        """``version(text)``: of a library whose module has that text and lies in a folder on the path."""
        monkeypatch.syspath_prepend(tmp_path)

        def of(text, name="a-package-that-nobody-has", load=True):
            (tmp_path / "rival_library.py").write_text(text)
            if load:
                importlib.import_module("rival_library")
            return provenance.versions({"rival": (name,)}, {"rival": "rival_library"})["rival"]

        yield of
        sys.modules.pop("rival_library", None)

    def test_a_module_that_says_its_version(self, version):
        assert version("__version__ = '1.2.3'") == "1.2.3"

    def test_a_folder_with_a_dist_info(self, version, tmp_path):
        """Of another name than those that the library is known by."""
        folder = tmp_path / "renamed_library-4.5.6.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: renamed-library\nVersion: 4.5.6\n")
        (folder / "RECORD").write_text("rival_library.py,,\n")
        assert version("") == "4.5.6"

    def test_neither(self, version):
        assert version("__version__ = (1, 2)") is None

    def test_what_is_not_loaded_stays_so(self, version):
        assert version("__version__ = '1.2.3'", load=False) is None
        assert "rival_library" not in sys.modules

    def test_what_is_installed_counts_first(self, version):
        assert version("__version__ = '1.2.3'", "torch") == provenance.versions()["torch"]


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
