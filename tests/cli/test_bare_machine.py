"""``verify`` on a machine that has torch and Triton, with what those need, and nothing else."""

import importlib.metadata
import json
import re

import pytest

from kvscout.testing.case import ops

# Names that cannot be imported are given as an argument; the code follows.
BLOCKED = """
import json, sys
from importlib.machinery import PathFinder

class Blocked(PathFinder):
    names = set(json.loads(sys.argv.pop(1)))

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in cls.names else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Blocked
"""

VERIFY = """
from kvscout.cli.main import main
sys.exit(main(sys.argv[1:]))
"""

# What a launch on such a chip does before the GPU is asked.
COMPILE = """
import torch
from dataclasses import replace
from kvscout.testing.case import SUITE, cases, family
from kvscout.testing.compiled import compile_launch

for op in sys.argv[1:]:
    case = cases(op, (SUITE,))[0]
    prepared = case.prepare(torch.device("cpu"))
    prepared.problem = replace(prepared.problem, arch="gfx950")
    choice = family(op).choose(prepared.problem)
    assert choice.variant.name.startswith("triton_"), choice
    assert compile_launch(prepared, choice, "gfx950").kernels
"""


def needed(*distributions):
    """Names of distributions with all that they require, optional parts aside."""
    found, new = set(), list(distributions)
    while new:
        name = re.sub(r"[-_.]+", "-", new.pop()).lower()
        try:
            requirements = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            new += [re.match(r"[\w.-]+", r)[0] for r in requirements if "extra ==" not in r]
    return found


@pytest.fixture(scope="module")
def blocked():
    """Every importable name that neither torch nor Triton brings or needs, as JSON."""
    kept = needed("torch", "triton", "kvscout")
    packages = importlib.metadata.packages_distributions()
    names = {n for n, of in packages.items() if not kept & {re.sub(r"[-_.]+", "-", d).lower() for d in of}}
    assert {"rich", "numpy", "pytest"} <= names
    assert not {"torch", "triton", "kvscout"} & names
    # CuTe DSL is not in a folder of its distribution's name.
    return json.dumps(sorted({*names, "cutlass"}))


def test_verify_needs_torch_alone(blocked, run_python, tmp_path):
    report = tmp_path / "verify.json"
    options = ("--device", "cpu", "--case", "1x1-", "--json", str(report))
    done = run_python("-W", "ignore", "-c", BLOCKED + VERIFY, blocked, "verify", "mqa_logits", *options)
    assert "passed" in done.stdout
    outcomes = json.loads(report.read_text())["outcomes"]
    assert {o["status"] for o in outcomes if o["variant"].startswith("torch_")} == {"passed"}


@pytest.mark.slow
def test_launches_of_triton_need_torch_and_triton_alone(blocked, run_python):
    with_triton = [op for op in ops() if op != "topk"]
    run_python("-W", "ignore", "-c", BLOCKED + COMPILE, blocked, *with_triton)
