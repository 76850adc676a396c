"""Which cases of a family of tests are quick or in CI, and which tests begin first."""

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


def leave_to_long(items):
    """Marks the cases of `few_in_ci` that others stand for: so many of a family stay, from its
    first to its last."""
    families = {}
    for item in items:
        if (mark := item.get_closest_marker("few_in_ci")) and "long" not in item.keywords:
            families.setdefault(item.nodeid.partition("[")[0], (mark.args[0], []))[1].append(item)
    for number, cases in families.values():
        kept = {round(at * (len(cases) - 1) / max(1, number - 1)) for at in range(number)}
        for at, item in enumerate(cases):
            if at not in kept:
                item.add_marker(pytest.mark.long)


def longest_first(items, record):
    """Sorts tests: those that take long by themselves, the longest first, then the rest by file."""

    def place(item):
        file, _, rest = item.nodeid.partition("::")
        return -record.get(item.nodeid, 0) if rest else 0, -record.get(file, 0)

    return sorted(items, key=place)
