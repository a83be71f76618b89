"""What "auto" takes for ``tables_of_blocks``, what a call costs, and what its cases would find."""

from dataclasses import replace

import pytest
import torch

from kvscout.ops.selection_tables import api
from kvscout.ops.selection_tables.cost import cost
from kvscout.testing.case import SUITE, cases
from kvscout.testing.cases.selection_tables import SelectionTablesCase, oracle
from kvscout.testing.selected_rows import Rows

CPU = torch.device("cpu")


def test_auto_sorts_in_a_kernel_what_a_program_holds():
    problem = replace(SelectionTablesCase(2, 4096).prepare(CPU).problem, arch="sm_90")
    assert api.FAMILY.choose(problem).variant.name == "triton_sort"
    wider = replace(problem, k=4097)
    assert api.FAMILY.choose(wider).variant.name == "torch_reference"
    assert api.FAMILY.refusal("triton_sort", wider) == "a program sorts at most 4096 entries of a row, not 4097"
    assert api.FAMILY.choose(replace(problem, arch="cpu")).variant.name == "torch_reference"


def test_cost():
    assert cost(10, 16, 700).bytes == 4 * (160 + 1400 + 20)
    assert cost(10, 16, 700).flops == 160


def test_oracle():
    tables = torch.tensor([[7, 3, 8, 5, 1, 9]])
    selected, lengths = torch.tensor([[2, 0, 2, -1]]), torch.tensor([70])
    assert oracle(Rows(selected, tables, lengths, None, None), 32, 16) == ([[7, 3, 1, -1, -1, -1, -1, -1]], [38])
    nobody = Rows(selected, tables, lengths, torch.tensor([1]), None)
    assert oracle(nobody, 32, 16) == ([[-1] * 8], [0])
    ended = Rows(selected, tables, lengths, None, torch.tensor([33]))
    assert oracle(ended, 32, 16) == ([[7, 3, -1, -1, -1, -1, -1, -1]], [32])


@pytest.mark.parametrize("wrong", ["block_tables", "context_lengths"])
def test_a_wrong_result_is_found(wrong):
    prepared = SelectionTablesCase(3, 5, ends=True).prepare(CPU)
    prepared.poison()
    api.FAMILY.choose(prepared.problem).launch(prepared.problem, prepared.args)
    assert all(found.ok for found in prepared.check(""))
    prepared.outputs[wrong][1] += 1
    assert [found.name for found in prepared.check("") if not found.ok] == [wrong]


def test_small_cases_select_something_and_nothing():
    found = [int((case.prepare(CPU).args.selected >= 0).sum()) for case in cases("selection_tables", (SUITE,))]
    assert min(found) == 0
    assert max(found) > 1000
