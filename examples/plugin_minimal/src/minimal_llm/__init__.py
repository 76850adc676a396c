"""Plugin `minimal`: declares what it provides. Imported to list plugins, so it imports no torch."""

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, ReasoningParserSpec, hookimpl


@hookimpl
def provide_models() -> list[ModelSpec]:
    """Returns the spec of LLaVA 1.5, which reads charts here; `<image>` is its placeholder."""
    return [
        ModelSpec(
            name="minimal-llava",
            architectures=("LlavaForConditionalGeneration",),
            factory="minimal_llm.model:LlavaForConditionalGeneration",
            media=("chart",),
            reasoning="notes",
            priority=1,  # wins over another plugin that serves LLaVA too
        )
    ]


@hookimpl
def provide_reasoning_parsers() -> list[ReasoningParserSpec]:
    """Returns the spec of a parser for models that write `<notes>` before they answer."""
    return [ReasoningParserSpec(name="notes", factory="minimal_llm.parser:NotesParser")]


@hookimpl
def provide_media_processors() -> list[MediaProcessorSpec]:
    """Returns the spec of a processor for charts, a new kind of media, for our model."""
    return [
        MediaProcessorSpec(
            name="minimal-chart",
            kind="chart",
            factory="minimal_llm.charts:ChartProcessor",
            models=("minimal-llava",),
        )
    ]
