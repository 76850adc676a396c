"""gpt-oss of OpenAI: windows in every other layer, attention sinks, and experts in MXFP4."""

from __future__ import annotations

from mmdeploy_llm.hooks import ModelSpec, hookimpl


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec of gpt-oss."""
    return (
        ModelSpec(
            name="gpt_oss",
            architectures=("GptOssForCausalLM",),
            factory="mmdeploy_llm_plugins.gptoss.text:GptOssForCausalLM",
            tiny="mmdeploy_llm_plugins.gptoss.tiny:GPT_OSS",
            reasoning="gpt-oss",
            tools="gpt-oss",
        ),
    )
