"""ERNIE 4.5: dense, mixture of experts, vision-language with experts by modality; PaddleOCR-VL."""

from __future__ import annotations

from mmdeploy_llm.hooks import ModelSpec, hookimpl

GGUF = "mmdeploy_llm_plugins.ernie.gguf:TABLE"


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the specs of ernie4_5, ernie4_5_moe, ernie4_5_vl_moe and paddleocr_vl."""
    return (
        ModelSpec(
            name="ernie4_5",
            architectures=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
            factory="mmdeploy_llm_plugins.ernie.text:ErnieForCausalLM",
            gguf=GGUF,
            deterministic=True,
            tools="ernie-x1",
        ),
        ModelSpec(
            name="ernie4_5_moe",
            architectures=("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoEForCausalLM"),
            factory="mmdeploy_llm_plugins.ernie.text:ErnieForCausalLM",
            gguf=GGUF,
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
            deterministic=True,
            media=("image", "video"),
            reasoning="ernie-45-vl",
            tools="ernie-45-vl-thinking",
        ),
        ModelSpec(
            name="paddleocr_vl",
            architectures=("PaddleOCRVLForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.ernie.paddleocr:PaddleOCRVLForConditionalGeneration",
            deterministic=True,
            media=("image",),
        ),
    )
