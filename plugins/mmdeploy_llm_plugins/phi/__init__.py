"""Phi-3, Phi-3.5 and Phi-4 (mini) text models."""

from __future__ import annotations

from mmdeploy_llm.hooks import ModelSpec, hookimpl

GGUF = "mmdeploy_llm_plugins.phi.gguf:TABLE"


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec of transformers' phi3."""
    return (
        ModelSpec(
            name="phi3",
            architectures=("Phi3ForCausalLM",),
            factory="mmdeploy_llm_plugins.phi.text:Phi3ForCausalLM",
            gguf=GGUF,
            tiny="mmdeploy_llm_plugins.phi.tiny:PHI3",
            deterministic=True,
        ),
    )
