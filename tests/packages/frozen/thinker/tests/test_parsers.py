from mmdeploy_llm.testing import (
    ParserExample,
    PluginConformance,
    ReasoningParserConformance,
    ToolParserConformance,
    ToolParserExample,
)
from thinker_llm import provide_reasoning_parsers, provide_tool_parsers

CALL = '<do>{"name": "f", "arguments": {"x": 1}}</do>'


class TestPlugin(PluginConformance):
    plugin = "thinker_llm"


class TestThoughts(ReasoningParserConformance):
    spec = provide_reasoning_parsers()[0]
    examples = (
        ParserExample(text="Red.</thoughts>It is red.", reasoning="Red.", content="It is red."),
        ParserExample(text="No end yet", reasoning="No end yet", content=""),
    )


class TestCalls(ToolParserConformance):
    spec = provide_tool_parsers()[0]
    examples = (ToolParserExample(text=f"a{CALL}b", content="ab", calls=(("f", {"x": 1}),)),)
