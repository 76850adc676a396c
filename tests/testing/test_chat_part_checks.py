"""The kit's checks of chat parts find planted bugs and pass what is right."""

import pytest

from mmdeploy_llm.testing import ChatPartExample
from mmdeploy_llm.testing.models.base import CheckFailed, CheckSkipped
from mmdeploy_llm.testing.plugins import chat_parts

from .planted_chat_parts import spec

PLACE = {"type": "place", "lat": 1, "lon": 2.5}
WRONG = ({"type": "place", "lat": 91, "lon": 0},)
EXAMPLES = (
    ChatPartExample(part=PLACE, expected=("At 1.0000, 2.5000.",)),
    ChatPartExample(part={**PLACE, "lat": 60}, expected=("At 60.0000, 2.5000.",)),
)
PATH = {"keys": {"path": str}}


def outcomes(function, *, examples=(), fields=None, wrong=(), files=None):
    """Returns name of a check -> "pass", "skip", or what it says of a fault."""
    subject = chat_parts.ChatPartSubject(
        spec=spec(function, **(fields or {})), examples=examples, wrong=wrong, files=files or {}
    )
    found = {}
    for check in chat_parts.CHECKS:
        try:
            check(subject)
            found[check.__name__] = "pass"
        except CheckSkipped:
            found[check.__name__] = "skip"
        except CheckFailed as failure:
            found[check.__name__] = str(failure)
    return found


def parts(*given):
    return tuple(ChatPartExample(part=part, expected=()) for part in given)


def test_a_right_part_passes_all():
    assert set(outcomes("good", examples=EXAMPLES, wrong=WRONG).values()) == {"pass"}


def test_without_examples_a_part_is_made_up():
    found = outcomes("good")
    skipped = {name for name, own in found.items() if own == "skip"}
    assert skipped == {"examples_hold", "wrong_parts_are_refused"}
    assert set(found.values()) == {"pass", "skip"}


def test_a_late_part_reads_what_fetch_returns(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("Hi")
    given = parts({"type": "place", "path": str(path)})
    fields = {**PATH, "late": True}
    found = outcomes("fetched", examples=given, fields=fields, files={str(path): b"Hi"})
    assert found.pop("it_depends_on_the_part_alone") == "skip"
    assert "the example says ()" not in found.pop("files_are_opened_by_fetch")
    assert "becomes [{'type': 'text', 'text': 'Hi'}], but the example says []" in found.pop(
        "examples_hold"
    )
    assert set(found.values()) == {"pass", "skip"}


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("function", "check", "words", "given"),
    [
        ("unchecked", "wrong_parts_are_refused", "raise ValueError for it", {}),
        ("says_nothing", "wrong_parts_are_refused", "without a message", {}),
        ("crashes", "wrong_parts_are_refused", "IndexError", {"wrong": ({**PLACE, "lon": 900},)}),
        ("crashes", "odd_values_work_or_are_refused", "with inf as 'lat'|IndexError", {}),
        ("without_lon", "examples_hold", "correct the function or the example", {}),
        ("without_lon", "every_key_has_an_effect", "lon: no value of these keys", {}),
        ("counts", "the_same_part_becomes_the_same", "no clock, no chance, no counter", {}),
        ("shared", "threads_do_not_disturb_each_other", "keep nothing in the module", {}),
        ("endless", "examples_hold", "parts become parts without an end", {}),
        ("asks_the_model", "it_depends_on_the_part_alone", "say late=True", {}),
        ("tells_an_address", "messages_show_no_addresses", "address is told", {}),
        ("refuses_with_an_address", "messages_show_no_addresses", "address is told", {}),
        ("unknown_type", "parts_are_of_known_types", "type 'map', which nobody knows", {}),
    ],
)
def test_planted_bugs_are_found(function, check, words, given):
    import re

    found = outcomes(function, **{"examples": EXAMPLES, "wrong": WRONG, **given})[check]
    assert re.search(words, found), found


def test_a_part_that_is_changed_is_found():
    given = parts({**PLACE, "tags": ["a"]})
    fields = {"keys": {"lat": float, "lon": float, "tags": list}}
    found = outcomes("changes_its_part", examples=given, fields=fields)
    assert "the function changed its part" in found["parts_are_left_as_they_are"]


def test_a_file_that_is_opened_without_fetch_is_found(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("Hi")
    given = parts({"type": "place", "path": str(path)})
    found = outcomes("opens_itself", examples=given, fields=PATH)
    assert "with about.fetch" in found["files_are_opened_by_fetch"]
    assert "failed on a part of type" in found["odd_values_work_or_are_refused"]
