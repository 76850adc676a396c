"""Plugin `reasoning`: parsers that split generated text into reasoning and content."""

from collections.abc import Iterable

from mmdeploy_llm.hooks import ReasoningParserSpec, hookimpl

PARSERS = {
    "deepseek-r1": "DeepSeekR1Parser",
    "ernie-45-vl": "Ernie45VLParser",
    "ernie-45-vl-thinking": "Ernie45VLThinkingParser",
    "ernie-x1": "ErnieX1Parser",
    "qwen3": "Qwen3Parser",
}


@hookimpl
def provide_reasoning_parsers() -> Iterable[ReasoningParserSpec]:
    """The parsers by the names that FastDeploy gives them."""
    return [
        ReasoningParserSpec(name=name, factory=f"{__name__}.parsers:{class_name}")
        for name, class_name in PARSERS.items()
    ]
