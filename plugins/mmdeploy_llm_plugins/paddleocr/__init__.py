"""PaddleOCR-VL, whose decoder is ERNIE 4.5's."""

from __future__ import annotations

from mmdeploy_llm.hooks import BoxRule, MediaProcessorSpec, ModelSpec, hookimpl

CELLS = ("<fcel>", "<ecel>", "<lcel>", "<ucel>", "<xcel>", "<nl>")

# How PaddleOCR-VL writes boxes: a line of text, then four corners as eight tokens, from 0 to
# 1000.
BOXES = BoxRule(
    pattern=r"(?:<\|LOC_\d{1,4}\|>){8}",
    corners=4,
    is_special=True,
)


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec."""
    return (
        ModelSpec(
            name="paddleocr_vl",
            architectures=("PaddleOCRVLForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.paddleocr.model:PaddleOCRVLForConditionalGeneration",
            tiny="mmdeploy_llm_plugins.paddleocr.tiny:PADDLEOCR_VL",
            deterministic=True,
            boxes="mmdeploy_llm_plugins.paddleocr:BOXES",
            media=("image",),
            # The cells of its tables.
            sampling={"no_repeat_ngram": {"may_repeat": CELLS}},
        ),
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the spec for images."""
    return (
        MediaProcessorSpec(
            name="paddleocr-image",
            kind="image",
            factory="mmdeploy_llm_plugins.paddleocr.image:PaddleOCRImageProcessor",
            models=("paddleocr_vl",),
        ),
    )
