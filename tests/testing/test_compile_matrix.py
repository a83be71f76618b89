"""What Triton makes of every variant for every architecture, compiled on a machine that need have none of them.

Numbers come from machine code; whether it computes the right thing is for the cases to say.
"""

import functools
import json
import pathlib
import re
import sys

import pytest

from kvscout.device import SHARED_BYTES
from kvscout.kernels.triton import WAVES_PER_SIMD
from kvscout.testing import compile_matrix
from kvscout.testing.case import family, ops
from kvscout.testing.compile_matrix import ARCHS, CASES, EXHAUSTIVE, GFX1250

pytestmark = pytest.mark.slow

# One process compiles for all of a group: Triton must not be in interpreter mode, and importing torch takes seconds.
COMPILE = """
import json, sys
from kvscout.testing import compile_matrix
kind, *archs = sys.argv[1:]
rows = [*compile_matrix.compile_all(archs, getattr(compile_matrix, kind))]
if kind == "EXHAUSTIVE":
    rows += compile_matrix.compile_all(archs, compile_matrix.CASES, every_config=True)
print(json.dumps(rows))
"""

GROUPS = {
    "nvidia": tuple(arch for arch in ARCHS if arch.startswith("sm_")),
    "amd": tuple(arch for arch, of in ARCHS.items() if arch.startswith("gfx") and of.triton != GFX1250),
    "gfx1250": ("gfx1250",),
}
GROUP_OF = {arch: group for group, archs in GROUPS.items() for arch in archs}

EVERY_ARCH = [
    pytest.param(kind, arch, marks=[pytest.mark.xdist_group(f"compile {GROUP_OF[arch]}"), *marks], id=f"{arch}{name}")
    for kind, name, marks in (("CASES", "", []), ("EXHAUSTIVE", "-exhaustive", [pytest.mark.exhaustive]))
    for arch in ARCHS
]
BY_NAME = {(case.op, case.name): case for case in (*CASES, *EXHAUSTIVE)}


def other_triton(root):
    """The folder of the Triton for gfx1250, or a failure that says how to get it."""
    folder = pathlib.Path(sys.prefix) / "gfx1250"
    pinned = re.search(r"==(\S+)", (root / "requirements" / GFX1250).read_text())[1]
    if not (folder / f"triton-{pinned}.dist-info").is_dir():
        pytest.fail(
            f"Triton {pinned}, which alone compiles for gfx1250, is not in {folder}. Run the suite by `make test`, "
            f"which installs it there (286 MB); or `pip install --no-deps --target {folder} triton=={pinned}`; "
            "or leave these tests out: -k 'not gfx1250'",
            pytrace=False,
        )
    return folder, pinned


@pytest.fixture(scope="session")
def compiled(run_python, root):
    """``compiled(kind, arch)``: what the cases of a kind became on an architecture, a row for each kernel."""

    @functools.cache
    def of_group(kind, group):
        env = {}
        if group == "gfx1250":
            folder, pinned = other_triton(root)
            env = {"PYTHONPATH": f"{folder}:{root}", "TRITON_DEFAULT_FP_FUSION": "1"}
        rows = json.loads(run_python("-c", COMPILE, kind, *GROUPS[group], env=env, timeout=3600).stdout)
        if group == "gfx1250":
            assert {row["triton"] for row in rows} == {pinned}
        return rows

    def of_arch(kind, arch):
        rows = [row for row in of_group(kind, GROUP_OF[arch]) if row["arch"] == arch]
        assert rows
        return rows

    return of_arch


@pytest.mark.parametrize(("kind", "arch"), EVERY_ARCH)
class TestCompiled:
    def test_nothing_spills_and_everything_fits(self, compiled, kind, arch):
        for row in compiled(kind, arch):
            assert row["shared"] <= SHARED_BYTES[arch], row
            # Others than the default configs were made for Hopper.
            assert row["stack"] == 0 or not (row["default"] or arch == "sm_90"), row

    def test_simds_have_room_for_a_second_wave(self, compiled, kind, arch):
        """``WAVES_PER_SIMD``, as the configs say; on NVIDIA GPUs copies run beside the program that waits for them."""
        for row in compiled(kind, arch):
            if arch.startswith("gfx") and row["default"]:
                # As triton_tile says of this head dimension.
                is_wide = row["op"] == "pa_decode" and "-d512-" in row["case"] and arch != "gfx1250"
                assert row["waves"] >= (1 if is_wide else WAVES_PER_SIMD), row

    def test_scores_multiply_e4m3_as_it_is(self, compiled, kind, arch):
        rows = [row for row in compiled(kind, arch) if row["op"] == "mqa_logits"]
        assert {row["variant"] for row in rows} == {"triton_direct", "triton_staged"}
        for row in rows:
            case = BY_NAME["mqa_logits", row["case"]]
            # Instructions of Hopper and Blackwell that know e4m3 have 64 rows, which are heads in triton_direct.
            too_few = arch in ("sm_90", "sm_100") and row["variant"] == "triton_direct" and case.heads < 64
            widened = too_few or arch == "sm_80"
            assert (row["half"] > 0) == widened, row
            assert (row["e4m3"] > 0) == (not widened), row

    def test_scores_are_one_kernel_that_keeps_nan(self, compiled, kind, arch):
        """The interpreter cannot tell: to it, every maximum keeps NaN."""
        for row in compiled(kind, arch):
            if row["op"] == "mqa_logits":
                assert row["kernels"] == 1, row
                assert row["torch_ops"] == [], row
                assert row["relu"] > 0, row

    def test_attention_multiplies_16_bits(self, compiled, kind, arch):
        """On purpose, of e4m3 caches too: probabilities of 8 bits would be too coarse."""
        rows = [row for row in compiled(kind, arch) if row["op"] == "pa_decode"]
        tiles = [row for row in rows if row["name"] == "_tile_kernel"]
        assert tiles
        assert {row["case"] for row in tiles} == {row["case"] for row in rows}
        for row in rows:
            assert row["e4m3"] == 0, row
            assert (row["half"] > 0) == (row in tiles), row


def test_every_triton_variant_is_compiled_for_every_architecture():
    """The table in the docs says so, which is made of this set."""
    names = {(op, name) for op in ops() for name in family(op).names if name.startswith("triton_")}
    assert compile_matrix.compiled() == {(op, name, arch) for op, name in names for arch in ARCHS}


@pytest.mark.parametrize("arch", ARCHS)
def test_its_shared_memory_is_known(arch):
    assert arch in SHARED_BYTES


def test_without_the_other_triton_the_test_says_how_to_get_it(monkeypatch, root, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match=r"Run the suite by `make test`, which installs it there"):
        other_triton(root)
