"""A check that is newer than a package fails `plugins check` and says so; the package's own pytest
run goes on as yesterday. A typo in a test class is refused; what nobody tries is named."""

import sys
from types import ModuleType

import pytest

from mmdeploy_llm.hooks import API_VERSION, ReasoningParserSpec
from mmdeploy_llm.testing import (
    ModelConformance,
    ReasoningParserConformance,
    check_plugin,
)
from mmdeploy_llm.testing.models.base import CheckFailed, demand, newer_than
from mmdeploy_llm.testing.plugins.declared import declared_by

PARSER = """
from mmdeploy_llm.hooks import ReasoningParserSpec, Segment, hookimpl
from mmdeploy_llm.testing import FakeReasoningParser

{declared}

class CutOff(FakeReasoningParser):
    def finish(self):
        return [Segment(kind="content", text=self._held)] if self._held else []

@hookimpl
def provide_reasoning_parsers():
    return [ReasoningParserSpec(name="cut", factory=__name__ + ":CutOff")]
"""
TESTS = """
from cut_off import provide_reasoning_parsers
from mmdeploy_llm.testing import PluginConformance, ReasoningParserConformance

class TestPlugin(PluginConformance):
    plugin = "cut_off"

class TestParser(ReasoningParserConformance):
    spec = provide_reasoning_parsers()[0]
"""
RUN = """
import sys, pytest
sys.exit(pytest.main(["-q", "-rxf", "-n", "0", "-p", "no:cacheprovider", "-k", "TestParser"]))
"""
NEWER = "since API 1.2; your package declares"


@pytest.fixture
def module(monkeypatch):
    """module(name, **contents) -> an importable module."""

    def make(name, **contents):
        made = ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    return make


@pytest.mark.parametrize(
    ("declared", "is_newer"),
    [(None, True), ((1, 0), True), ((1, 1), True), ((1, 2), False), ((2, 0), False)],
)
def test_a_newer_check(declared, is_newer):
    assert bool(newer_than((1, 2), declared)) == is_newer
    assert newer_than(None, declared) == ""
    if is_newer:
        assert newer_than((1, 2), declared).startswith(NEWER)


def test_what_a_package_declares(module):
    module("made_up_llm", MMDEPLOY_LLM_API=(1, 1))
    module("made_up_llm.deep", MMDEPLOY_LLM_API="nonsense")
    module("says_nothing_llm")

    def of(factory):
        spec = ReasoningParserSpec(name="x", factory=factory)
        return declared_by(type("Test", (), {"spec": spec}))

    assert of("made_up_llm.deep:Parser") == (1, 1)
    assert of("says_nothing_llm:Parser") is None
    assert of("no_such_module_llm:Parser") is None
    assert of("mmdeploy_llm.testing.fakes:FakeReasoningParser") == API_VERSION
    assert declared_by(type("Test", (), {"plugin": "made_up_llm"})) == (1, 1)
    assert declared_by(type("Test", (), {})) is None


@pytest.mark.full  # a process with pytest
@pytest.mark.parametrize(
    ("declared", "code"),
    [("", 0), ("MMDEPLOY_LLM_API = (1, 1)", 0), ("MMDEPLOY_LLM_API = (1, 2)", 1)],
)
def test_an_authors_tests_of_yesterday_go_on(tmp_path, run_program, declared, code):
    (tmp_path / "cut_off.py").write_text(PARSER.format(declared=declared))
    (tmp_path / "test_cut_off.py").write_text(TESTS)
    done = run_program(RUN, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == code, done.stdout[-3000:]
    told = [line for line in done.stdout.splitlines() if "the_end_keeps_its_kind" in line]
    assert told
    assert ("1 xfailed" in done.stdout) == (code == 0)
    assert (NEWER in done.stdout) == (code == 0)


@pytest.mark.parametrize(
    ("declared", "is_newer"), [("", True), ("MMDEPLOY_LLM_API = (1, 2)", False)]
)
def test_plugins_check_fails_and_says_that_the_check_is_newer(tmp_path, declared, is_newer):
    path = tmp_path / "cut_off.py"
    path.write_text(PARSER.format(declared=declared))
    found = {one.check: one for one in check_plugin(str(path))}["the_end_keeps_its_kind"]
    assert found.outcome == "fail"
    assert found.since == (1, 2)
    assert found.message.startswith(NEWER) == is_newer
    assert "let `finish` return it as reasoning" in found.message


def test_a_check_without_a_version_fails_for_everybody(module):
    class Old(ReasoningParserConformance):
        spec = ReasoningParserSpec(name="x", factory="says_nothing_llm:Parser")
        checks = (lambda subject: demand(False, "no"),)

    (test,) = (getattr(Old, name) for name in dir(Old) if "lambda" in name)
    with pytest.raises(CheckFailed, match="no"):
        test(Old(), None)


def new_class(base, factory, kind=ReasoningParserSpec, **fields):
    return type("TestOne", (base,), {"spec": kind(name="x", factory=factory), **fields})


@pytest.mark.parametrize(
    ("base", "fields", "told"),
    [
        (ReasoningParserConformance, {"exmaples": ()}, "did you mean 'examples'"),
        (ModelConformance, {"tolerence": 1e-3}, "did you mean 'tolerance'"),
        (ModelConformance, {"wirte": staticmethod(print)}, "did you mean 'write'"),
        (ModelConformance, {"family": "whisper"}, "it reads bf16_tolerance, cases"),
    ],
)
def test_an_unknown_attribute_is_refused(module, base, fields, told):
    module("made_up_llm", MMDEPLOY_LLM_API=API_VERSION)
    with pytest.raises(TypeError, match=f"is no attribute that the kit reads.*{told}"):
        new_class(base, "made_up_llm:Any", **fields)
    module("made_up_llm", MMDEPLOY_LLM_API=(1, 1))
    with pytest.warns(UserWarning, match=f"{NEWER} 1.1 .*{told}"):
        new_class(base, "made_up_llm:Any", **fields)


def test_attributes_of_ones_own_are_taken(module):
    module("made_up_llm", MMDEPLOY_LLM_API=API_VERSION)

    @pytest.fixture
    def prompt(self):
        return "hi"

    fields = {"_note": 3, "prompt": prompt, "of_no_interest": lambda self: 3, "__test__": False}
    made = new_class(ModelConformance, "made_up_llm:Any", test_more=lambda self: None, **fields)
    assert made._note == 3


UNTRIED = """
from mmdeploy_llm.hooks import LogitsProcessorSpec, MediaProcessorSpec, hookimpl
from mmdeploy_llm.testing.fakes import FakeMediaProcessor

class Pages(FakeMediaProcessor):
    def __init__(self, checkpoint, options):
        super().__init__(checkpoint, {"dpi": options.get("dpi", 72)})

    def count_tokens(self, item, options):
        first = options["page"] if "page" in options else options.get("first", 0)
        return max(1, item[0] // 16) + 0 * len(str(first))

@hookimpl
def provide_media_processors():
    return [MediaProcessorSpec(name="pages", kind="image", factory=__name__ + ":Pages")]

@hookimpl
def provide_logits_processors():
    return [
        LogitsProcessorSpec(name="bias", factory=__name__ + ":Bias", arguments=("bias", "window")),
        LogitsProcessorSpec(name="other", factory=__name__ + ":Bias"),
    ]

@hookimpl
def fetch_media(ref, limits):
    return None
"""


def test_what_no_test_class_tries_is_named(tmp_path, monkeypatch):
    from mmdeploy_llm.testing import (
        FetcherConformance,
        LogitsProcessorConformance,
        MediaProcessorConformance,
        PluginConformance,
    )
    from mmdeploy_llm.testing.untried import untried

    (tmp_path / "untried_llm.py").write_text(UNTRIED)
    monkeypatch.syspath_prepend(str(tmp_path))
    import untried_llm

    pages, (bias, other) = (
        untried_llm.provide_media_processors()[0],
        untried_llm.provide_logits_processors(),
    )
    whole = type("TestPlugin", (PluginConformance,), {"plugin": "untried_llm"})
    assert set(untried([whole, object])) == {
        "fetch_media has no FetcherConformance here",
        "image processor pages has no MediaProcessorConformance here",
        "logits processor bias has no LogitsProcessorConformance here",
        "logits processor other has no LogitsProcessorConformance here",
    }
    tests = [
        whole,
        type("TestFetcher", (FetcherConformance,), {"plugin": "untried_llm"}),
        type(
            "TestPages",
            (MediaProcessorConformance,),
            {"spec": pages, "item_options": ({"first": 3},)},
        ),
        type(
            "TestBias",
            (LogitsProcessorConformance,),
            {"spec": bias, "arguments": ({"bias": 1},)},
        ),
        type("TestOther", (LogitsProcessorConformance,), {"spec": other}),
    ]
    assert set(untried(tests)) == {
        "image processor pages: the option `page` stands in no item_options",
        "image processor pages: the option `dpi` stands in no other_options",
        "logits processor bias: the argument `window` stands in no arguments",
    }
    tried = {"spec": pages, "item_options": {"first": 3, "page": 1}, "other_options": {"dpi": 9}}
    tests[2] = type("TestPages", (MediaProcessorConformance,), tried)
    tests[3] = type(
        "TestBias",
        (LogitsProcessorConformance,),
        {"spec": bias, "arguments": ({"bias": 1, "window": 2},)},
    )
    assert untried(tests) == []
