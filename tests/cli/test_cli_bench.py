"""``kvscout bench``: figures for right variants, none for wrong ones."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvscout.cli import arguments, bench, selection, timed_cases
from kvscout.ops.mqa_logits.variants.torch_reference import reference
from kvscout.roofline import Cost
from kvscout.testing import peers, sustained
from kvscout.testing.case import BENCH, SUITE, cases, groups
from kvscout.testing.compare import Budget
from kvscout.testing.measure import Measurement
from kvscout.testing.peers import Peer
from kvscout.testing.peers.mqa_logits import deliver
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


def test_a_wrong_variant_gets_no_figure(run, launch_instead, tmp_path):
    launch_instead("torch_chunked", lambda problem, config, args: args.out.fill_(0.5))
    file = tmp_path / "out.json"
    code, out, err = run(*ONE, "--baseline", "torch_reference", "--json", str(file))
    assert code == 1
    assert row(out, "torch_reference")[-1] == "1.00x"
    assert row(out, "torch_chunked")[2:] == ["failed", *["-"] * 8]
    right, wrong = json.loads(file.read_text())["measurements"]
    assert (right["variant"], wrong["variant"], wrong["status"]) == ("torch_reference", "torch_chunked", FAILED)
    assert [wrong[name] for name in ("hot", "cold", "tflops", "tbytes_per_s", "roof", "speedup")] == [None] * 6
    assert right["speedup"] == 1.0
    assert "positions differ" in out.splitlines()[-1]
    assert "FAILED mqa_logits 17x76-h8-d64-causal-clean torch_chunked" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cold",), "only a GPU's cache can be flushed"),
        (("--baseline", "nope"), "there is no 'nope'; mqa_logits has torch_chunked, "),
        (("--variant", "nope"), "there is no 'nope'; mqa_logits has torch_chunked, "),
        (("--variant", "torch_chunked", "--variant", "nope"), "there is no 'nope'; mqa_logits has torch_chunked, "),
        (("--against", "nope"), "there is no peer 'nope'; mqa_logits has aiter, deepgemm"),
        (("--against", "aiter,nope"), "there is no peer 'nope'; mqa_logits has aiter, deepgemm"),
        (("--against", ""), "--against: expected the names of peers, got ''"),
        (("--against", ","), "--against: expected the names of peers, got ','"),
        (("--model-shapes",), "--model-shapes: these cases are timed on a GPU"),
        (("--shapes-csv", ""), "--shapes-csv: expected the name of a file, got an empty one"),
        (("--shapes-csv", "none.csv"), "--shapes-csv: none.csv: No such file or directory"),
        (("--shapes-csv", "none.csv", "--squares"), "--squares: --shapes-csv says which cases to time"),
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
    means = {variant: cells for _, group, variant, *cells in rows if group == "all"}
    assert means["triton_fast"] == ["3", "4.00x", "2.00x", "2", "25%"]
    assert means["torch_slow"] == ["2", "1.00x", "1.00x", "2", "-"]
    assert "triton_bad" not in means
    assert "torch_slow is not timed on 1 case, too large: so" in out


def test_variants_may_be_named_one_by_one_and_auto_beside_them(run, tmp_path):
    file = tmp_path / "out.json"
    words = ("--variant", "auto", "--variant", "torch_reference", "--baseline", "torch_reference", "--json", str(file))
    code, out, _ = run(*ONE, *words)
    assert code == 0
    assert "auto (torch_chunked)" in out
    found = json.loads(file.read_text())["measurements"]
    assert [(m["variant"], m["chosen"]) for m in found] == [("torch_reference", ""), ("auto", "torch_chunked")]


def test_back_to_back_times_have_columns(run, monkeypatch, tmp_path):
    monkeypatch.setattr(sustained, "SUSTAINED_S", 1e-3)
    file = tmp_path / "out.json"
    code, out, _ = run(*ONE, "--sustained", "--json", str(file))
    assert code == 0
    assert "us sustained" in out
    *_, us, clock, power = row(out, "torch_chunked")
    (found,) = json.loads(file.read_text())["measurements"]
    assert float(us) == pytest.approx(found["sustained"]["us"], abs=0.01)
    assert (clock, power, found["sustained"]["power_w"]) == ("-", "-", None)


def call(prepared):
    """What a right peer launches."""
    return lambda: reference(*prepared.args[:6], dtype=torch.float32)


@pytest.fixture
def rivals(monkeypatch):
    """Peers of the scores: a right one, a wrong and a coarse one, one that is not here, one that refuses."""
    given = {
        "right": {},
        "wrong": {"prepare": lambda prepared: lambda: call(prepared)() / 2},
        "coarse": {
            "prepare": lambda prepared: lambda: call(prepared)() * 1.01,
            "tolerance": lambda problem: Budget(0.02, 1e-3),
        },
        "absent": {"unavailable": lambda arch: f"needs another GPU than {arch}"},
        "picky": {"refuses": lambda problem: f"has no kernel for {problem.num_heads} heads"},
    }
    default = {"unavailable": lambda arch: None, "refuses": lambda problem: None, "prepare": call, "deliver": deliver}
    made = {name: Peer(**default | fields, distributions=("torch",), name=name) for name, fields in given.items()}
    monkeypatch.setattr(peers, "names", lambda op: tuple(made) if op == "mqa_logits" else ())
    monkeypatch.setattr(peers, "load", lambda op, name: made[name])
    return made


def test_a_right_peer_is_a_row_and_the_baseline(rivals, run, tmp_path):
    file = tmp_path / "out.json"
    code, out, err = run(*ONE, "--against", "right", "--json", str(file))
    assert (code, err) == (0, "")
    assert row(out, "right")[-1] == "1.00x"
    assert "speed-ups are over right" in out
    found = json.loads(file.read_text())
    theirs, ours = found["measurements"]
    assert (theirs["variant"], theirs["peer"], theirs["baseline"]) == ("right", True, True)
    assert ours["speedup"] == pytest.approx(theirs["hot"]["median_us"] / ours["hot"]["median_us"])
    assert found["versions"]["right"] == found["versions"]["torch"]
    means = {mean["variant"]: mean for mean in found["means"]}
    assert means["torch_chunked"]["over"]["right"]["mean"] == pytest.approx(ours["speedup"])


def test_a_peer_that_is_a_plain_folder_on_the_path_has_a_version(rivals, run, tmp_path, monkeypatch):
    rivals["right"] = replace(rivals["right"], distributions=("a-package-that-nobody-has",), module="rival_library")
    monkeypatch.setitem(sys.modules, "rival_library", SimpleNamespace(__version__="1.2.3"))
    assert run(*ONE, "--against", "right", "--json", str(tmp_path / "out.json"))[0] == 0
    assert json.loads((tmp_path / "out.json").read_text())["versions"]["right"] == "1.2.3"


def test_a_peer_as_baseline_need_not_be_named_twice(rivals, run):
    code, out, _ = run(*ONE, "--baseline", "right")
    assert code == 0
    assert row(out, "right")[-1] == "1.00x"
    assert row(out, "torch_chunked")[-1].endswith("x")


def test_peers_beside_a_variant_as_baseline_have_means_of_their_own(rivals, run):
    code, out, _ = run(*ONE, "--against", "right", "--baseline", "torch_reference")
    assert code == 0
    assert "speed-ups are over torch_reference" in out
    assert "over right" in out[out.index("geometric means") :]


def test_a_wrong_peer_gets_no_figure(rivals, run):
    code, out, err = run(*ONE, "--against", "wrong,right")
    assert code == 1
    assert row(out, "wrong")[2:] == ["failed", *["-"] * 8]
    assert "FAILED mqa_logits 17x76-h8-d64-causal-clean wrong: logits: largest relative difference" in err
    assert float(row(out, "right")[2]) > 0
    assert row(out, "torch_chunked")[-1] == "-"


def test_a_peer_that_is_judged_by_a_bound_of_its_own_says_so(rivals, run, tmp_path):
    file = tmp_path / "out.json"
    code, out, _ = run(*ONE, "--against", "coarse,right", "--json", str(file))
    assert code == 0
    assert out.count("has a bound of its own") == 1
    assert "coarse has a bound of its own on 1 case: an error of 2.0e-02" in out
    theirs = {m["variant"]: m for m in json.loads(file.read_text())["measurements"]}
    assert (theirs["coarse"]["tolerance"], theirs["right"]["tolerance"]) == ({"max_rel": 0.02, "cosine": 1e-3}, None)
    assert 0.001 < theirs["coarse"]["max_rel"] < 0.02


def test_a_peer_that_is_not_here_says_why_and_the_rest_goes_on(rivals, run, tmp_path):
    file = tmp_path / "out.json"
    code, out, err = run(*ONE, "--against", "absent,right", "--json", str(file))
    assert code == 0
    assert err == "absent is not timed on mqa_logits: needs another GPU than cpu\n"
    assert out.splitlines()[-1] + "\n" == err
    assert json.loads(file.read_text())["peers_missing"] == {"mqa_logits absent": err.strip()}
    assert row(out, "right")[-1] == "1.00x"


def test_a_peer_that_refuses_says_why(rivals, run):
    code, out, _ = run(*ONE, "--against", "picky")
    assert code == 0
    assert "picky is not timed on 1 case, has no kernel for 8 heads" in out
    assert row(out, "torch_chunked")[-1] == "-"
    assert "1 case without a speed-up: the baseline has no figure there" in out


def test_a_baseline_that_is_not_here_leaves_our_own_times(rivals, run):
    code, out, err = run(*ONE, "--baseline", "absent")
    assert (code, err) == (0, "absent is not timed on mqa_logits: needs another GPU than cpu\n")
    cells = row(out, "torch_chunked")
    assert (float(cells[2]) > 0, cells[-1]) == (True, "-")
    assert "1 case without a speed-up: the baseline has no figure there" in out


def test_a_baseline_that_one_op_has_is_none_for_another(run, tmp_path):
    file = tmp_path / "out.json"
    words = ("--device", "cpu", "--case", "5x7", "--baseline", "torch_chunked", "--json", str(file))
    code, out, err = run("bench", "mqa_logits", "topk", *words)
    assert (code, err) == (0, "torch_chunked is no baseline on topk, which has nothing of that name\n")
    assert out.count(err) == 1
    found = json.loads(file.read_text())["measurements"]
    assert {(m["op"], m["status"], m["baseline"]) for m in found} == {
        ("mqa_logits", PASSED, True),
        ("topk", PASSED, False),
    }


def test_a_variant_as_baseline_that_needs_a_gpu_says_so_once(run):
    words = ("--device", "cpu", "--case", "17x76-h8", "--baseline", "cute_wgmma")
    code, out, err = run("bench", "mqa_logits", *words)
    assert (code, err) == (0, "")
    assert out.count("cute_wgmma is not timed on 2 cases, CuTe DSL kernels are written for sm_90") == 1
    assert out.count("2 cases without a speed-up: the baseline has no figure there") == 1


def test_auto_as_baseline_is_a_row(run):
    code, out, _ = run(*ONE, "--baseline", "auto", "--variant", "torch_reference")
    assert code == 0
    assert row(out, "auto (torch_chunked)")[-1] == "1.00x"
    assert row(out, "torch_reference")[-1].endswith("x")
    assert "speed-ups are over auto" in out


def test_the_libraries_themselves_are_not_for_the_cpu(run):
    code, _, err = run(*ONE, "--against", "deepgemm,aiter")
    assert code == 0
    assert "deepgemm is not timed on mqa_logits: has kernels for sm_90 and sm_100; this is cpu" in err
    assert "aiter is not timed on mqa_logits: a Triton kernel needs a GPU; these tensors are on cpu" in err


OPS = ("mqa_logits", "topk", "pa_decode")
WORK = [selection.Work(case, ()) for op in OPS for case in cases(op, [BENCH])]


def test_presets_add_up():
    names = groups("mqa_logits") | groups("pa_decode")
    assert set(timed_cases.PRESETS) == set(names)
    for presets in (["model-shapes"], ["unaligned", "few-rows"], ["squares", "sparse"], list(timed_cases.PRESETS)):
        chosen = {item.case.name for item in timed_cases.of_presets(WORK, presets, [BENCH])}
        assert chosen == frozenset().union(*(names[preset] for preset in presets))
    assert timed_cases.of_presets(WORK, None, [SUITE]) == WORK


def test_a_preset_without_a_selected_case():
    with pytest.raises(arguments.UsageError, match="--few-rows: none of these cases"):
        timed_cases.of_presets([item for item in WORK if item.case.op == "topk"], ["few-rows"], [BENCH])


def test_every_preset_is_an_option():
    parser = bench.argparse.ArgumentParser()
    bench.add_arguments(parser)
    args = parser.parse_args([f"--{name}" for name in timed_cases.PRESETS])
    assert args.presets == list(timed_cases.PRESETS)


def test_against_torch(run, tmp_path):
    """Any op has it, and nothing else is needed: here it is measured for real."""
    file = tmp_path / "out.json"
    words = ("--device", "cpu", "--case", "5x7", "--against", "torch", "--json", str(file))
    code, out, err = run("bench", "mqa_logits", "topk", *words)
    assert (code, err) == (0, "")
    assert "torch (torch_chunked)" in out and "torch (torch_packed)" in out
    found = json.loads(file.read_text())["measurements"]
    assert {(m["variant"], m["peer"], m["baseline"]) for m in found} == {
        ("torch", True, True),
        ("torch_chunked", False, False),
        ("torch_packed", False, False),
    }
    assert all(m["speedup"] > 0 for m in found)


SHAPES = """op,rows,keys,heads,dim,lengths,group,page,odd
mqa_logits,3,70,8,32
pa_decode,,,,64,37 2x70,3,16,no_lse
mqa_logits,5,33,16,32
"""


def test_shapes_of_a_file_against_torch_and_sdpa(run, tmp_path):
    """Times on the CPU, of cases that are built in nowhere, with two peers that are always there."""
    shapes, file = tmp_path / "shapes.csv", tmp_path / "out.json"
    shapes.write_text(SHAPES)
    words = ("--device", "cpu", "--shapes-csv", str(shapes), "--against", "sdpa,torch", "--json", str(file))
    code, _, err = run("bench", *words)
    assert (code, err) == (0, "")
    found = json.loads(file.read_text())
    assert [(m["case"], m["variant"]) for m in found["measurements"]] == [
        ("3x70-h8-d32-causal-clean", "torch"),
        ("3x70-h8-d32-causal-clean", "torch_chunked"),
        ("5x33-h16-d32-causal-clean", "torch"),
        ("5x33-h16-d32-causal-clean", "torch_chunked"),
        ("37+70+70-g3x2-d64-bf16xe4m3-chunked16-no_lse", "sdpa"),
        ("37+70+70-g3x2-d64-bf16xe4m3-chunked16-no_lse", "torch_reference"),
        ("37+70+70-g3x2-d64-bf16xe4m3-chunked16-no_lse", "torch"),
    ]
    assert all(m["status"] == PASSED and m["speedup"] > 0 for m in found["measurements"])
    assert found["cases"]["pa_decode"] == {
        "37+70+70-g3x2-d64-bf16xe4m3-chunked16-no_lse": {
            "op": "pa_decode",
            "lengths": "37 2x70",
            "group": "3",
            "dim": "64",
            "odd": "no_lse",
        }
    }
    assert found["versions"]["sdpa"] == found["versions"]["torch"]
    means = {(mean["op"], mean["variant"]): mean["over"] for mean in found["means"]}
    assert set(means["pa_decode", "torch_reference"]) == {"sdpa", "torch"}


def test_ops_and_case_select_among_the_shapes_of_a_file(run, tmp_path):
    shapes = tmp_path / "shapes.csv"
    shapes.write_text(SHAPES)
    words = ("--device", "cpu", "--shapes-csv", str(shapes))
    code, out, _ = run("bench", "mqa_logits", *words, "--case", "5x33")
    assert code == 0
    assert "5x33" in out and "3x70" not in out and "pa_decode" not in out
    code, _, err = run("bench", "topk", *words)
    assert (code, err) == (
        2,
        "kvscout bench: OP: none of the given cases is of topk; they are of mqa_logits, pa_decode\n",
    )
    code, _, err = run("bench", *words, "--case", "nope")
    assert code == 2
    assert "--case: no case of mqa_logits, pa_decode of those that are given has 'nope' in its name" in err


def test_a_bad_row_is_refused_before_anything_is_timed(run, tmp_path):
    shapes = tmp_path / "shapes.csv"
    shapes.write_text(SHAPES.replace("16,32", "17,32"))
    code, out, err = run("bench", "--device", "cpu", "--shapes-csv", str(shapes))
    assert (code, out) == (2, "")
    assert f"--shapes-csv: {shapes}:4: column 'heads': expected one of 8, 16, 32, 64, 128, got 17\n" in err
