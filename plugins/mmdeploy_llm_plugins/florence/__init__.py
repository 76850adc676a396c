"""Florence-2: tasks such as captions, OCR and detection, by one encoder for picture and text."""

from __future__ import annotations

from mmdeploy_llm.hooks import BoxRule, MediaProcessorSpec, ModelSpec, hookimpl
from mmdeploy_llm_plugins.encoder_decoder.prompts import TEMPLATE

# How Florence-2 writes boxes: a label, then four tokens from <loc_0> to <loc_999> for each of its
# boxes, all in one line; text in a picture has eight, the corners of a quadrangle, and a mask has
# those of a polygon. A token names a bin, of which transformers takes the middle.
BOX_TASKS = (  # <OPEN_VOCABULARY_DETECTION> is answered by boxes or polygons
    ("<OD>", 4),
    ("<DENSE_REGION_CAPTION>", 4),
    ("<REGION_PROPOSAL>", 4),
    ("<CAPTION_TO_PHRASE_GROUNDING>", 4),
    ("<OCR_WITH_REGION>", 8),
    ("<REFERRING_EXPRESSION_SEGMENTATION>", 0),
    ("<REGION_TO_SEGMENTATION>", 0),
)
BOXES = BoxRule(
    pattern=r"(?:<loc_\d{1,3}>)+", has_both=True, tasks=BOX_TASKS, is_special=True, offset=0.5
)


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec."""
    return (
        ModelSpec(
            name="florence2",
            architectures=("Florence2ForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.florence.model:Florence2ForConditionalGeneration",
            encoder="mmdeploy_llm_plugins.florence.prompts:FlorencePrompts",
            boxes="mmdeploy_llm_plugins.florence:BOXES",
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
