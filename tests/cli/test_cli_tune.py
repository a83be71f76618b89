"""``kvscout tune``: a table that calls then use, and what becomes of it when it no longer holds."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from kvscout import tuning
from kvscout.cli import tune as command
from kvscout.cli import tune_stages
from kvscout.device import model_of
from kvscout.ops.mqa_logits import api
from kvscout.ops.mqa_logits.variants.torch_chunked import Config
from kvscout.testing import tune
from kvscout.testing.sweep import ContextLost
from kvscout.testing.tune import Clock
from kvscout.variants import Family

CASE = "17x76-h8-d64"
ONE = ("tune", "mqa_logits", "--device", "cpu", "--case", CASE)
TWO = (*ONE[:-1], "17x76-h8")
SMALL = "Config(budget_bytes=65536, block_kv=64)"
DEFAULT = "Config(budget_bytes=2097152, block_kv=512)"
FAST = Config(1 << 20, 128)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Tables are written into a folder of the test's own, and finals are short."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "FINAL_S", 1e-4)
    monkeypatch.setattr(tune, "QUICK_S", 1e-4)
    return tmp_path


@pytest.fixture
def takes(monkeypatch):
    """``takes({config: us})``: what launches take from now on."""

    def use(us):
        def made(launches, target_s, least):
            return [[us[str(launch.func.__self__.config)]] * least for launch in launches]

        monkeypatch.setattr(command.tune, "clock", lambda where, cold=False: Clock(made, lambda launch: 0.0))

    return use


def table(file=None):
    file = file or command.Path("tuned") / tuning.file_name(model_of("cpu"))
    return json.loads(file.read_text())


def winners(content, op="mqa_logits"):
    return [(entry["variant"], entry["config"]) for entry in content["ops"][op]["entries"]]


class TestTuning:
    def test_for_real(self, run, here, tuned):
        """Times of this CPU: whatever wins is written, and a call gets it."""
        code, out, err = run(*ONE, "--json", "found.json")
        assert (code, err) == (0, "")
        content = table()
        (entry,) = content["ops"]["mqa_logits"]["entries"]
        assert entry["variant"] == "torch_chunked"
        assert {entry["config"], entry["runner_up"]["config"]} == {SMALL, DEFAULT}
        assert entry["bucket"] == {
            "num_rows": 32, "num_keys": 128, "num_heads": 8, "head_dim": 64, "clean_logits": True, "fnuz": False,
        }  # fmt: skip
        (times,) = entry["cases"].values()
        assert times["us"] > 0 and times["runner_up_us"] > 0
        (origin,) = content["runs"]
        assert origin["command"].startswith("kvscout tune mqa_logits")
        assert origin["machine"]["device"] == content["device"] == model_of("cpu")
        assert "1 case, 2 variants and configs on them" in out
        assert out.splitlines()[-1] == f"tuned/{tuning.file_name(model_of('cpu'))}: 1 entry"
        (found,) = json.loads((here / "found.json").read_text())["buckets"]
        assert [trial["status"] for trial in found["trials"]][:3] == ["passed", "passed", "refused"]
        assert found["winner"]["config"] == entry["config"]
        # The fixture forgets what was read, before and after.
        tuned("mqa_logits", fingerprint=content["ops"]["mqa_logits"]["fingerprint"], ops=content["ops"])
        problem = api.Problem("cpu", 17, 76, 8, 64, True)
        assert str(api.FAMILY.choose(problem).config) == entry["config"]

    @pytest.mark.parametrize(("small", "winner"), [(90, SMALL), (99, DEFAULT)])
    def test_the_default_stays_within_noise(self, run, takes, small, winner):
        takes({DEFAULT: 100, SMALL: small})
        code, out, _ = run(*ONE)
        assert code == 0
        assert winners(table()) == [("torch_chunked", winner)]
        assert winner in out

    def test_an_older_table_keeps_its_other_buckets(self, run, takes):
        takes({DEFAULT: 100, SMALL: 50})
        assert run(*TWO, "--output", "t.json")[0] == 0
        before = table(command.Path("t.json"))
        assert len(winners(before)) == 2
        takes({DEFAULT: 50, SMALL: 100})
        code, out, _ = run(*ONE, "--output", "t.json")
        assert code == 0
        after = table(command.Path("t.json"))
        configs = [config for _, config in winners(after)]
        assert (configs.count(SMALL), configs.count(DEFAULT)) == (1, 1)
        assert [len(content["runs"]) for content in (before, after)] == [1, 2]
        assert "t.json: 2 entries" in out

    def test_what_another_run_has_added_meanwhile_is_kept(self, run, takes, monkeypatch):
        takes({DEFAULT: 100, SMALL: 50})
        assert run(*TWO, "--output", "other.json")[0] == 0
        tried = command._try

        def while_another_writes(file, model):
            tried(file, model)
            file.write_bytes(command.Path("other.json").read_bytes())

        monkeypatch.setattr(command, "_try", while_another_writes)
        takes({DEFAULT: 50, SMALL: 100})
        assert run(*ONE, "--output", "t.json")[0] == 0
        configs = [config for _, config in winners(table(command.Path("t.json")))]
        assert (configs.count(SMALL), configs.count(DEFAULT)) == (1, 1)

    def test_a_table_is_replaced_whole_or_not_at_all(self, run, takes, here, monkeypatch):
        takes({DEFAULT: 100, SMALL: 50})
        assert run(*TWO, "--output", "t.json")[0] == 0
        before = (here / "t.json").read_bytes()

        def full(*arguments):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(command.Path, "replace", full)
        code, _, err = run(*ONE, "--output", "t.json")
        assert code == 1
        assert "--output: cannot write 't.json': No space left on device" in err
        assert (here / "t.json").read_bytes() == before
        assert not list(here.glob(".t.json*"))

    def test_entries_of_other_kernels_are_replaced(self, run, takes):
        takes({DEFAULT: 100, SMALL: 50})
        assert run(*TWO, "--output", "t.json")[0] == 0
        file = command.Path("t.json")
        content = table(file)
        content["ops"]["mqa_logits"]["fingerprint"] = "0" * 16
        file.write_text(json.dumps(content))
        code, out, _ = run(*ONE, "--output", "t.json")
        assert code == 0
        assert "left out, as they are of other kernels: 2 older entries of mqa_logits\nt.json: 1 entry\n" in out
        assert len(table(file)["runs"]) == 1

    def test_ones_own_folder_is_where_it_goes(self, run, takes, here, monkeypatch):
        takes({DEFAULT: 100, SMALL: 50})
        monkeypatch.setenv("KVSCOUT_TUNED_DIR", str(here / "own" / "folder"))
        assert run(*ONE)[0] == 0
        assert winners(table(here / "own" / "folder" / tuning.file_name(model_of("cpu"))))

    def test_a_rule_that_stays_is_no_failure(self, run, takes, monkeypatch):
        monkeypatch.setattr(tune, "_decide", lambda *args: None)
        takes({DEFAULT: 100, SMALL: 50})
        code, out, _ = run(*ONE)
        assert code == 0
        assert "no one config is faster than what the rule takes for each case" in out

    def test_what_is_wrong_is_named_and_not_written(self, run, here, takes, launch_instead):
        launch_instead("torch_chunked", lambda problem, config, args: args.out.fill_(0.5))
        takes({DEFAULT: 100, SMALL: 50})
        code, out, err = run(*ONE)
        assert code == 1
        assert not (here / "tuned" / tuning.file_name(model_of("cpu"))).exists()
        assert out.count("FAILED mqa_logits 17x76-h8-d64-causal-clean torch_chunked Config(") == 2
        assert out.count("nothing that a table may have ran to a right result") == 1
        assert "FAILED" in err

    def test_shapes_of_ones_own(self, run, takes, here):
        takes({DEFAULT: 100, SMALL: 50})
        (here / "shapes.csv").write_text("op,rows,keys,heads,dim\nmqa_logits,3,9,8,64\nmqa_logits,4,16,8,64\n")
        code, out, _ = run("tune", "--device", "cpu", "--shapes-csv", "shapes.csv")
        assert code == 0
        (entry,) = table()["ops"]["mqa_logits"]["entries"]
        assert sorted(times["shape"]["rows"] for times in entry["cases"].values()) == ["3", "4"]
        assert "3x9-h8-d64-causal-clean and 1 more" in out

    def test_a_case_that_cannot_be_prepared(self, run, monkeypatch):
        monkeypatch.setattr(api, "check", lambda args, clean: 1 / 0)
        code, _, err = run(*ONE)
        assert code == 1
        assert "(inputs): ZeroDivisionError" in err
        assert not command.Path("tuned").joinpath(tuning.file_name(model_of("cpu"))).exists()

    def test_problems_that_no_table_may_have(self, run, monkeypatch):
        monkeypatch.setattr(api.Problem, "bucket", lambda problem: None)
        code, out, _ = run(*ONE)
        assert code == 1
        assert "1 case of problems that get no variant from a table" in out

    @pytest.mark.parametrize("ends", [KeyboardInterrupt(), ContextLost("gone")])
    def test_an_end_before_its_time_keeps_what_is_finished(self, run, takes, monkeypatch, ends):
        takes({DEFAULT: 100, SMALL: 50})
        whole, seen = tune.finish, []

        def once(*args, **kwargs):
            if seen:
                raise ends
            seen.append(whole(*args, **kwargs))
            return seen[0]

        monkeypatch.setattr(tune, "finish", once)
        code, out, err = run(*TWO, "--json", "found.json")
        assert code == (130 if isinstance(ends, KeyboardInterrupt) else 1)
        assert len(winners(table())) == 1
        assert "1 entry" in out
        assert "interrupted" in err or "broke the GPU's context" in err
        found = json.loads(command.Path("found.json").read_text())
        assert found["stopped"] == err.strip()
        assert found["not_reached"] == [{"op": "mqa_logits", "case": "17x76-h8-d512-causal-clean"}]
        assert "\nnot reached\n" in out and "\nmqa_logits  17x76-h8-d512-causal-clean\n" in out

    def test_nothing_finished_leaves_no_file(self, run, monkeypatch):
        def tune_nothing(*args, **kwargs):
            raise KeyboardInterrupt

        monkeypatch.setattr(tune, "finish", tune_nothing)
        assert run(*ONE)[0] == 130
        assert not command.Path("tuned").joinpath(tuning.file_name(model_of("cpu"))).exists()

    @pytest.fixture
    def hours(self, monkeypatch):
        """An hour passes with each bucket's second stage."""
        now, whole = [0.0], tune.finish
        monkeypatch.setattr(tune_stages, "time", SimpleNamespace(monotonic=lambda: now[0]))

        def finish(*args, **kwargs):
            now[0] += 3600
            return whole(*args, **kwargs)

        monkeypatch.setattr(tune, "finish", finish)

    def test_after_its_time_no_bucket_is_begun(self, run, takes, hours):
        takes({DEFAULT: 100, SMALL: 50})
        code, out, err = run(*TWO, "--seconds", "3000", "--json", "found.json")
        assert (code, err) == (0, "the 3000 s of --seconds were over\n")
        assert len(winners(table())) == 1
        assert "\nnot reached\n" in out and "\nmqa_logits  17x76-h8-d512-causal-clean\n" in out
        assert json.loads(command.Path("found.json").read_text())["stopped"] == err.strip()

    def test_within_its_time_all_are(self, run, takes, hours):
        takes({DEFAULT: 100, SMALL: 50})
        code, out, err = run(*TWO, "--seconds", "3601")
        assert (code, err) == (0, "")
        assert len(winners(table())) == 2
        assert "not reached" not in out

    def test_a_time_that_is_over_before_anything_is_timed_is_a_failure(self, run, takes, monkeypatch):
        now = iter(range(0, 10**6, 100))
        monkeypatch.setattr(tune_stages, "time", SimpleNamespace(monotonic=lambda: next(now)))
        takes({DEFAULT: 100, SMALL: 50})
        code, out, err = run(*TWO, "--seconds", "1")
        assert (code, err) == (1, "the 1 s of --seconds were over\n")
        assert "17x76-h8-d64-causal-clean" in out and "17x76-h8-d512-causal-clean" in out
        assert not command.Path("tuned").joinpath(tuning.file_name(model_of("cpu"))).exists()

    def test_what_a_slow_variant_spares_is_counted(self, run, takes, monkeypatch):
        """The rule's own variant here, beside one that takes half of its time."""
        family = Family("mqa_logits", api.FAMILY.package)
        chunked = family.load("torch_chunked")
        fast = dataclasses.replace(
            chunked, name="torch_fast", default_config=lambda problem: FAST, space=None, rank=lambda problem: 1
        )
        family.__dict__["names"] = ("torch_chunked", "torch_fast")
        family._loaded["torch_fast"] = fast
        monkeypatch.setattr(api, "FAMILY", family)
        takes({DEFAULT: 100, SMALL: 40, str(FAST): 50})
        code, out, _ = run(*ONE)
        assert (code, winners(table())) == (0, [("torch_fast", str(FAST))])
        reason = "its own choice takes more than 1.5 times as long as that of torch_fast"
        (line,) = [line for line in out.splitlines() if line.endswith(reason)]
        assert line.removesuffix(reason).split() == ["mqa_logits", "torch_chunked", "1"]
        assert run(*ONE, "--within", "2.1")[0] == 0
        assert winners(table()) == [("torch_chunked", SMALL)]


class TestUsage:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--cold",), "--cold: only a GPU's cache can be flushed"),
            (("--seconds", "0"), "argument --seconds: expected a number of seconds above 0, got '0'"),
            (("--within", "0.9"), "expected a number from 1, or inf, got '0.9'"),
            (("--within", "nan"), "expected a number from 1, or inf, got 'nan'"),
            (("--within", "near"), "expected a number from 1, or inf, got 'near'"),
            (("--seconds-per-case", "0"), "expected a number of seconds above 0, got '0'"),
            (("--seconds-per-case", "nan"), "expected a number of seconds above 0, got 'nan'"),
            (("--seconds-per-case", "soon"), "expected a number of seconds above 0, got 'soon'"),
            (("--jobs", "0"), "expected a whole number from 1"),
            (("--variant", "torch_chunked"), "unrecognized arguments: --variant"),
            (("--squares",), "--squares: these cases are timed on a GPU"),
            (("--output", "a", "--check", "b"), "not allowed with argument"),
            (("--output", ""), "expected the name of a file"),
            (("--output", "/dev/null"), "--output: '/dev/null' is no regular file"),
            (("--output", "."), "--output: '.' cannot be read (Is a directory)"),
            (("--output", "/proc/x/t.json"), "--output: cannot write '/proc/x/t.json'"),
            (("--check", "nope.json"), "--check: 'nope.json' cannot be read (No such file"),
            (("--check", "nope.json", "--shapes-csv", "x"), "leave presets and --shapes-csv out"),
            (("--shapes-csv", "nope.csv"), "--shapes-csv: nope.csv: No such file"),
            (("--json", "nowhere/x"), "--json: there is no folder"),
        ],
    )
    def test_bad_usage(self, run, words, message):
        code, out, err = run(*ONE, *words)
        assert (code, out) == (2, "")
        assert message in err

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("[]", "is no tuned table of format 1"),
            ("", "is not JSON"),
            ('{"format": 1, "device": "NVIDIA H200", "ops": {}}', "was tuned on 'NVIDIA H200', and this is"),
        ],
    )
    @pytest.mark.parametrize("option", ["--output", "--check"])
    def test_a_file_that_is_no_table_of_this_machine(self, run, here, content, message, option):
        (here / "t.json").write_text(content)
        code, _, err = run(*ONE, option, "t.json")
        assert code == 2
        assert f"{option}: 't.json' {message}" in err
        assert (here / "t.json").read_text() == content


class TestCheck:
    @pytest.fixture
    def made(self, run, takes):
        takes({DEFAULT: 100, SMALL: 50})
        assert run(*TWO, "--output", "t.json")[0] == 0
        return command.Path("t.json")

    def check(self, run, *words):
        return run("tune", "--check", "t.json", "--device", "cpu", *words)

    def test_a_table_that_holds(self, run, takes, made):
        takes({DEFAULT: 100, SMALL: 54})
        before = made.read_bytes()
        code, out, err = self.check(run, "--json", "found.json")
        assert (code, err) == (0, "")
        assert "0 of 2 cases flagged" in out
        assert made.read_bytes() == before
        assert [row["now_us"] for row in json.loads(command.Path("found.json").read_text())["retimed"]] == [54] * 2

    @pytest.mark.parametrize(
        ("us", "flag"),
        [
            ({DEFAULT: 100, SMALL: 60}, "takes 20% more than it did"),
            ({DEFAULT: 40, SMALL: 50}, f"torch_chunked with {DEFAULT} is faster now: the winner takes 25% more"),
        ],
    )
    def test_one_that_does_not(self, run, takes, made, us, flag):
        takes(us)
        code, out, _ = self.check(run)
        assert code == 1
        assert out.count(flag) == 2
        assert "2 of 2 cases flagged" in out

    def test_operations_that_are_not_here(self, run, made):
        content = table(made)
        content["ops"]["tpok"] = content["ops"]["mqa_logits"]
        made.write_text(json.dumps(content))
        code, _, err = self.check(run)
        assert code == 2
        assert "--check: 't.json' has entries of what is no operation here: tpok" in err

    def test_a_selection(self, run, made):
        code, out, _ = self.check(run, "mqa_logits", "--case", CASE)
        assert code == 0
        assert "0 of 1 case flagged" in out
        assert self.check(run, "topk")[0] == 2

    def test_other_kernels_are_mentioned(self, run, made):
        content = table(made)
        content["ops"]["mqa_logits"]["fingerprint"] = "0" * 16
        made.write_text(json.dumps(content))
        code, out, _ = self.check(run)
        assert code == 0
        assert "t.json: was tuned with other kernels of mqa_logits than these" in out

    def test_a_case_that_is_gone_is_flagged(self, run, made):
        made.write_text(made.read_text().replace('"keys": "76"', '"keys": "-76"'))
        code, out, _ = self.check(run)
        assert code == 1
        assert out.count("the case cannot be made any more") == 2

    def test_after_its_time_no_entry_is_timed(self, run, made, monkeypatch):
        now = iter([0, 1, 10])
        monkeypatch.setattr(tune_stages, "time", SimpleNamespace(monotonic=lambda: next(now)))
        code, out, err = self.check(run, "--seconds", "5")
        assert (code, err) == (1, "the 5 s of --seconds were over\n")
        assert "0 of 1 case flagged" in out
        # Whether the others hold is not known.
        assert "\nnot reached: mqa_logits " in out

    def test_ctrl_c(self, run, made, monkeypatch):
        whole, seen = command.retime, []

        def once(*args):
            if seen:
                raise KeyboardInterrupt
            seen.append(1)
            return whole(*args)

        monkeypatch.setattr(command, "retime", once)
        code, out, err = self.check(run)
        assert code == 130
        assert "0 of 1 case flagged" in out
        assert err == "interrupted\n"
