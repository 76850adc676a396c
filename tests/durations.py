"""Writes tests/durations.json: the seconds of the longest test files and tests, which begin first.
Used with `pytest -p tests.durations`."""

import json
from collections import Counter

from tests.tiers import RECORD

LEAST_FILE, LEAST_TEST = 10, 10  # seconds; the rest may run in any order


def worth_recording(seconds):
    """Returns the seconds of files and tests that take long, the longest first. seconds: by id."""
    files = Counter()
    for name, own in seconds.items():
        files[name.partition("::")[0]] += own
    found = {name: own for name, own in files.items() if own >= LEAST_FILE}
    found |= {name: own for name, own in seconds.items() if own >= LEAST_TEST}
    return {name: round(own) for name, own in sorted(found.items(), key=lambda item: -item[1])}


SECONDS = Counter()


def pytest_runtest_logreport(report):
    SECONDS[report.nodeid] += report.duration


def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        RECORD.write_text(json.dumps(worth_recording(SECONDS), indent=0) + "\n")
