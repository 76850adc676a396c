"""Qwen2, Qwen2.5 and Qwen3 text models, dense and with experts; Qwen2-VL, Qwen2.5-VL and Qwen3-VL;
Qwen3-Next; Qwen3.5 with and without media; MiniCPM-V 4.6, whose decoder is Qwen3.5's."""

from __future__ import annotations

from dataclasses import replace

from mmdeploy_llm.hooks import ModelSpec, hookimpl

GGUF = "mmdeploy_llm_plugins.qwen.gguf:TABLE"


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the specs of the families, named as in transformers."""
    specs = (*_text_models(), *_vl_models(), *_hybrid_models())
    return tuple(replace(spec, gguf=GGUF) for spec in specs)


def _text_models() -> tuple[ModelSpec, ...]:
    return (
        ModelSpec(
            name="qwen2",
            architectures=("Qwen2ForCausalLM",),
            factory="mmdeploy_llm_plugins.qwen.text:Qwen2ForCausalLM",
            deterministic=True,
            tools="qwen",
        ),
        ModelSpec(
            name="qwen2_moe",
            architectures=("Qwen2MoeForCausalLM",),
            factory="mmdeploy_llm_plugins.qwen.text:Qwen2MoeForCausalLM",
            # Not deterministic: torch's sigmoid of the shared expert's gate depends on the rows.
            tools="qwen",
        ),
        ModelSpec(
            name="qwen3",
            architectures=("Qwen3ForCausalLM",),
            factory="mmdeploy_llm_plugins.qwen.text:Qwen3ForCausalLM",
            deterministic=True,
            reasoning="qwen3",
            tools="qwen",
        ),
        ModelSpec(
            name="qwen3_moe",
            architectures=("Qwen3MoeForCausalLM",),
            factory="mmdeploy_llm_plugins.qwen.text:Qwen3MoeForCausalLM",
            deterministic=True,
            reasoning="qwen3",
            tools="qwen",
        ),
    )


def _vl_models() -> tuple[ModelSpec, ...]:
    return (
        ModelSpec(
            name="qwen2_vl",
            architectures=("Qwen2VLForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.qwen.vl:Qwen2VLForConditionalGeneration",
            deterministic=True,
            media=("image", "video"),
            tools="qwen",
        ),
        ModelSpec(
            name="qwen2_5_vl",
            architectures=("Qwen2_5_VLForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.qwen.vl:Qwen25VLForConditionalGeneration",
            deterministic=True,
            media=("image", "video"),
            tools="qwen",
        ),
        ModelSpec(
            name="qwen3_vl",
            architectures=("Qwen3VLForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.qwen.vl3:Qwen3VLForConditionalGeneration",
            deterministic=True,
            media=("image", "video"),
            reasoning="qwen3",
            tools="qwen",
        ),
        ModelSpec(
            name="qwen3_vl_moe",
            architectures=("Qwen3VLMoeForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.qwen.vl3:Qwen3VLMoeForConditionalGeneration",
            deterministic=True,
            media=("image", "video"),
            reasoning="qwen3",
            tools="qwen",
        ),
    )


def _hybrid_models() -> tuple[ModelSpec, ...]:
    text = "mmdeploy_llm_plugins.qwen.qwen35:Qwen35ForCausalLM"
    vl = "mmdeploy_llm_plugins.qwen.qwen35:Qwen35ForConditionalGeneration"
    media = ("image", "video")
    return (
        ModelSpec(
            name="qwen3_next",
            architectures=("Qwen3NextForCausalLM",),
            factory="mmdeploy_llm_plugins.qwen.next:Qwen3NextForCausalLM",
            reasoning="qwen3",
            tools="qwen",
        ),
        ModelSpec(
            name="qwen3_5_text",
            architectures=("Qwen3_5ForCausalLM",),
            factory=text,
            reasoning="qwen3",
            tools="qwen",
        ),
        ModelSpec(
            name="qwen3_5_moe_text",
            architectures=("Qwen3_5MoeForCausalLM",),
            factory=text,
            reasoning="qwen3",
            tools="qwen",
        ),
        ModelSpec(
            name="qwen3_5",
            architectures=("Qwen3_5ForConditionalGeneration",),
            factory=vl,
            media=media,
            reasoning="qwen3",
            tools="qwen",
        ),
        ModelSpec(
            name="qwen3_5_moe",
            architectures=("Qwen3_5MoeForConditionalGeneration",),
            factory=vl,
            media=media,
            reasoning="qwen3",
            tools="qwen",
        ),
        ModelSpec(
            name="minicpmv4_6",
            architectures=("MiniCPMV4_6ForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.qwen.minicpm:MiniCPMV46ForConditionalGeneration",
            media=("image",),
            reasoning="qwen3",
        ),
    )
