"""Plugin `thinker`."""

from mmdeploy_llm.hooks import ReasoningParserSpec, ToolParserSpec, hookimpl


@hookimpl
def provide_reasoning_parsers():
    return [ReasoningParserSpec(name="thinker", factory="thinker_llm.thoughts:Thoughts")]


@hookimpl
def provide_tool_parsers():
    return [ToolParserSpec(name="thinker", factory="thinker_llm.calls:Calls")]
