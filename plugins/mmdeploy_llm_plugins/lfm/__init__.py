"""LFM2 and LFM2-VL of Liquid AI."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl

FACTORY = "mmdeploy_llm_plugins.lfm.text:Lfm2ForCausalLM"
GGUF = "mmdeploy_llm_plugins.lfm.gguf:TABLE"


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the specs of dense models, of those with experts, and of those with images."""
    return (
        ModelSpec(
            name="lfm2",
            architectures=("Lfm2ForCausalLM",),
            factory=FACTORY,
            gguf=GGUF,
            tiny="mmdeploy_llm_plugins.lfm.tiny:LFM2",
        ),
        ModelSpec(
            name="lfm2_moe",
            architectures=("Lfm2MoeForCausalLM",),
            factory=FACTORY,
            gguf=GGUF,
            tiny="mmdeploy_llm_plugins.lfm.tiny:LFM2_MOE",
        ),
        ModelSpec(
            name="lfm2_vl",
            architectures=("Lfm2VlForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.lfm.vl:Lfm2VlForConditionalGeneration",
            gguf=GGUF,
            tiny="mmdeploy_llm_plugins.lfm.tiny:LFM2_VL",
            media=("image",),
        ),
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the spec for images."""
    return (
        MediaProcessorSpec(
            name="lfm2-image",
            kind="image",
            factory="mmdeploy_llm_plugins.lfm.image:LfmImageProcessor",
            models=("lfm2_vl",),
        ),
    )
