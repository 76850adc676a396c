"""GLM-4 text models."""

from __future__ import annotations

from mmdeploy_llm.hooks import ModelSpec, hookimpl


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the specs of glm (GLM-4 of 2024) and glm4 (GLM-4 of 2025, GLM-Z1)."""
    return (
        ModelSpec(
            name="glm",
            architectures=("GlmForCausalLM",),
            factory="mmdeploy_llm_plugins.glm.text:GlmForCausalLM",
            deterministic=True,
        ),
        ModelSpec(
            name="glm4",
            architectures=("Glm4ForCausalLM",),
            factory="mmdeploy_llm_plugins.glm.text:GlmForCausalLM",
            deterministic=True,
        ),
    )
