"""OLMoE text models."""

from __future__ import annotations

from mmdeploy_llm.hooks import ModelSpec, hookimpl


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec of transformers' olmoe."""
    return (
        ModelSpec(
            name="olmoe",
            architectures=("OlmoeForCausalLM",),
            factory="mmdeploy_llm_plugins.olmo.text:OlmoeForCausalLM",
            tiny="mmdeploy_llm_plugins.olmo.tiny:OLMOE",
            deterministic=True,
        ),
    )
