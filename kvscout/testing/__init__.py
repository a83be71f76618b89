"""One source of cases for the tests, ``verify``, ``bench`` and the demo, and how results are judged and timed."""
