"""The checks see what they are there to see: each kind of mistake, made on purpose, moves its figure alone."""

import math

import pytest
import torch

from kvscout.demo.checks import ERROR_BUDGET, Row, _recall, check, summary

GOOD = Row(0, 0, True, True, 1.0, 1.0, 1e-3, 2e-2)


@pytest.fixture
def job(finish):
    return finish()


def last_row(job):
    """The figures of the last token in the last layer."""
    return check(job.engine)[-1]


def last_attention(job):
    return job.engine.history[-1].attentions[-1]


def replace_last(job, **fields):
    job.engine.history[-1].attentions[-1] = last_attention(job)._replace(**fields)


def test_figures_of_a_run(job):
    counted, positions = [], range(job.prompt_tokens + 5)
    rows = check(job.engine, counted.append)
    assert len(rows) == sum(counted) == 2 * len(positions)
    assert {(row.layer, row.position) for row in rows} == {(layer, at) for layer in (0, 1) for at in positions}
    assert all(row.ok and 0 < row.kernel_error <= ERROR_BUDGET for row in rows)
    assert all(row.kernel_error < row.quantisation_error < 0.1 for row in rows)
    assert all(row.had_choice == (row.position // 16 > 3) for row in rows)
    assert all(row.page_recall == row.token_recall == 1 for row in rows if not row.had_choice)
    assert 0.5 < summary(rows).page_recall <= 1
    assert summary(rows).token_recall < 1


def test_recall_is_whole_when_every_page_is_selected(finish):
    rows = check(finish(top_pages=8).engine)
    assert all(row.page_recall == row.token_recall == 1 and not row.had_choice for row in rows)


def test_a_worse_page_costs_recall(job):
    before = last_row(job)
    last = last_attention(job)
    selected = last.block_tables[0].tolist()
    full = job.engine.block_of_page[: int(last.full_pages)].tolist()
    tables = last.block_tables.clone()
    tables[0, :3] = torch.tensor([block for block in full if block not in selected][:3])
    replace_last(job, block_tables=tables)
    after = last_row(job)
    assert after.valid
    assert after.page_recall < before.page_recall
    assert after.kernel_error > ERROR_BUDGET


@pytest.mark.parametrize("mistake", ["twice", "newest is not last"])
def test_wrong_tables_are_seen(job, mistake):
    tables = last_attention(job).block_tables.clone()
    if mistake == "twice":
        tables[0, 0] = tables[0, 1]
    else:
        tables = tables.flip(1)
    replace_last(job, block_tables=tables)
    assert not last_row(job).valid
    assert not last_row(job).ok


def test_a_wrong_output_is_the_kernels_error(job):
    output = last_attention(job).output.clone()
    output[0, 0, 0] += 0.1
    replace_last(job, output=output)
    assert last_row(job).kernel_error > ERROR_BUDGET
    assert not last_row(job).ok


def test_nan_is_no_pass(job):
    replace_last(job, output=torch.full_like(last_attention(job).output, float("nan")))
    assert not last_row(job).ok


def test_a_spoilt_cache_is_seen(job):
    job.engine.caches[-1].value_scale.mul_(1.5)
    assert last_row(job).kernel_error > 0.1


def test_unquantised_keys_are_those_that_were_projected(job):
    before = last_row(job)
    for history in job.engine.history:
        history.written[:] = [(k, v * 2, index_k) for k, v, index_k in history.written]
    after = last_row(job)
    assert after.kernel_error == before.kernel_error
    assert after.quantisation_error == pytest.approx(0.5, abs=0.05)


def test_recall_by_hand():
    scores = torch.arange(64.0)  # pages 0 to 3, the best token last
    assert _recall(scores, torch.tensor([3, 2]), 2) == (1.0, 1.0)
    assert _recall(scores, torch.tensor([3, 0]), 2) == (0.5, 0.5)
    scores[0] = 100.0
    assert _recall(scores, torch.tensor([3, 0]), 2) == (1.0, 17 / 32)
    assert _recall(scores[:0], torch.tensor([], dtype=torch.long), 0) == (1.0, 1.0)


def test_recall_takes_equal_scores_for_equally_good():
    assert _recall(torch.zeros(64), torch.tensor([1]), 1) == (1.0, 1.0)


def test_summary_looks_at_rows_that_had_a_choice():
    rows = [GOOD, Row(0, 1, True, True, 0.5, 0.25, 2e-3, 3e-2), Row(0, 2, False, True, 1.0, 1.0, 1e-4, 1e-4)]
    assert summary(rows).rows == 3
    assert summary(rows).page_recall == 0.75
    assert summary(rows).token_recall == 0.625
    assert (summary(rows).kernel_error, summary(rows).quantisation_error) == (2e-3, 3e-2)
    assert summary(rows[2:]).page_recall == 1


def test_summary_keeps_nan():
    broken = Row(0, 0, True, True, 1.0, 1.0, math.nan, 0.0)
    assert math.isnan(summary([GOOD, broken, GOOD]).kernel_error)
