"""Florence-2: tasks such as captions, OCR and detection, by one encoder for picture and text."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl
from mmdeploy_llm_plugins.encoder_decoder.prompts import TEMPLATE


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec."""
    return (
        ModelSpec(
            name="florence2",
            architectures=("Florence2ForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.florence.model:Florence2ForConditionalGeneration",
            encoder="mmdeploy_llm_plugins.florence.prompts:FlorencePrompts",
            boxes="mmdeploy_llm_plugins.florence.boxes:RULE",
            tiny="mmdeploy_llm_plugins.florence.tiny:FLORENCE2",
            chat_template=TEMPLATE,
            question="<DETAILED_CAPTION>",
            media=("image",),
        ),
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the spec for images."""
    return (
        MediaProcessorSpec(
            name="florence-image",
            kind="image",
            factory="mmdeploy_llm_plugins.florence.image:FlorenceImageProcessor",
            models=("florence2",),
        ),
    )
