"""LFM2 text models of Liquid AI."""

from __future__ import annotations

from mmdeploy_llm.hooks import ModelSpec, hookimpl


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec of the dense models."""
    return (
        ModelSpec(
            name="lfm2",
            architectures=("Lfm2ForCausalLM",),
            factory="mmdeploy_llm_plugins.lfm.text:Lfm2ForCausalLM",
        ),
    )
