"""BLIP: captions of pictures, by a tower and a decoder of BERT that attends to it."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec."""
    return (
        ModelSpec(
            name="blip",
            architectures=("BlipForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.blip.model:BlipForConditionalGeneration",
            encoder="mmdeploy_llm_plugins.blip.prompts:BlipPrompts",
            tiny="mmdeploy_llm_plugins.blip.tiny:BLIP",
            question=" ",
            media=("image",),
        ),
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the spec for images."""
    return (
        MediaProcessorSpec(
            name="blip-image",
            kind="image",
            factory="mmdeploy_llm_plugins.blip.image:BlipImages",
            models=("blip",),
        ),
    )
