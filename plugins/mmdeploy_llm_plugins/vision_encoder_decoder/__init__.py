"""TrOCR, Donut and Nougat: a tower for pictures, and a decoder that attends to its cells."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl
from mmdeploy_llm_plugins.encoder_decoder.prompts import TEMPLATE


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec."""
    return (
        ModelSpec(
            name="vision_encoder_decoder",
            architectures=("VisionEncoderDecoderModel",),
            factory="mmdeploy_llm_plugins.vision_encoder_decoder.model:VisionEncoderDecoderModel",
            encoder="mmdeploy_llm_plugins.vision_encoder_decoder.prompts:PicturePrompts",
            tiny="mmdeploy_llm_plugins.vision_encoder_decoder.tiny:TROCR",
            chat_template=TEMPLATE,
            question=" ",
            media=("image",),
        ),
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the spec for images."""
    return (
        MediaProcessorSpec(
            name="vision_encoder_decoder-image",
            kind="image",
            factory="mmdeploy_llm_plugins.vision_encoder_decoder.image:EncoderImages",
            models=("vision_encoder_decoder",),
        ),
    )
