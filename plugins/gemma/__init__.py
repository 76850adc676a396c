"""Gemma models of Google: text models of versions 1 to 3, versions 3 and 4 with images."""

from __future__ import annotations

from mmdeploy_llm.hooks import ModelSpec, hookimpl

FACTORY = "mmdeploy_llm_plugins.gemma.text:GemmaForCausalLM"
MODULE4 = "mmdeploy_llm_plugins.gemma.model4"
GGUF = "mmdeploy_llm_plugins.gemma.gguf:TABLE"


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the specs of all versions."""
    return (
        ModelSpec(name="gemma", architectures=("GemmaForCausalLM",), factory=FACTORY, gguf=GGUF),
        ModelSpec(name="gemma2", architectures=("Gemma2ForCausalLM",), factory=FACTORY, gguf=GGUF),
        ModelSpec(
            name="gemma3_text", architectures=("Gemma3ForCausalLM",), factory=FACTORY, gguf=GGUF
        ),
        ModelSpec(
            name="gemma3",
            architectures=("Gemma3ForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.gemma.model3:Gemma3ForConditionalGeneration",
            media=("image",),
            atomic_media=True,
        ),
        ModelSpec(
            name="gemma4_text",
            architectures=("Gemma4ForCausalLM",),
            factory=f"{MODULE4}:Gemma4ForCausalLM",
            gguf=GGUF,
            reasoning="gemma4",
        ),
        ModelSpec(
            name="gemma4",
            architectures=("Gemma4ForConditionalGeneration",),
            factory=f"{MODULE4}:Gemma4ForConditionalGeneration",
            gguf=GGUF,
            media=("image", "video"),
            reasoning="gemma4",
            atomic_media=True,
        ),
    )
