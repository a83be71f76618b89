"""Shapes from CSV files: what each kind of cell means, and that what means nothing is refused with its place."""

from dataclasses import replace

import pytest
import torch

from kvscout import fp8
from kvscout.testing import shapes_csv
from kvscout.testing.case import BENCH, SUITE, cases, ops
from kvscout.testing.cases.kv_cache import KvCacheCase
from kvscout.testing.cases.mqa_logits import MqaLogitsCase
from kvscout.testing.cases.pa_decode import PaDecodeCase
from kvscout.testing.cases.topk import TopkCase
from kvscout.testing.shapes_csv import ShapesError, case_of, read, row_of


@pytest.fixture
def shapes(tmp_path):
    """``shapes(text)``: what a file of that text is read as."""

    def write(text, **options):
        file = tmp_path / "shapes.csv"
        file.write_text(text, **options) if isinstance(text, str) else file.write_bytes(text)
        return read(file)

    return write


def test_several_ops_in_one_file(shapes):
    found = shapes(
        "# what a server sees\n"
        "op, rows, keys, k, lengths, group, odd, clean, dtype, splits, cache_dtype, tokens, heads, dim\n"
        "\n"
        "mqa_logits, 64, 8192,,,,, no\n"
        "topk,3,70,5,,,,,bf16\n"
        ",,,,,,,,,,,,,\n"
        '"pa_decode",,,,32x8192 7 2x9,16,no_lse  strided,,fp16,8 64\n'
        "kv_cache,,,,,,,,fp32,,fnuz,5,2,64\n"
    )
    assert found == [
        MqaLogitsCase(64, 8192, clean=False, level=BENCH),
        TopkCase(3, 70, 5, dtype=torch.bfloat16, level=BENCH),
        PaDecodeCase(
            (8192,) * 32 + (7, 9, 9), 16, odd=("no_lse", "strided"), dtype="fp16", splits=(8, 64), level=BENCH
        ),
        KvCacheCase(5, 2, 64, cache_dtype=fp8.FNUZ, dtype=torch.float32, level=BENCH),
    ]


def test_files_of_spreadsheets(shapes):
    assert shapes("\ufeffop,rows,keys,clean\r\nmqa_logits,1,2,FALSE\r\n", newline="") == [
        MqaLogitsCase(1, 2, clean=False, level=BENCH)
    ]


@pytest.mark.parametrize("op", ops())
def test_every_case_has_a_row(op):
    found = cases(op, [SUITE, BENCH])
    assert found
    for case in found:
        assert case_of(row_of(case)) == replace(case, level=BENCH)


@pytest.mark.parametrize("op", ops())
def test_what_a_field_accepts_is_a_field(op):
    made = shapes_csv.case_class(op)
    assert {*made.ACCEPTED, *made.LEAST} <= set(shapes_csv.columns(op))


def test_a_case_of_a_file_can_be_prepared(shapes):
    (case,) = shapes("op,rows,k,block_size,page,entries\nselection_tables,2,3,32,16,distinct\n")
    prepared = case.prepare(torch.device("cpu"))
    assert prepared.outputs["block_tables"].shape == (2, 6)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("7", (7,)),
        ("3x5 5 4", (5, 5, 5, 5, 4)),
        ("1..4 2x4 -2 -1 0", (1, 2, 3, 4, 4, 4, -2, -1, 0)),
        ("7..7 1x3", (7, 3)),
        ("1..2048 6144x2048", (*range(1, 2048), *(2048,) * 6145)),
    ],
)
def test_numbers_of_a_cell(text, numbers):
    case = case_of({"op": "pa_decode", "lengths": text})
    assert case.lengths == numbers
    assert case_of(row_of(case)) == case


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((5, 5, 5), "3x5"),
        ((1, 2), "1 2"),
        ((1, 2, 3, 3, 4, 5, 6, 9), "1 2 2x3 4..6 9"),
        ((-2, -1, 0, 1, 2), "-2 -1 0..2"),
        ((3, 2, 1), "3 2 1"),
        ((*range(1, 2048), *(2048,) * 6145), "1..2047 6145x2048"),
    ],
)
def test_a_cell_of_many_numbers_is_short(numbers, text):
    assert shapes_csv.cell(numbers) == text


HEADER = "op,rows,keys,heads,clean,lengths,scales,cache,odd,splits,label,page,layout,dim,dtype,k,tokens"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (",1,2", "column 'op': expected one of mqa_logits, topk, "),
        ("mqa,1,2", "column 'op': expected one of mqa_logits, topk, .*, got 'mqa'$"),
        ("mqa_logits,1", "column 'keys': mqa_logits needs it, and it has no default"),
        ("mqa_logits,x,2", "column 'rows': expected a whole number, got 'x'"),
        ("mqa_logits,1.0,2", "column 'rows': expected a whole number, got '1.0'"),
        ("mqa_logits,2x1,2", "column 'rows': expected a whole number, got '2x1'"),
        ("mqa_logits,0,2", "column 'rows': expected at least 1, got 0"),
        ("mqa_logits,1,2,7", "column 'heads': expected one of 8, 16, 32, 64, 128, got 7"),
        ("mqa_logits,1,2,8,maybe", "column 'clean': expected one of yes, no, true, false, got 'maybe'"),
        ("mqa_logits,1,2,8,,8192", "column 'lengths': mqa_logits has none of that name, .* got '8192'"),
        ("topk,1,2,,,,,,,,,,,,e4m3,5", "column 'dtype': expected one of fp32, bf16, fp16, got 'e4m3'"),
        ("pa_decode", "column 'lengths': pa_decode needs it"),
        ("pa_decode,,,,,8192+1", r"column 'lengths': expected whole numbers, got '8192\+1'"),
        ("pa_decode,,,,,4..2", "column 'lengths': expected whole numbers, got '4..2'"),
        ("pa_decode,,,,,5 0x7", "column 'lengths': expected whole numbers, got '5 0x7'"),
        ("mqa_logits,1" + 18 * "0" + ",2", "column 'rows': too large: expected at most 18 digits, .*, got '10{18}'$"),
        ("pa_decode,,,,,1000000x8", "column 'lengths': too large: .* 6 in a count or a range, got '1000000x8'$"),
        ("pa_decode,,,,,7 1..1000000", "column 'lengths': too large: .* 6 in a count or a range, got '7 1..1000000'$"),
        ("pa_decode,,,,,99999999999", "column 'lengths': expected from -2147483648 to 2147483647, got 99999999999"),
        ("pa_decode,,,,,8,none,mxfp4", "column 'cache': expected one of bf16, fp16, e4m3, fnuz, got mxfp4"),
        ("pa_decode,,,,,8,head,bf16", "column 'scales': expected none with a cache of bf16, got head"),
        ("pa_decode,,,,,8,,,strange", "column 'odd': expected one of magnitudes, .*, got strange"),
        ("pa_decode,,,,,8,head,,wild", "column 'odd': expected wild with scales per token alone"),
        ("pa_decode,,,,,99,,,sparse", "column 'num_blocks': expected a pool of 7 or more for sparse rows of 99 tokens"),
        (
            "pa_decode,,,,,8,,,,,\x1b[31mred",
            r"column 'label': expected characters that can be printed, got '.x1b\[31mred'",
        ),
        ("pa_decode,,,,,8,,,,5", "column 'splits': expected 2 whole numbers, got '5'"),
        ("pa_decode,,,,,8,,,,5 0", "column 'splits': expected at least 1, got 0"),
        ("kv_cache,,,8,,,,,,,,8,,64,,,5", "column 'page': expected one of 16, 32, 64, 128, got 8"),
        ("kv_cache,,,8,,,,,,,,16,plain_v,72,,,5", "column 'dim': expected a multiple of 16 in plain_v caches"),
        ("topk,1,2,,,,,,,,,,,,,5,,9", "18 cells, but there are 17 columns"),
        ("topk,1,\x00", "line contains NUL|column 'keys': expected a whole number, got '.x00'"),
        ('topk,"1', "unexpected end of data"),
    ],
)
def test_a_bad_row_is_refused_with_its_place(shapes, row, message):
    with pytest.raises(ShapesError, match=f"shapes.csv:3: ({message})"):
        shapes(f"{HEADER}\nmqa_logits,5,7\n{row}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "shapes.csv: expected a line of column names and a line for each case, found no case"),
        ("op,rows\n# nothing\n\n", "found no case"),
        ("rows,keys\n1,2\n", "shapes.csv:1: expected a column 'op', got rows, keys"),
        ("op,rows,seqlen\n", "shapes.csv:1: column 'seqlen': no op has that; there are op, rows, keys, "),
        ("op,level\n", "column 'level': no op has that"),
        ("op,rows,\n", "column '': no op has that"),
        ("op,rows,rows\n", "column 'rows' is there twice"),
        ("op,rows,keys\ntopk\xff".encode("latin-1"), "shapes.csv: expected text in UTF-8, got a byte 0xff"),
    ],
)
def test_a_file_that_is_none(shapes, text, message):
    with pytest.raises(ShapesError, match=message):
        shapes(text)


@pytest.mark.parametrize("name", [".", "there/is/none.csv", "null\0byte.csv"])
def test_a_file_that_cannot_be_read(tmp_path, name):
    with pytest.raises(ShapesError, match=r": (Is a directory|No such file|embedded null)"):
        read(tmp_path / name)


def test_cases_of_one_name(shapes):
    with pytest.raises(ShapesError, match=r"shapes.csv:4: topk 1x2-k3-causal is there already, in line 2"):
        shapes("op,rows,keys,k\ntopk,1,2,3\ntopk,2,2,3\ntopk,1,2,3\n")
    lengths = "op,lengths,label\npa_decode,1 2 3 4 5 9\npa_decode,9x9{}\npa_decode,6 6 6 6 6 9{}\n"
    with pytest.raises(ShapesError, match=r":4: pa_decode 6x9-.* is also the name of line 2; give one of them a label"):
        shapes(lengths.format("", ""))
    assert [case.name for case in shapes(lengths.format(",a", ",b"))][1:] == ["a", "b"]


def test_suite_cases_check_their_fields():
    """The classes themselves refuse, so that a built-in case cannot be one that a file could not give."""
    for op in ops():
        case = cases(op, [SUITE])[0]
        for name, accepted in type(case).ACCEPTED.items():
            wrong = ("none such",) if isinstance(getattr(case, name), tuple) else "none such"
            with pytest.raises(ValueError, match=f"^{name}: expected one of {accepted[0]}, "):
                replace(case, **{name: wrong})
        for name, least in type(case).LEAST.items():
            wrong = (least - 1,) * 2 if isinstance(getattr(case, name), tuple) else least - 1
            with pytest.raises(ValueError, match=f"^{name}: expected at least {least}, got {least - 1}"):
                replace(case, **{name: wrong})
