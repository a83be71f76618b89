"""Adding a variant is adding one file: on a copy of the package, everything finds it and nothing else changes."""

import json
import re
import shutil

import pytest

# One process makes the copy and runs all tests on it.
pytestmark = pytest.mark.xdist_group("one_file_variant")

MISSING = "needs the Python package 'a_package_that_nobody_has', which is not installed"
NEW = ("torch_by_head", "torch_wrong", "torch_needs_more")


@pytest.fixture(scope="module")
def copy(root, tmp_path_factory):
    """A checkout with three more files: the variant in CONTRIBUTING.md, a wrong one, and one that needs a package."""
    (shown,) = re.findall(r"^```python\n(.*?)^```$", (root / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE)
    files = {
        "torch_by_head": shown,
        "torch_wrong": shown.replace(".relu()", ""),
        "torch_needs_more": shown.replace("import torch\n", "import torch\nimport a_package_that_nobody_has\n"),
    }
    assert tuple(files) == NEW
    assert len({*files.values()}) == 3
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(root / "kvscout", folder / "kvscout", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").mkdir()
    for name in ("pyproject.toml", "tests/conftest.py", "tests/test_variants_on_cases.py"):
        shutil.copy(root / name, folder / name)
    for name, source in files.items():
        (folder / f"kvscout/ops/mqa_logits/variants/{name}.py").write_text(source)
    return folder


@pytest.fixture(scope="module")
def run(copy, run_python):
    """Run Python in the copy; what it printed."""
    return lambda *arguments, **options: run_python(*arguments, cwd=copy, **options).stdout


CALL = """
import torch, kvscout
from kvscout.ops.mqa_logits.api import FAMILY
torch.manual_seed(0)
q, k = (torch.randn(n, 64).to(torch.float8_e4m3fn) for n in (3 * 8, 5))
q = q.view(3, 8, 64)
starts, ends = torch.tensor([0, 1, 4]).int(), torch.tensor([3, 9, 2]).int()
def call(variant="auto"):
    weights = torch.linspace(-1, 1, 24).view(3, 8)
    return kvscout.fp8_mqa_logits(q, (k, torch.ones(5)), weights, starts, ends, variant=variant)
"""


def test_the_family_lists_it(run, copy):
    names = run("-c", "import kvscout.ops.mqa_logits.api as api; print(api.__file__, *api.FAMILY.names)").split()
    assert names[0].startswith(str(copy))
    assert set(NEW) < set(names)


def test_the_public_function_runs_it(run):
    checks = CALL + "torch.testing.assert_close(call('torch_by_head'), call('torch_reference'))\nprint('same')"
    assert run("-c", checks) == "same\n"


def test_the_environment_selects_it(run):
    code = CALL + "print(torch.equal(call(), call('torch_by_head')), torch.equal(call(), call('torch_wrong')))"
    assert run("-c", code, env={"KVSCOUT_MQA_LOGITS_VARIANT": "torch_by_head"}) == "True False\n"
    assert run("-c", code, env={"KVSCOUT_MQA_LOGITS_VARIANT": "torch_wrong"}) == "False True\n"


def test_the_suite_runs_it_and_a_wrong_one_fails(run_python, copy):
    """The one test of variants on cases, in the copy, on the new variants alone."""
    suite = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/test_variants_on_cases.py", "-k")
    good = run_python(*suite, "mqa_logits and torch_by_head", cwd=copy).stdout
    assert " passed" in good
    assert "failed" not in good
    assert "one head at a time is for few heads" in good
    bad = run_python(*suite, "mqa_logits and torch_wrong and 17x76-h8", cwd=copy, check=False)
    assert bad.returncode == 1
    assert "largest relative difference" in bad.stdout
    missing = run_python(*suite, "mqa_logits and torch_needs_more and 17x76-h8", cwd=copy).stdout
    assert MISSING in missing
    assert " passed" not in missing


def test_info_lists_them(run):
    variants = json.loads(run("-m", "kvscout", "info", "--json"))["ops"]["mqa_logits"]
    found = {variant["name"]: variant for variant in variants}
    assert found["torch_by_head"] == {"name": "torch_by_head", "unavailable": None, "summary": "One head at a time."}
    assert found["torch_needs_more"]["unavailable"] == MISSING
