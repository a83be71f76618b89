"""What becomes of the outputs that threads of ``cute_wgmma`` hold, run as Python: which element ends up where."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvscout.ops.pa_decode.cute_tile import MATH_THREADS, MEANS, REDUCE_FEW, REDUCE_THREADS
from kvscout.ops.pa_decode.variants.cute_wgmma import VARIANT
from tests.ops.mqa_logits import lanes
from tests.ops.mqa_logits.lanes import Int32
from tests.ops.pa_decode.device import Float32, Memory, code_of

GROUP, HEADS, HEAD, SEQUENCE = 9, 2, 1, 1
CAPACITY, SLOT = 12, 3

TILES = [
    program.spec
    for program in VARIANT.programs()
    if program.spec.blocks == 1
    and program.spec.cache == "bf16"
    and program.spec.layout == "plain_v"
    and not program.spec.cluster
]

QUADS = [program.spec for program in VARIANT.programs() if program.spec.warpgroups == 1 and program.spec.page == 16]

BY_ROWS = {program.spec.cache: program.spec for program in VARIANT.programs() if program.spec.by_rows}


def expected(dim):
    """``[GROUP, dim]``, each element another number, of those that float16 holds."""
    return np.arange(dim)[None] + 256 * (np.arange(GROUP)[:, None] % 8)


class Outputs:
    """Outputs, their logarithms, the plan and partial results of one call."""

    def __init__(self, tile, count):
        self.output = np.full((2, GROUP * HEADS, tile.dim), np.nan, np.float16)
        self.lse = np.full((2, GROUP * HEADS), np.nan, np.float32)
        dtype = {2: np.float16, 4: np.float32}[tile.partial_bytes]
        self.partials = np.full((HEADS, GROUP, CAPACITY, tile.dim), np.nan, dtype)
        self.stats = np.full((HEADS, GROUP, CAPACITY, 2), np.nan, np.float32)
        plan = np.array([[0, 0], [SLOT, count]], np.int32)
        value_scales = np.array([np.nan, 2], np.float32)
        self.memory = Memory(tile.places.size, [self.output, self.lse, self.partials, self.stats, plan, value_scales])
        at = self.memory.address
        self.data = SimpleNamespace(
            output=at(0), output_row=GROUP * HEADS * tile.dim * 2, output_head=tile.dim * 2, lse=at(1),
            lse_row=GROUP * HEADS * 4, partial_out=at(2), partial_stats=at(3), reduce_info=at(4), sinks=0,
            query_length=1, group=GROUP, per_group=np.float32(1 / GROUP), capacity=CAPACITY, is_float16=1,
            num_sequences=2, value_factor=np.float32(1 / 4), value_scale=at(5), values_by_token=0, value_scale_head=4,
        )  # fmt: skip

    def merge_warpgroups(self, tile, partitions):
        """Give every thread what the matrix unit would leave it of :func:`expected`, half of it to each warpgroup."""
        merge = code_of("cute_outputs", self.memory.ptx).merge_warpgroups
        wanted = np.zeros((tile.rows, tile.dim), np.float32)
        wanted[:GROUP] = expected(tile.dim)
        work = SimpleNamespace(first_row=Int32(0), kv_head=HEAD, sequence=SEQUENCE, slot=SLOT)
        own = tile.own_columns

        def one(warp, lane):
            group, warp = warp >> 2, warp & 3
            outputs = [None] * (tile.own_elements * own)
            for column in range(own):
                row = column // 2 * 8 + lane % 4 * 2 + column % 2
                for half in range(tile.dim // 64):
                    for second in range(2):
                        element = 64 * half + 16 * warp + 8 * second + lane // 4
                        outputs[(2 * half + second) * own + column] = Float32(wanted[row, element] / 2)
            references, sums = [Float32(2)] * own, [Float32(1 / 64)] * own
            merge(
                tile, references, sums, outputs, Float32(1), partitions, group, Int32(warp), lane,
                Int32(group * 128 + warp * 32 + lane), Int32(0), self.data, work,
            )  # fmt: skip

        lanes.run(one, MATH_THREADS, 0, 1)

    def merge_one_warpgroup(self, tile, partitions, outputs, sums, references, factor):
        """Give every thread of a single one its elements of ``[rows, dim]``, its sums and its references.

        ``sums`` are ``[rows, warp, eight]``, eight lanes of a warp having a part of a row's each.
        """
        merge = code_of("cute_outputs", self.memory.ptx).merge_warpgroups
        work = SimpleNamespace(first_row=Int32(0), kv_head=HEAD, sequence=SEQUENCE, slot=SLOT)
        own = tile.own_columns

        def one(warp, lane):
            rows = [column // 2 * 8 + lane % 4 * 2 + column % 2 for column in range(own)]
            elements = [
                64 * half + 16 * warp + 8 * second + lane // 4 for half in range(tile.dim // 64) for second in range(2)
            ]
            mine = [Float32(outputs[row, element]) for element in elements for row in rows]
            merge(
                tile, [Float32(references[row]) for row in rows], [Float32(sums[row, warp, lane // 4]) for row in rows],
                mine, Float32(factor), partitions, Int32(0), warp, lane, Int32(warp * 32 + lane), Int32(0), self.data,
                work,
            )  # fmt: skip

        lanes.run(one, tile.math_threads, 0, 1)

    def merge_rows(self, tile, partitions, unit, factor):
        """The same where query rows are the rows of products, of outputs times ``unit`` that ``factor`` multiplies."""
        merge = code_of("cute_rows", self.memory.ptx)._merge_warpgroups
        wanted = np.zeros((tile.rows, tile.dim), np.float32)
        wanted[:GROUP] = expected(tile.dim) * unit
        self.data.value_factor = np.float32(factor / 2)
        work = SimpleNamespace(first_row=Int32(0), kv_head=HEAD, sequence=SEQUENCE, slot=SLOT)

        def one(warp, lane):
            group, warp = warp >> 2, warp & 3
            first_row = warp * 16 + lane // 4
            outputs = [
                Float32(wanted[first_row + 8 * row, 8 * j + lane % 4 * 2 + e] / 2)
                for j in range(tile.dim // 8)
                for row in range(2)
                for e in range(2)
            ]
            # Four lanes have a part of a sum each.
            references, sums = [Float32(2)] * 2, [Float32(1 / 8)] * 2
            merge(
                tile, references, sums, outputs, Float32(factor), partitions, group, Int32(first_row),
                Int32(warp * 32 + lane), Int32(lane), Int32(0), self.data, work,
            )  # fmt: skip

        lanes.run(one, MATH_THREADS, 0, 1)

    def reduce(self, tile):
        reduce = code_of("cute_reduce", self.memory.ptx).reduce_sequences

        # Two blocks' warps, one block after the other.
        warps = REDUCE_THREADS // 32

        def one(warp, lane):
            for block in range(2):
                first = Int32(block * warps + warp)
                reduce(tile, lane, Int32(SEQUENCE), 2, first, 2 * warps, HEAD, self.data, tile.blocks > 1)

        lanes.run(one, REDUCE_THREADS, 0, 1)

    def check(self, dim, scale=1):
        rows = slice(HEAD * GROUP, (HEAD + 1) * GROUP)
        assert np.array_equal(self.output[SEQUENCE, rows], expected(dim) * scale)
        assert self.lse[SEQUENCE, rows] == pytest.approx(2, abs=1e-5)
        # Nothing of another head or sequence.
        assert np.isnan(self.output).sum() == self.output.size - GROUP * dim
        assert np.isnan(self.lse).sum() == self.lse.size - GROUP


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
def test_every_element_of_a_row_is_stored_in_its_place(tile):
    outputs = Outputs(tile, 1)
    outputs.merge_warpgroups(tile, 1)
    outputs.check(tile.dim)


@pytest.mark.filterwarnings("ignore:overflow encountered in scalar multiply")
@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("tile", QUADS, ids=lambda tile: tile.name)
def test_a_single_warpgroup_stores_what_it_has(tile, partitions):
    generator = np.random.default_rng(tile.dim)
    held = generator.normal(size=(tile.rows, tile.dim)).astype(np.float32)
    sums = generator.uniform(0, 9, (tile.rows, 4, 8)).astype(np.float32)
    references = generator.normal(size=tile.rows).astype(np.float32) * 50
    outputs = Outputs(tile, partitions)
    outputs.merge_one_warpgroup(tile, partitions, held, sums, references, 0.75)
    totals = sums.astype(np.float64).sum((1, 2))[:GROUP]
    wanted = held[:GROUP].astype(np.float64) * 0.75
    if partitions > 1:
        # Where a row's elements lie, only the merge knows: its second partial result is the same here.
        assert np.isnan(outputs.partials).sum() == outputs.partials.size - GROUP * tile.dim
        assert outputs.stats[HEAD, :, SLOT, 0] == pytest.approx(references[:GROUP])
        assert outputs.stats[HEAD, :, SLOT, 1] == pytest.approx(totals, rel=1e-6)
        for partial in (outputs.partials, outputs.stats):
            partial[HEAD, :, SLOT + 1] = partial[HEAD, :, SLOT]
        outputs.reduce(tile)
    rows = slice(HEAD * GROUP, (HEAD + 1) * GROUP)
    # float16 rounds to 2^-11.
    assert outputs.output[SEQUENCE, rows] == pytest.approx(wanted / totals[:, None], rel=6e-4, abs=1e-7)
    assert outputs.lse[SEQUENCE, rows] == pytest.approx(references[:GROUP] + np.log(totals * partitions), abs=1e-4)
    assert np.isnan(outputs.output).sum() == outputs.output.size - GROUP * tile.dim
    assert np.isnan(outputs.lse).sum() == outputs.lse.size - GROUP


@pytest.mark.filterwarnings("ignore:overflow encountered in scalar multiply")
@pytest.mark.parametrize("count", [1, 2, REDUCE_FEW + 1])
@pytest.mark.parametrize(("unit", "factor"), [(1 / 8, 1 / 2), (2.0**-28, 2.0**20)], ids=["large", "small"])
@pytest.mark.parametrize("tile", BY_ROWS.values(), ids=BY_ROWS)
def test_rows_of_products_become_the_same_outputs(tile, unit, factor, count):
    outputs = Outputs(tile, count)
    outputs.merge_rows(tile, count, unit, factor)
    if count > 1:
        mine = slice(SLOT, SLOT + 1)
        assert np.isnan(outputs.partials).sum() == outputs.partials.size - GROUP * tile.dim
        for partial in (outputs.partials, outputs.stats):
            partial[HEAD, :, SLOT : SLOT + count] = partial[HEAD, :, mine]
        outputs.reduce(tile)
        outputs.lse -= np.log(np.float32(count))
    outputs.check(tile.dim, unit * factor)


# What a warpgroup or a task has no token of, has sums of 0; what it has little of weighs as little.
@pytest.mark.filterwarnings("ignore:overflow encountered in scalar multiply")
@pytest.mark.parametrize("count", [3, REDUCE_FEW + 1])
def test_means_of_values_are_merged_by_their_weights(count):
    tile = BY_ROWS["e4m3"]
    outputs = Outputs(tile, count)
    generator = np.random.default_rng(count)
    means = generator.normal(size=(GROUP, count, tile.dim)).astype(np.float16)
    outputs.partials[HEAD, :, SLOT : SLOT + count] = means * np.float16(MEANS)
    tops, sums = generator.uniform(-3, 3, (2, GROUP, count)).astype(np.float32)
    sums = np.maximum(sums, 0)
    sums[:, 0] = 1
    outputs.stats[HEAD, :, SLOT : SLOT + count] = np.stack([tops, sums], -1)
    outputs.reduce(tile)
    weights = np.exp(tops.astype(np.float64)) * sums
    weights /= weights.sum(1, keepdims=True)
    wanted = np.einsum("rp,rpd->rd", weights, means.astype(np.float64)) / 2
    # Four threads share a row, pairs of neighbours in turn, and each stores eight of its elements at once.
    pairs = np.arange(tile.dim).reshape(4, 4, 4, 2)
    wanted = wanted[:, pairs.swapaxes(1, 2).argsort(None)]
    found = outputs.output[SEQUENCE, HEAD * GROUP : (HEAD + 1) * GROUP]
    assert found == pytest.approx(wanted, rel=6e-4, abs=1e-6)


@pytest.mark.filterwarnings("ignore:overflow encountered in scalar multiply")
@pytest.mark.parametrize(
    ("count", "is_late", "wanted"),
    [(1, True, ["launch", "wait"]), (2, True, ["wait", "merge", "launch"]), (2, False, ["launch", "wait", "merge"])],
)
def test_a_merge_lets_the_next_kernel_begin(count, is_late, wanted):
    tile = QUADS[0]
    outputs, events = Outputs(tile, count), []
    outputs.partials[:], outputs.stats[:] = 0, 1
    ptx = outputs.memory.ptx
    store = ptx.store

    def note(event):
        if lanes._lane.thread == 0 and event not in events:
            events.append(event)

    def note_store(*arguments, **words):
        note("merge")
        store(*arguments, **words)

    ptx.store = note_store
    arch = {
        "griddepcontrol_wait": lambda: note("wait"),
        "griddepcontrol_launch_dependents": lambda: note("launch"),
    }
    reduce = code_of("cute_reduce", ptx, arch).reduce_sequences

    def one(warp, lane):
        reduce(tile, lane, Int32(0), Int32(1), Int32(0), 1, HEAD, outputs.data, is_late)

    lanes.run(one, 32, 0, 1)
    assert events == wanted


# A partial result that is not there counts from the least float on.
@pytest.mark.filterwarnings("ignore:overflow encountered in scalar multiply")
@pytest.mark.parametrize(("dim", "count"), [(64, 2), (128, 2), (256, 2), (64, REDUCE_FEW + 1), (256, REDUCE_FEW + 1)])
def test_partial_results_are_merged_as_they_were_stored(dim, count):
    tile = next(tile for tile in TILES if tile.dim == dim)
    outputs = Outputs(tile, count)
    outputs.merge_warpgroups(tile, count)
    mine = slice(SLOT, SLOT + 1)
    assert np.isnan(outputs.partials).sum() == outputs.partials.size - GROUP * dim
    # The others' partial results are the same.
    for partial in (outputs.partials, outputs.stats):
        partial[HEAD, :, SLOT : SLOT + count] = partial[HEAD, :, mine]
    outputs.reduce(tile)
    # Sums of weights are as many times as large.
    outputs.lse -= np.log(np.float32(count))
    outputs.check(dim)


@pytest.mark.parametrize("dim", sorted({tile.dim for tile in TILES}))
def test_an_empty_sequence_s_rows_are_cleared(dim):
    tile = next(tile for tile in TILES if tile.dim == dim)
    outputs = Outputs(tile, 0)
    clear = code_of("cute_outputs", outputs.memory.ptx).clear_rows
    for thread in range(128):
        clear(tile, Int32(thread), SEQUENCE, HEAD, Int32(0), outputs.data)
    rows = slice(HEAD * GROUP, (HEAD + 1) * GROUP)
    assert not outputs.output[SEQUENCE, rows].any()
    assert (outputs.lse[SEQUENCE, rows] == -np.inf).all()
    assert np.isnan(outputs.output).sum() == outputs.output.size - GROUP * dim
