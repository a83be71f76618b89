"""Result files as ``kvscout bench`` writes them, with times that are made up."""

import json
from dataclasses import asdict

import pytest

from kvscout.roofline import Cost
from kvscout.testing import shapes_csv
from kvscout.testing.measure import Measurement
from kvscout.testing.sweep import FAILED, PASSED, REFUSED
from kvscout.testing.timing import Timing


@pytest.fixture
def timed():
    """``timed(case, "auto", 2.0, ...)``: a measurement with these microseconds; None is one that failed."""

    def make(case, variant, us, *, cold=True, cost=None, refused=False, **more):
        times = None if us is None or refused else Timing(us, us, 0.0, 5)
        status = REFUSED if refused else PASSED if times else FAILED
        given = {"cold" if cold else "hot": times, "cost": cost or Cost(8 * 10**6, 2 * 10**6)}
        return Measurement(case.op, case.name, variant, status, **given, **more)

    return make


@pytest.fixture
def result(tmp_path):
    """``result(cases, measurements)``: the file of such a run on an H200.

    ``known=False`` leaves out what the cases were; further arguments take the place of other parts.
    """

    def write(cases, measurements, name="bench-made.json", known=True, **more):
        rows = {}
        for case in cases:
            rows.setdefault(case.op, {})[case.name] = shapes_csv.row_of(case)
        content = {
            "time": "2030-01-02T03:04:05+00:00",
            "command": "kvscout bench --json bench-made.json",
            "commit": "0123456789abcdef0123456789abcdef01234567",
            "versions": {"python": "3.12.3", "kvscout": "9.8.7", "rival": None},
            "machine": {"device": "NVIDIA H200"},
            "peers_missing": {"op absent": "absent is not timed on op: it is not here"},
            "measurements": [
                asdict(m) | {"tflops": m.tflops, "roof": m.roof, "speedup": 1.0, "tbytes_per_s": m.tbytes_per_s}
                for m in measurements
            ],
        }
        file = tmp_path / name
        file.write_text(json.dumps(content | ({"cases": rows} if known else {}) | more))
        return file

    return write
