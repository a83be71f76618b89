"""Which kernel ``fp8_mqa_logits`` takes for which shape on Hopper, and why it takes none."""

import itertools
from dataclasses import replace

import pytest

from kvscout import UnsupportedProblem
from kvscout.kernels.cute import runtime, toolchain
from kvscout.kernels.cute.program import KernelUnavailable
from kvscout.ops.mqa_logits import cute_tile
from kvscout.ops.mqa_logits.api import FAMILY, NUM_HEADS, Problem
from kvscout.ops.mqa_logits.variants import cute_wgmma
from kvscout.ops.mqa_logits.variants.cute_wgmma import HEAD_DIMS, VARIANT, Config

NAME = "cute_wgmma"
SMALL = {"stage_keys": 64, "kv_stages": 8, "block_cost": 3}

# Rows, keys, heads -> config. A row or a key more or less stands on either side of each threshold.
PINS = {
    # One to four rows: both warpgroups on the same rows.
    (1, 1, 64): Config(1, "keys"),
    (1, 1_500_000, 64): Config(1, "keys"),
    (2, 131072, 64): Config(2, "keys"),
    (3, 131072, 64): Config(4, "keys"),
    (4, 131072, 64): Config(4, "keys"),
    (4, 131072, 128): Config(2, "keys"),
    (4, 131072, 8): Config(4, "keys"),
    # From five on, no more rows than there are.
    (5, 131072, 64): Config(4, **SMALL),
    (5, 131072, 128): Config(2, **SMALL),
    (8, 1 << 24, 32): Config(4, **SMALL),
    (9, 1 << 24, 32): Config(8),
    (16, 131072, 16): Config(8, **SMALL),
    (17, 1 << 24, 16): Config(16),
    (16, 131072, 8): Config(8, **SMALL),
    (64, 1 << 20, 8): Config(16),
    # Half as many rows up to 2 Mi logits, at 32 heads or fewer.
    (1024, 1024, 64): Config(4, **SMALL),
    (1024, 1024, 32): Config(4, **SMALL),
    (1024, 1024, 16): Config(8, **SMALL),
    (1024, 1024, 8): Config(8, **SMALL),
    (1024, 1024, 128): Config(2, **SMALL),
    (1024, 2048, 32): Config(4, **SMALL),
    (1024, 2049, 32): Config(8, **SMALL),
    # Short stages up to 8 Mi logits.
    (2048, 2048, 64): Config(4, **SMALL),
    (2048, 2048, 32): Config(8, **SMALL),
    (2048, 4096, 64): Config(4, **SMALL),
    (2048, 4097, 64): Config(4),
    (4096, 4096, 64): Config(4),
    (4096, 4096, 32): Config(8),
    (4096, 4096, 16): Config(16),
    (4096, 4096, 8): Config(16),
    (4096, 4096, 128): Config(2),
    (1024, 131072, 64): Config(4),
    (17000, 131072, 8): Config(16),
}


def problem(rows, keys, heads=64, dim=128, **words):
    return Problem("sm_90", rows, keys, heads, dim, clean_logits=True, **words)


@pytest.fixture(autouse=True)
def own_choices(forget):
    """No other test's choices."""


@pytest.fixture
def every_kernel(monkeypatch):
    monkeypatch.setattr(runtime, "refusal", lambda program: None)
    monkeypatch.setattr(runtime, "load", lambda program: print)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize(("shape", "config"), PINS.items(), ids=lambda x: str(x) if isinstance(x, tuple) else "")
def test_a_shape_gets_its_config(shape, config, dim, every_kernel):
    for words in ({}, {"has_q_scale": True}):
        choice = FAMILY.choose(problem(*shape, dim, **words))
        assert (choice.variant.name, choice.config) == (NAME, config)


def test_every_config_of_a_call_or_a_tuner_is_among_the_programs():
    programs = list(VARIANT.programs())
    assert len(set(programs)) == len(programs)
    assert len({program.name for program in programs}) == len(programs)
    # Powers of two, and what lies beside them.
    rows = sorted({max(1, (1 << i) + d) for i in range(15) for d in (-1, 0, 1)})
    keys = sorted({max(1, (1 << i) + d) for i in range(0, 22, 3) for d in (-1, 0, 1)})
    seen = set()
    for heads, dim in itertools.product(NUM_HEADS, HEAD_DIMS):
        for s, n in itertools.product(rows, keys):
            seen.add(cute_wgmma._program(heads, dim, VARIANT.default_config(problem(s, n, heads, dim))))
        for config in VARIANT.space(problem(1024, 1024, heads, dim)):
            seen.add(cute_wgmma._program(heads, dim, config))
    # And none is compiled in vain.
    assert seen == set(programs)


def test_every_default_config_is_in_the_space():
    for (rows, keys, heads), dim in itertools.product(PINS, HEAD_DIMS):
        asked = problem(rows, keys, heads, dim)
        assert VARIANT.default_config(asked) in list(VARIANT.space(asked))


def test_every_tile_is_one_that_the_kernel_can_be():
    for program in VARIANT.programs():
        tile = program.spec
        assert tile.columns % 8 == 0
        assert tile.columns <= cute_tile.MAX_COLUMNS
        assert tile.rows & (tile.rows - 1) == 0
        assert tile.block_rows <= 32  # a lane of a warp each, in the schedule and the fill
        assert tile.halves * cute_tile.KEYS * (cute_tile.WARPGROUPS if tile.split == "keys" else 1) == tile.stage_keys
        assert tile.groups * tile.quad_rows == tile.rows
        assert tile.pairs * tile.row_lanes * 2 == tile.heads
        assert tile.groups * tile.pairs * 2 * 4 == tile.columns  # two columns in every eight
        assert tile.stage_keys % cute_tile.COST_KEYS == 0
        assert tile.block_cost > 0  # a share begins within a block


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"head_dim": 256}, "keeps queries in shared memory up to head dimension 128, this is 256"),
        ({"head_dim": 512}, "keeps queries in shared memory up to head dimension 128, this is 512"),
        ({"fnuz": True}, "NVIDIA GPUs have no e4m3fnuz arithmetic; quantise to float8_e4m3fn"),
        ({"arch": "sm_80"}, "CuTe DSL kernels are written for sm_90 (H100, H200); this is sm_80"),
        ({"arch": "sm_100"}, "CuTe DSL kernels are written for sm_90 (H100, H200); this is sm_100"),
        ({"arch": "gfx942"}, "CuTe DSL kernels are written for sm_90 (H100, H200); this is gfx942"),
    ],
)
def test_what_is_not_served_is_told(changed, reason, every_kernel):
    asked = replace(problem(64, 2048), **changed)
    assert FAMILY.refusal(NAME, asked) == reason
    with pytest.raises(UnsupportedProblem, match="cute_wgmma") as raised:
        FAMILY.choose(asked, NAME)
    assert reason in str(raised.value)


@pytest.mark.parametrize(("dim", "name"), [(128, NAME), (256, "triton_staged"), (512, "triton_direct")])
def test_auto_takes_what_serves(dim, name, every_kernel):
    assert FAMILY.choose(problem(1024, 8192, 64, dim)).variant.name == name


def without_tvm_ffi(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "has_loader", lambda: False)
    return toolchain.NO_LOADER


def without_dsl(monkeypatch, tmp_path):
    monkeypatch.setenv("KVSCOUT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(toolchain, "has_loader", lambda: True)
    monkeypatch.setattr(toolchain, "dsl_version", lambda: None)
    return f"{tmp_path} holds no mqa_logits_h64_d128_rows4_keys128x4_cost4 of these sources"


def with_another_dsl(monkeypatch, tmp_path):
    monkeypatch.setenv("KVSCOUT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(toolchain, "has_loader", lambda: True)
    monkeypatch.setattr(toolchain, "dsl_version", lambda: "4.0.0")
    return f"{tmp_path} holds no mqa_logits_h64_d128_rows4_keys128x4_cost4 of these sources"


def without_files(monkeypatch, tmp_path):
    monkeypatch.setenv("KVSCOUT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("KVSCOUT_AOT_ONLY", "1")
    monkeypatch.setattr(toolchain, "has_loader", lambda: True)
    return f"{tmp_path} holds no mqa_logits_h64_d128_rows4_keys128x4_cost4 of these sources (see 'kvscout aot'), and "


@pytest.mark.parametrize("missing", [without_tvm_ffi, without_dsl, with_another_dsl])
def test_without_a_kernel_triton_takes_over_and_says_why(missing, monkeypatch, tmp_path):
    reason = missing(monkeypatch, tmp_path)
    asked = problem(4096, 4096)
    assert (FAMILY.refusal(NAME, asked) or "").startswith(reason)
    assert FAMILY.choose(asked).variant.name == "triton_staged"
    with pytest.raises(UnsupportedProblem) as raised:
        FAMILY.choose(asked, NAME)
    assert reason in str(raised.value)


def test_ahead_of_time_only_auto_raises_for_a_missing_kernel_and_for_nothing_else(monkeypatch, tmp_path, forget):
    reason = without_files(monkeypatch, tmp_path)
    for name in ("auto", NAME):
        with pytest.raises(UnsupportedProblem) as raised:
            FAMILY.choose(problem(4096, 4096), name)
        assert list(raised.value.reasons) == [NAME]
        assert raised.value.reasons[NAME] == f"{reason}KVSCOUT_AOT_ONLY is set"
    assert FAMILY.choose(problem(4096, 4096), "triton_direct").variant.name == "triton_direct"
    assert FAMILY.choose(problem(4096, 4096, 64, 256)).variant.name == "triton_staged"
    forget()
    without_tvm_ffi(monkeypatch, tmp_path)
    assert FAMILY.choose(problem(4096, 4096)).variant.name == "triton_staged"


def test_a_kernel_that_cannot_be_compiled_is_done_without(monkeypatch):
    tried = []

    def fails(program):
        tried.append(program)
        raise KernelUnavailable("it does not link")

    monkeypatch.setattr(toolchain, "has_loader", lambda: True)
    monkeypatch.setattr(toolchain, "cannot_compile", lambda: None)
    monkeypatch.setattr(runtime, "_loaded", fails)
    with pytest.warns(UserWarning, match=f"^mqa_logits: 'auto' does without {NAME}: it does not link$"):
        assert FAMILY.choose(problem(4096, 4096)).variant.name == "triton_staged"
    # Another shape of the same kernel.
    assert FAMILY.choose(problem(4096, 4097)).variant.name == "triton_staged"
    assert len(tried) == 1
    assert FAMILY.refusal(NAME, problem(4096, 4098)) == "it does not link"


@pytest.mark.parametrize("name", ["triton_staged", "torch_chunked", NAME])
def test_the_environment_names_the_variant(name, monkeypatch, every_kernel):
    monkeypatch.setenv("KVSCOUT_MQA_LOGITS_VARIANT", name)
    assert FAMILY.choose(problem(4096, 4096)).variant.name == name
    assert FAMILY.choose(problem(4096, 4096), "triton_direct").variant.name == "triton_direct"


def test_the_environment_s_variant_never_falls_back(monkeypatch, every_kernel):
    monkeypatch.setenv("KVSCOUT_MQA_LOGITS_VARIANT", NAME)
    with pytest.raises(UnsupportedProblem, match="this is 256"):
        FAMILY.choose(problem(4096, 4096, 64, 256))
