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


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((value, False) for value in (None, "0", "", "False", "off", "no")),
        *((value, True) for value in ("1", "ON", "true", "yes", "all", "ALL")),
    ],
)
def test_aot_only(monkeypatch, value, expected):
    if value is not None:
        monkeypatch.setenv("KVSCOUT_AOT_ONLY", value)
    assert env.aot_only() is expected


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("1", False), ("all", True), ("All", True)])
def test_only_all_is_for_triton_too(monkeypatch, value, expected):
    if value is not None:
        monkeypatch.setenv("KVSCOUT_AOT_ONLY", value)
    assert env.triton_aot_only() is expected


@pytest.mark.parametrize(("value", "expected"), [(None, None), ("", None), ("~/own", "/home/me/own")])
def test_tuned_dir(monkeypatch, value, expected):
    monkeypatch.setenv("HOME", "/home/me")
    if value is not None:
        monkeypatch.setenv("KVSCOUT_TUNED_DIR", value)
    assert env.tuned_dir() == (expected and env.Path(expected))


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("1", True), ("0", False), ("off", False)])
def test_use_tuned(monkeypatch, value, expected):
    if value is not None:
        monkeypatch.setenv("KVSCOUT_TUNED", value)
    assert env.use_tuned() is expected


@pytest.mark.parametrize(("value", "expected"), [(None, []), ("", []), ("ccache gcc", ["ccache", "gcc"])])
def test_c_compiler(monkeypatch, value, expected):
    monkeypatch.delenv("CC", raising=False)
    if value is not None:
        monkeypatch.setenv("CC", value)
    assert env.c_compiler() == expected


@pytest.mark.parametrize(
    ("variable", "value", "read", "message"),
    [
        ("KVSCOUT_AOT_ONLY", "2", env.aot_only, "expected 0, 1, true, false, on, off, yes, no or all, got '2'"),
        ("CC", 'cc "', env.c_compiler, "expected a command as in a shell, got 'cc \"': No closing quotation"),
        ("KVSCOUT_TUNED", "never", env.use_tuned, "expected 0, 1, true, false, on, off, yes or no, got 'never'"),
        ("KVSCOUT_TUNED_DIR", "~no-such-user/x", env.tuned_dir, "'~no-such-user/x' has no home folder"),
        ("KVSCOUT_CACHE_DIR", "~no-such-user/x", env.cache_dir, "'~no-such-user/x' has no home folder; set KVSCOUT_"),
        ("XDG_CACHE_HOME", "~no-such-user", env.cache_dir, "'~no-such-user' has no home folder; set KVSCOUT_"),
    ],
)
def test_values_that_mean_nothing(monkeypatch, variable, value, read, message):
    assert variable not in env.wrong()
    monkeypatch.setenv(variable, value)
    with pytest.raises(env.WrongVariable) as raised:
        read()
    assert str(raised.value).startswith(f"{variable}: {message}")
    assert str(raised.value) == f"{variable}: {env.wrong()[variable]}"


def test_without_a_home_folder(monkeypatch):
    def unknown(self):
        raise RuntimeError("Could not determine home directory.")

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(env.Path, "expanduser", unknown)
    with pytest.raises(env.WrongVariable, match=r"^HOME: is not set and .*; set KVSCOUT_CACHE_DIR to a folder$"):
        env.cache_dir()
    assert "HOME" not in env.wrong()


def test_only_env_reads_the_environment(root):
    readers = set()
    for path in (root / "kvscout").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in {"environ", "getenv", "putenv"}:
                readers.add(path.relative_to(root).as_posix())
    assert readers == {"kvscout/env.py"}
