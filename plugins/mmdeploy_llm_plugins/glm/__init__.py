"""GLM-4 text models, and GLM-4V with images and videos, dense and with experts; GLM-OCR."""

from __future__ import annotations

from mmdeploy_llm.hooks import BoxRule, MediaProcessorSpec, ModelSpec, hookimpl

TEXT = "mmdeploy_llm_plugins.glm.text:GlmForCausalLM"
MEDIA = "mmdeploy_llm_plugins.glm.vl:GlmVForConditionalGeneration"
GGUF = "mmdeploy_llm_plugins.glm.gguf:TABLE"
DRAFT_HEAD = "mmdeploy_llm_plugins.glm.draft:add_head"
CELLS = ("<table><tr><td></td></tr></table>", "<tr><th></th></tr>")  # of tables that GLM-OCR reads

# How GLM-4V writes boxes: <|begin_of_box|>[[100, 200, 300, 400]]<|end_of_box|> or JSON, from 0 to
# 1000. Its markers stand around other answers too.
BOXES = BoxRule(
    keys=("bbox_2d", "bbox"),
    pattern=r"\[\[?\s?\d[-\d\s.,\[\]]*",
)


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the specs of glm (GLM-4 of 2024), glm4 (GLM-4 of 2025, GLM-Z1), glm4_moe (GLM-4.5
    to 4.7), glm4v (GLM-4.1V), glm4v_moe (GLM-4.5V, GLM-4.6V), glm46v and glm_ocr."""
    return (*_text_models(), *_vl_models())


def _text_models() -> tuple[ModelSpec, ...]:
    return (
        ModelSpec(
            name="glm",
            architectures=("GlmForCausalLM",),
            factory=TEXT,
            tiny="mmdeploy_llm_plugins.glm.tiny:GLM",
            deterministic=True,
        ),
        ModelSpec(
            name="glm4",
            architectures=("Glm4ForCausalLM",),
            factory=TEXT,
            gguf=GGUF,
            tiny="mmdeploy_llm_plugins.glm.tiny:GLM4",
            deterministic=True,
        ),
        # Not deterministic: torch's sigmoid of the experts' scores depends on the rows.
        ModelSpec(
            name="glm4_moe",
            architectures=("Glm4MoeForCausalLM",),
            factory="mmdeploy_llm_plugins.glm.text:GlmMoeForCausalLM",
            draft_head=DRAFT_HEAD,
            tiny="mmdeploy_llm_plugins.glm.tiny:GLM4_MOE",
            reasoning="glm-4.5",
        ),
    )


def _vl_models() -> tuple[ModelSpec, ...]:
    return (
        ModelSpec(
            name="glm4v",
            architectures=("Glm4vForConditionalGeneration",),
            factory=MEDIA,
            gguf=GGUF,
            tiny="mmdeploy_llm_plugins.glm.tiny_vl:GLM4V",
            deterministic=True,
            boxes="mmdeploy_llm_plugins.glm:BOXES",
            media=("image", "video"),
            reasoning="glm-4.5",
        ),
        ModelSpec(
            name="glm4v_moe",  # not deterministic, as glm4_moe
            architectures=("Glm4vMoeForConditionalGeneration",),
            factory=MEDIA,
            draft_head=DRAFT_HEAD,
            tiny="mmdeploy_llm_plugins.glm.tiny_vl:GLM4V_MOE",
            boxes="mmdeploy_llm_plugins.glm:BOXES",
            media=("image", "video"),
            reasoning="glm-4.5",
        ),
        # Its text model may have experts.
        ModelSpec(
            name="glm46v",
            architectures=("Glm46VForConditionalGeneration",),
            factory=MEDIA,
            draft_head=DRAFT_HEAD,
            tiny="mmdeploy_llm_plugins.glm.tiny_vl:GLM46V",
            boxes="mmdeploy_llm_plugins.glm:BOXES",
            media=("image", "video"),
            reasoning="glm-4.5",
        ),
        ModelSpec(
            name="glm_ocr",
            architectures=("GlmOcrForConditionalGeneration",),
            factory=MEDIA,
            draft_head=DRAFT_HEAD,
            tiny="mmdeploy_llm_plugins.glm.tiny_vl:GLM_OCR",
            deterministic=True,
            media=("image", "video"),
            sampling={"no_repeat_ngram": {"may_repeat": CELLS}},
        ),
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the specs for images and videos."""
    return (
        MediaProcessorSpec(
            name="glm-image",
            kind="image",
            factory="mmdeploy_llm_plugins.glm.image:GlmImageProcessor",
            models=("glm4v", "glm4v_moe", "glm46v", "glm_ocr"),
        ),
        MediaProcessorSpec(
            name="glm-video",
            kind="video",
            factory="mmdeploy_llm_plugins.glm.video:GlmVideoProcessor",
            models=("glm4v", "glm4v_moe", "glm46v", "glm_ocr"),
        ),
    )
