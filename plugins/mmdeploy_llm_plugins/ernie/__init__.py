"""ERNIE 4.5: dense, mixture of experts, vision-language with experts by modality."""

from __future__ import annotations

from mmdeploy_llm.hooks import BoxRule, MediaProcessorSpec, ModelSpec, hookimpl

GGUF = "mmdeploy_llm_plugins.ernie.gguf:TABLE"
DRAFT_HEAD = "mmdeploy_llm_plugins.ernie.draft:add_head"

# How ERNIE 4.5 VL writes boxes: JSON with "bbox_2d", from 0 to 1000.
BOXES = BoxRule(keys=("bbox_2d", "bbox"))


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the specs of ernie4_5, ernie4_5_moe and ernie4_5_vl_moe."""
    return (
        ModelSpec(
            name="ernie4_5",
            architectures=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
            factory="mmdeploy_llm_plugins.ernie.text:ErnieForCausalLM",
            gguf=GGUF,
            tiny="mmdeploy_llm_plugins.ernie.tiny:ERNIE4_5",
            draft_head=DRAFT_HEAD,
            deterministic=True,
            tools="ernie-x1",
        ),
        ModelSpec(
            name="ernie4_5_moe",
            architectures=("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoEForCausalLM"),
            factory="mmdeploy_llm_plugins.ernie.text:ErnieForCausalLM",
            gguf=GGUF,
            tiny="mmdeploy_llm_plugins.ernie.tiny:ERNIE4_5_MOE",
            draft_head=DRAFT_HEAD,
            deterministic=True,
            tools="ernie-x1",
        ),
        ModelSpec(
            name="ernie4_5_vl_moe",
            architectures=(
                "Ernie4_5_VLMoeForConditionalGeneration",
                "Ernie4_5_VL_MoeForConditionalGeneration",
            ),
            factory="mmdeploy_llm_plugins.ernie.vl:ErnieVLForConditionalGeneration",
            tiny="mmdeploy_llm_plugins.ernie.tiny:ERNIE4_5_VL_MOE",
            draft_head=DRAFT_HEAD,
            deterministic=True,
            boxes="mmdeploy_llm_plugins.ernie:BOXES",
            media=("image", "video"),
            reasoning="ernie-45-vl",
            tools="ernie-45-vl-thinking",
        ),
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the specs for images and videos."""
    return (
        MediaProcessorSpec(
            name="ernie-image",
            kind="image",
            factory="mmdeploy_llm_plugins.ernie.image:ErnieImageProcessor",
            models=("ernie4_5_vl_moe",),
        ),
        MediaProcessorSpec(
            name="ernie-video",
            kind="video",
            factory="mmdeploy_llm_plugins.ernie.video:ErnieVideoProcessor",
            models=("ernie4_5_vl_moe",),
        ),
    )
