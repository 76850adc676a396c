"""Which cases of a family of tests are quick, and which tests begin first."""

from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("durations.json")  # see durations.py


def leave_to_full(items):
    """Marks the cases of `one_is_quick` that another one represents."""
    represented = set()
    for item in items:
        if "one_is_quick" not in item.keywords or {"full", "long"} & set(item.keywords):
            continue
        family = item.nodeid.partition("[")[0]
        if family in represented:
            item.add_marker(pytest.mark.full)
        represented.add(family)


def longest_first(items, record):
    """Sorts tests: those that take long by themselves, the longest first, then the rest by file."""

    def place(item):
        file, _, rest = item.nodeid.partition("::")
        return -record.get(item.nodeid, 0) if rest else 0, -record.get(file, 0)

    return sorted(items, key=place)
