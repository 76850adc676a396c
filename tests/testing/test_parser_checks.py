"""Each broken reasoning parser fails its check, whose message says what to do."""

import pytest

from mmdeploy_llm.hooks import NextText, ReasoningParser, ReasoningParserSpec, Segment
from mmdeploy_llm.testing import FakeReasoningParser, ParserExample
from mmdeploy_llm.testing.plugins.parsers import CHECKS, ParserSubject

END = "</think>"
NAMES = {check.__name__ for check in CHECKS}


class NeedsAnArgument(FakeReasoningParser):
    def __init__(self, tokenizer):
        super().__init__()


class NoParser:
    pass


def make_shared():
    parser = FakeReasoningParser()
    return lambda: parser


class ListOfMarkers(FakeReasoningParser):
    markers = [END]  # noqa: RUF012 - the fault


class ForgottenMarker(FakeReasoningParser):
    markers = ("<think>",)


class MarkerTwice(FakeReasoningParser):
    markers = (END, END)


class EndMarkerThatEndsNothing(FakeReasoningParser):
    markers = (END, "<answer>")
    end_marker = "<answer>"


class StartMarkerThatOpensNothing(FakeReasoningParser):
    start_marker = "<answer>"
    markers = (END, "<answer>")

    def start(self, prompt):
        super().start(prompt.replace("<answer>", END))


class StartMarkerThatIsNotClosed(FakeReasoningParser):
    def start(self, prompt):
        self._is_over = False

    def finish(self):
        return [Segment(kind="reasoning", text=self._held)] if self._held else []


class StartMarkerAlone(FakeReasoningParser):
    end_marker = None


class GivesNone(FakeReasoningParser):
    def feed(self, text):
        return super().feed(text) or ()


class EmptySegments(FakeReasoningParser):
    def finish(self):
        return [Segment(kind="content", text=self._held)]


class UnknownKind(FakeReasoningParser):
    def finish(self):
        return [Segment(kind="thoughts", text=self._held)] if self._held else []


class Raises(FakeReasoningParser):
    def feed(self, text):
        return super().feed(text) if "[" not in text else {}[text]


class SaysSomethingToNothing(FakeReasoningParser):
    def finish(self):
        return super().finish() or [Segment(kind="content", text=".")]


class LosesTheRest(FakeReasoningParser):
    def finish(self):
        return []


class AddsALine(FakeReasoningParser):
    def feed(self, text):
        segments = super().feed(text)
        return [
            Segment(kind=s.kind, text=s.text + "\n") if s.kind == "reasoning" else s
            for s in segments
        ]


class AlwaysFree(FakeReasoningParser):
    def next_text(self):
        return NextText(kind="free")


class LooksAtOnePiece(ReasoningParser):
    """Finds the marker only when it arrives in one piece."""

    markers = (END,)
    end_marker = END

    def __init__(self):
        self.kind = "reasoning"

    def feed(self, text):
        before, mark, after = text.partition(END)
        segments = [Segment(kind=self.kind, text=before)] if before else []
        if mark:
            self.kind = "content"
            segments += [Segment(kind="content", text=after)] if after else []
        return segments

    def finish(self):
        return []


class LosesATruncatedMarker(FakeReasoningParser):
    def finish(self):
        held = self._held
        for length in range(len(END) - 1, 0, -1):
            held = held.removesuffix(END[:length])
        return [Segment(kind="content", text=held)] if held else []


class Streams(ReasoningParser):
    """Gives the thinking as it comes, and holds back what may become the marker."""

    markers = (END,)
    start_marker = "<think>"
    end_marker = END

    def __init__(self):
        self.kind, self.held = "reasoning", ""

    def start(self, prompt):
        self.kind = "content" if prompt.rstrip().endswith(END) else "reasoning"

    def feed(self, text):
        if self.kind == "content":
            return self.given(content=text)
        before, mark, after = (self.held + text).partition(END)
        if mark:
            self.kind, self.held = "content", ""
            return self.given(reasoning=before, content=after)
        num_held = max(n for n in range(len(END)) if before.endswith(END[:n]))
        settled = before[: len(before) - num_held]
        self.held = before[len(settled) :]
        return self.given(reasoning=settled)

    def finish(self):
        return self.given(reasoning=self.held)

    def given(self, **texts):
        return [Segment(kind=kind, text=text) for kind, text in texts.items() if text]


class HeldIsContent(Streams):
    def finish(self):
        return self.given(content=self.held)


class LastWordIsContent(Streams):
    """Holds back the last word, to end the thinking at a word."""

    def feed(self, text):
        if self.kind == "reasoning" and END not in self.held + text:
            before, space, last = (self.held + text).rpartition(" ")
            self.held = last
            return self.given(reasoning=before + space)
        return super().feed(text)

    def finish(self):
        return self.given(content=self.held)


class CutOffIsContent(FakeReasoningParser):
    """Waits for the marker, and takes all of the text for the answer where none comes."""

    def finish(self):
        return [Segment(kind="content", text=self._held)] if self._held else []


class StateInTheClass(FakeReasoningParser):
    """Shares one list among all instances, cleared for each request."""

    held: list = []  # noqa: RUF012 - the fault

    def start(self, prompt):
        self.held.clear()
        super().start(prompt)

    def feed(self, text):
        self.held.append(text)
        return []

    def finish(self):
        text = "".join(self.held)
        self.held.clear()
        return [Segment(kind="content", text=text)] if text else []


BROKEN = [
    # factory, failing checks, regex for the message of the first
    (AlwaysFree, {"next_text_says_what_comes"}, "but the text '0' that follows is content; say"),
    (NeedsAnArgument, NAMES - {"examples_hold"}, "called without arguments, per request"),
    (NoParser, NAMES - {"examples_hold"}, "derive it from mmdeploy_llm.hooks.ReasoningParser"),
    (make_shared(), {"builds_without_arguments", "*"}, "each request needs a parser of its own"),
    (ListOfMarkers, {"markers_are_consistent", "*"}, "make it a tuple of texts"),
    (ForgottenMarker, {"markers_are_consistent"}, "'</think>' is not in `markers`.*; add it"),
    (MarkerTwice, {"markers_are_consistent"}, "holds a text twice; remove one"),
    (EndMarkerThatEndsNothing, {"markers_are_consistent"}, "ends the reasoning of no text"),
    (StartMarkerThatOpensNothing, {"markers_are_consistent"}, "opens no reasoning up to"),
    (StartMarkerThatIsNotClosed, {"markers_are_consistent", "*"}, "both of them do not close it"),
    (StartMarkerAlone, {"markers_are_consistent"}, "without `end_marker`; set both or none"),
    (
        GivesNone,
        {"segments_are_well_formed", "*"},
        "feed returns a tuple .*; return a list of Segments",
    ),
    (EmptySegments, {"segments_are_well_formed", "*"}, "finish returns a segment without text"),
    (UnknownKind, {"segments_are_well_formed", "*"}, "Segments of kind 'reasoning' or 'content'"),
    (Raises, {"segments_are_well_formed", "*"}, r"raised KeyError: .*; a parser accepts any text"),
    (SaysSomethingToNothing, {"empty_text_gives_nothing", "*"}, "return no segments"),
    (
        LosesTheRest,
        {"plain_text_is_kept", "the_end_keeps_its_kind"},
        "return in `finish` what was held back",
    ),
    (
        LosesATruncatedMarker,
        {"the_end_is_kept", "the_end_keeps_its_kind"},
        "return in `finish` what was held back",
    ),
    (HeldIsContent, {"the_end_keeps_its_kind"}, "return what was held back as the kind that"),
    (LastWordIsContent, {"the_end_keeps_its_kind"}, "let `finish` return it as reasoning"),
    (CutOffIsContent, {"the_end_keeps_its_kind"}, "cut off within its thinking.*as reasoning"),
    (AddsALine, {"nothing_is_made_up"}, "it does not add to it or reorder it"),
    (LooksAtOnePiece, {"any_split_equals_the_whole"}, "hold back text at the end of a piece"),
    (StateInTheClass, {"no_state_is_shared", "*"}, "keep the state in the instance"),
]


@pytest.fixture
def subject(factory):
    def make(parser, *examples):
        spec = ReasoningParserSpec(name="made-up", factory=factory(parser))
        return ParserSubject(spec=spec, examples=examples)

    return make


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("parser", "checks", "message"),
    BROKEN,
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_parser_fails(subject, failures, demand_failures, parser, checks, message):
    demand_failures(failures(CHECKS, subject(parser)), CHECKS, checks, message)


def test_a_parser_that_streams_passes(subject, failures):
    assert failures(CHECKS, subject(Streams)) == {}


def test_a_wrong_example_fails(subject, failures):
    right = ParserExample(text="why</think>so", reasoning="why", content="so")
    wrong = ParserExample(text="why</think>so", reasoning="", content="whyso")
    assert failures(CHECKS, subject(FakeReasoningParser, right)) == {}
    found = failures(CHECKS, subject(FakeReasoningParser, right, wrong))
    assert set(found) == {"examples_hold"}
    assert "but the example says ('', 'whyso'); correct the parser or the example" in str(found)


def test_a_factory_that_is_not_there(failures):
    spec = ReasoningParserSpec(name="made-up", factory="no_such_module:Parser")
    found = failures(CHECKS, ParserSubject(spec=spec))
    assert (
        "'no_such_module:Parser' of 'made-up' raised ModuleNotFoundError"
        in found["builds_without_arguments"]
    )


def test_every_check_has_a_broken_parser():
    covered = {next(c.__name__ for c in CHECKS if c.__name__ in checks) for _, checks, _ in BROKEN}
    assert covered | {"examples_hold"} == NAMES
