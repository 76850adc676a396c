"""Plugin `reasoning`: parsers that split generated text into reasoning and content."""

from collections.abc import Iterable

from mmdeploy_llm.hooks import ReasoningParserSpec, hookimpl

from .formats import FORMATS

# Parsers with rules of their own: name -> (class, aliases).
PARSERS = {
    "ernie-45-vl": ("parsers:Ernie45VLParser", ()),
    "ernie-45-vl-thinking": ("parsers:Ernie45VLThinkingParser", ()),
    "ernie-x1": ("parsers:ErnieX1Parser", ()),
    "gpt-oss": ("harmony:HarmonyParser", ("gptoss", "harmony", "openai-gptoss")),
    "granite": ("parsers:GraniteParser", ("granite-3.2",)),
    "qwen3": ("parsers:Qwen3Parser", ()),
}


@hookimpl
def provide_reasoning_parsers() -> Iterable[ReasoningParserSpec]:
    """Returns the parsers under the names that FastDeploy, vLLM and SGLang use."""
    own = [
        ReasoningParserSpec(name=name, factory=f"{__name__}.{factory}", aliases=aliases)
        for name, (factory, aliases) in PARSERS.items()
    ]
    return own + [
        ReasoningParserSpec(
            name=form.name,
            factory=f"{__name__}.parsers:formats.{form.key}",
            aliases=form.aliases,
        )
        for form in FORMATS
    ]
