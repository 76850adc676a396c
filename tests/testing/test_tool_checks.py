"""Each broken tool parser fails its check, whose message says what to do."""

import pytest

from mmdeploy_llm.hooks import ToolCall, ToolParser, ToolParserSpec
from mmdeploy_llm.testing import ToolParserExample
from mmdeploy_llm.testing.plugins.tools import CHECKS, ToolParserSubject

START, END = "<call>", "</call>"
NAMES = {check.__name__ for check in CHECKS}


class Whole(ToolParser):
    """Reads <call>name</call> only when the text is complete; it passes all checks."""

    markers = (START, END)

    def __init__(self):
        self.text = ""

    def feed(self, text):
        self.text += text
        return []

    def finish(self):
        text, self.text = self.text, ""
        before, start, rest = text.rpartition(START)
        name, end, after = rest.partition(END)
        if not start or not end or not name or after:
            return [text] if text else []
        call = ToolCall(name=name, arguments="{}")
        return [before, call] if before else [call]


class NeedsAnArgument(Whole):
    def __init__(self, tokenizer):
        super().__init__()


class NoParser:
    pass


def make_shared():
    parser = Whole()
    return lambda: parser


class ListOfMarkers(Whole):
    markers = [START]  # noqa: RUF012 - the fault


class GivesNone(Whole):
    def feed(self, text):
        self.text += text


class EmptyTexts(Whole):
    def finish(self):
        return [*super().finish(), ""]


class NoObject(Whole):
    def finish(self):
        return [
            ToolCall(name=item.name, arguments="[]") if isinstance(item, ToolCall) else item
            for item in super().finish()
        ]


class LosesBrokenCalls(Whole):
    def finish(self):
        return [
            item for item in super().finish() if isinstance(item, ToolCall) or START not in item
        ]


class LosesTheRest(Whole):
    def finish(self):
        return [item for item in super().finish() if isinstance(item, ToolCall)]


class LooksAtOnePiece(ToolParser):
    markers = (START, END)

    def feed(self, text):
        parser = Whole()
        return parser.feed(text) + parser.finish()

    def finish(self):
        return []


class Raises(Whole):
    def feed(self, text):
        return super().feed(text) if "[" not in text else {}[text]


class StateInTheClass(Whole):
    texts: list = []  # noqa: RUF012 - the fault

    def __init__(self):
        super().__init__()
        self.texts.clear()

    def feed(self, text):
        self.texts.append(text)
        return []

    def finish(self):
        self.text = "".join(self.texts)
        self.texts.clear()
        return super().finish()


ROWS = [
    (NeedsAnArgument, "builds_without_arguments", "called without arguments"),
    (NoParser, "builds_without_arguments", "derive it from mmdeploy_llm.hooks.ToolParser"),
    (make_shared(), "builds_without_arguments", "return a new one"),
    (ListOfMarkers, "builds_without_arguments", "make it a tuple"),
    (GivesNone, "items_are_well_formed", "return a list of texts and ToolCalls"),
    (EmptyTexts, "items_are_well_formed", "return texts that are not empty"),
    (EmptyTexts, "empty_text_gives_nothing", "return an empty list"),
    (NoObject, "items_are_well_formed", "text of a JSON object"),
    (LosesBrokenCalls, "nothing_is_lost", "including its tags"),
    (LosesTheRest, "plain_text_is_kept", "return it as content"),
    (LooksAtOnePiece, "any_split_equals_the_whole", "hold back text"),
    (Raises, "nothing_is_lost", "a parser must accept any text"),
    (StateInTheClass, "no_state_is_shared", "keep the state in the instance"),
]


def subject_of(factory, made, **fields):
    return ToolParserSubject(spec=ToolParserSpec(name="p", factory=factory(made)), **fields)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(("made", "check", "advice"), ROWS)
def test_broken_parsers(failures, factory, made, check, advice):
    assert check in NAMES
    example = ToolParserExample(text="a<call>f</call>", content="a", calls=(("f", {}),))
    assert advice in failures(CHECKS, subject_of(factory, made, examples=(example,)))[check]


def test_a_good_parser_passes(failures, factory):
    example = ToolParserExample(text="a<call>f</call>", content="a", calls=(("f", {}),))
    assert failures(CHECKS, subject_of(factory, Whole, examples=(example,))) == {}


def test_a_wrong_example(failures, factory):
    example = ToolParserExample(text="a<call>f</call>", calls=(("f", {}),))
    found = failures(CHECKS, subject_of(factory, Whole, examples=(example,)))
    assert list(found) == ["examples_hold"]
    assert "correct the parser or the example" in found["examples_hold"]
