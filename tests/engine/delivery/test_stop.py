"""Stop strings, however the text is split into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdeploy_llm.engine.delivery.stop import StopSequences, StopStrings


def run(stops: list[str], pieces: list[str], *, is_included: bool = False) -> str:
    """Returns all text that is released."""
    matcher = StopStrings(stops, is_included=is_included)
    return "".join(matcher.feed(piece) for piece in pieces) + matcher.finish()


def expected(stops: list[str], text: str, *, is_included: bool) -> str:
    """The plain reference: character by character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if is_included else end - max(map(len, found))]
    return text


@given(
    stops=st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=4),
    pieces=st.lists(st.text("ab<", max_size=5), max_size=8),
    is_included=st.booleans(),
)
def test_any_split_finds_the_first_complete_stop(
    stops: list[str], pieces: list[str], is_included: bool
) -> None:
    assert run(stops, pieces, is_included=is_included) == expected(
        stops, "".join(pieces), is_included=is_included
    )


@given(
    stops=st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(st.text("abc<", max_size=4), max_size=8),
)
def test_what_was_shown_is_never_part_of_a_later_match(stops: list[str], pieces: list[str]) -> None:
    matcher = StopStrings(stops)
    shown, text = "", ""
    for piece in pieces:
        shown += matcher.feed(piece)
        text += piece
        final = expected(stops, text, is_included=False)
        assert final.startswith(shown)
        if not matcher.is_stopped:  # and nothing is held back without need
            held = text[len(shown) :]
            assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(("is_included", "text"), [(False, "one two"), (True, "one two stop")])
def test_a_match_that_may_not_stop_is_text(is_included: bool, text: str) -> None:
    matcher = StopStrings([" stop", "one"], is_included=is_included)
    parts = [matcher.feed("one", can_stop=False), matcher.feed(" two st", can_stop=False)]
    parts += [matcher.feed("op x"), matcher.finish()]
    assert "".join(parts) == text


def test_a_match_completed_too_early_does_not_stop_later() -> None:
    matcher = StopStrings(["ab", "xaby"])
    assert matcher.feed("xab", can_stop=False) == ""  # may become "xaby"
    assert matcher.feed("z") + matcher.finish() == "xabz"
    assert not matcher.is_stopped


def test_a_whole_stop_that_may_not_stop_is_not_held_back() -> None:
    matcher = StopStrings(["ab", "xaby"])
    assert matcher.feed("ab", can_stop=False) == "ab"


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=4)


def expected_ids(
    stops: list[list[int]], ids: list[int], *, is_included: bool, min_tokens: int
) -> tuple[list[int], bool]:
    """The plain reference: token by token."""
    for end in range(max(1, min_tokens), len(ids) + 1):
        found = [stop for stop in stops if ids[:end][-len(stop) :] == stop]
        if found:
            return ids[: end if is_included else end - max(map(len, found))], True
    return ids, False


@given(
    stops=st.lists(IDS, min_size=1, max_size=4),
    ids=st.lists(st.integers(0, 3), max_size=20),
    is_included=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_the_first_complete_sequence_stops_and_nothing_shown_is_taken_back(
    stops: list[list[int]], ids: list[int], is_included: bool, min_tokens: int
) -> None:
    matcher = StopSequences(stops, is_included=is_included, min_tokens=min_tokens)
    settled: list[int] = []
    for number, token_id in enumerate(ids, 1):
        settled += matcher.feed(token_id)
        so_far, is_stopped = expected_ids(
            stops, ids[:number], is_included=is_included, min_tokens=min_tokens
        )
        assert matcher.is_stopped == is_stopped
        assert so_far[: len(settled)] == settled
        held = so_far[len(settled) :]
        assert not held or any(stop[: len(held)] == held for stop in stops)
    settled += matcher.finish()
    assert settled == expected_ids(stops, ids, is_included=is_included, min_tokens=min_tokens)[0]


@pytest.mark.parametrize(
    ("ids", "is_included", "settled"),
    [
        ([5, 1], False, (5, 1)),  # held back, and released by the end
        ([5, 1, 2], False, (5,)),  # the id that ends the request completes the sequence
        ([5, 1, 2], True, (5, 1, 2, 9)),
        ([5], False, (5,)),
    ],
)
def test_the_id_that_ends_a_request_counts(
    ids: list[int], is_included: bool, settled: tuple[int, ...]
) -> None:
    matcher = StopSequences([[1, 2, 9], [9, 9]], is_included=is_included, min_tokens=0)
    found = [one for token_id in ids for one in matcher.feed(token_id)]
    assert (*found, *matcher.end_with(9)) == settled
    assert matcher.is_stopped is (len(ids) == 3)
