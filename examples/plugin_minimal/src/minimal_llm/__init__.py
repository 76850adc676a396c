"""Plugin `minimal`: what there is. Imported to list plugins, so nothing heavy here."""

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, ReasoningParserSpec, hookimpl


@hookimpl
def provide_models() -> list[ModelSpec]:
    """LLaVA 1.5, which takes charts here; its prompts have `<image>` where one stands."""
    return [
        ModelSpec(
            name="minimal-llava",
            architectures=("LlavaForConditionalGeneration",),
            factory="minimal_llm.model:LlavaForConditionalGeneration",
            media=("chart",),
            reasoning="notes",
            priority=1,  # where another plugin serves LLaVA too, this one is wanted
        )
    ]


@hookimpl
def provide_reasoning_parsers() -> list[ReasoningParserSpec]:
    """For models that write `<notes>` before they answer."""
    return [ReasoningParserSpec(name="notes", factory="minimal_llm.parser:NotesParser")]


@hookimpl
def provide_media_processors() -> list[MediaProcessorSpec]:
    """A kind of media of our own, for our model."""
    return [
        MediaProcessorSpec(
            name="minimal-chart",
            kind="chart",
            factory="minimal_llm.charts:ChartProcessor",
            models=("minimal-llava",),
        )
    ]
