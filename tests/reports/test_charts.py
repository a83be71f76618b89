"""What figures show of a run."""

from dataclasses import replace

import pytest

from kvscout.reports.charts import Series, charts
from kvscout.reports.results import read
from kvscout.roofline import Cost
from kvscout.testing.case import BENCH
from kvscout.testing.cases.mqa_logits import MqaLogitsCase
from kvscout.testing.cases.pa_decode import PaDecodeCase

GBYTE = 10**9


def decode(batch, context, **more):
    return PaDecodeCase((context,) * batch, 16, 1, **{"page": 128, "odd": ("no_lse",), "level": BENCH, **more})


def moving(gbytes):
    """Of a call that computes little."""
    return Cost(10**6, int(gbytes * GBYTE), fp8=False)


@pytest.fixture
def drawn(result):
    """The charts of a run, by kind."""

    def draw(cases, measurements, **more):
        found = charts(read(result(cases, measurements, **more)))
        return {chart.name.rpartition("-")[2]: chart for chart in found}

    return draw


def test_latency_is_drawn_along_batches_and_along_contexts(drawn, timed):
    along_batch = [decode(batch, 512) for batch in (8, 1, 4)]
    along_context = [decode(4, context) for context in (2048, 1024)]
    cases = [*along_batch, *along_context, decode(5, 99), decode(1, 4096, cache="bf16")]
    found = [timed(case, "rival", 3.0, peer=True) for case in along_batch]
    found += [timed(case, "ours", 1.0 + i) for i, case in enumerate(cases)]
    latency = drawn(cases, found)["latency"]
    assert latency.name == "nvidia-h200-made-latency"
    assert latency.caption == "NVIDIA H200, 2030-01-02, kvscout 9.8.7 at 0123456789ab; medians, cold L2"
    batch, context = latency.panels
    assert batch.title == "e4m3 cache, 16/1 heads of 128, 512 tokens a sequence"
    assert (batch.x_label, batch.y_label, batch.log_x, batch.log_y) == ("batch (sequences)", "time (µs)", True, True)
    assert batch.series == (
        Series("ours", False, ((1, 2.0), (4, 3.0), (8, 1.0))),
        Series("rival", True, ((1, 3.0), (4, 3.0), (8, 3.0))),
    )
    assert context.title == "e4m3 cache, 16/1 heads of 128, 4 sequences"
    assert context.x_label == "context (tokens a sequence)"
    assert context.series[0] == Series("ours", False, ((512, 3.0), (1024, 5.0), (2048, 4.0)))


def test_cases_that_differ_otherwise_share_no_line(drawn, timed):
    cases = [decode(1, 512), decode(2, 512), decode(4, 512, page=64), decode(8, 512, query_length=2)]
    cases += [replace(decode(3, 512), lengths=(512, 512, 100))]
    assert "latency" not in drawn(cases, [timed(case, "ours", 1.0) for case in cases])


def test_what_failed_or_refused_is_no_point(drawn, timed):
    cases = [decode(batch, 512) for batch in (1, 2, 4, 8)]
    found = [timed(case, "ours", us) for case, us in zip(cases, (1.0, None, 3.0, 4.0), strict=True)]
    found += [timed(case, "rival", 9.0, peer=True, refused=case is not cases[0]) for case in cases]
    (panel,) = drawn(cases, found)["latency"].panels
    assert panel.series == (
        Series("ours", False, ((1, 1.0), (4, 3.0), (8, 4.0))),
        Series("rival", True, ((1, 9.0),)),
    )


def test_bandwidth_is_of_cold_calls_that_move_more_than_they_compute(drawn, timed):
    cases = [decode(batch, 512) for batch in (1, 2, 4, 8, 16)]
    found = [timed(case, "ours", 1000.0, cost=moving(gbytes)) for case, gbytes in zip(cases, (1, 2, 3), strict=False)]
    found += [timed(cases[3], "ours", 1000.0, cost=Cost(10**15, GBYTE, fp8=False))]
    found += [timed(cases[4], "ours", 1000.0, cold=False, cost=moving(1))]
    bandwidth = drawn(cases, found)["bandwidth"]
    (panel,) = bandwidth.panels
    assert (panel.title, panel.y_label, panel.log_x, panel.log_y) == ("pa_decode", "bandwidth (TB/s)", True, False)
    assert panel.series == (Series("ours", False, ((GBYTE, 1.0), (2 * GBYTE, 2.0), (3 * GBYTE, 3.0))),)
    assert panel.roof == (4.46, "measured read rate of memory, 4.46 TB/s")


def test_hot_calls_have_no_bandwidth(drawn, timed):
    cases = [decode(batch, 512) for batch in (1, 2, 4)]
    found = drawn(cases, [timed(case, "ours", 1.0, cold=False, cost=moving(i + 1)) for i, case in enumerate(cases)])
    assert list(found) == ["latency"]
    assert found["latency"].caption.endswith("medians, inputs in the cache")


def test_rates_are_a_line_per_shape_the_largest_last(drawn, timed):
    shapes = [MqaLogitsCase(rows, 128, 64, level=BENCH, clean=False) for rows in (64, 16)]
    shapes += [MqaLogitsCase(64, 128, 64, windows="packed", sequences=2, level=BENCH)]
    shapes += [MqaLogitsCase(1, 9, 32, level=BENCH)]
    tera = (8, 2, 8, 1)
    found = [timed(c, "auto", 1e6, cost=Cost(n * 10**12, 1)) for c, n in zip(shapes, tera, strict=True)]
    found += [timed(shapes[0], "rival", 4e6, peer=True, cost=Cost(8 * 10**12, 1))]
    rates = drawn(shapes, found)["rates"]
    (panel,) = rates.panels
    assert panel.title == "64 heads of 128"
    assert panel.shapes == ("16x128", "64x128", "64x128 packed x2 clean")
    assert panel.series == (
        Series("auto", False, ((2.0, 0), (8.0, 1), (8.0, 2))),
        Series("rival", True, ((2.0, 1),)),
    )
    assert panel.roof == (1559.0, "measured FP8 matrix rate, 1559 TFLOPS")


def test_no_roof_where_nobody_measured_the_gpu(drawn, timed):
    shapes = [MqaLogitsCase(rows, 128, level=BENCH) for rows in (1, 2, 3)]
    decodes = [decode(batch, 512) for batch in (1, 2, 4)]
    found = [timed(case, "auto", 1.0, cost=Cost(10**9, i + 1)) for i, case in enumerate((*shapes, *decodes))]
    made = drawn([*shapes, *decodes], found, machine={"device": "A GPU (of tomorrow)"})
    assert [panel.roof for chart in made.values() for panel in chart.panels] == [None] * 3
    assert made["rates"].name == "a-gpu-of-tomorrow-made-rates"


def test_few_points_are_no_figure(drawn, timed):
    cases = [decode(1, 512), decode(2, 512), MqaLogitsCase(1, 9, level=BENCH)]
    assert drawn(cases, [timed(case, "ours", 1.0) for case in cases]) == {}
