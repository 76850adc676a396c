"""Gemma, Gemma 2 and Gemma 3 text models of Google."""

from __future__ import annotations

from mmdeploy_llm.hooks import ModelSpec, hookimpl

FACTORY = "mmdeploy_llm_plugins.gemma.text:GemmaForCausalLM"


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the specs of the three versions."""
    return (
        ModelSpec(name="gemma", architectures=("GemmaForCausalLM",), factory=FACTORY),
        ModelSpec(name="gemma2", architectures=("Gemma2ForCausalLM",), factory=FACTORY),
        ModelSpec(name="gemma3_text", architectures=("Gemma3ForCausalLM",), factory=FACTORY),
    )
