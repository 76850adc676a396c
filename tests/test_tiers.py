"""The order and the tiers of tests: what tests/tiers.py and tests/durations.py decide."""

from types import SimpleNamespace

from tests.durations import worth_recording
from tests.tiers import leave_to_full, leave_to_long, longest_first


class Item(SimpleNamespace):
    """Stands for a test."""

    def add_marker(self, mark):
        self.keywords[mark.name] = True


def test_of_a_family_the_first_quick_case_stays_quick():
    marks = [{"long"}, set(), set(), {"full"}]
    items = [
        Item(nodeid=f"a.py::test_x[{n}]", keywords=dict.fromkeys({"one_is_quick", *own}))
        for n, own in enumerate(marks)
    ]
    items += [Item(nodeid=f"a.py::test_y[{n}]", keywords={}) for n in range(2)]
    leave_to_full(items)
    slow = [item.nodeid for item in items if {"full", "long"} & set(item.keywords)]
    assert slow == ["a.py::test_x[0]", "a.py::test_x[2]", "a.py::test_x[3]"]


def test_cases_stand_for_others_from_the_first_to_the_last():
    mark = SimpleNamespace(args=(3,))
    names = [*(f"a.py::test_x[{n}]" for n in range(9)), "a.py::test_y[0]", "a.py::test_y[1]"]
    items = [Item(nodeid=name, keywords={}, get_closest_marker=lambda _: mark) for name in names]
    leave_to_long(items)
    kept = [item.nodeid for item in items if "long" not in item.keywords]
    assert kept == [*(f"a.py::test_x[{n}]" for n in (0, 4, 8)), *names[-2:]]


def test_the_longest_begin_first_and_files_stay_together():
    names = ("a.py::b", "c.py::d", "c.py::e", "f.py::g")
    record = {"c.py": 30, "f.py": 20, "f.py::g": 15, "gone.py": 99}
    items = [SimpleNamespace(nodeid=name) for name in names]
    found = [item.nodeid for item in longest_first(items, record)]
    assert found == ["f.py::g", "c.py::d", "c.py::e", "a.py::b"]


def test_short_tests_and_files_are_not_recorded():
    seconds = {"a.py::b": 40.4, "a.py::c": 5.0, "d.py::e": 6.0, "d.py::f": 7.0, "g.py::h": 1.0}
    assert worth_recording(seconds) == {"a.py": 45, "a.py::b": 40, "d.py": 13}
