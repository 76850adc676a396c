"""Plugin `tools`: parsers that extract tool calls from generated text."""

from collections.abc import Iterable

from mmdeploy_llm.hooks import ToolParserSpec, hookimpl

from .formats import FORMATS


@hookimpl
def provide_tool_parsers() -> Iterable[ToolParserSpec]:
    """Returns the parsers under the names that FastDeploy, vLLM and SGLang use."""
    return [
        ToolParserSpec(
            name=form.name, factory=f"{__name__}.parsers:formats.{form.key}", aliases=form.aliases
        )
        for form in FORMATS
    ]
