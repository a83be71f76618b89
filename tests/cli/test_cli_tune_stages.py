"""The order of ``kvscout tune``: what is compiled when, by whom, and what ends it early."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import pytest
import torch

from kvscout.cli import builds, console, tune_stages
from kvscout.cli.builds import Built
from kvscout.cli.tune_stages import Compiler, Limit, OutOfTime, Stopped, Work
from kvscout.kernels.cute import runtime, store
from kvscout.kernels.cute.program import Program
from kvscout.kernels.triton_store import Kernel, Specialisation
from kvscout.testing.scout import Scouted
from kvscout.testing.sweep import FAILED, ContextLost
from kvscout.testing.tune import Begun, Key, Trial, Tuned

CPU = torch.device("cpu")
BUCKETS = [frozenset({("size", size)}) for size in (1, 2, 4)]


def kernel(name):
    return Kernel("kvscout.ops.x.variants.triton_x", name, "sm_90", name * 32, Specialisation({}, {}, {}, {}))


A, B, C, D, PLAN = map(kernel, "abcdp")
OWN, OTHER, SLOW = Key("triton_x", "own"), Key("triton_x", "other"), Key("triton_y", "other")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSCOUT_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def events(monkeypatch):
    """What happens, in its order; kernels are made at once, and ``events.ends(kernel, error)`` is what that raises."""
    log = []

    def results(pool, kernels, folder):
        if kernels:
            log.append("compile " + " ".join(kernel.function if pool else "nothing" for kernel in kernels))
        for kernel in kernels:
            store.write(builds.file_of(folder, kernel), b"")
            yield kernel, Built(0.5)

    def begin(bucket, cases, where, by, **options):
        log.append(f"begin {cases[0].name} within {options['within']}")
        trials = [[Trial("x", case.name, *OWN, "passed")] for case in cases]
        return Begun("x", bucket, cases, trials, {SLOW.variant: "slow"})

    def finish(begun, where, by, **options):
        log.append(f"finish {begun.cases[0].name}")
        return Tuned("x", begun.bucket, begun.cases, trials=[Trial("x", begun.cases[0].name, *OTHER, FAILED, "bad")])

    monkeypatch.setattr(builds, "results", results)
    monkeypatch.setattr(tune_stages.tune, "begin", begin)
    monkeypatch.setattr(tune_stages.tune, "finish", finish)
    monkeypatch.setattr(tune_stages.workers, "pool", lambda number: contextlib.nullcontext(f"pool of {number}"))
    return log


def work(bucket, name, **kernels):
    found = {OWN: (A,), OTHER: (A, B), SLOW: (C,)} | kernels.get("also", {})
    known = Scouted(bucket, (OWN,), (PLAN,), found)
    return Work("x", bucket, [SimpleNamespace(op="x", name=name)], [known])


def search(items, found, jobs=2, seconds=None):
    options = {"seed": 0, "within": 1.25, "seconds_per_case": None}
    tune_stages.search(items, CPU, None, found, Limit(seconds), jobs, **options)


class TestOrder:
    def test_own_choices_first_and_what_comes_near_then(self, events, cache, capsys):
        found = []
        search([work(BUCKETS[0], "one"), work(BUCKETS[1], "two", also={OTHER: (D,)})], found)
        assert events == [
            "compile p a",
            "begin one within 1.25",
            "begin two within 1.25",
            "compile b d",
            "finish one",
            "finish two",
        ]
        assert [tuned.bucket for tuned in found] == BUCKETS[:2]
        assert "FAILED x one triton_x other: bad\n" in capsys.readouterr().err

    def test_batch_after_batch_is_finished(self, events, cache, monkeypatch):
        monkeypatch.setattr(tune_stages, "BATCH", 2)
        search([work(bucket, str(i)) for i, bucket in enumerate(BUCKETS)], [])
        times = [event.partition(" within")[0] for event in events if not event.startswith("compile")]
        assert times == ["begin 0", "begin 1", "finish 0", "finish 1", "begin 2", "finish 2"]

    def test_what_is_compiled_is_said_now_and_then(self, events, cache, capsys, monkeypatch):
        monkeypatch.setattr(console, "LINE_EVERY_S", 0.0)
        search([work(BUCKETS[0], "one")], [])
        lines = capsys.readouterr().err.splitlines()
        assert lines[:3] == [
            "tune: 0 of 1 (1 of 2 kernels compiled)",
            "tune: 0 of 1 (2 of 2 kernels compiled)",
            "tune: 0 of 1 x one",
        ]

    def test_one_process_alone_compiles_nothing_ahead(self, events, cache):
        search([work(BUCKETS[0], "one")], [], jobs=1)
        assert events == ["begin one within 1.25", "finish one"]

    @pytest.mark.parametrize(
        ("reading", "last"), [(1, "begin one within 1.25"), (2, "begin two within 1.25"), (3, "finish one")]
    )
    def test_the_time_may_end_anywhere(self, events, cache, monkeypatch, reading, last):
        """The clock is read when the limit is made, and before each bucket of each stage."""
        now = iter([0] * (1 + reading) + [100] * 9)
        monkeypatch.setattr(tune_stages, "time", SimpleNamespace(monotonic=lambda: next(now)))
        found = []
        with pytest.raises(OutOfTime, match=r"^the 50 s of --seconds were over$"):
            search([work(BUCKETS[0], "one"), work(BUCKETS[1], "two")], found, jobs=1, seconds=50)
        assert events[-1] == last
        assert len(found) == (reading == 3)


class TestCompiler:
    def make(self, kernels, seconds=None):
        said = []
        with console.Progress(1, "tune"):
            Compiler("pool", Limit(seconds), said.append).make(kernels)
        return said

    def test_each_kernel_once_and_none_that_is_there(self, events, cache):
        store.write(builds.file_of(cache, B), b"")
        assert self.make([A, B, A, C]) == ["1 of 2 kernels compiled", "2 of 2 kernels compiled"]
        assert events == ["compile a c"]
        assert self.make([A, B, C]) == []

    def test_nothing_that_may_not_be_compiled(self, events, cache, monkeypatch):
        program = Program("k", "kvscout.ops.mqa_logits.cute_launch:build", 1)
        monkeypatch.setattr(runtime, "_why_no_compile", lambda: None)
        monkeypatch.setattr(runtime, "refusal", lambda program: "there is no driver")
        monkeypatch.setenv("KVSCOUT_AOT_ONLY", "all")
        self.make([A, program])
        monkeypatch.setenv("KVSCOUT_AOT_ONLY", "1")
        self.make([program])
        monkeypatch.setattr(runtime, "refusal", lambda program: None)
        monkeypatch.setattr(runtime, "_why_no_compile", lambda: "KVSCOUT_AOT_ONLY is set")
        self.make([program])
        assert events == []
        self.make([A])
        assert events == ["compile a"]

    def test_a_kernel_that_kills_its_process_ends_the_run(self, events, cache, monkeypatch):
        """Launched, it would end the process that times."""
        monkeypatch.setattr(builds, "results", lambda *args: [(A, Built(0, "it ended", killed=True))])
        with pytest.raises(Stopped, match=r"^a kernel killed the process that compiled it: it ended$"):
            self.make([A])

    def test_one_that_does_not_compile_does_not(self, events, cache, monkeypatch):
        monkeypatch.setattr(builds, "results", lambda *args: [(A, Built(0, "ValueError: no")), (B, Built(1))])
        assert self.make([A, B])[-1] == "2 of 2 kernels compiled"

    def test_nobody_waits_longer_than_there_is_time(self, events, cache, monkeypatch):
        now = iter([0, 1, 9])
        monkeypatch.setattr(tune_stages, "time", SimpleNamespace(monotonic=lambda: next(now)))
        with pytest.raises(OutOfTime):
            self.make([A, B, C], seconds=5)
        assert [builds.file_of(cache, one).exists() for one in (A, B, C)] == [True, True, False]


class TestScouts:
    @pytest.fixture
    def threads(self, monkeypatch):
        """``threads(scout)``: what stands in for processes, so that functions of the tests' own may run there."""

        def use(scout):
            monkeypatch.setattr(tune_stages, "scout", scout)
            monkeypatch.setattr(tune_stages, "bucket_of", lambda case, where, seed: f"{case} alone with {seed}")
            monkeypatch.setattr(tune_stages.workers, "pool", lambda number, start: ThreadPoolExecutor(number))
            return list(tune_stages.scouted(["a", "b"], CPU, 7, 2))

        return use

    def test_no_case_takes_no_process(self):
        assert list(tune_stages.scouted([], CPU, 7, 2)) == []

    def test_each_case_is_scouted(self, threads):
        assert threads(lambda *args: Scouted(args)) == [
            ("a", Scouted(("a", CPU, "cpu", 7))),
            ("b", Scouted(("b", CPU, "cpu", 7))),
        ]

    @pytest.mark.parametrize("ends", [None, ContextLost("gone")])
    def test_what_only_one_process_has_room_for_is_prepared_there(self, threads, ends):
        def scout(case, *more):
            if case == "a" and ends is not None:
                raise ends
            return "OutOfMemoryError: no room" if case == "a" else Scouted(None)

        assert threads(scout) == [("b", Scouted(None)), ("a", "a alone with 7")]

    def test_a_process_that_ends_is_said(self, threads):
        def scout(*args):
            raise BrokenProcessPool("gone")

        with pytest.raises(Stopped, match=r"^a process that made the inputs of cases has ended: gone$"):
            threads(scout)


@pytest.mark.gpu
def test_for_real(run_python, tmp_path):
    """On a GPU: kernels are compiled ahead into the cache, and what they take is timed."""
    env = {"KVSCOUT_CACHE_DIR": str(tmp_path / "cache"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    words = ("tune", "mqa_logits", "--case", "1024x1024-h32", "--jobs", "2", "--output", str(tmp_path / "t.json"))
    done = run_python("-m", "kvscout", *words, env=env)
    assert "t.json: 1 entry" in done.stdout
    assert list((tmp_path / "cache").rglob("triton_staged._kernel/*/kernel"))
