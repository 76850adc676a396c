"""The parsers with rules of their own; those of the formats.py table are built at the end.

All of them share these rules; each class states only how it differs:

- The last tag in the prompt sets the first state, unless it is an opening tag in an earlier turn:
  users may write about tags. After an open `<think>` the text begins as reasoning; if it never
  closes, it is reasoning to its end, since text that was streamed as reasoning cannot become
  content later. After `</think>` (a template with thinking off) all of it is content.
- A `<think>` at the beginning of the generated text (white space aside) opens the reasoning as one
  in the prompt does. In a text that is reasoning from the start it is dropped as well.
- Without either, some families think without an opening tag (their text is reasoning until
  `</think>`), others may not think at all (their text is held back until a `</think>` decides).

The rules are those of FastDeploy's parser of the same name, where it has one.
"""

from string import whitespace
from types import SimpleNamespace

from .formats import END_THINK, FORMATS, THINK, TagFormat
from .grammar import Exit, Grammar, Mode
from .scanner import TagParser

RESPONSE = "<response>"
END_RESPONSE = "</response>"
TOOL_CALL = "<tool_call>"


def _begin(otherwise: str) -> Mode:
    """Builds the mode for the beginning of the text, where an opening tag may come."""
    exits = {THINK: Exit(mode="reasoning")}
    return Mode(kind="reasoning", exits=exits, blanks=whitespace, otherwise=otherwise)


def _reasoning(then: str, *, is_stripped: bool = False) -> Mode:
    return Mode(kind="reasoning", exits={END_THINK: Exit(mode=then)}, is_stripped=is_stripped)


class Ernie45VLParser(TagParser):
    """ERNIE 4.5 VL: reasoning before the first `</think>`, content after it, nothing stripped.

    When neither the prompt nor the text has a tag, the whole text is content, returned at its end.
    """

    start_marker = THINK
    end_marker = END_THINK
    grammar = Grammar(
        modes={
            "begin": _begin("unknown"),
            "begin open": _begin("reasoning"),
            "unknown": Mode(kind="held", exits={END_THINK: Exit(mode="content")}),
            "reasoning": _reasoning("content"),
            "content": Mode(kind="content"),
        },
        entries={THINK: "begin open", END_THINK: "content"},
        default="begin",
        openings=frozenset({THINK}),
    )
    markers = grammar.tags


class Ernie45VLThinkingParser(TagParser):
    """ERNIE 4.5 VL Thinking: reasoning up to `</think>`, or to the end without one.

    When only newlines come between `</think>` and a tool call, there is no content: the call and
    all text after it go to the tool parser.
    """

    start_marker = THINK
    end_marker = END_THINK
    grammar = Grammar(
        modes={
            "begin": _begin("reasoning"),
            "reasoning": _reasoning("answer"),
            "answer": Mode(
                kind="dropped",
                exits={TOOL_CALL: Exit(mode="tool calls", is_kept=True)},
                blanks="\n",
                otherwise="content",
            ),
            "content": Mode(kind="content"),
            "tool calls": Mode(kind="tool_calls"),
        },
        entries={THINK: "begin", END_THINK: "answer"},
        default="begin",
        openings=frozenset({THINK}),
    )
    markers = grammar.tags


class ErnieX1Parser(TagParser):
    """ERNIE X1: reasoning up to `</think>`, content in `<response>`, the rest dropped.

    A tool call before the response means that there is no content. Calls before or after the
    response, and all text after them, go to the tool parser. A `</response>` in the prompt ends an
    earlier turn and says nothing about this one.
    """

    start_marker = THINK
    end_marker = END_THINK
    grammar = Grammar(
        modes={
            "begin": _begin("reasoning"),
            "reasoning": _reasoning("between"),
            "between": Mode(
                kind="dropped",
                exits={
                    RESPONSE: Exit(mode="response"),
                    TOOL_CALL: Exit(mode="tool calls", is_kept=True),
                },
            ),
            "response": Mode(kind="content", exits={END_RESPONSE: Exit(mode="over")}),
            "over": Mode(kind="dropped", exits={TOOL_CALL: Exit(mode="tool calls", is_kept=True)}),
            "tool calls": Mode(kind="tool_calls"),
        },
        entries={
            THINK: "begin",
            END_THINK: "between",
            RESPONSE: "response",
            END_RESPONSE: "begin",
        },
        default="begin",
        openings=frozenset({THINK, RESPONSE}),
    )
    markers = grammar.tags


class Qwen3Parser(TagParser):
    """Qwen3: reasoning between `<think>` and `</think>`, unchanged; without tags all is content.

    When the generated text has no `<think>`, white space at both ends of reasoning and content is
    dropped. Qwen3 opens its own block, so a `<think>` at the beginning counts even when the last
    tag of the prompt (perhaps from an earlier turn) is a closing one.
    """

    start_marker = THINK
    end_marker = END_THINK
    grammar = Grammar(
        modes={
            "begin": _begin("unknown"),
            "begin open": _begin("bare reasoning"),
            "begin closed": _begin("content"),
            "unknown": Mode(
                kind="held",
                exits={
                    THINK: Exit(mode="reasoning", held="content"),
                    END_THINK: Exit(mode="bare content"),
                },
                is_stripped=True,
            ),
            "reasoning": _reasoning("content"),
            "bare reasoning": _reasoning("bare content", is_stripped=True),
            "content": Mode(kind="content"),
            "bare content": Mode(kind="content", is_stripped=True),
        },
        entries={THINK: "begin open", END_THINK: "begin closed"},
        default="begin",
        openings=frozenset({THINK}),
    )
    markers = grammar.tags


class GraniteParser(TagParser):
    """Granite 3.2: reasoning between "Here is my thought process:" at the beginning of the text and
    "Here is my response:"; all content without the first.

    Both sentences may say "Here's" (vLLM's and Dynamo's parsers). The template's system prompt
    quotes both, the end last, so a prompt neither opens nor closes the reasoning: there is no
    `start_marker`.
    """

    end_marker = "Here is my response:"
    grammar = Grammar(
        modes={
            "begin": Mode(
                kind="dropped",
                exits={
                    "Here is my thought process:": Exit(mode="reasoning"),
                    "Here's my thought process:": Exit(mode="reasoning"),
                },
                blanks=whitespace,
                otherwise="content",
            ),
            "reasoning": Mode(
                kind="reasoning",
                exits={
                    end_marker: Exit(mode="content"),
                    "Here's my response:": Exit(mode="content"),
                },
            ),
            "content": Mode(kind="content"),
        },
        entries={},
        default="begin",
    )
    markers = grammar.tags


def _parser_of(form: TagFormat) -> type[TagParser]:
    """Builds the parser class of one row of the table."""
    grammar = form.grammar()
    fields = {
        "grammar": grammar,
        "markers": grammar.tags,
        "start_marker": None if form.is_quoted else form.start,
        "end_marker": form.end,
        "__module__": __name__,
        "__doc__": f"The format {form.name!r} of the table.",
    }
    return type(f"TagParser({form.name})", (TagParser,), fields)


# formats.<key>: the parser classes of the table.
formats = SimpleNamespace(**{form.key: _parser_of(form) for form in FORMATS})
