"""What surrounds the model grows as its work."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "examples/benchmarks/scaling.py"


@pytest.mark.long
def test_nothing_grows_much_faster_than_its_work():
    """The bound is loose: other programs run beside the tests."""
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    found = dict(re.findall(r"^(\w[\w -]*?) +(-?\d\.\d\d)  ", done.stdout, re.MULTILINE))
    assert len(found) == 16, done.stdout + done.stderr
    assert {name: own for name, own in found.items() if float(own) > 1.4} == {}


@pytest.mark.full
def test_every_row_runs():
    """So that one which no longer fits the code is seen before the long tests."""
    rows = runpy.run_path(str(SCRIPT))["ROWS"]
    sizes = {"garbage": 100, "vocabulary": 1000, "media": 10}
    for row in rows:
        row.prepare(sizes.get(row.name, row.sizes[0]))()
    assert len(rows) == 16


@pytest.mark.full
def test_an_unknown_row_is_named():
    done = subprocess.run(
        [sys.executable, SCRIPT, "frobs"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "unknown rows ['frobs']; known: ['admission'" in done.stderr
