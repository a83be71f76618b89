"""Commands run in this process, on variants that a test may replace."""

from dataclasses import replace

import pytest

from kvscout.cli.main import main
from kvscout.ops.mqa_logits import api
from kvscout.testing import timing
from kvscout.variants import Family


@pytest.fixture
def run(capsys):
    """``run("verify", ...)``: exit code, what went to stdout and what to stderr."""

    def run(*words):
        try:
            code = main(words)
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def launch_instead(monkeypatch):
    """``launch_instead("torch_chunked", launch)``: a variant of ``mqa_logits`` with another launch."""

    def use(name, launch):
        family = Family("mqa_logits", api.FAMILY.package)
        family._loaded[name] = replace(family.load(name), launch=launch)
        monkeypatch.setattr(api, "FAMILY", family)

    return use


@pytest.fixture
def short_timing(monkeypatch):
    monkeypatch.setattr(timing, "TARGET_S", 1e-4)
