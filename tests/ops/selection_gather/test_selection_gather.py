"""What "auto" takes for ``gather_tokens``, what a call costs, and what its cases would find."""

from dataclasses import replace

import pytest
import torch

from kvscout import fp8
from kvscout.ops.selection_gather import api
from kvscout.ops.selection_gather.cost import cost
from kvscout.paging import LAYOUTS
from kvscout.testing.cases.selection_gather import SelectionGatherCase, oracle
from kvscout.testing.selected_rows import Rows

CPU = torch.device("cpu")


def test_auto_copies_in_a_kernel_what_a_program_holds():
    problem = replace(SelectionGatherCase(1, 4096, 1, 1024).prepare(CPU).problem, arch="sm_90")
    assert api.FAMILY.choose(problem).variant.name == "triton_copy"
    for changed, sentence in (
        ({"k": 4097}, "a program sorts at most 4096 entries of a row, not 4097"),
        ({"head_dim": 1040}, "a program copies at most 1024 elements of a token and head, not 1040"),
    ):
        larger = replace(problem, **changed)
        assert api.FAMILY.choose(larger).variant.name == "torch_reference"
        assert api.FAMILY.refusal("triton_copy", larger) == sentence
    assert api.FAMILY.choose(replace(problem, arch="cpu")).variant.name == "torch_reference"


def test_cost():
    problem = SelectionGatherCase(2, 40, 3, 64, dtype=fp8.FN, scales="both").prepare(CPU).problem
    words = 2 * (40 + 3 + 2) + 50
    assert cost(problem, 50).bytes == 2 * 50 * 3 * (128 + 8) + 4 * words
    assert cost(replace(problem, dtype=torch.float16), 50).bytes == 2 * 50 * 3 * (256 + 8) + 4 * words
    assert cost(problem, 50).flops == 80


def test_oracle():
    rows = Rows(torch.tensor([[19, 1, 19, -1], [3, 2, 1, 0]]), torch.zeros(1, 2), torch.tensor([20]), None, None)
    assert oracle(rows, 16) == [[1, 19], [0, 1, 2, 3]]
    assert oracle(rows._replace(ends=torch.tensor([19, 2])), 16) == [[1], [0, 1]]
    assert oracle(rows._replace(sequences=torch.tensor([-1, 1])), 16) == [[], []]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pool", ["separate", "interleaved", "shifted"])
@pytest.mark.parametrize(
    "wrong", ["key_cache", "value_cache", "key_scale", "value_scale", "block_tables", "context_lengths", "around"]
)
def test_a_wrong_result_is_found(layout, pool, wrong):
    prepared = SelectionGatherCase(2, 20, 2, 64, layout=layout, scales="both", pool=pool).prepare(CPU)
    prepared.poison()
    api.FAMILY.choose(prepared.problem).launch(prepared.problem, prepared.args)
    assert all(found.ok for found in prepared.check(""))
    if wrong == "around":
        cache = prepared.outputs["key_cache"].view(torch.uint8)
        cache.as_strided((1,), (1,), cache.storage_offset() - 1).fill_(0)
    else:
        # The first page, of which every row of this case fills something.
        output = prepared.outputs[wrong]
        output = output.view(torch.uint8) if wrong.endswith("cache") else output
        output[0] += 1
    found = [comparison.name for comparison in prepared.check("") if not comparison.ok]
    assert found == ["around the caches" if wrong == "around" else wrong]
