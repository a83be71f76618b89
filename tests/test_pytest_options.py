"""What pyproject.toml tells pytest."""

import warnings

import pytest


@pytest.mark.parametrize("category", [DeprecationWarning, RuntimeWarning, UserWarning])
@pytest.mark.parametrize("module", ["triton.runtime.interpreter", "triton.runtime.jit", "kvscout.variants"])
def test_numpys_warnings_about_tritons_interpreter_alone_are_silent(monkeypatch, category, module):
    shown = []
    monkeypatch.setattr(warnings, "showwarning", lambda *arguments: shown.append(arguments))
    warnings.warn_explicit("a message", category, "some/file.py", 1, module=module)
    assert bool(shown) != (module == "triton.runtime.interpreter" and category is not UserWarning)
