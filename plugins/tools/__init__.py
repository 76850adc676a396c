"""Plugin `tools`: parsers that take tool calls out of generated text."""

from collections.abc import Iterable

from mmdeploy_llm.hooks import ToolParserSpec, hookimpl

from .formats import FORMATS


@hookimpl
def provide_tool_parsers() -> Iterable[ToolParserSpec]:
    """The parsers, by the names that FastDeploy, vLLM and SGLang give them."""
    return [
        ToolParserSpec(
            name=form.name, factory=f"{__name__}.parsers:formats.{form.key}", aliases=form.aliases
        )
        for form in FORMATS
    ]
