"""A toolbox of an outsider: a fetcher, a logits processor, an observer, a command and two parsers
in one file, checked by the kit and used together."""

import importlib
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import MediaError, MediaLimitError
from mmdeploy_llm.hooks import MediaLimits, MediaRef
from mmdeploy_llm.testing import (
    FetcherConformance,
    LogitsExample,
    LogitsProcessorConformance,
    ParserExample,
    PluginConformance,
    ReasoningParserConformance,
    ToolParserConformance,
    ToolParserExample,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES / "plugins"))
toolbox = importlib.import_module("toolbox")


class TestPlugin(PluginConformance):
    plugin = "toolbox"


class TestFetcher(FetcherConformance):
    plugin = "toolbox"
    serves = {"shelf://picture-1.png": (EXAMPLES / "images/picture-1.png").read_bytes()}  # noqa: RUF012


class TestBan(LogitsProcessorConformance):
    spec = toolbox.provide_logits_processors()[0]
    arguments = ({}, {"banned": [0, 2]})
    wrong_arguments = ({"banned": [-1]}, {"banned": "much"}, {"banned": [10**9]})
    examples = (
        LogitsExample(arguments={"banned": [1]}, logits=(1.0, 2.0), expected=(1.0, -float("inf"))),
    )


class TestArrow(ReasoningParserConformance):
    spec = toolbox.provide_reasoning_parsers()[0]
    examples = (
        ParserExample(text="why ==> so", reasoning="why ", content=" so"),
        ParserExample(text="= == ==", reasoning="= == ==", content=""),
    )


class TestCalls(ToolParserConformance):
    spec = toolbox.provide_tool_parsers()[0]
    examples = (
        ToolParserExample(
            text='a<call>{"name": "f", "arguments": {"x": 1}}</call>b',
            content="ab",
            calls=(("f", {"x": 1}),),
        ),
        ToolParserExample(text="<call>[]</call><ca", content="<call>[]</call><ca"),
    )


class TestShelf:
    @staticmethod
    def fetch(uri, **limits):
        return toolbox.fetch_media(MediaRef(kind="image", uri=uri), MediaLimits(**limits))

    def test_reads_what_is_on_the_shelf(self):
        assert (
            self.fetch("shelf://picture-1.png") == (EXAMPLES / "images/picture-1.png").read_bytes()
        )
        assert self.fetch("/etc/passwd") is None

    @pytest.mark.parametrize(
        "uri", ["shelf://../quickstart.py", "shelf:///etc/passwd", "shelf://a\0b"]
    )
    def test_refuses_what_lies_elsewhere(self, uri):
        with pytest.raises(MediaError, match="shelf://"):
            self.fetch(uri)

    def test_keeps_the_limit(self):
        with pytest.raises(MediaLimitError):
            self.fetch("shelf://picture-1.png", max_bytes=100)


def test_its_command_lists_the_shelf():
    import typer

    app = typer.Typer()
    app.callback()(lambda: None)
    toolbox.extend_cli(app)
    done = CliRunner().invoke(app, ["shelf"])
    assert "picture-1.png" in done.output.splitlines()


@pytest.mark.full
def test_all_parts_in_one_engine():
    params = SamplingParams(
        temperature=0,
        max_tokens=6,
        logits_processors="ban",
        logits_processors_args={"banned": [0]},
    )
    before = toolbox.TALLY.requests
    with LLM("shapes-vl", quiet=True) as llm:
        llm.plugins.register(toolbox, "toolbox")
        image = {"type": "image", "image": "shelf://picture-2.jpg"}
        question = {"type": "text", "text": "Describe the image."}
        (output,) = llm.chat(
            [{"role": "user", "content": [image, question]}], params, use_tqdm=False
        )
    assert output.error_msg is None
    assert output.outputs.text
    assert toolbox.TALLY.requests == before + 1
