"""Llama and Mistral text models."""

from __future__ import annotations

from mmdeploy_llm.hooks import ModelSpec, hookimpl

GGUF = "mmdeploy_llm_plugins.llama.gguf:TABLE"


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the specs of transformers' llama and mistral."""
    return (
        ModelSpec(
            name="llama",
            architectures=("LlamaForCausalLM",),
            factory="mmdeploy_llm_plugins.llama.text:LlamaForCausalLM",
            gguf=GGUF,
            tiny="mmdeploy_llm_plugins.llama.tiny:LLAMA",
            deterministic=True,
        ),
        ModelSpec(
            name="mistral",
            architectures=("MistralForCausalLM",),
            factory="mmdeploy_llm_plugins.llama.text:MistralForCausalLM",
            gguf=GGUF,
            tiny="mmdeploy_llm_plugins.llama.tiny:MISTRAL",
            deterministic=True,
        ),
    )
