"""Kosmos-2.5: pages to text with boxes, or to Markdown."""

from __future__ import annotations

from mmdeploy_llm.hooks import BoxRule, MediaProcessorSpec, ModelSpec, hookimpl
from mmdeploy_llm_plugins.encoder_decoder.prompts import TEMPLATE

# How Kosmos-2.5 writes boxes, if asked by <ocr>: four tokens before each line of text, in pixels
# of the resized page.
BOXES = BoxRule(
    pattern=r"<bbox>(?P<box>(?:<[xy]_\d{1,5}>){4})</bbox>(?P<label>[^\n<]{0,500})", scale=None
)


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec."""
    return (
        ModelSpec(
            name="kosmos2_5",
            architectures=("Kosmos2_5ForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.kosmos.model:Kosmos2_5ForConditionalGeneration",
            boxes="mmdeploy_llm_plugins.kosmos:BOXES",
            tiny="mmdeploy_llm_plugins.kosmos.tiny:KOSMOS2_5",
            chat_template=TEMPLATE,
            question="<ocr>",
            media=("image",),
            # Its norms are over all channels.
            tp_plan={"model.layers.*.mlp*": "whole", "resampler.*": "whole"},
        ),
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the spec for images."""
    return (
        MediaProcessorSpec(
            name="kosmos2_5-image",
            kind="image",
            factory="mmdeploy_llm_plugins.kosmos.image:KosmosImages",
            models=("kosmos2_5",),
        ),
    )
