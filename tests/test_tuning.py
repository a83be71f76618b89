"""Tuned tables: what they tell apart, how they are read, and what a call takes from them."""

import ast
import dataclasses
import itertools
import json
import logging
import os
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvscout
from kvscout import tuning
from kvscout.device import model_of
from kvscout.kernels.cute.program import KernelUnavailable
from kvscout.ops.mqa_logits import api
from kvscout.ops.mqa_logits.variants.torch_chunked import Config
from kvscout.testing.case import SUITE, cases, family, ops

PROBLEM = api.Problem("cpu", 3, 5, 8, 64, True)
OTHER = Config(1 << 16, 64)
"""A config of PROBLEM's space that is not the default one."""

ENTRY = (PROBLEM.bucket(), "torch_chunked", OTHER)


@pytest.fixture
def said(caplog):
    """What was logged."""
    caplog.set_level(logging.INFO, "kvscout")
    return lambda: [record.getMessage() for record in caplog.records]


def by_rule():
    return api.FAMILY._best(PROBLEM, "auto")


class TestBuckets:
    @given(st.integers(1, 2**40))
    def test_a_class_ends_at_a_power_of_two(self, n):
        found = tuning.size_class(n)
        assert found.bit_count() == 1
        assert n <= found < 2 * n

    def test_nothing_is_a_class_of_its_own(self):
        assert [tuning.size_class(n) for n in (0, 1, 2, 3, 4, 5)] == [0, 1, 2, 4, 4, 8]

    @pytest.mark.parametrize("op", ops())
    def test_what_an_op_tells_apart(self, op):
        """All fields but the architecture and a few; it survives a file, and looks at every other field."""
        problem = cases(op, [SUITE])[0].prepare(torch.device("cpu")).problem
        bucket = problem.bucket()
        assert frozenset(json.loads(json.dumps(dict(bucket))).items()) == bucket
        fields = {field.name for field in dataclasses.fields(problem)} - {"arch"}
        left_out = {"mqa_logits": {"has_q_scale"}, "pa_decode": {"has_sinks", "has_lse"}}.get(op, set())
        assert dict(bucket).keys() == fields - left_out
        assert dataclasses.replace(problem, arch="sm_90").bucket() == bucket
        for name in fields - {"batch_invariant"}:
            value = getattr(problem, name)
            other = not value if isinstance(value, bool) else 4 * value + 1 if isinstance(value, int) else "another"
            changed = dataclasses.replace(problem, **{name: other}).bucket()
            assert (changed == bucket) is (name in left_out), name

    @pytest.mark.parametrize(("rows", "same"), [(1024, True), (513, True), (512, False), (1025, False)])
    def test_sizes_count_by_class(self, rows, same):
        a, b = (dataclasses.replace(PROBLEM, num_rows=n) for n in (1000, rows))
        assert (a.bucket() == b.bucket()) is same

    def test_file_names(self):
        assert tuning.file_name("NVIDIA H200") == "nvidia_h200.json"
        assert tuning.file_name("Intel(R) Xeon(R) CPU @ 2.0GHz") == "intel_r_xeon_r_cpu_2_0ghz.json"


class TestChoice:
    def test_a_table_has_its_say(self, tuned, said):
        tuned("mqa_logits", ENTRY)
        assert by_rule().config != OTHER
        assert api.FAMILY.choose(PROBLEM) == (api.FAMILY.load("torch_chunked"), OTHER)
        assert api.FAMILY.choose(PROBLEM) is api.FAMILY.choose(PROBLEM)
        assert said() == []

    @pytest.mark.parametrize(("over_default", "has_a_say"), [(0.0, False), (0.02, True), (-0.01, True), (None, True)])
    def test_where_the_rule_s_own_choice_won_the_rule_stays(self, tuned, over_default, has_a_say):
        file = tuned("mqa_logits", ENTRY)
        content = json.loads(file.read_text())
        content["ops"]["mqa_logits"]["entries"][0]["over_default"] = over_default
        file.write_text(json.dumps(content))
        assert (api.FAMILY.choose(PROBLEM).config == OTHER) is has_a_say
        assert (api.FAMILY.choose(PROBLEM).config == by_rule().config) is not has_a_say

    def test_another_bucket_gets_what_the_rule_gives(self, tuned):
        tuned("mqa_logits", ENTRY)
        problem = dataclasses.replace(PROBLEM, num_rows=9)
        assert api.FAMILY.choose(problem).config == by_rule().config

    def test_names_win_with_their_default_config(self, tuned, monkeypatch):
        tuned("mqa_logits", ENTRY)
        assert api.FAMILY.choose(PROBLEM, "torch_chunked").config == by_rule().config
        monkeypatch.setenv("KVSCOUT_MQA_LOGITS_VARIANT", "torch_chunked")
        assert api.FAMILY.choose(PROBLEM).config == by_rule().config
        monkeypatch.setenv("KVSCOUT_MQA_LOGITS_VARIANT", "auto")
        assert api.FAMILY.choose(PROBLEM).config == OTHER

    @pytest.mark.parametrize(
        ("variant", "config"),
        [
            ("torch_chunked", Config(1, 1)),
            ("torch_reference", "Config(dtype=torch.float64)"),  # its rank is 0
            ("triton_staged", "Config(rows_per_wave=1, block_kv=64, num_warps=4, num_stages=3, least_tiles=8)"),
            ("cute_wgmma", "Config()"),
            ("torch_removed", "Config()"),
            ("", ""),
        ],
    )
    def test_what_auto_could_not_take_is_not_taken(self, tuned, variant, config):
        tuned("mqa_logits", (PROBLEM.bucket(), variant, config))
        assert api.FAMILY.choose(PROBLEM) == by_rule()

    @pytest.mark.parametrize(
        ("variant", "config", "sentence"),
        [
            (
                "torch_removed",
                "Config()",
                "torch_removed is tuned and not used: it is none of those that auto takes here",
            ),
            ("torch_chunked", "Config(1, 2, 3)", "torch_chunked is tuned and not used: Config(1, 2, 3) is none of its"),
        ],
    )
    def test_what_is_not_there_is_told_once(self, tuned, said, variant, config, sentence):
        tuned("mqa_logits", (PROBLEM.bucket(), variant, config))
        for _ in range(2):
            vars(api.FAMILY).pop("_choose", None)
            api.FAMILY.choose(PROBLEM)
        (line,) = said()
        assert sentence in line

    def test_a_variant_that_refuses_is_not_taken(self, tuned, monkeypatch):
        tuned("mqa_logits", ENTRY)
        refusing = dataclasses.replace(api.FAMILY.load("torch_chunked"), refuses=lambda problem: "not today")
        monkeypatch.setitem(api.FAMILY._loaded, "torch_chunked", refusing)
        with pytest.raises(kvscout.UnsupportedProblem, match="not today"):
            api.FAMILY.choose(PROBLEM)

    def test_a_config_whose_kernel_is_missing_is_not_taken(self, tuned, said, monkeypatch):
        def load(problem, config):
            if config == OTHER:
                raise KernelUnavailable("no kernel of that")

        tuned("mqa_logits", ENTRY)
        monkeypatch.setitem(
            api.FAMILY._loaded, "torch_chunked", dataclasses.replace(api.FAMILY.load("torch_chunked"), load=load)
        )
        assert api.FAMILY.choose(PROBLEM) == by_rule()
        api.FAMILY.choose(dataclasses.replace(PROBLEM, num_keys=6))
        assert said() == [f"mqa_logits: torch_chunked with {OTHER} is tuned and not used: no kernel of that"]

    def test_a_table_is_read_once(self, tuned):
        file = tuned("mqa_logits", ENTRY)
        assert api.FAMILY.choose(PROBLEM).config == OTHER
        file.unlink()
        assert api.FAMILY.choose(dataclasses.replace(PROBLEM, num_keys=6)).config == OTHER

    def test_calls_give_the_same_result_and_compiled_ones_too(self, tuned, monkeypatch):
        torch.manual_seed(0)
        q, k = (torch.randn(*shape, 64).to(torch.float8_e4m3fn) for shape in ((3, 8), (5,)))
        bounds = torch.tensor([0, 1, 2]).int(), torch.tensor([3, 5, 4]).int()

        def call(q, k):
            return kvscout.fp8_mqa_logits(q, (k, torch.ones(5)), torch.ones(3, 8), *bounds)

        expected = call(q, k)
        tuned("mqa_logits", ENTRY)
        seen = []
        chunked = api.FAMILY.load("torch_chunked")

        def launch(problem, config, args):
            seen.append(config)
            chunked.launch(problem, config, args)

        monkeypatch.setitem(api.FAMILY._loaded, "torch_chunked", dataclasses.replace(chunked, launch=launch))
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for found in (call(q, k), compiled(q, k)):
            torch.testing.assert_close(found, expected)
        assert seen == [OTHER, OTHER]


class TestFallback:
    """What cannot be used costs a line in the log and nothing else."""

    def one_line(self, said):
        for keys in (5, 6):
            assert api.FAMILY.choose(dataclasses.replace(PROBLEM, num_keys=keys)).config == by_rule().config
        (line,) = said()
        return line

    def test_stale(self, tuned, said):
        file = tuned("mqa_logits", ENTRY, fingerprint="0" * 16)
        sentence = "was tuned with other kernels of mqa_logits than these, so its entries for mqa_logits are not used"
        assert self.one_line(said) == f"{file}: {sentence}; run 'kvscout tune'"

    def test_foreign(self, tuned, said):
        file = tuned("mqa_logits", ENTRY, device="NVIDIA H800")
        assert self.one_line(said) == f"{file}: was tuned on 'NVIDIA H800', and this is {model_of('cpu')}"

    @pytest.mark.parametrize(
        ("device", "shown"),
        [
            ("a\n\x1b[2J", r"'a\n\x1b[2J'"),
            (64 * "x", repr(64 * "x")),
            (65 * "x", f"'{64 * 'x'}...'"),
            (["x"], "\"['x']\""),
        ],
    )
    def test_a_foreign_name_is_quoted_and_cut(self, tuned, said, device, shown):
        tuned("mqa_logits", ENTRY, device=device)
        assert f": was tuned on {shown}, and this is " in self.one_line(said)

    @pytest.mark.parametrize(
        ("changed", "sentence"),
        [
            ({"format": 2}, "is no tuned table of format 1"),
            ({"ops": None}, "is no whole table (AttributeError: "),
            ({"ops": {"mqa_logits": {}}}, "is no whole table (KeyError: 'fingerprint')"),
            ({"ops": {"mqa_logits": {"fingerprint": "", "entries": [3]}}}, "is no whole table ("),
            (
                {"ops": {"topk": {"fingerprint": "", "entries": [{"bucket": {"a": []}, "variant": "", "config": ""}]}}},
                "is no whole table (TypeError: ",
            ),
        ],
    )
    def test_not_a_table(self, tuned, said, changed, sentence):
        file = tuned("mqa_logits", ENTRY, **changed)
        assert self.one_line(said).startswith(f"{file}: {sentence}")

    @pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b'"text"'])
    def test_not_json(self, tuned, said, content):
        tuned("mqa_logits", ENTRY).write_bytes(content)
        assert ": is n" in self.one_line(said)

    def test_not_readable(self, tuned, said):
        file = tuned("mqa_logits", ENTRY)
        file.unlink()
        file.mkdir()
        assert self.one_line(said) == f"{file}: cannot be read ({os.strerror(21)})"

    def test_not_there(self, tuned, said):
        file = tuned("mqa_logits", ENTRY)
        file.unlink()
        assert self.one_line(said) == f"KVSCOUT_TUNED_DIR: there is no {file}, so no table of one's own is used"

    def test_no_such_home_folder(self, tuned, said, monkeypatch):
        tuned("mqa_logits", ENTRY)
        monkeypatch.setenv("KVSCOUT_TUNED_DIR", "~no-such-user/x")
        assert self.one_line(said) == "KVSCOUT_TUNED_DIR: '~no-such-user/x' has no home folder"

    def test_no_table_at_all_is_not_worth_a_word(self, tuned, said, monkeypatch):
        tuned("mqa_logits", ENTRY)
        monkeypatch.delenv("KVSCOUT_TUNED_DIR")
        assert api.FAMILY.choose(PROBLEM) == by_rule()
        assert said() == []

    def test_turned_off(self, tuned, said, monkeypatch):
        tuned("mqa_logits", ENTRY)
        monkeypatch.setenv("KVSCOUT_TUNED", "0")
        assert api.FAMILY.choose(PROBLEM) == by_rule()
        assert said() == []

    def test_a_gpu_that_is_not_here_has_no_table(self, tuned, said, monkeypatch):
        tuned("mqa_logits", ENTRY)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert tuning.entry("mqa_logits", api.FAMILY.package, dataclasses.replace(PROBLEM, arch="sm_90")) is None
        assert said() == []


def test_ones_own_table_wins_over_the_packaged_one(tuned, tmp_path, monkeypatch, said):
    larger = dataclasses.replace(PROBLEM, num_rows=100)
    file = tuned("mqa_logits", (PROBLEM.bucket(), "packaged", "a"), (larger.bucket(), "packaged", "b"))
    file.rename(tmp_path / file.name)
    monkeypatch.setattr(tuning, "PACKAGED", tmp_path)
    tuned("mqa_logits", (PROBLEM.bucket(), "own", "c"))
    found = [tuning.entry("mqa_logits", api.FAMILY.package, problem) for problem in (PROBLEM, larger)]
    assert found == [("own", "c"), ("packaged", "b")]
    assert said() == []


def wrong_in(file):
    """What keeps a table from being packaged: it is none, is named after another device, or names what is not there."""
    try:
        model = json.loads(file.read_text())["device"]
        content = tuning.read(file, model)
    except (ValueError, KeyError) as error:
        return [str(error)]
    wrong = [] if tuning.file_name(model) == file.name else [f"is of {model}"]
    for op, section in content["ops"].items():
        wrong += [f"{op} has no {e['variant']}" for e in section["entries"] if e["variant"] not in family(op).names]
    return wrong


def test_packaged_tables_can_be_used():
    assert [fault for file in tuning.PACKAGED.glob("*.json") for fault in wrong_in(file)] == []


def test_what_a_packaged_table_may_not_be_is_seen(tuned):
    file = tuned("mqa_logits", ENTRY)
    assert wrong_in(file) == []
    other = file.rename(file.with_name("nvidia_h200.json"))
    assert wrong_in(other) == [f"is of {model_of('cpu')}"]
    assert wrong_in(tuned("mqa_logits", (PROBLEM.bucket(), "torch_gone", "a"))) == ["mqa_logits has no torch_gone"]
    assert wrong_in(tuned("mqa_logits", ENTRY, format=2)) == ["is no tuned table of format 1"]
    file.write_text("{")
    assert len(wrong_in(file)) == 1


class TestModels:
    """Whose tables are here, for GPUs that are not."""

    @pytest.fixture
    def table(self, tmp_path, monkeypatch):
        """``table(device, arch, sms, folder="own")``: a table of one's own, or a packaged one, that was tuned there."""
        monkeypatch.setenv("KVSCOUT_TUNED_DIR", str(tmp_path / "own"))
        monkeypatch.setattr(tuning, "PACKAGED", tmp_path / "packaged")
        tuning.warn.cache_clear()

        def write(device, *machines, folder="own", **changed):
            runs = [{"machine": {"device": device, **machine}} for machine in machines]
            content = {"format": tuning.FORMAT, "device": device, "runs": runs, "ops": {}} | changed
            (tmp_path / folder).mkdir(exist_ok=True)
            file = tmp_path / folder / tuning.file_name(device)
            file.write_text(json.dumps(content))
            return file

        yield write
        tuning.warn.cache_clear()

    def test_of_the_architecture_with_as_many_multiprocessors(self, table, said):
        assert tuning.models("sm_90", 132) == []
        table("NVIDIA H200", {"arch": "sm_90", "sms": 132}, folder="packaged")
        table("NVIDIA H200", {"arch": "sm_90", "sms": 132})
        table("NVIDIA H100 80GB HBM3", {"arch": "sm_90"}, folder="packaged")
        table("NVIDIA H100 PCIe", {"arch": "sm_90", "sms": 114})
        table("AMD MI300X", {"arch": "gfx942", "sms": 304})
        assert tuning.models("sm_90", 132) == ["NVIDIA H200", "NVIDIA H100 80GB HBM3"]
        assert tuning.models("sm_90", 114) == ["NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3"]
        assert tuning.models("gfx942", 304) == ["AMD MI300X"]
        assert tuning.models("sm_80", 108) == []
        assert said() == []

    def test_one_that_no_call_would_look_into_does_not_count(self, table, said, monkeypatch):
        file = table("NVIDIA H200", {"arch": "sm_90"})
        file.rename(file.with_name("mine.json"))
        assert tuning.models("sm_90", 132) == []
        table("NVIDIA H200", {"arch": "sm_90"})
        assert tuning.models("sm_90", 132) == ["NVIDIA H200"]
        monkeypatch.setenv("KVSCOUT_TUNED", "0")
        assert tuning.models("sm_90", 132) == []
        assert said() == []

    @pytest.mark.parametrize(
        ("machines", "changed", "sentence"),
        [
            ((), {}, "does not say on which architecture it was tuned"),
            (({},), {}, "does not say on which architecture it was tuned"),
            ((), {"runs": None}, "is no whole table (TypeError: "),
            ((), {"runs": [{"machine": "x"}]}, "is no whole table (ValueError: "),
            (({"arch": "sm_90"},), {"format": 2}, "is no tuned table of format 1"),
        ],
    )
    def test_one_that_does_not_say_is_told(self, table, said, machines, changed, sentence):
        file = table("NVIDIA H200", *machines, **changed)
        assert tuning.models("sm_90", 132) == []
        (line,) = said()
        assert line.startswith(f"{file}: {sentence}")


# A package is imported once a process, so each test has one of its own name.
numbers = itertools.count()


class TestFingerprint:
    SOURCE = '"""Says\n\nMeasured: 3 us."""\nimport os\n\n\ndef f(x):\n    """Does."""\n    # why\n    return x + 1\n'

    @pytest.fixture
    def of(self, tmp_path, monkeypatch):
        """The fingerprint of a package with one more file of this source."""
        monkeypatch.syspath_prepend(tmp_path)
        package = tmp_path / f"fingerprinted_{next(numbers)}"
        (package / "variants").mkdir(parents=True)
        (package / "__init__.py").write_text("")

        def of(source):
            (package / "variants" / "torch_a.py").write_text(source)
            tuning.fingerprint.cache_clear()
            return tuning.fingerprint(package.name)

        yield of
        tuning.fingerprint.cache_clear()

    def test_words_do_not_count(self, of):
        source = self.SOURCE.replace("3 us", "4 us").replace("Does", "Does it").replace("# why", "# why not\n\n")
        assert source != self.SOURCE
        assert of(source) == of(self.SOURCE)

    @pytest.mark.parametrize("change", [("x + 1", "x + 2"), ("os", "re"), ("return", "    return"), ("f(x)", "f( x)")])
    def test_code_does(self, of, change):
        assert of(self.SOURCE.replace(*change)) != of(self.SOURCE)

    def test_nothing_but_words_is_left_out_of_the_sources(self, root):
        """Every statement that is no docstring still has its first and its last line."""
        files = [*(root / "kvscout/ops").rglob("*.py"), *(root / "kvscout/kernels").rglob("*.py")]
        assert len(files) > 50
        for file in files:
            source = file.read_text()
            words = {
                line
                for found in tuning.UNREAD.finditer(source)
                for line in range(source.count("\n", 0, found.start()) + 1, source.count("\n", 0, found.end()) + 1)
            }
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.stmt) and not is_docstring(node):
                    assert not {node.lineno, node.end_lineno} & words - ends_in_docstring(node), (file, node.lineno)

    def test_it_differs_between_ops_and_is_cheap_to_ask_again(self):
        found = [tuning.fingerprint(family(op).package) for op in ops()]
        assert len({*found}) == len(found)
        assert all(re.fullmatch("[0-9a-f]{16}", one) for one in found)


def is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def ends_in_docstring(node):
    """The last line of a function or class that ends in a docstring."""
    body = getattr(node, "body", None)
    return {node.end_lineno} if isinstance(body, list) and body and is_docstring(body[-1]) else set()
