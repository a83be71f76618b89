"""``kvscout verify``: what it counts, prints, writes and returns."""

import json
import shutil

import pytest

from kvscout.cli import verify
from kvscout.testing.case import family
from kvscout.testing.sweep import FAILED, PASSED, ContextLost, Outcome

CPU = ("verify", "mqa_logits", "--device", "cpu")
ONE = (*CPU, "--case", "1x1-h8", "--variant", "torch_chunked")
TWO = (*CPU, "--case", "17x76-h8", "--variant", "torch_chunked")


def wrong(problem, config, args):
    args.out.fill_(0.5)


def raises(problem, config, args):
    raise ArithmeticError("the kernel gave up")


def row(out, variant):
    """The cells of a variant in the summary."""
    return next(line.split() for line in out.splitlines() if line.startswith("mqa_logits") and variant in line)


def test_right_variants_pass(run):
    code, out, err = run(*TWO)
    assert (code, err) == (0, "")
    assert row(out, "torch_chunked")[2:6] == ["2", "0", "0", "0"]
    assert 0 < float(row(out, "torch_chunked")[6]) < 1e-5
    assert "torch_reference" not in out
    assert "failed\n" not in out


def test_a_wrong_variant_fails_and_is_said_at_once_and_last(run, launch_instead):
    launch_instead("torch_chunked", wrong)
    code, out, err = run(*TWO)
    assert code == 1
    assert row(out, "torch_chunked")[2:6] == ["0", "0", "0", "2"]
    assert err.count("FAILED mqa_logits 17x76-h8-d64-causal-clean torch_chunked Config(") == 1
    assert out.splitlines()[-3] == "2 failed"
    assert out.splitlines()[-1].startswith("FAILED mqa_logits 17x76-h8-d512-causal-clean torch_chunked Config(")
    assert "nothing passed" in err


def test_a_variant_that_raises_fails_and_the_run_goes_on(run, launch_instead):
    launch_instead("torch_chunked", raises)
    code, out, err = run(*CPU, "--case", "1x1-h8")
    assert code == 1
    assert row(out, "torch_chunked")[2:6] == ["0", "0", "0", "1"]
    assert row(out, "torch_reference")[2:6] == ["1", "0", "0", "0"]
    assert "ArithmeticError: the kernel gave up" in err
    assert "nothing passed" not in err


def test_a_wrong_file_dropped_into_a_copy_fails(root, run_python, tmp_path):
    shutil.copytree(root / "kvscout", tmp_path / "kvscout", ignore=shutil.ignore_patterns("__pycache__"))
    variants = tmp_path / "kvscout/ops/mqa_logits/variants"
    source = (variants / "torch_reference.py").read_text()
    assert source.count("dots.relu()") == 1
    (variants / "torch_no_relu.py").write_text(source.replace("dots.relu()", "dots"))
    done = run_python("-m", "kvscout", *CPU, "--case", "17x76-h8", cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert row(done.stdout, "torch_no_relu")[2:6] == ["0", "0", "0", "2"]
    assert row(done.stdout, "torch_reference")[2:6] == ["2", "0", "0", "0"]


def test_refusals_are_counted_with_their_sentence(run, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, out, err = run(*CPU, "--case", "1x1-h8", "--variant", "triton_direct")
    assert row(out, "triton_direct")[2:] == ["0", "1", "0", "0", "-"]
    assert "refused: Triton kernels need a GPU" in out
    assert code == 1
    assert "nothing passed" in err


def test_json_holds_every_outcome_and_where_it_comes_from(run, tmp_path, launch_instead):
    launch_instead("torch_chunked", wrong)
    file = tmp_path / "out.json"
    assert run(*CPU, "--case", "1x1-h8", "--seed", "3", "--json", str(file))[0] == 1
    found = json.loads(file.read_text())
    assert found["command"] == f"kvscout verify mqa_logits --device cpu --case 1x1-h8 --seed 3 --json {file}"
    assert (found["seed"], found["stopped"]) == (3, None)
    assert {"time", "commit", "versions", "machine"} <= set(found)
    by_variant = {outcome["variant"]: outcome for outcome in found["outcomes"]}
    assert set(by_variant) == set(family("mqa_logits").names)
    assert by_variant["torch_chunked"]["status"] == "failed"
    assert "exceeds" in by_variant["torch_chunked"]["message"]
    assert by_variant["torch_reference"]["status"] == "passed"
    assert by_variant["torch_reference"]["config"] == "Config(dtype=torch.float64)"


def test_full_runs_every_config_and_more_cases(run, tmp_path):
    files = [tmp_path / name for name in ("default.json", "full.json")]
    words = (*CPU, "--case", "17x76-h32-d128", "--variant", "torch_chunked")
    run(*words, "--json", str(files[0]))
    run(*words, "--full", "--json", str(files[1]))
    default, full = (json.loads(file.read_text())["outcomes"] for file in files)
    assert {o["case"] for o in default} < {o["case"] for o in full}
    assert len({o["config"] for o in default}) == 1
    assert len({o["config"] for o in full}) > 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("verify", "nope"), "there is no op 'nope'; there are mqa_logits, "),
        (("verify", "mqa_logits", "--variant", "nope"), "there is no 'nope'; mqa_logits has torch_chunked, "),
        ((*CPU, "--case", "nope"), "no case of mqa_logits at level suite has 'nope'"),
        ((*CPU, "--jobs", "0"), "--jobs: expected at least 1, got 0"),
        (("verify", "--json", "/no/such/folder/x.json"), "there is no folder /no/such/folder"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(run, words, message):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert message in err


def test_several_jobs_find_what_one_finds(run, tmp_path):
    files = [tmp_path / name for name in ("one.json", "two.json")]
    words = (*CPU, "--case", "17x76-h", "--variant", "torch_chunked")
    results = [run(*words, "--jobs", jobs, "--json", str(file)) for jobs, file in zip("12", files, strict=True)]
    assert results[0][:2] == results[1][:2]
    one, two = (json.loads(file.read_text())["outcomes"] for file in files)
    assert len(one) > 2
    assert one == two


def test_a_process_that_dies_fails_its_case_and_stops_the_run(root, run_python, tmp_path):
    shutil.copytree(root / "kvscout", tmp_path / "kvscout", ignore=shutil.ignore_patterns("__pycache__"))
    variant = tmp_path / "kvscout/ops/mqa_logits/variants/torch_reference.py"
    source = variant.read_text().replace("import torch\n", "import os\nimport torch\n", 1)
    variant.write_text(source.replace("    launch=_launch,", "    launch=lambda *_: os._exit(3),"))
    words = (*CPU, "--case", "17x76-h8", "--variant", "torch_reference", "--jobs", "2")
    done = run_python("-m", "kvscout", *words, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "FAILED mqa_logits 17x76-h8-d64-causal-clean" in done.stderr
    assert "terminated abruptly" in done.stderr


def stop_after_one(exception):
    """A ``verify_case`` that runs one case and no more."""
    seen = []

    def verify_case(case, *args, **kwargs):
        if seen:
            raise exception
        seen.append(case)
        yield Outcome(case.op, case.name, "torch_chunked", PASSED, max_rel=1e-7)

    return verify_case


def test_ctrl_c_keeps_what_was_found(run, monkeypatch, tmp_path):
    monkeypatch.setattr(verify, "verify_case", stop_after_one(KeyboardInterrupt()))
    file = tmp_path / "out.json"
    code, out, err = run(*TWO, "--json", str(file))
    assert code == 130
    assert row(out, "torch_chunked")[2:6] == ["1", "0", "0", "0"]
    assert err == "interrupted; 1 of 2 cases were not reached\n"
    found = json.loads(file.read_text())
    assert found["stopped"] == "interrupted"
    assert len(found["outcomes"]) == 1


def test_a_lost_gpu_stops_the_run_with_a_sentence(run, monkeypatch):
    monkeypatch.setattr(verify, "verify_case", stop_after_one(ContextLost("illegal address")))
    code, out, err = run(*TWO)
    assert code == 1
    assert row(out, "torch_chunked")[2:6] == ["1", "0", "0", "0"]
    assert "broke the GPU's context" in err
    assert "1 of 2 cases were not reached" in err


def test_long_messages_are_cut_and_many_reasons_summed_up(run, monkeypatch):
    def verify_case(case, *args, **kwargs):
        yield Outcome(case.op, case.name, "torch_chunked", FAILED, message="x" * 10_000)
        for i in range(5):
            yield Outcome(case.op, case.name, "torch_reference", "refused", message=f"reason {min(i, 3)}")

    monkeypatch.setattr(verify, "verify_case", verify_case)
    code, out, err = run(*ONE)
    assert code == 1
    assert len(err) < 2000
    lines = [line.split() for line in out.splitlines() if "reason" in line]
    assert lines[1] == ["mqa_logits", "torch_reference", "2", "refused:", "reason", "3"]
    assert lines[-1] == ["mqa_logits", "torch_reference", "1", "for", "1", "other", "reason"]
