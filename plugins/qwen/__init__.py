"""Qwen2 and Qwen2.5 text models, and Qwen2.5-VL."""

from __future__ import annotations

from mmdeploy_llm.hooks import ModelSpec, hookimpl


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """The families of transformers' qwen2 and qwen2_5_vl."""
    return (
        ModelSpec(
            name="qwen2",
            architectures=("Qwen2ForCausalLM",),
            factory="mmdeploy_llm_plugins.qwen.text:QwenForCausalLM",
        ),
        ModelSpec(
            name="qwen2_5_vl",
            architectures=("Qwen2_5_VLForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.qwen.vl:QwenVLForConditionalGeneration",
            media=("image", "video"),
        ),
    )
