"""How figures are put into lines."""

import json
from types import SimpleNamespace

import pytest

from kvscout.demo import report
from kvscout.demo.checks import Row
from kvscout.demo.job import Settings


def row(position, recall=1.0, error=1e-3, valid=True):
    return Row(0, position, True, valid, recall, recall / 2, error, 2e-2)


@pytest.fixture
def results():
    """Two prompt tokens and three decoded ones, of 10, 20 and 30 ms."""
    job = SimpleNamespace(prompt_tokens=2, prefill_s=0.5, step_s=[0.01, 0.02, 0.03])
    return report.by_phase(job, [row(4, 0.25), row(1), row(2, 0.75, 2e-3), row(3, 0.5)])


def test_phases_part_at_the_end_of_the_prompt(results):
    assert [row.position for row in results.prefill] == [1]
    assert [row.position for row in results.decode] == [4, 2, 3]


def test_each_line_has_its_own_steps(results):
    lines = report.steps(results, 2).rows
    assert lines == [
        ["1..2", "30.0", "66.7", "0.625", "0.312", "2.0e-03", "2.0e-02"],
        ["3", "30.0", "33.3", "0.250", "0.125", "1.0e-03", "2.0e-02"],
    ]
    assert [line[0] for line in report.steps(results, 1).rows] == ["1", "2", "3"]


def test_totals(results):
    assert report.totals(results).rows == [
        ["prefill", 2, "500.0", "4.0", 1, "1.000", "0.500", "1.0e-03", "2.0e-02"],
        ["decode", 3, "60.0", "50.0", 3, "0.500", "0.250", "2.0e-03", "2.0e-02"],
    ]


def test_failures_say_what_is_wrong(results):
    assert report.failures(results) == []
    results = results._replace(decode=[row(7, error=0.01), row(8, valid=False), row(9, error=float("nan"))])
    wrong, invalid, nan = report.failures(results)
    assert wrong == "FAILED position 7, layer 0: attention is 1.0e-02 off, more than 4e-03"
    assert invalid.startswith("FAILED position 8, layer 0: the selected pages are not distinct")
    assert "nan off" in nan


def test_every_op_has_a_line_and_every_variant_its_calls(finish):
    job = finish()
    lines = {line[0]: line[1:] for line in report.variants(job).rows}
    assert list(lines) == ["pa_plan", "kv_cache", "mqa_logits", "topk", "pa_decode"]
    job.decode_ops["topk", "another"] = 3
    assert {line[0]: line[2] for line in report.variants(job).rows}["topk"].startswith("another (3), ")


def test_content_is_json(finish, decoder):
    job = finish()
    settings = Settings(decoder.shape, 5, 4, 0)
    content = json.loads(json.dumps(report.content(report.by_phase(job, [row(1), row(114)]), settings)))
    assert content["summary"]["decode"]["page_recall"] == 1.0
    assert content["settings"]["shape"]["num_layers"] == 2
    assert content["memory_bytes"]["logits"] == job.memory["logits"]
