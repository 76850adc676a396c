"""Llama 3.2 Vision: a tower for pictures, and a Llama in which some layers attend to its tiles."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec."""
    return (
        ModelSpec(
            name="mllama",
            architectures=("MllamaForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.mllama.model:MllamaForConditionalGeneration",
            encoder="mmdeploy_llm_plugins.mllama.prompts:MllamaPrompts",
            tiny="mmdeploy_llm_plugins.mllama.tiny:MLLAMA",
            media=("image",),
        ),
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the spec for images."""
    return (
        MediaProcessorSpec(
            name="mllama-image",
            kind="image",
            factory="mmdeploy_llm_plugins.mllama.image:MllamaImages",
            models=("mllama",),
        ),
    )
