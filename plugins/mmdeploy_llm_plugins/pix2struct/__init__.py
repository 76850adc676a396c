"""Pix2Struct, DePlot and MatCha: pictures of any shape as patches, and T5's decoder, which attends
to them; a question is drawn above the picture."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl
from mmdeploy_llm_plugins.encoder_decoder.prompts import TEMPLATE


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec."""
    return (
        ModelSpec(
            name="pix2struct",
            architectures=("Pix2StructForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.pix2struct.model:Pix2StructForConditionalGeneration",
            encoder="mmdeploy_llm_plugins.pix2struct.prompts:Pix2StructPrompts",
            tiny="mmdeploy_llm_plugins.pix2struct.tiny:PIX2STRUCT",
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
            name="pix2struct-image",
            kind="image",
            factory="mmdeploy_llm_plugins.pix2struct.image:Pix2StructImages",
            models=("pix2struct",),
        ),
    )
