"""T5Gemma 2: an encoder of text and pictures in both directions, and a decoder that attends to it
and to itself at once."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec."""
    return (
        ModelSpec(
            name="t5gemma2",
            architectures=("T5Gemma2ForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.t5gemma.model:T5Gemma2ForConditionalGeneration",
            encoder="mmdeploy_llm_plugins.t5gemma.prompts:T5GemmaPrompts",
            tiny="mmdeploy_llm_plugins.t5gemma.tiny:T5GEMMA2",
            media=("image",),
        ),
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the spec for images."""
    return (
        MediaProcessorSpec(
            name="t5gemma2-image",
            kind="image",
            factory="mmdeploy_llm_plugins.t5gemma.image:T5GemmaImages",
            models=("t5gemma2",),
        ),
    )
