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


def test_only_env_reads_the_environment(root):
    readers = set()
    for path in (root / "kvscout").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in {"environ", "getenv", "putenv"}:
                readers.add(path.relative_to(root).as_posix())
    assert readers == {"kvscout/env.py"}
