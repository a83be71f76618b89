"""``kvscout bench``: figures for right variants, none for wrong ones."""

import json
import math

import pytest

from kvscout.cli import bench
from kvscout.roofline import Cost
from kvscout.testing.measure import Measurement
from kvscout.testing.sweep import FAILED, PASSED, SKIPPED
from kvscout.testing.timing import Timing

ONE = ("bench", "mqa_logits", "--device", "cpu", "--case", "17x76-h8-d64")

pytestmark = pytest.mark.usefixtures("short_timing")


def row(out, variant):
    """The cells of a variant in its op's table."""
    return next(line.split() for line in out.splitlines() if line.lstrip().startswith("17x76") and variant in line)


def test_the_cpu_times_the_default_variant(run):
    code, out, err = run(*ONE)
    assert (code, err) == (0, "")
    cells = dict(zip((*bench.COLUMNS[:2], "hot", "cold", *bench.COLUMNS[4:]), row(out, "torch_chunked"), strict=True))
    assert float(cells["hot"]) >= float(cells["min"]) > 0
    assert (cells["cold"], cells["roof"], cells["speed-up"]) == ("-", "-", "1.00x")
    assert "torch_reference" not in out
    assert "geometric means" in out


def test_a_named_variant_is_compared_with_a_named_baseline(run, tmp_path):
    file = tmp_path / "out.json"
    words = ("--variant", "torch_chunked", "--baseline", "torch_reference", "--json", str(file))
    code, out, _ = run(*ONE, *words)
    assert code == 0
    assert row(out, "torch_reference")[-1] == "1.00x"
    found = json.loads(file.read_text())
    assert found["command"].startswith("kvscout bench mqa_logits")
    baseline, other = found["measurements"]
    assert (baseline["variant"], baseline["baseline"], baseline["speedup"]) == ("torch_reference", True, 1.0)
    ratio = baseline["hot"]["median_us"] / other["hot"]["median_us"]
    assert other["speedup"] == pytest.approx(ratio)
    assert other["tflops"] == pytest.approx(other["cost"]["flops"] / other["hot"]["median_us"] / 1e6)
    assert other["hot"]["runs"] >= 5


def test_a_wrong_variant_gets_no_figure(run, launch_instead):
    launch_instead("torch_chunked", lambda problem, config, args: args.out.fill_(0.5))
    code, out, err = run(*ONE)
    assert code == 1
    assert row(out, "torch_chunked")[2:] == ["failed", *["-"] * 8]
    assert "positions differ" in out.splitlines()[-1]
    assert "FAILED mqa_logits 17x76-h8-d64-causal-clean torch_chunked" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cold",), "only a GPU's cache can be flushed"),
        (("--baseline", "nope"), "there is no 'nope'; mqa_logits has torch_chunked, "),
        (("--variant", "nope"), "there is no 'nope'; mqa_logits has torch_chunked, "),
    ],
)
def test_bad_usage(run, words, message):
    code, out, err = run(*ONE, *words)
    assert (code, out) == (2, "")
    assert message in err


def test_ctrl_c_keeps_what_was_timed(run, monkeypatch):
    def measure_case(case, *args, **kwargs):
        yield Measurement(case.op, case.name, "torch_chunked", PASSED, hot=Timing(1, 2, 0.1, 5))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure_case", measure_case)
    code, out, err = run(*ONE)
    assert code == 130
    assert row(out, "torch_chunked")[2] == "2.00"
    assert err == "interrupted\n"


@pytest.mark.parametrize(("spread", "noticed"), [(0.5, False), (0.51, True)])
def test_a_busy_machine_is_noticed(run, monkeypatch, spread, noticed):
    def measure_case(case, *args, **kwargs):
        yield Measurement(case.op, case.name, "torch_chunked", PASSED, hot=Timing(1, 2, spread, 5))

    monkeypatch.setattr(bench, "measure_case", measure_case)
    code, out, _ = run(*ONE)
    assert code == 0
    assert out.count("the machine was busy: where the spread is over 50%, the median is unreliable\n") == noticed


def test_means_are_geometric_and_of_cases_with_a_baseline(run, monkeypatch):
    """Speed-ups 8 and 2 in two cases; a third has no baseline; roofs 1/2 and 1/8 for the fast one."""

    def measure_case(case, *args, **kwargs):
        def made(name, variant, us, floor=None, baseline=False, status=PASSED):
            times = Timing(us, us, 0.0, 5) if status == PASSED else None
            figures = {"hot": times, "cost": Cost(1, 1), "floor_us": floor, "baseline": baseline}
            return Measurement("mqa_logits", name, variant, status, message="too large: so", **figures)

        yield made("17x76-a", "torch_slow", 16.0, baseline=True)
        yield made("17x76-a", "triton_fast", 2.0, floor=1.0)
        yield made("17x76-b", "torch_slow", 16.0, baseline=True)
        yield made("17x76-b", "triton_fast", 8.0, floor=1.0)
        yield made("17x76-b", "triton_bad", 1.0, status=FAILED)
        yield made("17x76-c", "torch_slow", 0.0, status=SKIPPED)
        yield made("17x76-c", "triton_fast", 1.0)

    monkeypatch.setattr(bench, "measure_case", measure_case)
    code, out, _ = run(*ONE)
    assert code == 1
    rows = [line.split() for line in out.splitlines() if line.startswith("mqa_logits ")]
    means = {variant: cells for _, variant, *cells in rows}
    assert means["triton_fast"] == ["3", "4.00x", "2", "25%"]
    assert means["torch_slow"] == ["2", "1.00x", "2", "-"]
    assert "triton_bad" not in means
    assert "torch_slow is not timed on 1 case, too large: so" in out


def test_geometric_mean():
    assert bench._geomean([2.0, 8.0]) == pytest.approx(4.0)
    assert bench._geomean([]) is None
    assert math.isclose(bench._geomean([3.0]), 3.0)
