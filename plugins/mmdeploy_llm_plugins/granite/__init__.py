"""Granite of IBM: the dense models of version 3, Granite 4 with Mamba-2 layers, and Bamba, from
which these come."""

from __future__ import annotations

from mmdeploy_llm.hooks import ModelSpec, hookimpl

GGUF = "mmdeploy_llm_plugins.granite.gguf:TABLE"


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the specs of all of them."""
    return (
        ModelSpec(
            name="granite",
            architectures=("GraniteForCausalLM",),
            factory="mmdeploy_llm_plugins.granite.text:GraniteForCausalLM",
            gguf=GGUF,
            tiny="mmdeploy_llm_plugins.granite.tiny:GRANITE",
        ),
        ModelSpec(
            name="granite_hybrid",
            architectures=("GraniteMoeHybridForCausalLM",),
            factory="mmdeploy_llm_plugins.granite.hybrid:GraniteHybridForCausalLM",
            gguf=GGUF,
            tiny="mmdeploy_llm_plugins.granite.tiny:GRANITE_HYBRID",
        ),
        ModelSpec(
            name="bamba",
            architectures=("BambaForCausalLM",),
            factory="mmdeploy_llm_plugins.granite.bamba:BambaForCausalLM",
            tiny="mmdeploy_llm_plugins.granite.tiny:BAMBA",
        ),
    )
