"""Environment variables: what they mean, and that one file reads them."""

import ast

import pytest

from kvscout import env


@pytest.mark.parametrize(("value", "expected"), [(None, "auto"), ("", "auto"), ("torch_chunked", "torch_chunked")])
def test_variant_override(monkeypatch, value, expected):
    if value is not None:
        monkeypatch.setenv("KVSCOUT_MQA_LOGITS_VARIANT", value)
    assert env.variant_override("mqa_logits") == expected


def test_variant_override_is_per_op(monkeypatch):
    monkeypatch.setenv("KVSCOUT_TOPK_VARIANT", "torch_sort")
    assert env.variant_override("mqa_logits") == "auto"


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("0", False), ("", False), ("1", True)])
def test_triton_interpret(monkeypatch, value, expected):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert env.triton_interpret() is expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"KVSCOUT_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"KVSCOUT_CACHE_DIR": "~/own"}, "/home/me/own"),
        ({"KVSCOUT_CACHE_DIR": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/kvscout"),
        ({"XDG_CACHE_HOME": ""}, "/home/me/.cache/kvscout"),
        ({}, "/home/me/.cache/kvscout"),
    ],
)
def test_cache_dir(monkeypatch, variables, expected):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    assert str(env.cache_dir()) == expected


def test_a_relative_cache_dir_is_below_the_current_one(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVSCOUT_CACHE_DIR", "cache")
    assert env.cache_dir() == tmp_path / "cache"


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("0", False), ("", False), ("1", True), ("ON", True)])
def test_aot_only(monkeypatch, value, expected):
    if value is not None:
        monkeypatch.setenv("KVSCOUT_AOT_ONLY", value)
    assert env.aot_only() is expected


@pytest.mark.parametrize(("value", "expected"), [(None, []), ("", []), ("ccache gcc", ["ccache", "gcc"])])
def test_c_compiler(monkeypatch, value, expected):
    monkeypatch.delenv("CC", raising=False)
    if value is not None:
        monkeypatch.setenv("CC", value)
    assert env.c_compiler() == expected


def test_only_env_reads_the_environment(root):
    readers = set()
    for path in (root / "kvscout").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in {"environ", "getenv", "putenv"}:
                readers.add(path.relative_to(root).as_posix())
    assert readers == {"kvscout/env.py"}
