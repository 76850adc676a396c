"""Nemotron-H of NVIDIA, Nemotron Nano 2 and 3 among them: layers of Mamba-2, attention, plain MLPs
and experts."""

from __future__ import annotations

from mmdeploy_llm.hooks import ModelSpec, hookimpl


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec of the text models."""
    return (
        ModelSpec(
            name="nemotron_h",
            architectures=("NemotronHForCausalLM",),
            factory="mmdeploy_llm_plugins.nemotron.hybrid:NemotronHForCausalLM",
            tiny="mmdeploy_llm_plugins.nemotron.tiny:NEMOTRON_H",
        ),
    )
