"""Selected blocks and tokens, attended to through ``pa_decode``: against float64 attention over sets of tokens."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvscout
from kvscout import fp8, pa_decode, paging, plan_pa_decode
from kvscout.ops.selection_gather import api as gather_api
from kvscout.ops.selection_tables import api as tables_api
from kvscout.paging import CACHE_DTYPES, LAYOUTS, PAGE_SIZES
from kvscout.selection import Tables, Tokens, gather_tokens, tables_of_blocks
from kvscout.testing import paged_inputs

HEADS, GROUP, DIM = 2, 2, 64
SCALE = DIM**-0.5
EXTREMES = (-1, -7, -(2**31), 2**31 - 1)
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


TORCH, TRITON = ("torch_reference", "torch_reference"), ("triton_sort", "triton_copy")


@pytest.fixture(scope="module", params=[TORCH, TRITON], ids=["torch", "triton"])
def select(request):
    """Both functions, on a backend that runs on the CPU here."""
    for api, variant in zip((tables_api, gather_api), request.param, strict=True):
        if refusal := api.FAMILY.unavailable(variant, "cpu"):
            pytest.skip(refusal)
    tables, gather = request.param
    return SimpleNamespace(
        tables_of_blocks=functools.partial(tables_of_blocks, variant=tables),
        gather_tokens=functools.partial(gather_tokens, variant=gather),
    )


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


class World:
    """Sequences in NaN-poisoned caches, and their tokens by slot in float64, dequantised."""

    def __init__(self, lengths, page, layout="hnd", dtype=torch.bfloat16, seed=0, scales=(None, None)):
        self.generator = torch.Generator().manual_seed(seed)
        self.page, self.layout, self.lengths = page, layout, int32(lengths)
        self.tables = paged_inputs.tables(lengths, page, self.generator)
        self.caches = paged_inputs.caches(layout, self.tables, HEADS, page, DIM, dtype, self.generator)
        kinds = {
            None: lambda: None,
            "number": lambda: 0.5,
            "head": lambda: torch.rand(HEADS, generator=self.generator) + 0.5,
            "token": lambda: paged_inputs.token_scales(self.tables, HEADS, page, self.generator, True),
        }
        self.scales = tuple(kinds[kind]() for kind in scales)
        self.options = {"num_kv_heads": HEADS, "kv_layout": layout}
        self.options |= dict(zip(("key_scale", "value_scale"), self.scales, strict=True))
        kv = paging.pages(*self.caches, HEADS, layout)
        self.by_slot = [
            by_slot(view.float().flatten(*flat).double(), scale)
            for view, flat, scale in zip((kv.keys, kv.values), ((3, 4), (2, 3)), self.scales, strict=True)
        ]

    def attend(self, query, owner, tokens):
        """Float64 output ``[Hq, D]`` and lse ``[Hq]`` over a set of tokens of a sequence."""
        table = self.tables.block_tables[owner].tolist() if tokens else []
        slots = torch.tensor([table[t // self.page] * self.page + t % self.page for t in sorted(tokens)]).long()
        keys, values = (x[slots].repeat_interleave(GROUP, 1) for x in self.by_slot)
        logits = SCALE * torch.einsum("hd,thd->ht", query.double(), keys)
        return torch.einsum("ht,thd->hd", logits.softmax(1), values), logits.logsumexp(1)


def by_slot(pages, scale):
    """``[slots, Hkv, D]`` of ``[blocks, Hkv, page, D]``, scaled."""
    if isinstance(scale, torch.Tensor):
        scale = scale.double()[..., None] if scale.dim() == 3 else scale.double()[:, None, None]
    return (pages if scale is None else pages * scale).transpose(1, 2).flatten(0, 1)


def decode(query, caches, tables, lengths, layout, causal, scales=(None, None)):
    output, lse = torch.empty_like(query), torch.empty(query.shape[:2])
    options = {"key_scale": scales[0], "value_scale": scales[1], "kv_layout": layout, "causal": causal, "lse": lse}
    pa_decode(output, query, *caches, lengths, tables, SCALE, work_plan=plan_pa_decode(lengths, HEADS), **options)
    return output, lse


def assert_attends(world, owners, sets, query, found):
    """That every row attends to its set of tokens; a row of none gives zeros."""
    for row, (owner, tokens) in enumerate(zip(owners, sets, strict=True)):
        output, lse = world.attend(query[row], owner, tokens)
        torch.testing.assert_close(found[1][row].double(), lse, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            found[0][row].double(), output, rtol=2**-7, atol=2**-9 * float(output.abs().sum() > 0)
        )


@st.composite
def selections(draw, block_sizes):
    """Lengths, page, block size, owners, ends (None: whole sequences), and selected blocks of every kind of entry."""
    page = draw(st.sampled_from(PAGE_SIZES))
    size = draw(block_sizes(page))
    length = st.one_of(st.integers(0, 4 * max(size, page)), st.sampled_from([-3, 1, size, 2 * size + 1, 3 * page]))
    lengths = draw(st.lists(length, min_size=1, max_size=3))
    per_sequence = draw(st.sampled_from([None, 1, 2]))
    if per_sequence is None:
        owners = draw(st.lists(st.integers(-3, len(lengths) + 1), min_size=1, max_size=4))
    else:
        owners = [i for i in range(len(lengths)) for _ in range(per_sequence)]
    limit = st.integers(-2, 5 * max(size, page))
    ends = draw(st.none() | st.lists(limit, min_size=len(owners), max_size=len(owners)))
    k, most = draw(st.integers(1, 9)), max(max(lengths) // size + 1, 1)
    entry = st.one_of(st.integers(0, most), st.sampled_from(EXTREMES))
    rows = draw(st.lists(st.lists(entry, min_size=k, max_size=k), min_size=len(owners), max_size=len(owners)))
    return lengths, page, size, owners, per_sequence is not None, ends, rows


def ends_of(lengths, owners, ends):
    """One past the last token that each row sees, in plain Python."""
    whole = [lengths[owner] if 0 <= owner < len(lengths) else 0 for owner in owners]
    return whole if ends is None else [min(pair) for pair in zip(whole, ends, strict=True)]


def tokens_of(blocks, size, end):
    return {t for b in set(blocks) if b >= 0 for t in range(b * size, min((b + 1) * size, end))}


@given(selections(lambda page: st.sampled_from([page, 2 * page, 128])), st.booleans(), st.integers(0, 2**31))
def test_a_row_attends_to_the_tokens_of_its_blocks(select, drawn, causal, seed):
    lengths, page, size, owners, even, ends, rows = drawn
    world = World(lengths, page, seed=seed)
    options = {} if even else {"sequences": torch.tensor(owners)}
    options |= {} if ends is None else {"ends": int32(ends)}
    tables, found = select.tables_of_blocks(
        int32(rows), world.tables.block_tables, world.lengths, size, page, **options
    )
    assert tables.dtype == found.dtype == torch.int32
    assert tables.shape == (len(rows), len(rows[0]) * size // page)
    sets = [tokens_of(row, size, end) for row, end in zip(rows, ends_of(lengths, owners, ends), strict=True)]
    assert found.tolist() == [len(tokens) for tokens in sets]
    for table, tokens in zip(tables.tolist(), sets, strict=True):
        used = -(-len(tokens) // page)
        assert len(set(table[:used])) == used
        assert set(table[used:]) <= {-1}
    query = torch.randn(len(rows), HEADS * GROUP, DIM, generator=world.generator).bfloat16()
    assert_attends(world, owners, sets, query, decode(query, world.caches, tables, found, "hnd", causal))


@given(
    selections(lambda page: st.just(1)),
    st.sampled_from(LAYOUTS),
    st.sampled_from(CACHE_DTYPES),
    st.tuples(*[st.sampled_from([None, "number", "head", "token"])] * 2),
    st.integers(0, 2**31),
)
def test_a_row_attends_to_its_tokens(select, drawn, layout, dtype, kinds, seed):
    lengths, page, _, owners, even, ends, rows = drawn
    world = World(lengths, page, layout, dtype, seed, kinds if dtype in fp8.E4M3 else (None, None))
    options = {} if even else {"sequences": int32(owners)}
    options |= {} if ends is None else {"ends": int32(ends)}
    got = select.gather_tokens(
        int32(rows), *world.caches, block_tables=world.tables.block_tables, context_lengths=world.lengths,
        **options, **world.options,
    )  # fmt: skip
    sets = [tokens_of(row, 1, end) for row, end in zip(rows, ends_of(lengths, owners, ends), strict=True)]
    assert got.context_lengths.tolist() == [len(tokens) for tokens in sets]
    query = torch.randn(len(rows), HEADS * GROUP, DIM, generator=world.generator).bfloat16()
    scales = (got.key_scale, got.value_scale)
    found = decode(query, got[:2], got.block_tables, got.context_lengths, layout, True, scales)
    assert_attends(world, owners, sets, query, found)


@settings(max_examples=25)
@pytest.mark.parametrize("select", [TRITON], indirect=True, ids=["triton"])
@given(selections(lambda page: st.sampled_from([page, 3 * page])), st.sampled_from(LAYOUTS), st.integers(0, 2**31))
def test_results_are_bit_for_bit_those_of_the_definition(select, drawn, layout, seed):
    """Also behind a row's last token, of which nothing is promised."""
    lengths, page, size, owners, even, ends, rows = drawn
    world = World(lengths, page, layout, fp8.FN, seed, ("token", "token"))
    options = {} if even else {"sequences": torch.tensor(owners)}
    options |= {} if ends is None else {"ends": int32(ends)}
    selected, pages, lengths = int32(rows), world.tables.block_tables, world.lengths

    def both(functions, **variant):
        yield from functions.tables_of_blocks(selected, pages, lengths, size, page, **options, **variant)
        rest = {"block_tables": pages, "context_lengths": lengths, **world.options, **options, **variant}
        yield from functions.gather_tokens(selected, *world.caches, **rest)

    for found, defined in zip(both(select), both(kvscout.selection, variant="torch_reference"), strict=True):
        assert bits(found).equal(bits(defined))


@LAYOUT
@pytest.mark.parametrize("page", PAGE_SIZES)
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_every_bit_of_every_token_is_copied(select, layout, page, dtype):
    """More tokens than a page holds, from two sequences, in the order of the sequence; scales of both shapes."""
    world = World((300, 280), page, layout, dtype)
    scale = torch.rand(len(world.tables.fill), HEADS, page, generator=world.generator)
    drawn = [torch.randperm(280, generator=world.generator)[:150].tolist() for _ in range(2)]
    got = select.gather_tokens(
        int32(drawn), *world.caches, HEADS, world.tables.block_tables, world.lengths, kv_layout=layout,
        key_scale=scale, value_scale=scale[..., None],
    )  # fmt: skip
    assert got.key_scale.shape == got.value_scale.shape == (2 * -(-150 // page), HEADS, page)
    before, after = (paging.pages(*caches, HEADS, layout) for caches in (world.caches, got[:2]))
    for row, tokens in enumerate(drawn):
        for i, t in enumerate(sorted(tokens)):
            old, new = int(world.tables.block_tables[row, t // page]), int(got.block_tables[row, i // page])
            assert after.keys[new, :, i % page].equal(before.keys[old, :, t % page])
            one, other = (divmod(place % page, before.values.shape[3]) for place in (t, i))
            assert after.values[new, :, *other].equal(before.values[old, :, *one])
            assert got.key_scale[new, :, i % page].equal(scale[old, :, t % page])
            assert got.value_scale[new, :, i % page].equal(scale[old, :, t % page])


def test_strided_arguments_and_shared_pages(select):
    selected = int32([[0, 9, 1, 9], [9, 9, 0, 9]])[:, ::2]
    pages = int32([[5, 0, 5, 0], [5, 0, 6, 0]])[:, ::2]
    tables, lengths = select.tables_of_blocks(selected, pages, int32([20, 99, 17, 99])[::2], 16, 16)
    assert (tables.tolist(), lengths.tolist()) == ([[5, 5], [5, -1]], [20, 16])


def test_places_past_32_bits_do_not_wrap(select):
    """The longest context there is, through one entry of a table that stands for all."""
    longest, pages = 2**31 - 1, int32([[3]]).expand(1, 2**27)
    selected = int32([[2**24 - 1, 2**24, -1, longest]])
    tables, lengths = select.tables_of_blocks(selected, pages, int32([longest]), 128, 16)
    assert tables[0].tolist() == [3] * 8 + [-1] * 24
    assert lengths.tolist() == [127]


@pytest.mark.parametrize(("rows", "count", "columns"), [(0, 0, 0), (0, 2, 3), (3, 0, 3), (2, 2, 0)])
def test_nothing_to_select_from(select, rows, count, columns):
    """No rows, no sequences, tables without columns, and a pool without blocks."""
    selected, owners = torch.zeros(rows, 2).int(), torch.zeros(rows).long()
    pages, lengths = torch.zeros(count, columns).int(), torch.full((count,), 9).int()
    tables, found = select.tables_of_blocks(selected, pages, lengths, 32, 16, sequences=owners)
    assert (tables.tolist(), found.tolist()) == ([[-1] * 4] * rows, [0] * rows)
    caches = paging.new_caches("nhd", 0, HEADS, 16, DIM, torch.float16, "cpu")
    got = select.gather_tokens(selected, *caches, HEADS, pages, lengths, sequences=owners)
    assert (got.context_lengths.tolist(), len(got.key_cache)) == ([0] * rows, rows)


def test_a_table_that_names_no_block_is_not_followed(select):
    """A length without a pool: there is nothing to copy, and nothing of another's memory is read."""
    caches = paging.new_caches("hnd", 0, HEADS, 16, DIM, torch.float16, "cpu")
    got = select.gather_tokens(int32([[3, 1, 3]]), *caches, HEADS, int32([[0]]), int32([9]), kv_layout="hnd")
    assert got.context_lengths.tolist() == [2]
    assert not got.key_cache.any()
    assert not got.value_cache.any()


def step(select, selected, pages, lengths, ends, key_cache, value_cache, scale):
    tables = select.tables_of_blocks(selected, pages, lengths, 32, 16, ends=ends)
    options = {"ends": ends, "key_scale": scale, "kv_layout": "chunked"}
    return tables, select.gather_tokens(selected, key_cache, value_cache, HEADS, pages, lengths, **options)


def test_compiled_equals_eager(select):
    torch.compiler.reset()
    one_step = functools.partial(step, select)
    compiled = torch.compile(one_step, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths, rows, k in (((90, 33), 4, 5), ((70, 0, 200), 6, 3)):
        world = World(lengths, 16, "chunked", fp8.FN, scales=("token", None))
        selected = torch.randint(-1, 5, (rows, k), generator=world.generator).int()
        ends = torch.randint(0, 200, (rows,), generator=world.generator).int()
        arguments = (selected, world.tables.block_tables, world.lengths, ends, *world.caches, world.scales[0])
        for one, other in zip(compiled(*arguments), one_step(*arguments), strict=True):
            assert type(one) is type(other)
            for x, y in zip(one, other, strict=True):
                assert x is y is None or bits(x).equal(bits(y))


def bits(x):
    return x.contiguous().view(torch.uint8)


def test_results_are_written_anew_in_place(select):
    world = World((90, 33), 16, "plain_v", fp8.FN, scales=("token", "number"))
    pages, lengths = world.tables.block_tables, world.lengths
    one, other = int32([[0, 3], [1, 0]]), int32([[5, -1], [0, 0]])
    tables = select.tables_of_blocks(one, pages, lengths, 16, 16)
    tokens = select.gather_tokens(one, *world.caches, block_tables=pages, context_lengths=lengths, **world.options)
    again = select.tables_of_blocks(other, pages, lengths, 16, 16, out=tables)
    assert again is tables
    arguments = {"block_tables": pages, "context_lengths": lengths, **world.options}
    refreshed = select.gather_tokens(other, *world.caches, **arguments, out=tokens)
    assert [x.data_ptr() for x in refreshed[:5]] == [x.data_ptr() for x in tokens[:5]]
    assert refreshed.value_scale == 0.5
    for got, new in (
        (tables, select.tables_of_blocks(other, pages, lengths, 16, 16)),
        (refreshed[:5], select.gather_tokens(other, *world.caches, **arguments)[:5]),
    ):
        assert all(bits(x).equal(bits(y)) for x, y in zip(got, new, strict=True))


def test_caches_of_other_memory_are_written(select):
    """Interleaved pools, as a serving engine has them."""
    world = World((40,), 16, "nhd", torch.float16)
    pool = torch.full((1, 2, 16, HEADS, DIM), float("nan")).half()
    out = Tokens(pool[:, 0], pool[:, 1], torch.empty(1, 1).int(), torch.empty(1).int())
    rest = (HEADS, world.tables.block_tables, world.lengths)
    got = select.gather_tokens(int32([[7, 39, 2]]), *world.caches, *rest, out=out)
    new = select.gather_tokens(int32([[7, 39, 2]]), *world.caches, *rest)
    assert got.key_cache.data_ptr() == pool.data_ptr()
    assert pool[:, 0, :3].equal(new.key_cache[:, :3])
    assert pool[:, 1, :3].equal(new.value_cache[:, :3])


SELECTED = torch.zeros(4, 3).int()
GOOD = {"selected": SELECTED, "block_tables": torch.zeros(2, 5).int(), "context_lengths": int32([9, 70])}
BLOCKS = GOOD | {"block_size": 32, "page": 16}
CACHE = torch.zeros(10, 16, HEADS, DIM).to(fp8.FN)
TOKENS = GOOD | {"key_cache": CACHE, "value_cache": CACHE, "num_kv_heads": HEADS}
BAD = [
    ({"selected": SELECTED.long()}, TypeError, "selected: expected dtype torch.int32, got torch.int64"),
    ({"selected": SELECTED[0]}, ValueError, r"selected: expected shape \[rows, k\], got \[3\]"),
    ({"selected": SELECTED[:, :0]}, ValueError, "selected: number of columns k: expected at least 1, got 0"),
    ({"selected": SELECTED[:3]}, ValueError, "sequences: expected a tensor, as 3 rows are no equal parts of 2 seq"),
    ({"selected": SELECTED.to("meta")}, ValueError, "context_lengths: expected on meta"),
    ({"block_tables": torch.zeros(3, 5).int()}, ValueError, r"block_tables: expected shape \[2, max_blocks\]"),
    ({"block_tables": torch.zeros(2, 5)}, TypeError, "block_tables: expected dtype torch.int32"),
    ({"context_lengths": int32([[9, 70]])}, ValueError, r"context_lengths: expected shape \[B\]"),
    ({"sequences": torch.zeros(4)}, TypeError, "sequences: expected dtype torch.int32 or torch.int64"),
    ({"sequences": torch.zeros(3).int()}, ValueError, r"sequences: expected shape \[4\], got \[3\]"),
    ({"ends": torch.zeros(4).long()}, TypeError, "ends: expected dtype torch.int32"),
    ({"ends": torch.zeros(2).int()}, ValueError, r"ends: expected shape \[4\], got \[2\]"),
    ({"out": (SELECTED, SELECTED)}, TypeError, "out: expected (Tables|Tokens), got tuple"),
]
BAD_BLOCKS = [
    *BAD,
    ({"variant": "fast"}, ValueError, "variant: selection_tables has no variant 'fast'; it has torch_reference"),
    ({"page": 8}, ValueError, "page: expected one of 16, 32, 64, 128, got 8"),
    ({"page": 16.0}, ValueError, "page: expected one of 16, 32, 64, 128, got 16.0"),
    ({"selected": torch._neg_view(SELECTED)}, ValueError, "selected: expected values as they are stored"),
    (
        {"out": Tables(torch.zeros(1, 6).int().expand(4, 6), torch.zeros(4).int())},
        ValueError,
        "out.block_tables: expected elements that do not overlap",
    ),
    ({"block_size": 40}, ValueError, "block_size: expected 16, the page size, times a whole number, got 40"),
    ({"block_size": 0}, ValueError, "block_size: expected at least 16, got 0"),
    ({"block_size": 32.0}, TypeError, "block_size: expected an int, got float"),
    ({"out": Tables(torch.zeros(4, 5).int(), torch.zeros(4).int())}, ValueError, "out.block_tables: expected shape"),
    ({"out": Tables(torch.zeros(4, 6).int(), torch.zeros(4))}, TypeError, "out.context_lengths: expected dtype"),
]
OUT = gather_tokens(**TOKENS, key_scale=torch.ones(10, HEADS, 16))
BAD_TOKENS = [
    *BAD,
    ({"variant": "fast"}, ValueError, "variant: selection_gather has no variant 'fast'; it has torch_reference"),
    ({"key_cache": CACHE.float()}, TypeError, "key_cache: expected dtype"),
    ({"kv_layout": "sbhd"}, ValueError, "kv_layout: expected one of"),
    ({"key_scale": torch.ones(9, HEADS, 16)}, ValueError, r"key_scale: expected shape \[10, 2, 16\]"),
    ({"value_scale": torch.ones(10, HEADS, 16, 2)}, ValueError, r"value_scale: expected shape \[10, 2, 16, 1\]"),
    ({"key_scale": torch.ones(10, HEADS, 16).half()}, TypeError, "key_scale: expected dtype torch.float32"),
    ({"key_scale": "1"}, TypeError, "key_scale: expected a number, got str"),
    ({"value_scale": math.nan}, ValueError, "value_scale: expected a finite number within float32's range, got nan"),
    (
        {"key_scale": torch.ones(3)},
        *(ValueError, r"key_scale: expected 1 element, shape \[2\] or shape \[blocks, 2, page\], got \[3\]"),
    ),
    ({"out": OUT, "value_scale": torch.ones(10, HEADS)}, ValueError, r"value_scale: expected 1 element, .* \[10, 2\]"),
    ({"value_scale": torch.ones(HEADS).double()}, TypeError, "value_scale: expected dtype torch.float32"),
    ({"key_scale": torch.ones(1, device="meta")}, ValueError, "key_scale: expected on cpu"),
    ({"out": OUT._replace(key_cache=CACHE)}, ValueError, r"out.key_cache: expected shape \[4, 16, 2, 64\]"),
    ({"out": OUT._replace(value_cache=CACHE[:4].half())}, TypeError, "out.value_cache: expected dtype"),
    (
        {"out": OUT, "value_scale": torch.ones(10, HEADS, 16)},
        *(TypeError, "out.value_scale: expected a torch.Tensor, got NoneType"),
    ),
    (
        {"out": OUT._replace(key_scale=torch.ones(3, HEADS, 16)), "key_scale": torch.ones(10, HEADS, 16)},
        *(ValueError, r"out.key_scale: expected shape \[4, 2, 16\]"),
    ),
]


@pytest.mark.parametrize(("wrong", "error", "message"), BAD_BLOCKS)
def test_bad_blocks(wrong, error, message):
    with pytest.raises(error, match=message):
        tables_of_blocks(**BLOCKS | wrong)


@pytest.mark.parametrize(("wrong", "error", "message"), BAD_TOKENS)
def test_bad_tokens(wrong, error, message):
    with pytest.raises(error, match=message):
        gather_tokens(**TOKENS | wrong)


@pytest.mark.gpu
def test_replays_follow_the_selection():
    """Tables and copies in one graph, without a word from the device to the host."""
    world = World((400, 350), 16, "chunked", fp8.FN, scales=("token", None))
    selected = torch.randint(-1, 12, (4, 6), generator=world.generator).int().cuda()
    ends = int32([400, 390, 350, 1]).cuda()
    pages, lengths, scale = (x.cuda() for x in (world.tables.block_tables, world.lengths, world.scales[0]))
    arguments = (selected, pages, lengths, ends, *(cache.cuda() for cache in world.caches), scale)
    one_step = functools.partial(step, kvscout.selection)
    one_step(*arguments)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            captured = one_step(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for values in (selected.clone(), selected.flip(1), torch.full_like(selected, -1), selected * 0):
        selected.copy_(values)
        lengths.sub_(1)
        graph.replay()
        for got, new in zip(captured, one_step(*arguments), strict=True):
            assert all(x is y is None or bits(x).equal(bits(y)) for x, y in zip(got, new, strict=True))
