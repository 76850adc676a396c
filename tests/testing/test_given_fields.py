"""`plugins check` uses the fields that a plugin's module names in CHECKED_WITH."""

import pytest

from mmdeploy_llm.testing import check_plugin

PLUGIN = """
from mmdeploy_llm.errors import MediaLimitError
from mmdeploy_llm.hooks import hookimpl

STORE = {{}}
CHECKED_WITH = {given}

@hookimpl
def fetch_media(ref, limits):
    found = STORE.get(ref.uri)
    if found is not None:
        limits.check_bytes(len(found), ref.uri)
    return found
"""
GIVEN = '''{"fetch_media": {"serves": {"shelf://a": b"abc"}}}
STORE["shelf://a"] = b"abc"'''
SET_UP = """None
import contextlib

@contextlib.contextmanager
def CHECKED_WITH():
    STORE["shelf://a"] = b"abc"
    yield {"fetch_media": {"serves": {"shelf://a": b"abc"}}}
    STORE.clear()"""
OF_FETCHER = ("returns_the_bytes", "bytes_are_limited")


@pytest.fixture
def verdicts(tmp_path):
    """verdicts(given) -> name of a check -> its verdict."""

    def check(given):
        path = tmp_path / "shelf.py"
        path.write_text(PLUGIN.format(given=given))
        return {found.check: found for found in check_plugin(str(path))}

    return check


@pytest.mark.one_is_quick
@pytest.mark.parametrize("given", [GIVEN, SET_UP], ids=["a mapping", "a context manager"])
def test_nothing_is_skipped_for_want_of_samples(verdicts, given):
    found = verdicts(given)
    assert found["given_fields_are_known"].outcome == "pass"
    assert [found[name].outcome for name in OF_FETCHER] == ["pass", "pass"]


def test_what_is_given_is_checked(verdicts):
    found = verdicts('{"fetch_media": {"serves": {"shelf://b": b"abc"}}}')
    assert found["returns_the_bytes"].outcome == "fail"


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ('{"fetch_medai": {}}', "did you mean 'fetch_media'"),
        ('{"fetch_media": {"serve": {}}}', "did you mean 'serves'"),
        ('{"fetch_media": {"fetch": len}}', "whose checks have foreign, limits"),
        ('{"fetch_media": 3}', "CHECKED_WITH gives"),
        ("7", "CHECKED_WITH gives 7"),
        ('"nowhere_at_all:FIELDS"', "reading CHECKED_WITH = 'nowhere_at_all:FIELDS' raised"),
        ('"json:FIELDS"', "has no attribute 'FIELDS'"),
        (
            "{'fetch_media': {'serves': [b'abc']}}",
            "gives 'serves' for 'fetch_media' as list; it is a",
        ),
    ],
)
def test_what_does_not_fit_is_told(verdicts, given, told):
    verdict = verdicts(given)["given_fields_are_known"]
    assert verdict.outcome == "fail"
    assert told in verdict.message


PARSER = """
from mmdeploy_llm.hooks import ReasoningParser, ReasoningParserSpec, Segment, hookimpl

CHECKED_WITH = {{"all": {{"examples": {given}}}}}

class All(ReasoningParser):
    def feed(self, text): return [Segment(kind="content", text=text)] if text else []
    def finish(self): return []

@hookimpl
def provide_reasoning_parsers():
    return [ReasoningParserSpec(name="all", factory=f"{{__name__}}:All")]
"""


@pytest.mark.parametrize(
    ("given", "outcomes", "told"),
    [
        ('[{"text": "a", "reasoning": "", "content": "a"}]', ("pass", "pass"), ""),
        ('[{"text": "a", "reasoning": "a", "content": ""}]', ("pass", "fail"), "correct the pars"),
        ('[{"text": "a", "answer": "a"}]', ("fail", "skip"), "an example has fields: content, pro"),
        ("[7]", ("fail", "skip"), "an example has fields: content, pro"),
    ],
)
def test_an_example_is_a_mapping_of_its_fields(given, outcomes, told, tmp_path):
    path = tmp_path / "all.py"
    path.write_text(PARSER.format(given=given))
    found = {verdict.check: verdict for verdict in check_plugin(str(path))}
    verdicts = [found[name] for name in ("given_fields_are_known", "examples_hold")]
    assert tuple(verdict.outcome for verdict in verdicts) == outcomes
    assert told in "".join(verdict.message for verdict in verdicts if verdict.outcome == "fail")
