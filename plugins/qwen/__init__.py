"""Qwen2 and Qwen2.5 text models, Qwen2-VL and Qwen2.5-VL."""

from __future__ import annotations

from mmdeploy_llm.hooks import ModelSpec, hookimpl


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """The families of transformers' qwen2, qwen2_vl and qwen2_5_vl."""
    return (
        ModelSpec(
            name="qwen2",
            architectures=("Qwen2ForCausalLM",),
            factory="mmdeploy_llm_plugins.qwen.text:QwenForCausalLM",
        ),
        ModelSpec(
            name="qwen2_vl",
            architectures=("Qwen2VLForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.qwen.vl:Qwen2VLForConditionalGeneration",
            media=("image", "video"),
        ),
        ModelSpec(
            name="qwen2_5_vl",
            architectures=("Qwen2_5_VLForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.qwen.vl:Qwen25VLForConditionalGeneration",
            media=("image", "video"),
        ),
    )
