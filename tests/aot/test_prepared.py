"""Triton kernels that are missing, damaged or in another's place, and processes that make them at once."""

import json
import shutil
import threading

import pytest

from kvscout.kernels.cute import store, toolchain

pytestmark = [
    pytest.mark.xdist_group("aot"),
    pytest.mark.slow,
    pytest.mark.skipif(toolchain.cannot_compile() is not None, reason="needs CuTe DSL and a C compiler"),
]

# Some calls, kernel by kernel: what Triton says of each, warnings, and why it was refused.
ONE_BY_ONE = """
import warnings
from kvscout.kernels.cute.program import KernelUnavailable
from triton.runtime.jit import JITFunction

with compiling_for(arch), warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    run = JITFunction.run

    def note(self, *arguments, **options):
        try:
            return run(self, *arguments, **options)
        except KernelUnavailable as error:
            print("REFUSED", error)

    JITFunction.run = note
    CALLS
    JITFunction.run = run
print("HITS", sum(hits), "of", len(hits))
for warning in said:
    print("SAID", warning.message)
"""


PLAN = "kvscout.plan_pa_decode(torch.tensor([40]).int(), 1)"


def triton_files(folder, arch="sm_90"):
    return sorted((folder / "triton" / arch).rglob("kernel"))


@pytest.fixture
def copy(prepared, tmp_path):
    """A folder of the test's own."""
    return shutil.copytree(prepared[0], tmp_path / "copy")


def calls(code):
    return ONE_BY_ONE.replace("CALLS", code)


def lines(done, word):
    return [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith(word)]


def test_a_kernel_that_is_missing_is_named_with_what_builds_it(copy, engine):
    refused = lines(engine(calls("call(batch=1)"), copy), "REFUSED")
    name = "kvscout.ops.pa_decode.variants.triton_tile._tile_kernel"
    assert refused[0].startswith(f"{name} for sm_90 (output: *bf16 by 16, lse=None, ")
    assert "query_row: i32 by 16" in refused[0] and "KV_HEADS=1, GROUP=8, " in refused[0]
    assert ", num_warps=4, num_stages=" in refused[0]
    assert refused[0].endswith(
        f"{copy} holds no such kernel, and KVSCOUT_AOT_ONLY is all; "
        "'kvscout aot --shapes FILE --archs sm_90' compiles what the shapes of FILE ask for"
    )


def test_only_all_is_said_of_triton_s_kernels(tmp_path, engine):
    """1 is for those who prepared CuTe DSL kernels alone."""
    (tmp_path / "empty" / "triton").mkdir(parents=True)
    done = engine(calls(PLAN), tmp_path / "empty", aot_only="1")
    assert done.stdout == "HITS 0 of 1\n"


@pytest.mark.parametrize("aot_only", ["0", "all"])
def test_what_is_damaged_is_compiled_again_or_refused_and_never_taken(copy, engine, aot_only):
    first, second, third, fourth, *rest = triton_files(copy)
    content = first.read_bytes()
    first.write_bytes(content[:-1])
    second.write_bytes(b"")
    third.write_bytes(b"no archive" * 1000)
    # Whole, and another kernel.
    fourth.write_bytes(content)
    done = engine(calls("call()"), copy, aot_only=aot_only)
    damaged = [f"{path} is damaged or not readable" for path in (first, second, third, fourth)]
    if aot_only == "all":
        assert lines(done, "SAID") == []
        refused = [line.partition("): ")[2].partition(", and")[0] for line in lines(done, "REFUSED")]
        assert sorted(set(refused)) == damaged
    else:
        assert lines(done, "REFUSED") == []
        assert sorted(lines(done, "SAID")) == [f"compiled again: {sentence}" for sentence in damaged]
        assert lines(done, "HITS") == [f"{len(rest)} of {len(rest) + 4}"]


def test_a_cache_of_triton_s_that_cannot_be_written_is_said(copy, engine, tmp_path):
    (tmp_path / "triton").write_text("a file, not a folder")
    refused = lines(engine(calls(PLAN), copy), "REFUSED")
    assert f": Triton's cache {tmp_path / 'triton'} cannot be written (Not a directory); TRITON_CACHE_DIR" in refused[0]


def test_what_is_damaged_in_triton_s_cache_is_replaced(copy, engine):
    damage = """
    for path in Path(knobs.cache.dir).rglob("__grp__*"):
        path.write_text("garbage")
    from kvscout.ops.pa_plan.variants.triton_single_block import _plan
    _plan.device_caches.clear()
    """
    assert engine(calls(f"{PLAN}{damage}{PLAN}"), copy).stdout == "HITS 2 of 2\n"


def test_a_folder_that_is_not_there_is_none(engine, tmp_path):
    assert engine(calls(PLAN), tmp_path / "nowhere", aot_only="0").stdout == "HITS 0 of 1\n"


def test_other_sources_are_other_kernels(copy, engine):
    """As if the folder were another version's: none of its kernels is taken."""
    (refused,) = lines(engine("triton_store.sources_digest = lambda: 'other'" + calls(PLAN), copy), "REFUSED")
    assert "holds no such kernel" in refused


def test_so_are_those_of_another_version_of_triton(copy, engine):
    (refused,) = lines(engine("import triton; triton.__version__ = '3.6.1'" + calls(PLAN), copy), "REFUSED")
    assert "holds no such kernel" in refused


def test_processes_that_make_the_same_kernels_share_the_work(run_python, tmp_path):
    shapes, folder, done = tmp_path / "shapes.json", tmp_path / "out", []
    attend = {"query_heads": 8, "kv_heads": 1, "head_dim": 64, "pages": 16, "layouts": "nhd", "batches": 1}
    shapes.write_text(json.dumps({"a": {"attend": attend | {"caches": "bfloat16", "written_tokens": 1}}}))
    words = (
        "-m",
        "kvscout",
        "aot",
        "--shapes",
        str(shapes),
        "--archs",
        "sm_80",
        "--output",
        str(folder),
        "--jobs",
        "1",
    )
    processes = [threading.Thread(target=lambda: done.append(run_python(*words))) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    states = [[line.split()[4] for line in one.stdout.splitlines() if " sm_80 " in line] for one in done]
    for of_a_kernel in zip(*states, strict=True):
        assert sorted(of_a_kernel) == ["compiled", "kept"]
    assert len(states[0]) == len(triton_files(folder, "sm_80")) == 4
    assert all(map(store.is_whole, triton_files(folder, "sm_80")))
    # Nothing but the files is left.
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 4
